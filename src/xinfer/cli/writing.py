"""Files that commands write: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from xinfer.errors import RequestError


def check_target(path: Path, option: str) -> None:
    """Refuse a name that cannot become a file, before the work begins."""
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(
            f"{option} {path} is a folder, or lies in none; expected a file name in a folder that exists"
        )


def write_file(path: Path, text: str) -> None:
    """Write text as UTF-8."""
    partial = path.parent / f".xinfer-{os.getpid()}.partial"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
