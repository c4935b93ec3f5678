"""How fast a model is on a device, and how much of what the device can do that is: `xinfer bench`.

`loops` times prompts and decode steps, `work` counts what they need, `speeds` measures the device itself, `run` puts
them together; `text` and `plot` show the result.
"""
