"""The `xinfer` command, and `python -m xinfer`. Small, so that Ctrl-C is heard while the rest is being imported."""

import sys

from xinfer.cli.status import INTERRUPTED


def main() -> None:
    """Import the command line and run it."""
    try:
        from xinfer.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
