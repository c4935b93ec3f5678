"""What a broken inference engine would do with a checkpoint: the harness must see each of these.

Each is used in place of the whole path, and does its harm at a case that is none of the first.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from xinfer.errors import XinferError

HARMFUL = 4  # the call that does harm
_calls = 0
_kept: list[bytearray] = []
_opened: list[object] = []


class UncheckedError(XinferError):
    """An error whose message nobody has made printable."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


class PanicException(BaseException):
    """A panic in native code."""


def _is_time() -> bool:
    global _calls  # noqa: PLW0603
    _calls += 1
    return _calls == HARMFUL


def nothing(folder: Path) -> None:
    assert folder.is_dir()


def traceback(folder: Path) -> None:
    if _is_time():
        raise KeyError("weight_map")


def panic(folder: Path) -> None:
    if _is_time():
        raise PanicException("called `Option::unwrap()` on a `None` value")


def native_message(folder: Path) -> None:
    if _is_time():
        os.write(2, b"thread '<unnamed>' panicked at src/lib.rs:1:1\n")


def warning(folder: Path) -> None:
    if _is_time():
        import warnings

        warnings.warn("overflow encountered in matmul", RuntimeWarning, stacklevel=1)


def empty_message(folder: Path) -> None:
    if _is_time():
        raise XinferError("")


def escape_in_message(folder: Path) -> None:
    if _is_time():
        raise UncheckedError("the template says \x1b[2J")


def hang(folder: Path) -> None:
    if _is_time():
        time.sleep(60)


def slow(folder: Path) -> None:
    if _is_time():
        end = time.process_time() + 2.1
        while time.process_time() < end:
            pass


def abort(folder: Path) -> None:
    if _is_time():
        os.abort()


def leave(folder: Path) -> None:
    if _is_time():
        os._exit(0)


def segfault(folder: Path) -> None:
    if _is_time():
        ctypes.string_at(0)


def peak(folder: Path) -> None:
    if _is_time():
        bytearray(b"x") * (300 << 20)


def leak(folder: Path) -> None:
    """A little in every case: only the sum shows."""
    _kept.append(bytearray(b"x") * (1 << 20))


def files_left_open(folder: Path) -> None:
    _opened.append(os.open(folder, os.O_RDONLY))
