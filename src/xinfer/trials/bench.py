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
        data = np.ascontiguousarray(array).tobytes()
        data += b"\0" * (-len(data) % 4)
        spare = np.full(16, np.nan, np.float32).tobytes()
        data += spare + spare[: -(len(data) + len(spare)) % 16]
        buffer = self._buffer(len(data))
        self.device.upload(buffer, data)
        return buffer[0 : buffer.size]

    def put_rows(self, array: Array) -> Rows:
        """Upload activations (T, width), rows a little apart with NaN between them where alignment allows it."""
        n, width = array.shape
        stride = width + 8
        flat = np.full((n, stride), np.nan, np.float32)
        flat[:, :width] = array
        return Rows(place=self.put(flat), n=n, width=width, stride=stride)

    def put_matrix(self, weights: NDArray[Any], weight_format: ops.Format) -> Matrix:
        """Upload a matrix (rows, columns) of values that the format has, in slices that a binding can span."""
        n_rows, columns = weights.shape
        stride = ops.row_stride(columns, weight_format)
        dtype = DTYPES[weight_format]
        stored = np.zeros((n_rows, stride // dtype.itemsize), dtype)
        stored[:, :columns] = weights
        most = max(1, (self.device.info.max_storage_range - 256) // stride // 16 * 16)
        slices = tuple(
            MatrixSlice(self.put(stored[first : first + most]), first, min(most, n_rows - first))
            for first in range(0, n_rows, most)
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
        self.device.upload(buffer, data.tobytes())
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

    def _buffer(self, size: int) -> Buffer:
        self._buffers.append(self.device.create_buffer(size, "device", f"trial {len(self._buffers)}"))
        return self._buffers[-1]
