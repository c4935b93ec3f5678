"""The `xinfer` command line. `app` puts the commands together; each of them has a module of its own.

Text goes to stdout; progress, statistics and warnings go to stderr. A command imports what costs time to import when it
runs, so that `xinfer --help` answers at once.
"""
