"""One safetensors file: its header checked whole before anything is read, its tensor bytes read without a mapping.

The layout is eight bytes (the header's length N, little endian), N bytes of JSON (for each tensor its dtype, shape and
byte range) and the data, which the ranges cover without a hole or an overlap. The header is read here, because the
`safetensors` library does not tell offsets, and then by the library too: a file that either of them refuses is refused.
A mapped file that somebody truncates ends the process with SIGBUS, so tensor bytes come through `preadv`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import safetensors

from xinfer.errors import WeightsError
from xinfer.files import open_regular, parse_json_object, shown

_LENGTH_BYTES: Final = 8
# The format allows a header of 100 MB; the largest model that a config may describe, of 1,024 layers, has one of 2 MB
# with 13,315 tensors, and reading many more would take long for nothing.
_MAX_HEADER_BYTES: Final = 4 << 20
_MAX_TENSORS: Final = 1 << 14
_MAX_DIMENSIONS: Final = 16
_GIT_LFS_POINTER: Final = b"version https://git-lfs.github.com/spec/v1"

# The types whose size is judged here, so that the message names the tensor; the library judges all of them.
_ITEM_BYTES: Final[Mapping[str, int]] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}

# Windows has no positional read; there a seek and a read are held together by a lock.
_preadv: Callable[[int, list[memoryview], int], int] | None = getattr(os, "preadv", None)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in its file."""

    dtype: str  # the format's own name: "F32", "BF16", ...
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsFile:
    """An open safetensors file. Reads may come from several threads at once.

    Raises:
        WeightsError: the file is absent, is no regular file, is truncated, or its header is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = open_regular(path, error=WeightsError)
        self.stamp = self._stamp()  # to tell whether it is still what was checked
        try:
            self.tensors: Mapping[str, StoredTensor] = MappingProxyType(self._read_header())
            self._ask_library()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        self._file.close()

    def check_unchanged(self) -> None:
        """Raise WeightsError where the open file was written to since its header was read.

        One that was replaced, as programs do that rename a new file over it, stays what it was as long as it is open.
        """
        if self._stamp() != self.stamp:
            raise WeightsError(f"{self.path} was changed while it was in use; leave it alone, and start again")

    def _stamp(self) -> tuple[int, int, int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, a flat view of bytes, with the file's bytes from `offset` on."""
        done = 0
        while done < buffer.nbytes:  # one call reads at most 2 GiB on Linux, and may read less
            try:
                count = self._read_some(offset + done, buffer[done:])
            except OSError as problem:
                raise WeightsError(f"{self.path} cannot be read at byte {offset + done}: {problem}") from problem
            if count == 0:
                raise WeightsError(
                    f"{self.path} ends at byte {offset + done}; expected {offset + buffer.nbytes} bytes or more. "
                    "It became shorter after it was opened: restore it and start again"
                )
            done += count

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        if _preadv is not None:
            return _preadv(self._file.fileno(), [buffer], offset)
        with self._lock:
            self._file.seek(offset)
            return self._file.readinto(buffer) or 0  # type: ignore[attr-defined]

    def _read_header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._file.fileno()).st_size
        if size < _LENGTH_BYTES:
            raise WeightsError(f"{self.path} has {size} bytes, too few for a safetensors file; download it again")
        length_bytes = bytearray(_LENGTH_BYTES)
        self.read_into(0, memoryview(length_bytes))
        if length_bytes == _GIT_LFS_POINTER[:_LENGTH_BYTES]:
            raise WeightsError(f"{self.path} is a Git LFS pointer, not the weights themselves; run: git lfs pull")
        length = int.from_bytes(length_bytes, "little")
        data_start = _LENGTH_BYTES + length
        if length > _MAX_HEADER_BYTES or data_start > size:
            raise WeightsError(
                f"{self.path} gives {length} bytes as the length of its header; expected at most "
                f"{min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES)} in a file of {size} bytes. It is truncated, or no "
                "safetensors file: download it again"
            )
        header = bytearray(length)
        self.read_into(_LENGTH_BYTES, memoryview(header))
        where = f"the header of {self.path}"
        if not header.startswith(b"{"):
            raise WeightsError(f"{where} does not start with a brace; expected JSON: download the file again")
        entries = parse_json_object(bytes(header), where=where, error=WeightsError)
        _check_metadata(entries.pop("__metadata__", None), where)
        if len(entries) > _MAX_TENSORS:
            raise WeightsError(
                f"{where} lists {len(entries)} tensors; expected at most {_MAX_TENSORS}, more than any model of this "
                "kind has: use the original checkpoint"
            )
        tensors = {name: _stored_tensor(name, entry, where, data_start) for name, entry in entries.items()}
        _check_ranges(tensors, self.path, data_start, size)
        return tensors

    def _ask_library(self) -> None:
        """Let the format's own library judge the file as well."""
        try:
            with safetensors.safe_open(self.path, framework="numpy") as library:
                names = set(library.keys())
        except (safetensors.SafetensorError, OSError) as problem:
            raise WeightsError(f"{self.path} is refused by the safetensors library: {problem!s:.500}") from problem
        if names != self.tensors.keys():
            raise WeightsError(f"{self.path} changed while it was being opened; try again")


def _check_metadata(metadata: Any, where: str) -> None:
    if metadata is not None and (
        not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values())
    ):
        raise WeightsError(f"{where} has __metadata__ {shown(metadata)}; expected an object of strings")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _stored_tensor(name: str, entry: Any, where: str, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(f"{where} gives {shown(entry)} for {shown(name)}; expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise WeightsError(f"{where} gives {shown(dtype)} as the dtype of {shown(name)}; expected a string")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_size(size) for size in shape):
        raise WeightsError(f"{where} gives {shown(shape)} as the shape of {shown(name)}; expected a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise WeightsError(
            f"{where} gives {shown(offsets)} as the data_offsets of {shown(name)}; expected a begin and an end"
        )
    begin, end = offsets
    if begin > end:
        raise WeightsError(f"{where} places {shown(name)} at {begin} to {end}; expected an end after the begin")
    if dtype in _ITEM_BYTES and end - begin != (size := math.prod(shape) * _ITEM_BYTES[dtype]):
        raise WeightsError(f"{where}: {shown(name)} has {end - begin} bytes; expected {size} for {shape} of {dtype}")
    return StoredTensor(dtype, tuple(shape), data_start + begin, end - begin)


def _check_ranges(tensors: Mapping[str, StoredTensor], path: Path, data_start: int, size: int) -> None:
    """The byte ranges must cover the data one after another, up to the file's last byte."""
    at = data_start
    previous = "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            what = "overlaps" if tensor.offset < at else "leaves a hole after"
            raise WeightsError(
                f"{path}: the bytes of {shown(name)} begin at {tensor.offset}, which {what} {shown(previous)}, ending "
                f"at {at}; expected one to follow the other: the file is damaged, download it again"
            )
        at += tensor.nbytes
        previous = name
    if at != size:
        what = "it is truncated" if at > size else "there is something after the last tensor"
        raise WeightsError(f"{path} has {size} bytes; expected {at} by its header: {what}, download it again")
