"""Single ops on a device: arrays in, one recording, arrays out, with guard bands around every output.

Outputs start as NaN between bands of a pattern, inputs have NaN behind them: what reads or writes too far shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.gpu.api import Buffer, BufferSlice, Device, Groups
from xinfer.ops import KernelSet, Matrix, MatrixSlice, Recorder, Rows, RowState
from xinfer.shaders.catalog import Variant
from xinfer.trials.judge import Array

GUARD_BYTES = 1024  # a multiple of every storage alignment
GUARD_WORD = 0x7FC0_1DEA  # a NaN of its own
TIMEOUT_S = 60.0
DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class WatchedRecorder(Recorder):
    """A recorder that notes which variants it dispatched."""

    used: list[str] = field(default_factory=list)

    def dispatch(
        self,
        variant: Variant,
        buffers: Any,
        constants: Any,
        groups: Groups,
        label: str,
    ) -> None:
        """Record one dispatch and note its variant."""
        self.used.append(variant.id)
        Recorder.dispatch(self, variant, buffers, constants, groups, label)


class Output:
    """A device array that an op writes."""

    def __init__(self, bench: Bench, buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._bench = bench
        self._buffer = buffer
        self._shape = shape
        self._dtype = dtype

    @property
    def place(self) -> BufferSlice:
        """What the op is given."""
        return self._buffer[GUARD_BYTES : self._buffer.size - GUARD_BYTES]

    def read(self) -> NDArray[Any]:
        """Its content; words outside that were written are counted by the bench."""
        words = np.frombuffer(self._bench.device.download(self._buffer), np.uint32)
        payload = words[GUARD_BYTES // 4 : -GUARD_BYTES // 4].view(self._dtype)
        size = int(np.prod(self._shape))
        outside = (words[: GUARD_BYTES // 4], words[-GUARD_BYTES // 4 :], _whole_words(payload[size:].view(np.uint8)))
        self._bench.n_outside += sum(int(np.count_nonzero(part != GUARD_WORD)) for part in outside)
        return payload[:size].reshape(self._shape)

    def rows(self) -> Rows:
        """As an op's rows, (T, width)."""
        return Rows.dense(self.place, *self._shape)


def _whole_words(tail: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return tail[len(tail) % 4 :].view(np.uint32)


class Bench:
    """One device, its kernels, and the buffers of one trial; a context manager that gives the buffers back."""

    def __init__(self, device: Device, kernels: KernelSet, *, timeout_s: float = TIMEOUT_S) -> None:
        self.device = device
        self.kernels = kernels
        self.used: list[str] = []  # variants dispatched
        self.n_outside = 0  # words that were written outside of outputs
        self._timeout_s = timeout_s
        self._buffers: list[Buffer] = []

    def put(self, array: NDArray[Any]) -> BufferSlice:
        """Upload an input; NaN lies behind it, within the binding."""
        return self._put([_bytes_of(array)])

    def put_rows(self, array: Array) -> Rows:
        """Upload activations (T, width), rows a little apart with NaN between them where alignment allows it."""
        n, width = array.shape
        stride = width + 8
        flat = np.full((n, stride), np.nan, np.float32)
        flat[:, :width] = array
        return Rows(place=self.put(flat), n=n, width=width, stride=stride)

    def put_matrix(self, weights: NDArray[Any], weight_format: ops.Format, *, rows: int | None = None) -> Matrix:
        """Upload a matrix (rows, columns) of values that the format has, in slices that a binding can span.

        Of `rows` rows, where given: those of `weights`, over and over.
        """
        own, columns = weights.shape
        n_rows = own if rows is None else rows
        stride = ops.row_stride(columns, weight_format)
        dtype = DTYPES[weight_format]
        stored = np.zeros((own, stride // dtype.itemsize), dtype)
        stored[:, :columns] = weights
        most = max(1, (self.device.info.max_storage_range - 256) // stride // 16 * 16)
        slices = tuple(
            MatrixSlice(self._put(_repeated(stored, first, last)), first, last - first)
            for first in range(0, n_rows, most)
            for last in (min(first + most, n_rows),)
        )
        return Matrix(rows=n_rows, columns=columns, format=weight_format, row_stride=stride, slices=slices)

    def out(self, *shape: int, dtype: Any = np.float32, fill: NDArray[Any] | None = None) -> Output:
        """An output, NaN at the start, or `fill`."""
        dtype, size = np.dtype(dtype), int(np.prod(shape))
        padded = -(-size * dtype.itemsize // 256) * 256
        data = np.full((padded + 2 * GUARD_BYTES) // 4, GUARD_WORD, np.uint32)
        body = data[GUARD_BYTES // 4 : -GUARD_BYTES // 4].view(dtype)[:size]
        body[:] = fill.ravel() if fill is not None else np.frombuffer(b"\xff\xff\xff\x7f", dtype)[0]
        buffer = self._buffer(data.nbytes)
        self.device.upload(buffer, data.data)
        return Output(self, buffer, shape, dtype)

    def states(self, rows: Sequence[RowState]) -> BufferSlice:
        """The rows of a step."""
        return self.put(np.frombuffer(b"".join(row.pack() for row in rows), np.uint32))

    def run(self, record: Callable[[Recorder], None]) -> None:
        """Record, submit and wait."""
        recording = self.device.create_recording("trial")
        try:
            record(WatchedRecorder(recording, self.kernels, self.used))
            recording.finish()
            self.device.wait(self.device.submit(recording), self._timeout_s)
        finally:
            recording.release()

    def release(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _put(self, parts: Sequence[NDArray[np.uint8]]) -> BufferSlice:
        """Upload bytes, one part behind the other, and the NaN behind them, with one copy on the host."""
        size = sum(part.nbytes for part in parts)
        spare = np.full(20, np.nan, np.float32).view(np.uint8)
        to_word, tail = -size % 4, 64 + -(size + -size % 4) % 16
        data = np.concatenate([*parts, np.zeros(to_word, np.uint8), spare[:tail]])
        buffer = self._buffer(data.nbytes)
        self.device.upload(buffer, data.data)
        return buffer[0 : buffer.size]

    def _buffer(self, size: int) -> Buffer:
        self._buffers.append(self.device.create_buffer(size, "device", f"trial {len(self._buffers)}"))
        return self._buffers[-1]


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _repeated(block: NDArray[Any], first: int, last: int) -> list[NDArray[np.uint8]]:
    """Rows `first` to `last` of a block's rows, over and over."""
    parts = []
    while first < last:
        begin = first % len(block)
        end = min(len(block), begin + last - first)
        parts.append(_bytes_of(block[begin:end]))
        first += end - begin
    return parts
