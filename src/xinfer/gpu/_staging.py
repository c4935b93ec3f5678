"""Uploads and downloads through a ring of staging chunks, for every backend alike; each adds how a chunk copies.

Uploads run on a queue of their own where there is one. Order is kept by what was submitted: an upload waits for the
submitted work that uses its target, and later work that uses the target waits for the upload.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from xinfer.errors import DeviceHungError
from xinfer.gpu._checks import check_transfer
from xinfer.gpu._record import NativeSegment
from xinfer.gpu.api import BufferKind, BufferSlice, Bytes
from xinfer.gpu.native import copy_bytes

# Bytes. What a chunk costs beside them is the interpreter's, one thread's, and wants them large; but all chunks should
# stay in the processor's cache together, from which the device then copies: that spares the host's memory two thirds.
CHUNK = 4 << 20
# At most, each made when all the others are in use: for threads that fill one each while another is on its way.
CHUNKS = 32
FEW_CHUNKS = 8  # where staging takes of the device's own memory
SMALL = 256 << 10  # smaller uploads share a chunk and one submission
TIMEOUT_S = 60.0


class StagingChunk(Protocol):
    """Mapped memory with commands to copy out of it or into it."""

    commands: Any  # what its queue takes
    used: int  # bytes of it that are to be copied
    value: int  # with which its last submission ends
    holder: int  # the thread that has taken it; 0 while it is idle
    in_use: bool  # and is sure to give it back
    targets: list[BufferSlice]  # of the copies recorded

    @property
    def buffer(self) -> Any:
        """The backend's own, made when it is first needed: not where the bytes lie in mapped memory already."""

    def begin(self) -> None:
        """Start to record; its last submission has ended."""

    def copy(self, source: BufferSlice, target: BufferSlice) -> None:
        """Record a copy, behind those before it where they overlap."""

    def end(self) -> None:
        """Close the commands; what follows them sees what they wrote."""

    def release(self) -> None:
        """Give its objects back."""


class NativeChunk(ABC):
    """What a chunk is on every graphics API; each adds its commands."""

    def __init__(self, owner: Any, size: int, label: str, *, readback: bool = False) -> None:
        self.owner = owner
        self.size = size
        self.label = label
        self.kind: BufferKind = "readback" if readback else "upload"
        self.value = 0
        self.used = 0
        self.holder = 0
        self.in_use = False
        self.targets: list[BufferSlice] = []
        self._buffer: Any = None

    @abstractmethod
    def _make_buffer(self) -> Any:
        """`size` bytes of mapped memory."""

    @abstractmethod
    def _give_back(self) -> None:
        """Retire the native objects."""

    @property
    def buffer(self) -> Any:
        """Mapped memory, made when it is first needed."""
        if self._buffer is None:
            self._buffer = self._make_buffer()
        return self._buffer

    def release(self) -> None:
        """Give its objects back."""
        if self._buffer is not None:
            self._buffer.release()
        self._give_back()


C = TypeVar("C", bound=StagingChunk)


