"""Staging on Direct3D 12: uploads on a copy queue, beside the work of the compute queue."""

from __future__ import annotations

from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.memory import BufferOwner, D3D12Buffer, buffer_of
from xinfer.gpu._d3d12.queue import CommandList, Queue
from xinfer.gpu._d3d12.states import States
from xinfer.gpu._staging import NativeChunk, Staging, overlaps
from xinfer.gpu.api import BufferSlice


class Chunk(NativeChunk):
    """A staging buffer with a command list to copy out of it or into it."""

    def __init__(self, owner: BufferOwner, queue: Queue, size: int, label: str, *, readback: bool = False) -> None:
        super().__init__(owner, size, label, readback=readback)
        self.commands = [CommandList(owner.core, label, queue.kind)]
        self._states = States(self.commands[0].list)

    def begin(self) -> None:
        """Start to record; its last submission has ended.

        What other submissions wrote is seen: by the order of a queue's submissions, and by the fences between queues.
        """
        self.targets.clear()
        self.commands[0].begin()
        self._states = States(self.commands[0].list)

    def copy(self, source: BufferSlice, target: BufferSlice) -> None:
        """Record a copy."""
        a, b = buffer_of(source), buffer_of(target)
        if overlaps(target, self.targets):  # the later one wins
            self._states.need((b, d3d.D3D12_RESOURCE_STATE_COPY_SOURCE))
        self._states.need((a, d3d.D3D12_RESOURCE_STATE_COPY_SOURCE), (b, d3d.D3D12_RESOURCE_STATE_COPY_DEST))
        to, at = b.native, target.offset
        self.commands[0].list.call("CopyBufferRegion", to, at, a.native, source.offset, source.size)
        self.targets.append(target)

    def end(self) -> None:
        """Close the list. With its run buffers are back in the common state, and the next one sees what it wrote."""
        self.commands[0].end()

    def _make_buffer(self) -> D3D12Buffer:
        return D3D12Buffer(self.owner, self.size, self.kind, self.label)

    def _give_back(self) -> None:
        self.owner.retire(*self.commands[0].handles)


class Transfers(Staging[Chunk]):
    """Moves bytes between the host and device memory."""

    owner: BufferOwner

    def _make(self, queue: Queue, label: str, *, readback: bool = False) -> Chunk:
        return Chunk(self.owner, queue, self.chunk, label, readback=readback)
