"""Uploads and downloads, through a ring of staging chunks on the one queue: what was asked for first is done first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from xinfer.errors import DeviceHungError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._checks import check_transfer
from xinfer.gpu._d3d12.memory import BufferOwner, D3D12Buffer, buffer_of
from xinfer.gpu._d3d12.queue import CommandList, Queue
from xinfer.gpu._d3d12.states import States
from xinfer.gpu._trail import HUNG
from xinfer.gpu.api import BufferSlice, Bytes
from xinfer.gpu.native import copy_bytes

CHUNK = 16 << 20
CHUNKS = 4
SMALL = 256 << 10  # smaller uploads share a chunk and one submission
TIMEOUT_S = 60.0


class Chunk:
    """A staging buffer with a command list to copy out of it or into it."""

    def __init__(self, owner: BufferOwner, label: str, *, readback: bool = False) -> None:
        self.buffer = D3D12Buffer(owner, CHUNK, "readback" if readback else "upload", label)
        self.commands = CommandList(owner.core, label)
        self.used = 0
        self._states = States(self.commands.list)
        self._targets: list[BufferSlice] = []

    def begin(self) -> None:
        """Start to record; its last submission has ended."""
        self.used = 0
        self._targets.clear()
        self.commands.begin()
        self._states = States(self.commands.list)
        self._states.barrier()

    def copy(self, source: BufferSlice, target: BufferSlice) -> None:
        """Record a copy."""
        start, stop = target.offset, target.offset + target.size
        if any(t.buffer is target.buffer and t.offset < stop and start < t.offset + t.size for t in self._targets):
            self._states.barrier()  # the later one wins
        a, b = buffer_of(source), buffer_of(target)
        self._states.need((a, d3d.D3D12_RESOURCE_STATE_COPY_SOURCE), (b, d3d.D3D12_RESOURCE_STATE_COPY_DEST))
        self.commands.list.call("CopyBufferRegion", b.native, target.offset, a.native, source.offset, source.size)
        self._targets.append(target)

    def end(self) -> None:
        """Close the list."""
        self._states.barrier()
        self.commands.end()
        self._targets.clear()

    def release(self, owner: BufferOwner) -> None:
        """Give its objects back."""
        self.buffer.release()
        owner.retire(*self.commands.handles)


class Transfers:
    """Moves bytes between the host and device memory."""

    def __init__(self, owner: BufferOwner, queue: Queue) -> None:
        self.owner = owner
        self.queue = queue
        self._lock = threading.RLock()  # guards what follows
        self._room = threading.Condition(self._lock)
        self._chunks = 0
        self._idle: deque[Chunk] = deque()  # the longest idle first; the last submissions may still be in flight
        self._open: Chunk | None = None  # gathers small uploads
        self._back: Chunk | None = None

    def upload(self, target: BufferSlice, data: Bytes) -> None:
        """Write `data` into `target`."""
        buffer_of(target).ensure_alive()
        source = memoryview(data).cast("B")
        if len(source) != target.size:
            raise ValueError(f"cannot upload {len(source)} bytes into {target.size} of {target.buffer.label!r}")
        if target.size <= SMALL:
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
        buffer_of(target).ensure_alive()
        self.kick()
        for start in range(0, target.size, CHUNK):
            piece = target[start : min(start + CHUNK, target.size)]
            with self._taken_chunk() as chunk:
                with chunk.buffer.view(0, piece.size) as view:
                    fill(view)
                with self._lock:
                    chunk.begin()
                    chunk.copy(chunk.buffer[: piece.size], piece)
                    self._submit(chunk)

    def transfer(self, source: BufferSlice, target: BufferSlice) -> None:
        """Copy `source`, an upload buffer that stays as it is, into `target`."""
        for part in (source, target):
            buffer_of(part).ensure_alive()
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

    def flush(self, timeout_s: float) -> None:
        """Block until every upload has arrived."""
        self.kick()
        self._wait_for(self.queue.submitted, "the uploads", timeout_s)

    def download(self, source: BufferSlice, timeout_s: float) -> bytes:
        """Read `source` after everything submitted before."""
        buffer_of(source).ensure_alive()
        self.flush(timeout_s)
        pieces = []
        with self._lock:
            if self._back is None:
                self._back = Chunk(self.owner, "readback staging", readback=True)
            for start in range(0, source.size, CHUNK):
                piece = source[start : min(start + CHUNK, source.size)]
                pieces.append(self._read_back(self._back, piece, timeout_s))
        return b"".join(pieces)

    def release(self) -> None:
        """Give the staging memory back."""
        with self._lock:
            for chunk in (*self._idle, self._open, self._back):
                if chunk:
                    chunk.release(self.owner)
            self._idle.clear()
            self._open = self._back = None

    def _upload_small(self, target: BufferSlice, source: memoryview) -> None:
        with self._lock:
            if self._open and self._open.used + len(source) > CHUNK:
                self.kick()
            chunk = self._open or self._open_chunk()
            with chunk.buffer.view(chunk.used, len(source)) as view:
                view[:] = source
            chunk.copy(chunk.buffer[chunk.used : chunk.used + len(source)], target)
            chunk.used += -(-len(source) // 16) * 16

    def _open_chunk(self) -> Chunk:
        chunk = self._take()
        try:
            chunk.begin()
        except BaseException:
            self._give(chunk)
            raise
        self._open = chunk
        return chunk

    def _submit(self, chunk: Chunk) -> None:
        chunk.end()
        self.queue.submit([chunk.commands])

    @contextmanager
    def _taken_chunk(self) -> Iterator[Chunk]:
        chunk = self._take()
        try:
            yield chunk
        finally:
            self._give(chunk)

    def _take(self) -> Chunk:
        """A chunk that no work in flight uses; waits for one."""
        with self._room:
            while not self._idle:
                if self._chunks < CHUNKS:
                    chunk = Chunk(self.owner, f"staging {self._chunks}")
                    self._chunks += 1
                    return chunk
                self.kick()
                if not self._idle and not self._room.wait(TIMEOUT_S):
                    raise DeviceHungError(
                        f"all staging chunks were in use for {TIMEOUT_S:.0f} s; is an upload stuck?",
                        self.queue.core.loss("an upload", HUNG),
                    )
            chunk = self._idle.popleft()
        try:
            self._wait_for(chunk.commands.value, "the uploads before")
        except BaseException:
            self._give(chunk)
            raise
        return chunk

    def _give(self, chunk: Chunk) -> None:
        with self._room:
            self._idle.append(chunk)
            self._room.notify()

    def _read_back(self, chunk: Chunk, piece: BufferSlice, timeout_s: float) -> bytes:
        self._wait_for(chunk.commands.value, "the read before", timeout_s)
        chunk.begin()
        chunk.copy(piece, chunk.buffer[: piece.size])
        self._submit(chunk)
        self._wait_for(chunk.commands.value, "the copy", timeout_s)
        return chunk.buffer.read(0, piece.size)

    def _wait_for(self, value: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        if value > self.queue.completed() and not self.queue.wait(value, timeout_s):
            raise DeviceHungError(
                f"a transfer waited {timeout_s:.0f} s for {what}, which has not ended; is the device hung?",
                self.queue.core.loss("a transfer", HUNG),
            )
