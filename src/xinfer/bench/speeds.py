"""What a device can do at best, measured: how fast it reads its memory, multiplies matrices, and is sent bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.bench.loops import WARM_S, repeated
from xinfer.errors import NumericalError
from xinfer.gpu.api import Buffer, Device
from xinfer.ops import KernelSet, Matrix, MatrixSlice, Recorder, Rows

Array = NDArray[np.float32]

READ_BYTES = 2 << 30  # more than any cache holds
READ_BYTES_SOFTWARE = 32 << 20
READ_COLUMNS = 8192
BLOCK_ROWS = 512  # of the matrix that is read; they repeat
SENT_BYTES = 256 << 20
SENT_BYTES_SOFTWARE = 16 << 20
COPIES = 4  # one after the other
# Products (rows, columns of the result, length of the sums), each 32 times the work of the one before.
PRODUCTS = ((256, 1024, 1024), (1024, 4096, 2048), (4096, 16384, 4096))
LONGEST_S = 0.5  # of one product: drivers give up what takes some seconds
REPEATS = 7
TOLERANCE = 2e-3  # of the largest number of a result: activations may have been rounded to 11 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes and operations a second, the median of some runs by the device's own clock; the bus by the host's."""

    memory: float  # read by a kernel, from memory that no cache holds
    bus: float  # from the host's memory into the device's
    matrix: float  # a multiplication and an addition are two
    matrix_kernel: str


def measure_speeds(device: Device, kernels: KernelSet) -> Speeds:
    """Some seconds on a GPU. Nothing else should run on it.

    Raises:
        NumericalError: the device's results are wrong.
    """
    bus = bus_speed(device)
    matrix, kernel = matrix_speed(device, kernels)
    return Speeds(memory=memory_speed(device, kernels), bus=bus, matrix=matrix, matrix_kernel=kernel)


