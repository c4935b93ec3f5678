"""A bench for single ops: arrays in, one recording, arrays out, with guard bands around every output.

Outputs start as NaN and lie between guard bands of a pattern; `Output.read` fails where a band changed. Inputs have NaN
behind them, so that reading too far shows. Tolerances are computed, not chosen: see `sum_tolerance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.gpu.api import Buffer, BufferSlice, Device

Array = NDArray[np.float32]
GUARD_BYTES = 1024  # a multiple of every storage alignment
GUARD_WORD = 0x7FC0_1DEA  # a NaN of its own
UNIT = 2.0**-24  # the largest relative error of one rounding to float32

DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def sum_tolerance(n: int, magnitude: Array) -> Array:
    """Bound on the difference of two float32 sums of n products in different orders; magnitude: the sum of |products|.

    Each partial sum is rounded by at most UNIT of its size, so the worst case is n * UNIT * magnitude; roundings are
    not aligned, so sqrt(n) of them count (Higham, Accuracy and Stability, 4.2), with a few more for what comes before
    and behind, and twice, since both sides round.
    """
    return np.asarray(2 * UNIT * (np.sqrt(n) + 8) * magnitude, np.float32)


@dataclass
class Output:
    """A device array that an op writes."""

    bench: Bench
    buffer: Buffer
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def place(self) -> BufferSlice:
        """What the op is given."""
        return self.buffer[GUARD_BYTES : self.buffer.size - GUARD_BYTES]

    def read(self) -> NDArray[Any]:
        """Its content; the guard bands must have stayed."""
        words = np.frombuffer(self.bench.device.download(self.buffer), np.uint32)
        bands = np.concatenate([words[: GUARD_BYTES // 4], words[-GUARD_BYTES // 4 :]])
        assert (bands == GUARD_WORD).all(), f"{np.count_nonzero(bands != GUARD_WORD)} words written outside the output"
        size = int(np.prod(self.shape))
        payload = words[GUARD_BYTES // 4 : -GUARD_BYTES // 4].view(self.dtype)
        rest = payload[size:].view(np.uint8)
        assert (rest == np.resize(np.frombuffer(np.uint32(GUARD_WORD).tobytes(), np.uint8), rest.size)).all()
        return payload[:size].reshape(self.shape)

    def rows(self, *, stride: int | None = None, width: int | None = None) -> ops.Rows:
        """As an op's rows, (T, width)."""
        n, full = self.shape
        return ops.Rows(place=self.place, n=n, width=width or full, stride=stride or full)


