"""Staging on Vulkan, or none where the host reaches device memory.

Uploads run on a transfer queue of their own where there is one. Order is kept by what was submitted: an upload waits
for the submitted work that uses its target, and later work that uses the target waits for the upload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import byref

from xinfer.errors import Loss
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._staging import CHUNK, Staging, overlaps
from xinfer.gpu._trail import HUNG
from xinfer.gpu._vk.memory import BufferOwner, VulkanBuffer, buffer_of
from xinfer.gpu._vk.queue import Queue
from xinfer.gpu._vk.recording import Segment
from xinfer.gpu.api import BufferKind, BufferSlice


class Chunk:
    """A staging buffer with a command buffer to copy out of it or into it."""

    def __init__(self, owner: BufferOwner, queue: Queue, label: str, *, readback: bool = False) -> None:
        core = owner.core
        self.owner = owner
        self._label = label
        self._kind: BufferKind = "readback" if readback else "upload"
        self._buffer: VulkanBuffer | None = None
        flags = vk.VK_COMMAND_POOL_CREATE_TRANSIENT_BIT | vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        self.family = queue.family
        self.pool = core.command_pool(queue.family, label, flags)
        self.commands = core.command_buffers(self.pool, 1)
        self.value = 0  # with which its last submission ends
        self.used = 0
        self.targets: list[BufferSlice] = []

    @property
    def buffer(self) -> VulkanBuffer:
        """Mapped memory, made when it is first needed."""
        if self._buffer is None:
            self._buffer = VulkanBuffer(self.owner, CHUNK, self._kind, self._label)
        return self._buffer

    def begin(self) -> None:
        """Start to record copies behind what was submitted."""
        self.targets.clear()
        self.used = 0
        self.restart()
        self.barrier()

    def restart(self) -> None:
        """Start to record. Reset first: an interrupt may have left it half recorded."""
        core = self.owner.core
        core.check(core.vk.vkResetCommandBuffer(self.commands[0], 0), "vkResetCommandBuffer")
        core.begin(self.commands[0], vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)

    def copy(self, source: BufferSlice, target: BufferSlice) -> None:
        """Record a copy."""
        if overlaps(target, self.targets):
            self.barrier()
        region = vk.VkBufferCopy(srcOffset=source.offset, dstOffset=target.offset, size=target.size)
        a, b = buffer_of(source).native, buffer_of(target).native
        self.owner.core.vk.vkCmdCopyBuffer(self.commands[0], a, b, 1, byref(region))
        self.targets.append(target)

    def barrier(self, *, host: bool = False) -> None:
        """What follows, and with `host` the host, sees what came before."""
        self.owner.core.barrier(self.commands[0], self.family, host=host)

    def end(self, *, host: bool = False) -> None:
        """Close the commands; what follows them sees what they wrote."""
        self.barrier(host=host)
        self.owner.core.check(self.owner.core.vk.vkEndCommandBuffer(self.commands[0]), "vkEndCommandBuffer")

    def release(self) -> None:
        """Give its objects back."""
        if self._buffer is not None:
            self._buffer.release()
        self.owner.retire(self.pool)


class Transfers(Staging[Chunk]):
    """Moves bytes between the host and device memory."""

    def __init__(self, owner: BufferOwner, compute: Queue, queue: Queue) -> None:
        super().__init__(owner.core.adapter.info)
        self.owner = owner
        self.compute = compute
        self.queue = queue  # the compute queue itself where there is no other
        self._pending: dict[VulkanBuffer, int] = {}  # uploads in flight on the transfer queue

    def waits_for(self, segments: Iterable[Segment]) -> list[tuple[Queue, int]]:
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
        buffer = buffer_of(source)
        buffer.ensure_alive()
        self.flush(timeout_s)
        self._wait_for(self.compute, self.compute.submitted, "the work submitted before", timeout_s)
        if buffer.mapped is not None and buffer.cached:
            with buffer.view(source.offset, source.size) as view:
                return bytes(view)
        return self._download(source, timeout_s)

    def _in_place(self, target: BufferSlice) -> bool:
        return buffer_of(target).mapped is not None

    def _write_in_place(self, target: BufferSlice, fill: Callable[[memoryview], None]) -> None:
        self._wait_for(self.compute, self._last_use(buffer_of(target)), "the work that uses it")
        with buffer_of(target).view(target.offset, target.size) as view:
            fill(view)

    def _last_use(self, buffer: VulkanBuffer) -> int:
        return max((segment.last_value for segment in buffer.users()), default=0)

    def _make(self, label: str, *, readback: bool = False) -> Chunk:
        return Chunk(self.owner, self.compute if readback else self.queue, label, readback=readback)

    def _submit(self, chunk: Chunk) -> None:
        """Send a chunk's copies off, behind the submitted compute work that uses their targets."""
        chunk.end()
        apart = self.queue is not self.compute
        last = max((self._last_use(buffer_of(t)) for t in chunk.targets), default=0)
        waits = [(self.compute, last)] if apart and last > self.compute.completed() else []
        try:
            self.queue.submit(chunk.commands, waits)
        finally:
            chunk.value = self.queue.submitted
            if apart:
                self._pending.update((buffer_of(t), chunk.value) for t in chunk.targets)
            chunk.targets.clear()

    def _ended(self, chunk: Chunk) -> bool:
        return chunk.value <= self.queue.completed()

    def _wait(self, chunk: Chunk, what: str) -> None:
        self._wait_for(self.queue, chunk.value, what)

    def _read_back(self, chunk: Chunk, piece: BufferSlice, timeout_s: float) -> bytes:
        self._wait_for(self.compute, chunk.value, "the read before", timeout_s)
        chunk.restart()
        chunk.targets.clear()
        chunk.copy(piece, chunk.buffer[: piece.size])
        chunk.end(host=True)
        try:
            self.compute.submit(chunk.commands)
        finally:
            chunk.value = self.compute.submitted
        self._wait_for(self.compute, chunk.value, "the copy", timeout_s)
        return chunk.buffer.read(0, piece.size)

    def _loss(self, work: str) -> Loss:
        return self.owner.core.loss(work, HUNG.name)
