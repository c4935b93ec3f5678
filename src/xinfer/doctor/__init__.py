"""`xinfer doctor`: what is on this machine, and which kernels its drivers run right.

`menu` says what each variant is tried on, `child` tries one in a process of its own, `isolated` runs such a process and
tells how it ended, `rounds` runs several at a time, `clinic` goes through all of them and keeps the quarantine, and
`report` shows it.
"""
