"""Small files in which programs remember something: written whole or not at all, by one program at a time."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LOCK_S = 10.0  # another writer takes milliseconds


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in place of what was there. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        partial = Path(file.name)
        file.write(data)
    try:
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def entries_of(data: bytes, version: int, entry: Callable[[Any], T | None]) -> tuple[list[T], list[Any]]:
    """The entries of a JSON file that is {"version": ..., "entries": [...]}, and those that `entry` makes nothing of.

    Raises ValueError where it is another file.
    """
    content = json.loads(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it has no list of entries")  # noqa: TRY004  # of a file's content, not a caller's
    if content.get("version") != version:
        raise ValueError(f"its version is {content.get('version')!r}; expected {version}")
    read = [(entry(item), item) for item in content["entries"]]
    return [made for made, _ in read if made is not None], [item for made, item in read if made is None]


def once(tell: Callable[[str], None] | None) -> Callable[[str], None]:
    """Tells each text once, however often a file is read; nobody where there is nobody to tell."""
    told: set[str] = set()

    def warn(text: str) -> None:
        if tell is not None and text not in told:
            told.add(text)
            tell(text)

    return warn


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be understood, so that another can take its place; where it is then.

    No copy takes the place of an earlier one. Raises OSError.
    """
    names = (f"{path.name}.damaged{f'-{n}' if n else ''}" for n in itertools.count())
    aside = next(place for name in names if not (place := path.with_name(name)).exists())
    path.rename(aside)
    return aside


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Nobody else between reading and writing a file, by a lock beside it: for as long as others give it up in time.

    Where there are no locks, as on some network drives, all goes on without; what cannot be written is told elsewhere.
    """
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(path.with_name(path.name + ".lock").open("ab"))
            end = time.monotonic() + LOCK_S
            while not _lock(file.fileno()) and time.monotonic() < end:
                time.sleep(0.01)
        yield


def _lock(descriptor: int) -> bool:
    """Take a file's lock, which is given back when it is closed; whether it could be had."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # it is another's
        return False
    return True
