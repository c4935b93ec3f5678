"""Exit statuses besides 0, 1 (an error) and 2 (wrong usage)."""

INTERNAL = 70  # EX_SOFTWARE: a fault in this program
INTERRUPTED = 130  # what a shell reports for Ctrl-C
TERMINATED = 143  # and for SIGTERM