def memory_speed(device: Device, kernels: KernelSet) -> float:
    """Bytes a second that a product of one row with a large f16 matrix reads.

    That is what a decode step does: a driver's copy may use an engine that is slower than the multiprocessors are.
    """
    info = device.info
    wanted = READ_BYTES_SOFTWARE if info.kind == "cpu" else READ_BYTES
    row = 2 * READ_COLUMNS
    size = min(wanted, info.max_storage_range, info.max_allocation, device.memory().free // 2)
    n_rows = max(1, size // (BLOCK_ROWS * row)) * BLOCK_ROWS
    rng = np.random.default_rng(1)
    block = rng.standard_normal((BLOCK_ROWS, READ_COLUMNS), dtype=np.float32).astype(np.float16)
    values = rng.standard_normal(READ_COLUMNS, dtype=np.float32)
    with _buffers(device) as buffer:
        place, given, made = buffer(n_rows * row), buffer(values.nbytes), buffer(4 * n_rows)
        for start in range(0, place.size, block.nbytes):
            device.upload(place[start : start + block.nbytes], block.view(np.uint8).reshape(-1).data)
        device.upload(given, values.tobytes())
        w = _matrix(place, n_rows, READ_COLUMNS)
        x, y = Rows.dense(given, 1, READ_COLUMNS), Rows.dense(made, 1, n_rows)
        seconds = _timed(device, kernels, lambda on: ops.linear(on, x, w, y, label="read"))
        found = np.frombuffer(device.download(made[:]), np.float32).reshape(-1, BLOCK_ROWS)
    _check(found, block.astype(np.float32) @ values, "reading of memory")
    return n_rows * row / seconds


def bus_speed(device: Device) -> float:
    """Bytes a second from the host's memory into the device's, copied by the device."""
    size = SENT_BYTES_SOFTWARE if device.info.kind == "cpu" else SENT_BYTES
    size = min(size, device.info.max_allocation, device.memory().free // 4)
    with _buffers(device) as buffer:
        targets = [buffer(size) for _ in range(2)]
        source = buffer(size, "upload")
        source.write(bytes(size))
        seconds = []
        for _ in range(3):  # the first time from cold
            began = time.perf_counter()
            for i in range(COPIES):
                device.transfer(source[:], targets[i % 2][:])
            device.flush_uploads()
            seconds.append((time.perf_counter() - began) / COPIES)
        return size / min(seconds)


def matrix_speed(device: Device, kernels: KernelSet) -> tuple[float, str]:
    """Operations a second of the best kernel for prompts, at a shape as large as the device takes; and the kernel."""
    best, name = 0.0, ""
    for shape in PRODUCTS:
        if not _fits(device, *shape):
            break
        best, name = max(_product_speeds(device, kernels, *shape))
        if 32 * 2 * np.prod(shape) / best > LONGEST_S:
            break
    return best, name


def _fits(device: Device, m: int, n: int, k: int) -> bool:
    sizes = (2 * n * k, 4 * m * k, 4 * m * n, ops.packed_bytes(m, k))
    return max(sizes) <= device.info.max_storage_range and 2 * sum(sizes) <= device.memory().free


def _product_speeds(device: Device, kernels: KernelSet, m: int, n: int, k: int) -> list[tuple[float, str]]:
    """(operations a second, variant) of x (m, k) times a matrix (n, k), f16 weights, by every kernel that runs."""
    rng = np.random.default_rng(4)
    some = rng.standard_normal((256, k), dtype=np.float32)
    weights = some.astype(np.float16)
    found = []
    with _buffers(device) as buffer:
        place, given, made = buffer(2 * n * k), buffer(4 * m * k), buffer(4 * m * n)
        for start in range(0, place.size, weights.nbytes):
            device.upload(place[start : start + weights.nbytes], weights.view(np.uint8).reshape(-1).data)
        for start in range(0, given.size, some.nbytes):
            device.upload(given[start : start + some.nbytes], some.view(np.uint8).reshape(-1).data)
        w, x, y = _matrix(place, n, k), Rows.dense(given, m, k), Rows.dense(made, m, n)
        packed = ops.PackedRows(buffer(ops.packed_bytes(m, k)), m, k, exact=False)
        packed_names = [*filter(kernels.usable, ops.packed_candidates(w, m, exact=False))]
        expected = some @ weights.astype(np.float32).T  # (256, 256), over and over
        if packed_names:
            _timed(device, kernels, lambda on: ops.pack_rows(on, x, packed, label="pack"), repeats=1, warm_s=0)
        for name in packed_names or filter(kernels.usable, ops.gemm_candidates(w, m)):

            def record(on: Recorder, name: str = name) -> None:
                if packed_names:
                    ops.linear_packed(on, packed, w, y, label="product", variant=name)
                else:
                    ops.linear(on, x, w, y, label="product", variant=name)

            seconds = _timed(device, kernels, record)
            corner = np.frombuffer(device.download(made[: 4 * n]), np.float32)
            _check(corner.reshape(-1, 256), expected[0], name)
            found.append((2 * m * n * k / seconds, name))
    return found


def _timed(
    device: Device,
    kernels: KernelSet,
    record: Callable[[Recorder], None],
    *,
    repeats: int = REPEATS,
    warm_s: float | None = None,
) -> float:
    """Median seconds of what is recorded, by the device's clock, behind a warm-up."""
    if warm_s is None:
        warm_s = 0.0 if device.info.kind == "cpu" else WARM_S
    recording = device.create_recording("speed")
    try:
        recording.barrier()
        recording.timestamp("begin")
        record(Recorder(recording, kernels))
        recording.barrier()
        recording.timestamp("end")
        recording.finish()

        def run() -> float:
            device.wait(device.submit(recording))
            return device.timestamps(recording)[1][1]

        return repeated(run, repeats, warm_s=warm_s).median
    finally:
        recording.release()


def _check(found: Array, expected: Array, what: str) -> None:
    """Raise NumericalError where a row of what was found is not as expected."""
    off = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not off <= TOLERANCE:
        raise NumericalError(
            f"{what} gave wrong numbers, off by {off:.1e} of the largest one: `xinfer doctor` tries every kernel"
        )


def _matrix(place: Buffer, rows: int, columns: int) -> Matrix:
    part = MatrixSlice(place[: 2 * rows * columns], 0, rows)
    return Matrix(rows=rows, columns=columns, format="f16", row_stride=2 * columns, slices=(part,))


@contextmanager
def _buffers(device: Device) -> Iterator[Callable[..., Buffer]]:
    """What makes buffers (size, kind) that are given back at the end."""
    with ExitStack() as held:

        def make(size: int, kind: str = "device") -> Buffer:
            buffer = device.create_buffer(size, kind, "speed")  # type: ignore[arg-type]
            held.callback(buffer.release)
            return buffer

        yield make
