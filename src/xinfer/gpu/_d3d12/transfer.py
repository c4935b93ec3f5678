"""Staging on Direct3D 12, on the one queue: what was asked for first is done first."""

from __future__ import annotations

from xinfer.errors import Loss
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.memory import BufferOwner, D3D12Buffer, buffer_of
from xinfer.gpu._d3d12.queue import CommandList, Queue
from xinfer.gpu._d3d12.states import States
from xinfer.gpu._staging import CHUNK, Staging, overlaps
from xinfer.gpu._trail import HUNG
from xinfer.gpu.api import BufferKind, BufferSlice


class Chunk:
    """A staging buffer with a command list to copy out of it or into it."""

    def __init__(self, owner: BufferOwner, label: str, *, readback: bool = False) -> None:
        self.owner = owner
        self._label = label
        self._kind: BufferKind = "readback" if readback else "upload"
        self._buffer: D3D12Buffer | None = None
        self.commands = CommandList(owner.core, label)
        self.used = 0
        self._states = States(self.commands.list)
        self._targets: list[BufferSlice] = []

    @property
    def buffer(self) -> D3D12Buffer:
        """Mapped memory, made when it is first needed."""
        if self._buffer is None:
            self._buffer = D3D12Buffer(self.owner, CHUNK, self._kind, self._label)
        return self._buffer

    def begin(self) -> None:
        """Start to record; its last submission has ended."""
        self.used = 0
        self._targets.clear()
        self.commands.begin()
        self._states = States(self.commands.list)
        self._states.barrier()

    def copy(self, source: BufferSlice, target: BufferSlice) -> None:
        """Record a copy."""
        if overlaps(target, self._targets):
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

    def release(self) -> None:
        """Give its objects back."""
        if self._buffer is not None:
            self._buffer.release()
        self.owner.retire(*self.commands.handles)


class Transfers(Staging[Chunk]):
    """Moves bytes between the host and device memory."""

    def __init__(self, owner: BufferOwner, queue: Queue) -> None:
        super().__init__(owner.core.adapter.info)
        self.owner = owner
        self.queue = queue

    def flush(self, timeout_s: float) -> None:
        """Block until every upload has arrived."""
        self.kick()
        self._wait_for(self.queue, self.queue.submitted, "the uploads", timeout_s)

    def download(self, source: BufferSlice, timeout_s: float) -> bytes:
        """Read `source` after everything submitted before."""
        buffer_of(source).ensure_alive()
        self.flush(timeout_s)
        return self._download(source, timeout_s)

    def _make(self, label: str, *, readback: bool = False) -> Chunk:
        return Chunk(self.owner, label, readback=readback)

    def _submit(self, chunk: Chunk) -> None:
        chunk.end()
        self.queue.submit([chunk.commands])

    def _ended(self, chunk: Chunk) -> bool:
        return chunk.commands.value <= self.queue.completed()

    def _wait(self, chunk: Chunk, what: str) -> None:
        self._wait_for(self.queue, chunk.commands.value, what)

    def _read_back(self, chunk: Chunk, piece: BufferSlice, timeout_s: float) -> bytes:
        self._wait_for(self.queue, chunk.commands.value, "the read before", timeout_s)
        chunk.begin()
        chunk.copy(piece, chunk.buffer[: piece.size])
        self._submit(chunk)
        self._wait_for(self.queue, chunk.commands.value, "the copy", timeout_s)
        return chunk.buffer.read(0, piece.size)

    def _loss(self, work: str) -> Loss:
        return self.queue.core.loss(work, HUNG)
