"""Staging on Vulkan, or none where the host reaches device memory."""

from __future__ import annotations

from ctypes import byref

from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._staging import NativeChunk, Staging, overlaps
from xinfer.gpu._vk.memory import BufferOwner, VulkanBuffer, buffer_of
from xinfer.gpu._vk.queue import Queue
from xinfer.gpu.api import BufferSlice


class Chunk(NativeChunk):
    """A staging buffer with a command buffer to copy out of it or into it."""

    def __init__(self, owner: BufferOwner, queue: Queue, size: int, label: str, *, readback: bool = False) -> None:
        super().__init__(owner, size, label, readback=readback)
        core = owner.core
        flags = vk.VK_COMMAND_POOL_CREATE_TRANSIENT_BIT | vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        self.family = queue.family
        self.pool = core.command_pool(queue.family, label, flags)
        self.commands = core.command_buffers(self.pool, 1)

    def begin(self) -> None:
        """Start to record, behind what was submitted. Reset first: an interrupt may have left it half recorded."""
        self.targets.clear()
        core = self.owner.core
        core.check(core.vk.vkResetCommandBuffer(self.commands[0], 0), "vkResetCommandBuffer")
        core.begin(self.commands[0], vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        self.barrier()

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

    def end(self) -> None:
        """Close the commands; what follows them sees what they wrote, the host too where it reads the chunk."""
        self.barrier(host=self.kind == "readback")
        self.owner.core.check(self.owner.core.vk.vkEndCommandBuffer(self.commands[0]), "vkEndCommandBuffer")

    def _make_buffer(self) -> VulkanBuffer:
        return VulkanBuffer(self.owner, self.size, self.kind, self.label)

    def _give_back(self) -> None:
        self.owner.retire(self.pool)


class Transfers(Staging[Chunk]):
    """Moves bytes between the host and device memory."""

    owner: BufferOwner

    def _make(self, queue: Queue, label: str, *, readback: bool = False) -> Chunk:
        return Chunk(self.owner, queue, self.chunk, label, readback=readback)
