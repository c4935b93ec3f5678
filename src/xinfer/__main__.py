"""`python -m xinfer` is the `xinfer` command."""

from xinfer.cli import main

if __name__ == "__main__":
    main()
