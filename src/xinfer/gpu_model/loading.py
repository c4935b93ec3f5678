"""From a checkpoint's files into device memory: threads read a piece of a file at a time, in the files' order.

Where the file has tensors as the device wants them, their bytes are read straight into memory that the device copies
from, or into the device's own where the host reaches that: nothing else touches them. The threads do nothing but read;
one thread, the caller's, hands out pieces and sends them off, whatever tensors they are of. Many would pass the
interpreter around, and find its data in another core's cache each time. The rest is converted by the threads.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from xinfer.gpu.api import Buffer, BufferSlice, Device, Stage
from xinfer.gpu_model.layout import STORED, Place
from xinfer.model.reference import round_weights, to_float32
from xinfer.model.weights import ModelWeights
from xinfer.ops import Format

Progress = Callable[[int, int], None]  # bytes read, bytes in all

MOST_READERS = 12  # threads; each reads 4 to 8 GB/s, so that these are ahead of any bus
FEWEST_READERS = 4  # also where there are fewer cores: disks want several requests at a time
OTHER_CORES = 2  # not for readers: one for the thread that sends, and one for the driver
SMALLEST = 1 << 20  # bytes of a piece, where there is too little for all threads to read large ones
CONVERTED = 8 << 20  # bytes of one conversion, as float32
PAGE = 4096  # reads begin at multiples of it, as the pages of the page cache do
GAP = 1 << 20  # bytes between two tensors that are rather read for nothing than passed over
TOLD_S = 0.1  # between two reports of the progress
LISTEN_S = 5.0  # after which a thread that has nothing to do looks whether it is needed
POLL_S = 1e-3  # between two looks whether threads have ended
INTERRUPTS = (KeyboardInterrupt, SystemExit)  # Ctrl-C, SIGTERM

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

    @property
    def in_place(self) -> bool:
        """Whether the host reaches the memory that it goes into."""
        return self.parts[0][1].buffer.in_place

    @property
    def wanted(self) -> int:
        """Bytes of its parts."""
        return sum(target.size for _, target in self.parts)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor to be converted; a vector has one."""

    place: Place
    buffer: Buffer
    first: int
    last: int  # behind the last


