"""Uploads and downloads through a ring of staging chunks, for every backend alike; each adds how a chunk copies."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from xinfer.errors import DeviceHungError, Loss
from xinfer.gpu._checks import check_transfer
from xinfer.gpu.api import Bindable, BufferSlice, Bytes, DeviceInfo, MemoryStatus, Ticket
from xinfer.gpu.native import copy_bytes

CHUNK = 16 << 20
# At most, each made when all the others are in use: for threads that fill one each, and some on their way.
CHUNKS = 20
FEW_CHUNKS = 4  # where staging takes of the device's own memory; and what stays once every upload has been waited for
SMALL = 256 << 10  # smaller uploads share a chunk and one submission
TIMEOUT_S = 60.0


class StagingChunk(Protocol):
    """Mapped memory with commands to copy out of it or into it."""

    used: int  # bytes of it that are to be copied

    @property
    def buffer(self) -> Any:
        """The backend's own, made when it is first needed: not where the bytes lie in mapped memory already."""

    def begin(self) -> None:
        """Start to record; its last submission has ended."""

    def copy(self, source: BufferSlice, target: BufferSlice) -> None:
        """Record a copy, behind those before it where they overlap."""

    def release(self) -> None:
        """Give its objects back."""


C = TypeVar("C", bound=StagingChunk)


