"""Uploads and downloads through a ring of staging chunks, for every backend alike; each adds how a chunk copies.

Uploads run on a queue of their own where there is one. Order is kept by what was submitted: an upload waits for the
submitted work that uses its target, and later work that uses the target waits for the upload.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Generic, Protocol, Self, TypeVar

from xinfer.errors import DeviceError, DeviceHungError
from xinfer.gpu._checks import check_transfer
from xinfer.gpu._record import NativeSegment
from xinfer.gpu.api import Bindable, BufferKind, BufferSlice, Bytes
from xinfer.gpu.native import copy_bytes

# Bytes. What a chunk costs beside them is the interpreter's, one thread's, and wants them large; but all chunks should
# stay in the processor's cache together, from which the device then copies: that spares the host's memory two thirds.
CHUNK = 8 << 20
CHUNKS = 16  # at most, each made when all the others are in use: for threads that fill one each, and some on their way
FEW_CHUNKS = 8  # where staging takes of the device's own memory
SMALL = 256 << 10  # smaller uploads share a chunk and one submission
TIMEOUT_S = 60.0
POLL_S = 5e-4  # between two looks for what other threads give back


class StagingChunk(Protocol):
    """Mapped memory with commands to copy out of it or into it."""

    commands: Any  # what its queue takes
    used: int  # bytes of it that small uploads have
    copies: list[tuple[BufferSlice, BufferSlice]]  # of those
    value: int  # with which its last submission ends
    holder: int  # the thread that has taken it; 0 while it is idle
    user: weakref.ref[Any] | None  # what will give it back, as long as that is there
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
        self.copies: list[tuple[BufferSlice, BufferSlice]] = []
        self.holder = 0
        self.user: weakref.ref[Any] | None = None
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


class Stage(Generic[C]):
    """A chunk in somebody's hands; see `api.Stage`."""

    def __init__(self, staging: Staging[C], chunk: C, size: int) -> None:
        self._staging = staging
        self._chunk: C | None = chunk
        self._size = size
        self._view: memoryview | None = None
        chunk.user = weakref.ref(self)

    @property
    def _taken(self) -> C:
        if self._chunk is None:
            raise DeviceError("the stage is sent or given back; ask for another")
        return self._chunk

    @property
    def view(self) -> memoryview:
        """Its bytes. A chunk's memory is made by the thread that asks first."""
        if self._view is None:
            self._staging.owner.core.ensure_usable()
            self._view = self._taken.buffer.view(0, self._size)
        return self._view

    def send(self, parts: Iterable[tuple[int, Bindable]]) -> None:
        """Copy to each target the bytes that begin at a place in the stage, and give it back."""
        with self:
            buffer, copies = self._taken.buffer, []
            for at, target in parts:
                part = target if isinstance(target, BufferSlice) else target[:]
                if at + part.size > self._size:
                    raise ValueError(f"a stage of {self._size} bytes has none from {at} to {at + part.size}")
                copies.append((BufferSlice(buffer, at, part.size), part))
            self.copy(copies)

    def copy(self, copies: Sequence[tuple[BufferSlice, BufferSlice]]) -> None:
        """Let copies go with the chunk's commands, and give it back. Threads take turns only to submit."""
        with self:
            chunk = self._taken
            for _, target in copies:
                _ensure_alive(target)
            self._staging.owner.core.ensure_usable()
            self._staging.kick()
            self._staging.send(chunk, copies)

    def release(self) -> None:
        """Give it back; may be called twice. Between any two steps the chunk is ours, or lost and found, or given."""
        view, self._view = self._view, None
        if view is not None:
            view.release()
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            chunk.user = None
            self._staging.give(chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Staging(ABC, Generic[C]):
    """Moves bytes between the host and device memory."""

    def __init__(self, owner: Any, compute: Any, queue: Any) -> None:
        self.owner = owner
        self.compute = compute
        self.queue = queue  # the compute queue itself where there is no other
        discrete = owner.core.adapter.info.kind == "discrete"
        self.most = CHUNKS if discrete else FEW_CHUNKS
        self.chunk = CHUNK  # bytes of each
        self._closing = False
        self._lock = threading.RLock()  # guards what follows
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

    def mapped(self, target: BufferSlice) -> memoryview:
        """The bytes themselves of a buffer that is `in_place`, behind the submitted work that uses it."""
        _ensure_alive(target)
        buffer: Any = target.buffer
        self._wait_for(self.compute, self._last_use(target), "the work that uses it")
        self._wait_for(self.queue, buffer.last_copy, "the transfer before")
        view: memoryview = buffer.view(target.offset, target.size)
        return view

    def upload(self, target: BufferSlice, data: Bytes) -> None:
        """Write `data` into `target`."""
        _ensure_alive(target)
        source = memoryview(data).cast("B")
        if len(source) != target.size:
            raise ValueError(f"cannot upload {len(source)} bytes into {target.size} of {target.buffer.label!r}")
        if target.buffer.in_place:
            with self.mapped(target) as view:
                copy_bytes(view, source)
            return
        if target.size <= SMALL:
            self._upload_small(target, source)
            return
        for start in range(0, target.size, self.chunk):
            piece = source[start : start + self.chunk]
            with self._own_stage(len(piece)) as stage:
                copy_bytes(stage.view, piece)
                stage.send([(0, target[start : start + len(piece)])])

    def stage(self, size: int, *, wait: bool = True) -> Stage[C] | None:
        """`size` bytes that are filled by whoever can, and then sent; see `api.Device.stage`."""
        if size > self.chunk:
            raise ValueError(f"a stage has {self.chunk} bytes at most, not {size}")
        if self._closing:
            raise DeviceError("the device is being closed; open it again")
        chunk = self._take(wait=wait, patient=False)
        return None if chunk is None else Stage(self, chunk, size)

    def _own_stage(self, size: int) -> Stage[C]:
        return Stage(self, self._own_chunk(), size)

    def _own_chunk(self) -> C:
        chunk = self._take()
        if chunk is None:
            raise DeviceError("all staging is in the hands of this thread; send a stage, or give one back")
        return chunk

    def transfer(self, source: BufferSlice, target: BufferSlice) -> None:
        """Copy `source`, mapped memory that stays as it is, into `target`."""
        for part in (source, target):
            _ensure_alive(part)
        check_transfer(source, target)
        self._own_stage(0).copy([(source, target)])

    def kick(self) -> None:
        """Submit the small uploads gathered so far.

        Where an interrupt comes between they are submitted by the next call, maybe once more: that does no harm.
        """
        if self._open is None:
            return
        with self._lock:
            chunk = self._open
            if chunk is None:
                return
            try:
                self._wait_for(self.queue, chunk.value, "the uploads before")
                self.send(chunk, [(source, target) for source, target in chunk.copies if not _is_gone(target)])
            except Exception:
                self._close(chunk)
                raise
            self._close(chunk)

    def _close(self, chunk: C) -> None:
        """It gathers no more small uploads."""
        self._open = None
        self.give(chunk)

    def drain(self, timeout_s: float) -> None:
        """Hand out nothing any more, and wait (bounded) until other threads have given back what they have."""
        self._closing = True
        end, ours = time.monotonic() + timeout_s, threading.get_ident()
        while time.monotonic() < end and any(chunk.holder != ours and _in_hand(chunk) for chunk in [*self._made]):
            time.sleep(POLL_S)

    def release(self) -> None:
        """Give the staging memory back."""
        with self._lock:
            for chunk in (*self._made, self._back):
                if chunk:
                    chunk.release()
            self._made.clear()
            self._idle.clear()
            self._open = self._back = None

    def send(self, chunk: C, copies: Sequence[tuple[BufferSlice, BufferSlice]]) -> None:
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
        while True:
            with self._lock:
                if self._open and self._open.used + len(source) > self.chunk:
                    self.kick()
                chunk = self._open
                if chunk:
                    with chunk.buffer.view(chunk.used, len(source)) as view:
                        view[:] = source
                    chunk.copies.append((chunk.buffer[chunk.used : chunk.used + len(source)], target))
                    chunk.used += -(-len(source) // 16) * 16
                    return
            fresh = self._own_chunk()
            fresh.used = 0
            fresh.copies.clear()
            with self._lock:
                if self._open is None:
                    self._open = fresh
                else:  # another thread was faster
                    self.give(fresh)

    def _pieces(self, part: BufferSlice) -> Iterator[BufferSlice]:
        for start in range(0, part.size, self.chunk):
            yield part[start : min(start + self.chunk, part.size)]

    def _take(self, *, wait: bool = True, patient: bool = True) -> C | None:
        """A chunk that no work in flight uses: an idle one, else a new one, else the first to become idle.

        None where all are busy and `wait` is not set, or where the thread that asks has all of them itself. One that is
        not `patient` does not wait for other threads while it has any itself: they may be waiting for that.
        """
        me, end = threading.get_ident(), time.monotonic() + TIMEOUT_S
        while True:
            with self._lock:
                self._find_lost({me})
                if not self._idle and len(self._made) >= self.most:
                    self.kick()
                if len(self._made) < self.most and not (self._idle and self._ended(self._idle[0])):
                    chunk = self._make(self.queue, f"staging {len(self._made)}")
                    chunk.holder = me
                    self._made.append(chunk)
                    return chunk
                if self._idle:
                    if not wait and not self._ended(self._idle[0]):
                        return None
                    chunk = self._idle.popleft()
                    chunk.holder = me
                    break
                mine = sum(chunk.holder == me for chunk in self._made)
                if not wait or mine == len(self._made):
                    return None
                self._find_lost({chunk.holder for chunk in self._made} - {t.ident for t in threading.enumerate()})
                if mine and not patient and not self._idle:
                    return None
            if time.monotonic() > end:
                raise DeviceHungError(
                    f"all staging chunks were in use for {TIMEOUT_S:.0f} s; is an upload stuck?",
                    self.owner.core.hung("an upload"),
                )
            if not self._idle:
                time.sleep(POLL_S)
        try:
            self._wait_for(self.queue, chunk.value, "the uploads before")
        except BaseException:
            self.give(chunk)
            raise
        return chunk

    def _find_lost(self, holders: Set[int]) -> None:
        """Make idle what these threads will not give back: an exception out of a signal's handler may come anywhere.

        A thread that asks for a chunk has none but those that it will give back; one that has ended has none at all.
        """
        for chunk in self._made:
            if chunk.holder in holders and not (_in_hand(chunk) or chunk is self._open or chunk in self._idle):
                self._idle.append(chunk)

    def _ended(self, chunk: C) -> bool:
        ended: bool = chunk.value <= self.queue.completed()
        return ended

    def give(self, chunk: C) -> None:
        """Nobody uses it any more, but for what was submitted."""
        with self._lock:
            self._idle.append(chunk)
            chunk.holder = 0

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


def _in_hand(chunk: StagingChunk) -> bool:
    """Whether what will give it back is still there."""
    return chunk.user is not None and chunk.user() is not None


def _is_gone(part: BufferSlice) -> bool:
    buffer: Any = part.buffer
    gone: bool = buffer.released
    return gone


def _ensure_alive(part: BufferSlice) -> None:
    buffer: Any = part.buffer
    buffer.ensure_alive()