class _Work:
    """What a thread is to do for a load, and then how it went."""

    def __init__(self, load: _Load, task: _Span | list[_Rows]) -> None:
        self.load = load
        self.task = task
        self.stage: Stage | None = None  # that a span is read into
        self.taken = False  # by a thread; set before that looks whether the load has been stopped
        self.back = False
        self.done = 0  # bytes of the checkpoint
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless loading has been given up. For a thread of the loader."""
        self.taken = True
        try:
            if not self.load.stopped:
                self.done = self.load.do(self)
        except BaseException as error:
            self.error = error
        self.back = True
        self.load.finished.put(self)


def n_readers() -> int:
    """Threads that read at a time."""
    return max(FEWEST_READERS, min(MOST_READERS, (os.cpu_count() or 1) - OTHER_CORES))


class Loader:
    """Reads tensors of one checkpoint; a context manager, which owns its threads."""

    def __init__(self, device: Device, weights: ModelWeights) -> None:
        self._device = device
        self._weights = weights
        self._to_do: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def load(self, jobs: Sequence[Job], *, progress: Progress | None = None, flush: bool = True) -> None:
        """Fill the places; with `flush`, wait until all has arrived. Ctrl-C ends the reading before it is passed on.

        Raises:
            WeightsError: the checkpoint cannot be read, or has values beyond the range of f16; the tensor is named.
        """
        load = _Load(self._device, self._weights, jobs, self._to_do)
        try:
            self._start(load.n_threads)
            load.send(progress)
            if flush:
                self._device.flush_uploads()
        finally:
            _whatever_comes(load.end)

    def _start(self, n: int) -> None:
        """Let there be so many threads. Each is known before it starts, and ends with this process."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        while len(self._threads) < n:
            thread = threading.Thread(target=self._work, name="xinfer-load", daemon=True)
            self._threads.append(thread)
            try:
                thread.start()
            except RuntimeError as error:  # what Python's own threads make of an interrupt at some places
                if isinstance(error.__context__, INTERRUPTS):
                    raise error.__context__ from None
                raise

    def _work(self) -> None:
        while not self._closed:
            with suppress(Empty):
                work = self._to_do.get(timeout=LISTEN_S)
                if work is not None:
                    work.run()

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._closed = True
        _whatever_comes(self._join)

    def _join(self) -> None:
        for _ in self._threads:
            self._to_do.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(TOLD_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Load:
    """One call of `Loader.load`: what its threads share."""

    def __init__(
        self, device: Device, weights: ModelWeights, jobs: Sequence[Job], to_do: SimpleQueue[_Work | None]
    ) -> None:
        self.stopped = False
        self.finished: SimpleQueue[_Work] = SimpleQueue()
        self._device = device
        self._weights = weights
        self._to_do = to_do
        self._out: set[_Work] = set()  # what has been handed out, and not been sent off
        self._total = sum(weights.tensors[place.name].nbytes for place, _ in jobs)
        self._done = 0  # bytes
        self._jobs = self._ordered(jobs)
        self.n_threads = min(n_readers(), len(jobs))

    def send(self, progress: Progress | None) -> None:
        """Hand out all the work, and send off what comes back. For the thread that loads."""
        told = 0.0
        for task in self.tasks():
            work = _Work(self, task)
            while len(self._out) >= 2 * self.n_threads:
                self._finish_one(progress)
            if isinstance(task, _Span) and not task.in_place:
                # With fewer pieces out than there are threads, one of them has nothing to do: wait for the device.
                while (stage := self._device.stage(task.size, wait=len(self._out) < self.n_threads)) is None:
                    self._finish_one(progress)
                work.stage = stage
            self._out.add(work)
            self._to_do.put(work)
            while not self.finished.empty():
                self._finish_one(progress)
            if progress is not None and time.perf_counter() - told > TOLD_S:
                told = time.perf_counter()
                progress(self._done, self._total)
        while self._out:
            self._finish_one(progress)
        if progress is not None:
            progress(self._done, self._total)

    def _finish_one(self, progress: Progress | None) -> None:
        """Send off what a thread has filled, as soon as one has."""
        assert self._out, "nothing that could be finished"
        while True:
            try:
                work = self.finished.get(timeout=TOLD_S)
                break
            except Empty:
                if progress is not None:
                    progress(self._done, self._total)
        if work.error is not None:
            raise work.error
        if work.stage is not None:
            assert isinstance(work.task, _Span)
            work.stage.send(work.task.parts)
        self._out.discard(work)
        self._done += work.done

    def end(self) -> None:
        """Let no thread begin anything more, wait for those at work, and give back what was not sent off.

        At once where nobody uses it: threads that convert may be waiting for it.
        """
        self.stopped = True
        while self._out:
            for work in [*self._out]:
                if work.back or not work.taken:  # one that takes it now sees that it is to do nothing
                    if work.stage is not None:
                        work.stage.release()
                    self._out.discard(work)
            if self._out:
                time.sleep(POLL_S)

    def do(self, work: _Work) -> int:
        """Read a span to where the device has it from, or convert rows; bytes of the checkpoint."""
        task = work.task
        if not isinstance(task, _Span):
            return sum(self._convert(rows) for rows in task if not self.stopped)
        if work.stage is not None:
            self._weights.read_span(task.file, task.begin, work.stage.view)
            return task.wanted
        for at, target in task.parts:
            with self._device.mapped(target) as view:
                self._weights.read_span(task.file, task.begin + at, view)
        return task.wanted

    def tasks(self) -> Iterator[_Span | list[_Rows]]:
        """All the work, in parts that are made as they are handed out."""
        straight = [job for job in self._jobs if self._is_straight(job[0])]
        others = [job for job in self._jobs if not self._is_straight(job[0])]
        vectors = [_Rows(*job, 0, 1) for job in others if job[0].rows == 1]
        if vectors:
            yield vectors
        yield from self._spans(straight)
        yield from ([rows] for job in others if job[0].rows > 1 for rows in _cut(*job))

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
        total = sum(self._weights.tensors[place.name].nbytes for place, _ in jobs)
        piece = max(SMALLEST, min(self._device.stage_bytes, total // (2 * n_readers()))) // PAGE * PAGE
        for run in self._runs(jobs):
            file, begin, _ = self._where(run[0])
            begin -= begin % PAGE
            stop = self._where(run[-1])[2]
            first = 0  # of the run's jobs, that which the next piece begins in
            while begin < stop:
                size = min(piece, stop - begin)
                parts = []
                for i in range(first, len(run)):
                    (place, buffer), (_, start, end) = run[i], self._where(run[i])
                    if start >= begin + size:
                        break
                    at, to = max(start, begin), min(end, begin + size)
                    parts.append((at - begin, BufferSlice(buffer, place.offset + at - start, to - at)))
                    first = i if end > begin + size else i + 1
                if parts:
                    yield _Span(file, begin, size, parts)
                begin += size

    def _runs(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Jobs that follow each other in a file closely, and go to memory that is reached alike."""
        run: list[Job] = []
        for job in jobs:
            file, begin, _ = self._where(job)
            if run:
                before, _, end = self._where(run[-1])
                if (before, run[-1][1].in_place) != (file, job[1].in_place) or not 0 <= begin - end <= GAP:
                    yield run
                    run = []
            run.append(job)
        if run:
            yield run

    def _convert(self, piece: _Rows) -> int:
        """Read rows and put them in their place; bytes of the checkpoint."""
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
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        self._device.upload(piece.buffer[begin : begin + n_rows * place.stride], data.data)
        return stored_bytes


def _cut(place: Place, buffer: Buffer) -> Iterator[_Rows]:
    """A matrix to be converted, some rows at a time."""
    step = max(1, CONVERTED // (4 * place.columns))
    for first in range(0, place.rows, step):
        yield _Rows(place, buffer, first, min(first + step, place.rows))


def _whatever_comes(work: Callable[[], None]) -> None:
    """Do it to its end, and pass on an interrupt that comes meanwhile: memory may not go while threads write it."""
    interrupt: BaseException | None = None
    while True:
        try:
            work()
            break
        except INTERRUPTS as again:
            interrupt = again
    if interrupt is not None:
        raise interrupt
