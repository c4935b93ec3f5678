"""One op on given inputs, on the device, by a variant of choice, judged by the reference.

`xinfer verify` runs trials on a model's own activations, to name the culprit of a divergence; `xinfer doctor` runs them
at the shapes of real models. `expected` says what is right and how far off rounding may be, `bench` runs an op between
guard bands, and `linear`, `attention`, `rows`, `cache` and `choice` hold a trial for each op.
"""
