"""`xinfer doctor`: what is on this machine, and which kernels its drivers run right.

`menu` says what each variant is tried on, `child` tries one in a process of its own, `isolated` runs such a process and
tells how it ended, `clinic` goes through all of them and keeps the quarantine, `report` shows it. `directml` tries
Windows' own matrix product for comparison.
"""