class Staging(ABC, Generic[C]):
    """Moves bytes between the host and device memory."""

    def __init__(self, owner: Any, compute: Any, queue: Any) -> None:
        self.owner = owner
        self.compute = compute
        self.queue = queue  # the compute queue itself where there is no other
        discrete = owner.core.adapter.info.kind == "discrete"
        self.most = CHUNKS if discrete else FEW_CHUNKS
        self.chunk = CHUNK  # bytes of each
        self._lock = threading.RLock()  # guards what follows
        self._room = threading.Condition(self._lock)
        self._made: list[C] = []
        self._idle: deque[C] = deque()  # the longest idle first; the last submissions may still be in flight
        self._open: C | None = None  # gathers small uploads
        self._back: C | None = None
        self._pending: dict[Any, int] = {}  # by buffer: the last upload in flight on a queue apart

    @abstractmethod
    def _make(self, queue: Any, label: str, *, readback: bool = False) -> C:
        """A new chunk, its commands for this queue."""

    def waits_for(self, segments: Iterable[NativeSegment]) -> list[tuple[Any, int]]:
        """The uploads that must have arrived before these segments run."""
        if not self._pending:
            return []
        with self._lock:
            done = self.queue.completed()
            self._pending = {buffer: value for buffer, value in self._pending.items() if value > done}
            values = [v for buffer, v in self._pending.items() if any(buffer in s.buffers for s in segments)]
        return [(self.queue, max(values))] if values else []

    def flush(self, timeout_s: float) -> None:
        """Block until every upload has arrived."""
        self.kick()
        self._wait_for(self.queue, self.queue.submitted, "the uploads", timeout_s)

    def download(self, source: BufferSlice, timeout_s: float) -> bytes:
        """Read `source` after everything submitted before."""
        _ensure_alive(source)
        self.flush(timeout_s)
        self._wait_for(self.compute, self.compute.submitted, "the work submitted before", timeout_s)
        in_place = self._read_in_place(source)
        if in_place is not None:
            return in_place
        with self._lock:
            if self._back is None:
                self._back = self._make(self.compute, "readback staging", readback=True)
            return b"".join([self._read_back(self._back, piece, timeout_s) for piece in self._pieces(source)])

    @staticmethod
    def _read_in_place(source: BufferSlice) -> bytes | None:
        """What the host reads in the device's memory itself; None where it has to be copied."""
        buffer: Any = source.buffer
        if buffer.mapped is None or not buffer.cached:
            return None
        with buffer.view(source.offset, source.size) as view:
            return bytes(view)

    @staticmethod
    def _in_place(target: BufferSlice) -> bool:
        """Whether the host writes into the device's memory itself."""
        buffer: Any = target.buffer
        return buffer.mapped is not None

    def _write_in_place(self, target: BufferSlice, fill: Callable[[memoryview], None]) -> None:
        buffer: Any = target.buffer
        self._wait_for(self.compute, self._last_use(target), "the work that uses it")
        self._wait_for(self.queue, buffer.last_copy, "the transfer before")
        with buffer.view(target.offset, target.size) as view:
            fill(view)

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
        self.upload_span(target.size, [(0, target)], lambda _, piece: fill(piece))

    def upload_span(
        self, size: int, parts: Sequence[tuple[int, BufferSlice]], fill: Callable[[int, memoryview], None]
    ) -> None:
        """Let `fill` write `size` bytes piece by piece, told where each begins; `parts` of them go to their targets."""
        staged: list[tuple[int, BufferSlice]] = []
        for at, target in parts:
            _ensure_alive(target)
            if self._in_place(target):
                self._write_in_place(target, partial(fill, at))
            else:
                staged.append((at, target))
        if not staged:
            return
        self.kick()
        for start in range(0, size, self.chunk):
            stop = min(start + self.chunk, size)
            with self._taken_chunk() as chunk:
                with chunk.buffer.view(0, stop - start) as view:
                    fill(start, view)
                self._send(chunk, list(_copies(chunk, start, stop, staged)))

    def transfer(self, source: BufferSlice, target: BufferSlice) -> None:
        """Copy `source`, mapped memory that stays as it is, into `target`."""
        for part in (source, target):
            _ensure_alive(part)
        check_transfer(source, target)
        self.kick()
        with self._taken_chunk() as chunk:
            self._send(chunk, [(source, target)])

    def kick(self) -> None:
        """Submit the small uploads gathered so far."""
        if self._open is None:
            return
        with self._lock:
            chunk, self._open = self._open, None
            if chunk:
                try:
                    chunk.end()
                    self._submit(chunk)
                finally:
                    self._give(chunk)

    def release(self) -> None:
        """Give the staging memory back."""
        with self._lock:
            for chunk in (*self._made, self._back):
                if chunk:
                    chunk.release()
            self._made.clear()
            self._idle.clear()
            self._open = self._back = None

    def _send(self, chunk: C, copies: Sequence[tuple[BufferSlice, BufferSlice]]) -> None:
        """Let copies go with a chunk's commands. Threads record at the same time and take turns only to submit."""
        chunk.begin()
        for source, target in copies:
            chunk.copy(source, target)
        chunk.end()
        with self._lock:
            self._submit(chunk)

    def _submit(self, chunk: C) -> None:
        """Send a chunk's commands off, behind the submitted compute work that uses the targets of their copies."""
        apart = self.queue is not self.compute
        last = max((self._last_use(target) for target in chunk.targets), default=0)
        waits = [(self.compute, last)] if apart and last > self.compute.completed() else []
        try:
            self.queue.submit(chunk.commands, waits)
        finally:
            chunk.value = self.queue.submitted
            buffers: list[Any] = [target.buffer for target in chunk.targets]
            for buffer in buffers:
                buffer.last_copy = chunk.value
            if apart:
                self._pending.update(dict.fromkeys(buffers, chunk.value))
            chunk.targets.clear()

    @staticmethod
    def _last_use(part: BufferSlice) -> int:
        """The value with which the submitted compute work ends that uses a slice's buffer."""
        buffer: Any = part.buffer
        return max((segment.last_value for segment in buffer.users()), default=0)

    def _read_back(self, chunk: C, piece: BufferSlice, timeout_s: float) -> bytes:
        """One piece of a download."""
        self._wait_for(self.compute, chunk.value, "the read before", timeout_s)
        chunk.begin()
        chunk.copy(piece, chunk.buffer[: piece.size])
        chunk.end()
        try:
            self.compute.submit(chunk.commands)
        finally:
            chunk.value = self.compute.submitted
            chunk.targets.clear()
        self._wait_for(self.compute, chunk.value, "the copy", timeout_s)
        data: bytes = chunk.buffer.read(0, piece.size)
        return data

    def _upload_small(self, target: BufferSlice, source: memoryview) -> None:
        with self._lock:
            if self._open and self._open.used + len(source) > self.chunk:
                self.kick()
            chunk = self._open or self._open_chunk()
            with chunk.buffer.view(chunk.used, len(source)) as view:
                view[:] = source
            chunk.copy(chunk.buffer[chunk.used : chunk.used + len(source)], target)
            chunk.used += -(-len(source) // 16) * 16

    def _pieces(self, part: BufferSlice) -> Iterator[BufferSlice]:
        for start in range(0, part.size, self.chunk):
            yield part[start : min(start + self.chunk, part.size)]

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
            chunk.in_use = True
            yield chunk
        finally:
            chunk.in_use = False
            self._give(chunk)

    def _take(self) -> C:
        """A chunk that no work in flight uses: an idle one, else a new one, else the first to become idle."""
        with self._room:
            self._find_lost({threading.get_ident()})
            while not (self._idle and (len(self._made) >= self.most or self._ended(self._idle[0]))):
                if len(self._made) < self.most:
                    chunk = self._make(self.queue, f"staging {len(self._made)}")
                    chunk.holder = threading.get_ident()
                    self._made.append(chunk)
                    return chunk
                self.kick()
                self._find_lost(
                    {chunk.holder for chunk in self._made} - {thread.ident for thread in threading.enumerate()}
                )
                if not self._idle and not self._room.wait(TIMEOUT_S):
                    raise DeviceHungError(
                        f"all staging chunks were in use for {TIMEOUT_S:.0f} s; is an upload stuck?",
                        self.owner.core.hung("an upload"),
                    )
            chunk = self._idle.popleft()
            chunk.holder = threading.get_ident()
        try:
            self._wait_for(self.queue, chunk.value, "the uploads before")
        except BaseException:
            self._give(chunk)
            raise
        return chunk

    def _find_lost(self, holders: Set[int]) -> None:
        """Make idle what these threads will not give back: an exception out of a signal's handler may come anywhere.

        A thread that asks for a chunk has none but those that it will give back; one that has ended has none at all.
        """
        for chunk in self._made:
            if chunk.holder in holders and not (chunk.in_use or chunk is self._open or chunk in self._idle):
                self._idle.append(chunk)

    def _ended(self, chunk: C) -> bool:
        ended: bool = chunk.value <= self.queue.completed()
        return ended

    def _give(self, chunk: C) -> None:
        with self._room:
            self._idle.append(chunk)
            chunk.holder = 0
            self._room.notify()

    def _wait_for(self, queue: Any, value: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        if value > queue.completed() and not queue.wait(value, timeout_s):
            raise DeviceHungError(
                f"a transfer waited {timeout_s:.0f} s for {what}, which has not ended; is the device hung?",
                self.owner.core.hung("a transfer"),
            )


def overlaps(target: BufferSlice, others: list[BufferSlice]) -> bool:
    """Whether a slice shares bytes with one of the others."""
    start, stop = target.offset, target.offset + target.size
    return any(t.buffer is target.buffer and t.offset < stop and start < t.offset + t.size for t in others)


def _copies(
    chunk: StagingChunk, start: int, stop: int, parts: Iterable[tuple[int, BufferSlice]]
) -> Iterator[tuple[BufferSlice, BufferSlice]]:
    """What of the bytes `start` to `stop`, which lie in a chunk, goes to the parts' targets."""
    for at, target in parts:
        first, last = max(start, at), min(stop, at + target.size)
        if first < last:
            yield chunk.buffer[first - start : last - start], target[first - at : last - at]


def _ensure_alive(part: BufferSlice) -> None:
    buffer: Any = part.buffer
    buffer.ensure_alive()