class Staging(ABC, Generic[C]):
    """Moves bytes between the host and device memory."""

    def __init__(self, info: DeviceInfo) -> None:
        self.most = CHUNKS if info.kind == "discrete" else FEW_CHUNKS
        self._lock = threading.RLock()  # guards what follows
        self._room = threading.Condition(self._lock)
        self._chunks = 0
        self._idle: deque[C] = deque()  # the longest idle first; the last submissions may still be in flight
        self._open: C | None = None  # gathers small uploads
        self._back: C | None = None

    @abstractmethod
    def _make(self, label: str, *, readback: bool = False) -> C:
        """A new chunk of CHUNK bytes."""

    @abstractmethod
    def _submit(self, chunk: C) -> None:
        """Send its copies off."""

    @abstractmethod
    def _ended(self, chunk: C) -> bool:
        """Whether its last submission has ended."""

    @abstractmethod
    def _wait(self, chunk: C, what: str) -> None:
        """Block until its last submission has ended."""

    @abstractmethod
    def _read_back(self, chunk: C, piece: BufferSlice, timeout_s: float) -> bytes:
        """One piece of a download."""

    @abstractmethod
    def _loss(self, work: str) -> Loss:
        """What is known about a device that does not answer."""

    def _in_place(self, target: BufferSlice) -> bool:
        """Whether the host writes there itself: `_write_in_place`."""
        del target
        return False

    def _write_in_place(self, target: BufferSlice, fill: Callable[[memoryview], None]) -> None:
        raise NotImplementedError

    def upload(self, target: BufferSlice, data: Bytes) -> None:
        """Write `data` into `target`."""
        _ensure_alive(target)
        source = memoryview(data).cast("B")
        if len(source) != target.size:
            raise ValueError(f"cannot upload {len(source)} bytes into {target.size} of {target.buffer.label!r}")
        if target.size <= SMALL and not self._in_place(target):
            self._upload_small(target, source)
            return
        done = 0

        def fill(piece: memoryview) -> None:
            nonlocal done
            copy_bytes(piece, source[done : done + len(piece)])
            done += len(piece)

        self.upload_from(target, fill)

    def upload_from(self, target: BufferSlice, fill: Callable[[memoryview], None]) -> None:
        """Let `fill` write the pieces of `target`, front to back."""
        _ensure_alive(target)
        if self._in_place(target):
            self._write_in_place(target, fill)
            return
        self.kick()
        for piece in _pieces(target):
            with self._taken_chunk() as chunk:
                with chunk.buffer.view(0, piece.size) as view:
                    fill(view)
                with self._lock:
                    chunk.begin()
                    chunk.copy(chunk.buffer[: piece.size], piece)
                    self._submit(chunk)

    def transfer(self, source: BufferSlice, target: BufferSlice) -> None:
        """Copy `source`, mapped memory that stays as it is, into `target`."""
        for part in (source, target):
            _ensure_alive(part)
        check_transfer(source, target)
        self.kick()
        with self._taken_chunk() as chunk, self._lock:
            chunk.begin()
            chunk.copy(source, target)
            self._submit(chunk)

    def kick(self) -> None:
        """Submit the small uploads gathered so far."""
        if self._open is None:
            return
        with self._lock:
            chunk, self._open = self._open, None
            if chunk:
                try:
                    self._submit(chunk)
                finally:
                    self._give(chunk)

    def release(self) -> None:
        """Give the staging memory back."""
        with self._lock:
            for chunk in (*self._idle, self._open, self._back):
                if chunk:
                    chunk.release()
            self._idle.clear()
            self._open = self._back = None

    def _download(self, source: BufferSlice, timeout_s: float) -> bytes:
        """Read `source`, through a chunk of its own."""
        with self._lock:
            if self._back is None:
                self._back = self._make("readback staging", readback=True)
            return b"".join([self._read_back(self._back, piece, timeout_s) for piece in _pieces(source)])

    def _upload_small(self, target: BufferSlice, source: memoryview) -> None:
        with self._lock:
            if self._open and self._open.used + len(source) > CHUNK:
                self.kick()
            chunk = self._open or self._open_chunk()
            with chunk.buffer.view(chunk.used, len(source)) as view:
                view[:] = source
            chunk.copy(chunk.buffer[chunk.used : chunk.used + len(source)], target)
            chunk.used += -(-len(source) // 16) * 16

    def _open_chunk(self) -> C:
        chunk = self._take()
        try:
            chunk.begin()
        except BaseException:
            self._give(chunk)
            raise
        self._open = chunk
        return chunk

    @contextmanager
    def _taken_chunk(self) -> Iterator[C]:
        chunk = self._take()
        try:
            yield chunk
        finally:
            self._give(chunk)

    def _take(self) -> C:
        """A chunk that no work in flight uses: an idle one, else a new one, else the first to become idle."""
        with self._room:
            while not (self._idle and (self._chunks >= self.most or self._ended(self._idle[0]))):
                if self._chunks < self.most:
                    chunk = self._make(f"staging {self._chunks}")
                    self._chunks += 1
                    return chunk
                self.kick()
                if not self._idle and not self._room.wait(TIMEOUT_S):
                    raise DeviceHungError(
                        f"all staging chunks were in use for {TIMEOUT_S:.0f} s; is an upload stuck?",
                        self._loss("an upload"),
                    )
            chunk = self._idle.popleft()
        try:
            self._wait(chunk, "the uploads before")
        except BaseException:
            self._give(chunk)
            raise
        return chunk

    def trim(self) -> None:
        """Give back what a large upload took, once it has been waited for."""
        with self._lock:
            while self._chunks > FEW_CHUNKS and self._idle and self._ended(self._idle[0]):
                self._idle.popleft().release()
                self._chunks -= 1

    def _give(self, chunk: C) -> None:
        with self._room:
            self._idle.append(chunk)
            self._room.notify()

    def _wait_for(self, queue: Any, value: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        if value > queue.completed() and not queue.wait(value, timeout_s):
            raise DeviceHungError(
                f"a transfer waited {timeout_s:.0f} s for {what}, which has not ended; is the device hung?",
                self._loss("a transfer"),
            )


def overlaps(target: BufferSlice, others: list[BufferSlice]) -> bool:
    """Whether a slice shares bytes with one of the others."""
    start, stop = target.offset, target.offset + target.size
    return any(t.buffer is target.buffer and t.offset < stop and start < t.offset + t.size for t in others)


def _pieces(part: BufferSlice) -> Iterator[BufferSlice]:
    for start in range(0, part.size, CHUNK):
        yield part[start : min(start + CHUNK, part.size)]


def _ensure_alive(part: BufferSlice) -> None:
    buffer: Any = part.buffer
    buffer.ensure_alive()


class StagingDevice:
    """What a device of every graphics API does by its staging and its allocator; see `api.Device`."""

    core: Any  # the backend's own, all four
    allocator: Any
    _transfers: Any
    _queue: Any

    def _slice(self, item: Bindable) -> BufferSlice:
        """A whole buffer as a slice; a slice as it is. Raises TypeError for another backend's."""
        raise NotImplementedError

    def poll(self, ticket: Ticket) -> bool:
        """Whether `ticket` has ended."""
        self.core.ensure_usable()
        ended: bool = self._queue.completed() >= ticket.value
        return ended

    def upload(self, target: Bindable, data: Bytes) -> None:
        """Write `data` (as long as `target`) into device memory; `data` may be reused on return."""
        self.core.ensure_usable()
        self._transfers.upload(self._slice(target), data)

    def upload_from(self, target: Bindable, fill: Callable[[memoryview], None]) -> None:
        """As `upload`, where `fill` is called with the pieces to be filled, front to back."""
        self.core.ensure_usable()
        self._transfers.upload_from(self._slice(target), fill)

    def transfer(self, source: Bindable, target: Bindable) -> None:
        """Copy from an upload buffer into device memory, in order as an upload."""
        self.core.ensure_usable()
        self._transfers.transfer(self._slice(source), self._slice(target))

    def flush_uploads(self, timeout_s: float = 60.0) -> None:
        """Block until every upload has arrived."""
        self.core.ensure_usable()
        self._transfers.flush(timeout_s)
        self._transfers.trim()

    def download(self, source: Bindable, timeout_s: float = 60.0) -> bytes:
        """Read device memory after everything submitted before."""
        self.core.ensure_usable()
        read: bytes = self._transfers.download(self._slice(source), timeout_s)
        return read

    def memory(self) -> MemoryStatus:
        """How full the device memory is."""
        self.core.ensure_usable()
        status: MemoryStatus = self.allocator.status()
        return status

    def limit_memory(self, n_bytes: int | None) -> None:
        """Let device buffers take so much at most; the peak begins anew."""
        self.allocator.meter.set_limit(n_bytes)
