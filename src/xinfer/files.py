"""A checkpoint's files as bytes, text and JSON: bounded, strict, and never a traceback.

Whatever is read from a model's folder is read through here (tensor bytes are `model._safetensors`' own): a folder, a
FIFO or a device under a file's name, a link to nothing, a file that may not be read or is too large is refused, and
never waited for or passed over.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from xinfer.errors import CheckpointError

# A shard index of 1,024 layers takes 1 MB. More is not worth reading: a byte of JSON can become thirty in memory.
MAX_JSON_BYTES = 4 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_repr = reprlib.Repr()
_repr.maxlevel = 2
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def shown(value: object) -> str:
    """A value as an error message shows it: bounded in length and depth, whatever the file held."""
    try:
        return _repr.repr(value)
    except ValueError:  # an integer beyond Python's limit of printable digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"


def is_there(path: Path) -> bool:
    """Whether there is anything under this name, a link to nothing included; False where that cannot be told."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder; False where that cannot be told."""
    try:
        return path.is_dir()
    except OSError:  # no permission, or a name that is too long
        return False


def open_regular(path: Path, *, error: type[CheckpointError]) -> BinaryIO:
    """Open `path` for reading, unbuffered.

    Anything but a regular file is refused before it is opened: opening a FIFO would wait for a writer, and reading a
    device may never end. Symbolic links are followed, since the hub's cache is made of them.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise error(f"{path} is {what}; expected a file")
        return path.open("rb", buffering=0)
    except FileNotFoundError as problem:
        if path.is_symlink():
            raise error(
                f"{path} is a link to {path.readlink()}, which does not exist: the download may be incomplete; "
                "fetch the model again"
            ) from problem
        raise error(
            f"{path} does not exist; expected it in the model's folder, beside the *.safetensors files"
        ) from problem
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        raise error(f"{path} cannot be opened: {problem}") from problem


def read_bytes(path: Path, *, error: type[CheckpointError], max_bytes: int) -> bytes:
    """All of the file `path`, which may have `max_bytes`."""
    with open_regular(path, error=error) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise error(_too_large(path, size, max_bytes))
            # An unbuffered read may return less than there is: ask until the file ends or the limit is passed.
            data = bytearray()
            while len(data) <= max_bytes and (chunk := file.read(min(size + 1, max_bytes + 1) - len(data) or 1)):
                data += chunk
        except OSError as problem:
            raise error(f"{path} cannot be read: {problem}") from problem
    if len(data) > max_bytes:  # it grew, or its size is not told
        raise error(_too_large(path, len(data), max_bytes))
    return bytes(data)


def read_text(path: Path, *, error: type[CheckpointError], max_bytes: int) -> str:
    """The UTF-8 text of the file `path`; every line ends with a line feed."""
    text = _decode(read_bytes(path, error=error, max_bytes=max_bytes), where=str(path), error=error)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json_object(path: Path, *, error: type[CheckpointError], max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in the file `path`, or `error` with what is wrong with it."""
    return parse_json_object(read_bytes(path, error=error, max_bytes=max_bytes), where=str(path), error=error)


def parse_json_object(data: bytes, *, where: str, error: type[CheckpointError]) -> dict[str, Any]:
    """The JSON object that the bytes `data` hold; `where` names their source in messages."""
    if data.startswith(_BYTE_ORDER_MARK):
        raise error(f"{where} starts with a byte order mark; save it as UTF-8 without one")
    text = _decode(data, where=where, error=error)

    def refuse_constant(name: str) -> NoReturn:
        raise error(f"{where} holds the literal {name}, which is not JSON; expected finite numbers")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise error(f"{where} has the key {shown(twice)} twice in one object; keep one of them")
        return result

    try:
        value = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except RecursionError as problem:
        raise error(f"{where} is nested too deeply to be a checkpoint's JSON") from problem
    except json.JSONDecodeError as problem:
        raise error(f"{where} is not valid JSON: {problem}") from problem
    except ValueError as problem:  # Python reads no integer of thousands of digits
        raise error(f"{where} holds an integer of thousands of digits; expected a number in range") from problem
    if not isinstance(value, dict):
        raise error(f"{where} holds {shown(value)} at the top; expected a JSON object")
    return value


def _decode(data: bytes, *, where: str, error: type[CheckpointError]) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(
            f"{where} is not UTF-8 text: byte {problem.start} cannot be decoded; download it again"
        ) from problem


def _too_large(path: Path, size: int, max_bytes: int) -> str:
    return f"{path} has {size:,} bytes; expected at most {max_bytes:,}: take it from the original checkpoint"