@dataclass
class Bench:
    """One device, its kernels, and the buffers of one test."""

    device: Device
    kernels: ops.KernelSet
    buffers: list[Buffer] = field(default_factory=list)

    def put(self, array: NDArray[Any], *, spare_bytes: int = 64) -> BufferSlice:
        """Upload an input; NaN lies behind it, within the binding."""
        data = np.ascontiguousarray(array).tobytes()
        data += b"\0" * (-len(data) % 4)
        spare = np.full(spare_bytes // 4, np.nan, np.float32).tobytes()
        data += spare + spare[: -(len(data) + len(spare)) % 16]
        buffer = self._buffer(len(data))
        self.device.upload(buffer, data)
        return buffer[0 : buffer.size]

    def put_rows(self, array: Array, *, stride: int | None = None, offset: int = 0) -> ops.Rows:
        """Upload (T, width) activations, NaN between and around the rows."""
        n, width = array.shape
        stride = stride or width
        flat = np.full(offset + n * stride, np.nan, np.float32)
        flat[offset:].reshape(n, stride)[:, :width] = array
        return ops.Rows(place=self.put(flat), n=n, width=width, stride=stride, offset=offset)

    def put_matrix(self, weights: NDArray[Any], weight_format: ops.Format, *, slices: int = 1) -> ops.Matrix:
        """Upload a matrix (rows, columns) of values that the format has, in row slices, each in its own buffer."""
        n_rows, columns = weights.shape
        stride = ops.row_stride(columns, weight_format)
        stored = np.zeros((n_rows, stride // np.dtype(DTYPES[weight_format]).itemsize), DTYPES[weight_format])
        stored[:, :columns] = weights
        bounds = np.linspace(0, n_rows, slices + 1).astype(int)
        parts = tuple(
            ops.MatrixSlice(self.put(stored[first:last]), int(first), int(last - first))
            for first, last in itertools.pairwise(bounds)
        )
        return ops.Matrix(rows=n_rows, columns=columns, format=weight_format, row_stride=stride, slices=parts)

    def out(self, *shape: int, dtype: Any = np.float32, fill: NDArray[Any] | None = None) -> Output:
        """An output, NaN at the start, or `fill`."""
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        padded = -(-size // 256) * 256
        data = np.full((padded + 2 * GUARD_BYTES) // 4, GUARD_WORD, np.uint32)
        body = data[GUARD_BYTES // 4 : -GUARD_BYTES // 4].view(dtype)[: int(np.prod(shape))]
        body[:] = fill.ravel() if fill is not None else np.frombuffer(b"\xff\xff\xff\x7f", dtype)[0]
        buffer = self._buffer(data.nbytes)
        self.device.upload(buffer, data.tobytes())
        return Output(self, buffer, shape, dtype)

    def state(self, rows: Sequence[ops.RowState]) -> BufferSlice:
        """The rows of a step."""
        return self.put(np.frombuffer(b"".join(row.pack() for row in rows), np.uint32))

    def run(self, op: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Record `op(recorder, ...)`, submit, wait; the validation layers must stay silent."""
        recording = self.device.create_recording("test")
        try:
            op(ops.Recorder(recording, self.kernels), *arguments, **options)
            recording.finish()
            self.device.wait(self.device.submit(recording), timeout_s=300)  # lavapipe compiles on first use
        finally:
            recording.release()
        assert self.device.drain_debug_messages() == []

    def release(self) -> None:
        """Give the test's buffers back."""
        for buffer in self.buffers:
            buffer.release()
        self.buffers.clear()

    def _buffer(self, size: int) -> Buffer:
        self.buffers.append(self.device.create_buffer(size, "device", f"test {len(self.buffers)}"))
        return self.buffers[-1]


def assert_close(found: Array, expected: Array, tolerance: Array | float) -> None:
    """Every element within its own tolerance; NaN anywhere fails."""
    assert found.shape == expected.shape
    excess = np.abs(found - expected) - tolerance
    worst = int(np.argmax(np.where(np.isnan(excess), np.inf, excess)))
    where = np.unravel_index(worst, found.shape)
    limit = np.broadcast_to(tolerance, found.shape)[where]
    assert excess[where] <= 0, (
        f"{np.count_nonzero(~(excess <= 0))} of {found.size} elements are off; the worst at {where}: "
        f"{found[where]!r} instead of {expected[where]!r}, tolerance {limit:.3g}"
    )


def random_weights(rng: np.random.Generator, shape: tuple[int, ...], weight_format: str) -> NDArray[Any]:
    """Standard normal weights, rounded to the format."""
    return rng.standard_normal(shape, np.float32).astype(DTYPES[weight_format])


CacheFormat = Literal["f32", "f16"]


def cache_array(blocks: NDArray[Any], table: NDArray[np.uint32], sequence: int, n_keys: int) -> Array:
    """(S, n_kv_heads, head_dim): a sequence's keys, from blocks (n, n_kv_heads, BLOCK_TOKENS, head_dim)."""
    own = blocks[table[sequence]]  # (blocks, n_kv_heads, BLOCK_TOKENS, head_dim)
    flat = own.transpose(0, 2, 1, 3).reshape(-1, blocks.shape[1], blocks.shape[3])
    return np.asarray(flat[:n_keys], np.float32)
