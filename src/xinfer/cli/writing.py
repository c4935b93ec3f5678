"""Files that commands write: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from xinfer.cli.output import say
from xinfer.errors import RequestError


def check_target(path: Path, option: str) -> None:
    """Refuse a name that cannot become a file, before the work begins."""
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(
            f"{option} {path} is a folder, or lies in none; expected a file name in a folder that exists"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise RequestError(f"{option} {path} may not be written by this user; name another file")


def write_report(path: Path, text: str, what: str) -> bool:
    """Write what took minutes to find, besides printing it, and say so; where that fails all else goes on."""
    try:
        write_file(path, text)
    except RequestError as error:
        say(f"error: {error}")
        return False
    say(f"{path}: {what}")
    return True


def write_file(path: Path, text: str) -> None:
    """Write text as UTF-8."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when all is written.

    What is no plain file is written to and stays what it is: root could put a file in the place of /dev/null.

    Raises:
        RequestError: it cannot be written.
    """
    partial = path.parent / f".xinfer-{os.getpid()}.partial"
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    try:
        with (path if in_place else partial).open("wb") as file:
            yield file
        if not in_place:
            partial.replace(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if not in_place:
            partial.unlink(missing_ok=True)
