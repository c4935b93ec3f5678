"""What a command's exit status says."""

OK, ERROR, USAGE = 0, 1, 2
INTERNAL = 70  # EX_SOFTWARE
INTERRUPTED = 130  # what a shell reports for Ctrl-C
TERMINATED = 143  # and for SIGTERM

MEANINGS = {  # the README has them as a table
    OK: "all that was asked for was done; a reader that leaves early, as head does, is no error",
    ERROR: "something could not be done; verify: something diverged or is not finite; doctor: a kernel failed",
    USAGE: "wrong usage: an unknown option, a missing value, a value of the wrong form",
    INTERNAL: "a fault in xinfer itself",
    INTERRUPTED: "ended by Ctrl-C",
    TERMINATED: "ended by SIGTERM",
}
