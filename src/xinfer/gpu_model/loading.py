"""From a checkpoint's files into device memory: many threads, each tensor in pieces, in the order of the files.

Where the file has a tensor as the device wants it, its bytes are read straight into memory that the device copies from,
or into the device's own where the host reaches that: nothing else touches them. The rest is converted by the threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xinfer.gpu.api import Buffer, BufferSlice, Device
from xinfer.gpu_model.layout import STORED, Place
from xinfer.model.reference import round_weights, to_float32
from xinfer.model.weights import ModelWeights
from xinfer.ops import Format

Progress = Callable[[int, int], None]  # bytes read, bytes in all

MOST_READERS = 16  # threads; what one of them reads, 2 to 4 GB/s, is far below what a bus moves
FEWEST_READERS = 4  # also where there are fewer cores: disks want several requests at a time
PIECE = 16 << 20  # bytes that a thread takes at a time
READ = 8 << 20  # bytes of one read, and of one conversion: between them a thread hears that loading is given up
SMALL = 256 << 10  # uploads up to here are put together by the device

_DTYPES: dict[Format, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}

Job = tuple[Place, Buffer]  # a tensor, and the allocation that it goes into


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a tensor (a vector has one), or bytes of one that goes as it is."""

    place: Place
    buffer: Buffer
    first: int
    last: int  # behind the last
    straight: bool


def n_readers() -> int:
    """Threads that read at a time."""
    return max(FEWEST_READERS, min(MOST_READERS, os.cpu_count() or 1))


class Loader:
    """Reads tensors of one checkpoint; a context manager, which owns its threads."""

    def __init__(self, device: Device, weights: ModelWeights) -> None:
        self._device = device
        self._weights = weights
        self._threads = ThreadPoolExecutor(n_readers(), "xinfer-load")

    def load(self, jobs: Sequence[Job], *, progress: Progress | None = None, flush: bool = True) -> None:
        """Fill the places; with `flush`, wait until all has arrived. Ctrl-C ends the reading before it is passed on.

        Raises:
            WeightsError: the checkpoint cannot be read, or has values beyond the range of f16; the tensor is named.
        """
        load = _Load(self._device, self._weights, jobs)
        futures = [self._threads.submit(load.work) for _ in range(min(n_readers(), load.n_pieces))]
        try:
            left: set[Future[None]] = set(futures)
            while left:
                ended, left = wait(left, timeout=0.1, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                if progress is not None:
                    progress(load.done, load.total)
            if flush:
                self._device.flush_uploads()
        except BaseException:
            load.stop.set()
            while not all(future.done() for future in futures):
                with suppress(KeyboardInterrupt):  # a second one: memory may not go while threads write it
                    wait(futures)
            raise

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._threads.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Load:
    """One call of `Loader.load`: what its threads share."""

    def __init__(self, device: Device, weights: ModelWeights, jobs: Sequence[Job]) -> None:
        self.stop = threading.Event()
        self.done = 0
        self.total = sum(weights.tensors[place.name].nbytes for place, _ in jobs)
        self._device = device
        self._weights = weights
        self._lock = threading.Lock()
        in_file = {
            place.name: (weights.tensors[place.name].file, weights.tensors[place.name].offset) for place, _ in jobs
        }
        pieces = [p for job in sorted(jobs, key=lambda job: in_file[job[0].name]) for p in self._cut(*job)]
        self.n_pieces = len(pieces)
        self._pieces = iter(pieces)

    def work(self) -> None:
        """Take one piece after the other, until there is none or loading is given up."""
        try:
            while not self.stop.is_set():
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                if piece.straight:
                    self._copy(piece)
                else:
                    self._convert(piece)
        except BaseException:
            self.stop.set()
            raise

    def _cut(self, place: Place, buffer: Buffer) -> Iterator[_Piece]:
        info = self._weights.tensors[place.name]
        packed = place.stride == place.columns * _DTYPES[place.format].itemsize
        straight = info.dtype == STORED[place.format] and packed
        if straight:
            n, step = info.nbytes, PIECE
        else:
            n, step = place.rows, max(1, READ // (4 * place.columns))
        for first in range(0, n, step):
            yield _Piece(place, buffer, first, min(first + step, n), straight)

    def _copy(self, piece: _Piece) -> None:
        name, size = piece.place.name, piece.last - piece.first
        begin = piece.place.offset + piece.first
        target = piece.buffer[begin : begin + size]
        at = piece.first

        def fill(part: memoryview) -> None:
            nonlocal at
            for start in range(0, len(part), READ):
                if self.stop.is_set():
                    raise InterruptedError("loading was given up")
                some = part[start : start + READ]
                self._weights.read_into(name, some, offset=at)
                at += len(some)
                self._count(len(some))

        if piece.buffer.kind != "device":
            with piece.buffer.view(target.offset, size) as view:
                fill(view)
        elif size <= SMALL:
            data = bytearray(size)
            fill(memoryview(data))
            self._device.upload(target, data)
        else:
            self._device.upload_from(target, fill)

    def _convert(self, piece: _Piece) -> None:
        place, name = piece.place, piece.place.name
        info, dtype = self._weights.tensors[name], _DTYPES[place.format]
        if len(info.shape) == 1:
            values = to_float32(self._weights.read(name)).reshape(1, -1)
            stored_bytes = info.nbytes
        else:
            stored = self._weights.read_rows(name, piece.first, piece.last)
            values = round_weights(stored, name, "float16") if place.format == "f16" else stored
            stored_bytes = stored.nbytes
        n_rows, width = len(values), place.stride // dtype.itemsize
        if values.dtype != dtype or values.shape[1] != width:
            padded = np.zeros((n_rows, width), dtype)
            padded[:, : place.columns] = values
            values = padded
        begin = place.offset + piece.first * place.stride
        self._put(piece.buffer[begin : begin + n_rows * place.stride], values)
        self._count(stored_bytes)

    def _put(self, target: BufferSlice, values: NDArray[Any]) -> None:
        """Into device memory, or into the host's own that the device copies from."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if target.buffer.kind == "device":
            self._device.upload(target, data.data)
            return
        with target.buffer.view(target.offset, target.size) as view:
            np.frombuffer(view, np.uint8)[:] = data

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.done += n_bytes
