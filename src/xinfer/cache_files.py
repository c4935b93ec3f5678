"""Files that can be made again: safe to delete or to damage, and never a reason to fail."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from pathlib import Path

DIGEST_BYTES = 32


def cache_folder(name: str) -> Path | None:
    """Where the platform keeps what can be made again; None where there is no home to put it in."""
    try:
        home = Path.home()
    except RuntimeError:
        home = None
    variable, below = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}.get(
        sys.platform, ("XDG_CACHE_HOME", ".cache")
    )
    named = Path(os.environ.get(variable, ""))
    base = named if named.is_absolute() else home and home / below  # a relative one is to be ignored (XDG)
    return base / "xinfer" / name if base and base.is_absolute() else None


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a pipe without waiting for somebody to write to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read(path: Path | None, magic: bytes, largest: int) -> bytes | None:
    """What `write` wrote with this magic, if it is whole and not above `largest` bytes; else None."""
    if path is None:
        return None
    longest = largest + len(magic) + DIGEST_BYTES
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(longest + 1)
    except OSError:
        return None
    if len(content) > longest:
        return None
    digest, data = content[len(magic) :][:DIGEST_BYTES], content[len(magic) + DIGEST_BYTES :]
    whole = content.startswith(magic) and digest == hashlib.sha256(data).digest()
    return data if whole else None


def write(path: Path | None, magic: bytes, data: bytes) -> None:
    """Write a file whole or not at all; whatever goes wrong is of no consequence."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            partial = Path(file.name)
            try:
                file.write(magic + hashlib.sha256(data).digest() + data)
                file.close()
                partial.replace(path)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
    except OSError:
        return
