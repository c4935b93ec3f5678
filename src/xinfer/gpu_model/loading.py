"""From a checkpoint's files into device memory: many threads, each a piece of a file at a time, in the files' order.

Where the file has tensors as the device wants them, their bytes are read straight into memory that the device copies
from, or into the device's own where the host reaches that: nothing else touches them. A piece is read by one call and
copied by one submission, whatever tensors it is of. The rest is converted by the threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
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
PIECE = 32 << 20  # bytes that a thread takes at a time; less at the end, so that all have work until then
READ = 8 << 20  # bytes of one read at least, and of one conversion
READ_S = 0.05  # that one read may take: between two a thread hears that loading is given up
PAGE = 4096  # reads begin at multiples of it, as the pages of the page cache do
GAP = 1 << 20  # bytes between two tensors that are rather read for nothing than passed over

_DTYPES: dict[Format, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}

Job = tuple[Place, Buffer]  # a tensor, and the allocation that it goes into


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a file as the device wants them, and where parts of them go, by where in the span each begins."""

    file: Path
    begin: int
    size: int
    parts: list[tuple[int, BufferSlice]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor to be converted; a vector has one."""

    place: Place
    buffer: Buffer
    first: int
    last: int  # behind the last


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
        futures = [self._threads.submit(load.work) for _ in range(min(n_readers(), load.n_tasks))]
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
        self._at_once = READ  # bytes of one read, as far as is known by now
        ordered = self._ordered(jobs)
        straight = [job for job in ordered if self._is_straight(job[0])]
        vectors = [_Rows(*job, 0, 1) for job in ordered if job[0].rows == 1 and not self._is_straight(job[0])]
        matrices = [job for job in ordered if job[0].rows > 1 and not self._is_straight(job[0])]
        tasks: list[_Span | list[_Rows]] = [vectors] if vectors else []
        tasks += self._spans(straight)
        tasks += [[rows] for job in matrices for rows in _cut(*job)]
        self.n_tasks = len(tasks)
        self._tasks = iter(tasks)

    def work(self) -> None:
        """Take one task after the other, until there is none or loading is given up."""
        try:
            while not self.stop.is_set():
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                if isinstance(task, _Span):
                    self._copy(task)
                    continue
                for rows in task:
                    self._convert(rows)
        except BaseException:
            self.stop.set()
            raise

    def _ordered(self, jobs: Sequence[Job]) -> list[Job]:
        """In the order of the files; where the same bytes go to several places, all that comes first is before them."""
        seen: Counter[tuple[Path, int]] = Counter()
        keys: list[tuple[int, Path, int]] = []
        for job in jobs:
            file, begin, _ = self._where(job)
            keys.append((seen[file, begin], file, begin))
            seen[file, begin] += 1
        return [jobs[i] for i in sorted(range(len(jobs)), key=keys.__getitem__)]

    def _where(self, job: Job) -> tuple[Path, int, int]:
        """A tensor's file, and where in it the tensor begins and ends."""
        info = self._weights.tensors[job[0].name]
        return info.file, info.offset, info.offset + info.nbytes

    def _is_straight(self, place: Place) -> bool:
        """Whether the file has a tensor as the device wants it."""
        packed = place.stride == place.columns * _DTYPES[place.format].itemsize
        return packed and self._weights.tensors[place.name].dtype == STORED[place.format]

    def _spans(self, jobs: Sequence[Job]) -> Iterator[_Span]:
        """What lies together in a file, in pieces."""
        left = sum(self._weights.tensors[place.name].nbytes for place, _ in jobs)
        for run in self._runs(jobs):
            file, begin, _ = self._where(run[0])
            begin -= begin % PAGE
            stop = self._where(run[-1])[2]
            first = 0  # of the run's jobs, that which the next piece begins in
            while begin < stop:
                size = min(max(READ, min(PIECE, left // n_readers())) // PAGE * PAGE or PAGE, stop - begin)
                parts = []
                for i in range(first, len(run)):
                    (place, buffer), (_, start, end) = run[i], self._where(run[i])
                    if start >= begin + size:
                        break
                    at, to = max(start, begin), min(end, begin + size)
                    parts.append((at - begin, buffer[place.offset + at - start : place.offset + to - start]))
                    first = i if end > begin + size else i + 1
                if parts:
                    yield _Span(file, begin, size, parts)
                begin, left = begin + size, left - size

    def _runs(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Jobs that follow each other in a file closely, and go to one kind of memory."""
        run: list[Job] = []
        for job in jobs:
            file, begin, _ = self._where(job)
            if run:
                before, _, end = self._where(run[-1])
                if (before, run[-1][1].kind) != (file, job[1].kind) or not 0 <= begin - end <= GAP:
                    yield run
                    run = []
            run.append(job)
        if run:
            yield run

    def _copy(self, span: _Span) -> None:
        left = sum(target.size for _, target in span.parts)  # to be counted

        def fill(at: int, view: memoryview) -> None:
            nonlocal left
            done = 0
            while done < len(view):
                if self.stop.is_set():
                    raise InterruptedError("loading was given up")
                began = time.perf_counter()
                some = view[done : done + self._at_once]
                self._weights.read_span(span.file, span.begin + at + done, some)
                done += len(some)
                speed = len(some) / max(1e-9, time.perf_counter() - began)
                self._at_once = max(READ, min(PIECE, int(speed * READ_S)))
                self._count(min(len(some), left))
                left -= min(len(some), left)

        if span.parts[0][1].buffer.kind == "device":
            self._device.upload_span(span.size, span.parts, fill)
            return
        for at, target in span.parts:
            with target.buffer.view(target.offset, target.size) as view:
                fill(at, view)

    def _convert(self, piece: _Rows) -> None:
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


def _cut(place: Place, buffer: Buffer) -> Iterator[_Rows]:
    """A matrix to be converted, some rows at a time."""
    step = max(1, READ // (4 * place.columns))
    for first in range(0, place.rows, step):
        yield _Rows(place, buffer, first, min(first + step, place.rows))
