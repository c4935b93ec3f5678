"""`xinfer verify`: a checkpoint on a device against the oracle, op by op, on the device's own inputs.

`watch` runs the very kernels that recorded steps use, one at a time, and reads what they are given and make; `layers`
and `ends` judge it by the reference, `oracle` reads the weights for that a layer at a time; `recorded` replays the real
recordings and compares them with the ops that they are made of; `culprit` names the kernel behind a divergence and asks
other drivers; `session` puts it together, `report` and `page` show it.
"""
