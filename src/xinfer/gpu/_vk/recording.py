"""Recordings: command buffers, one a segment, with the descriptor sets and queries that they use."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, byref, c_uint64, c_void_p

from xinfer.gpu import _checks
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._record import NativeRecording, NativeSegment
from xinfer.gpu._vk.core import Core, Handle
from xinfer.gpu._vk.kernel import Layouts, VulkanKernel
from xinfer.gpu._vk.memory import BufferOwner, as_slice, buffer_of
from xinfer.gpu._vk.queue import Queue
from xinfer.gpu.api import MAX_BUFFERS, Bindable, BufferSlice, Groups, Kernel

SETS_A_POOL = 64
QUERIES_A_POOL = 128


class Segment(NativeSegment):
    """One command buffer of a recording."""

    def __init__(self, recording: VulkanRecording, name: str, command_buffer: int | None) -> None:
        super().__init__(recording, name)
        self.command_buffer = command_buffer


class Queries:
    """Timestamps: pools of queries, each used by one segment and reset where it starts to be used."""

    def __init__(self, core: Core, queue: Queue, label: str) -> None:
        self.core = core
        self.label = label
        self.bits = queue.family.timestamp_bits
        self.pools: list[Handle] = []
        self.labels: list[tuple[str, int, int]] = []  # (label, pool, query), in order
        self._used = QUERIES_A_POOL

    def write(self, command_buffer: int | None, label: str) -> None:
        """Record a timestamp."""
        if not self.bits:
            return
        if self._used == QUERIES_A_POOL:
            info = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=QUERIES_A_POOL)
            self.pools.append(self.core.create("VkQueryPool", info, self.label))
            self._used = 0
            self.core.vk.vkCmdResetQueryPool(command_buffer, self.pools[-1].value, 0, QUERIES_A_POOL)
        stage = vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT
        self.core.vk.vkCmdWriteTimestamp(command_buffer, stage, self.pools[-1].value, self._used)
        self.labels.append((label, len(self.pools) - 1, self._used))
        self._used += 1

    def end_segment(self) -> None:
        """The next segment takes a pool of its own."""
        self._used = QUERIES_A_POOL

    def last_finished(self) -> str | None:
        """The label of the last timestamp of a run that has not written all; None where that cannot be told."""
        finished = self.read()
        return finished[-1][0] if 0 < len(finished) < len(self.labels) else None

    def read(self) -> list[tuple[str, int]]:
        """(label, ticks) of the queries that the device has written."""
        results: list[Array[c_uint64]] = []
        for pool in self.pools:
            values = (c_uint64 * (2 * QUERIES_A_POOL))()
            flags = vk.VK_QUERY_RESULT_64_BIT | vk.VK_QUERY_RESULT_WITH_AVAILABILITY_BIT
            count = max(query for _, index, query in self.labels if self.pools[index] is pool) + 1
            result = self.core.vk.vkGetQueryPoolResults(
                self.core.device, pool.value, 0, count, 16 * count, values, 16, flags
            )
            self.core.check(result, "vkGetQueryPoolResults")
            results.append(values)
        mask = (1 << self.bits) - 1
        return [
            (label, results[pool][2 * query] & mask)
            for label, pool, query in self.labels
            if results[pool][2 * query + 1]
        ]


class VulkanRecording(NativeRecording[Segment]):
    """Commands in command buffers; see `api.Recording`."""

    owner: BufferOwner

    def __init__(self, owner: BufferOwner, layouts: Layouts, queue: Queue, label: str) -> None:
        super().__init__(owner, label)
        self.commands: Array[c_void_p] = (c_void_p * 0)()
        self.queries = Queries(self.core, queue, label)
        self._family = queue.family
        self._layouts = layouts
        self._pool = self.core.command_pool(queue.family, label)
        self._set_pools: list[Handle] = []
        self._sets_left = 0
        self._sets: dict[tuple[int, ...], int] = {}
        self._bound: VulkanKernel | None = None

    def _open(self, name: str) -> None:
        if self.parts:
            self._end_segment()
        command_buffer = self.core.command_buffers(self._pool, 1)[0]
        self.core.begin(command_buffer, vk.VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT)
        self._bound = None
        self.parts.append(Segment(self, name, command_buffer))
        self._mark(command_buffer, self._notes.begin(name))

    def dispatch(
        self, kernel: Kernel, buffers: Sequence[Bindable], constants: bytes | Sequence[int], groups: Groups, label: str
    ) -> None:
        """Run `kernel` over `groups` workgroups. Constants are unsigned dwords, or their bytes."""
        if not isinstance(kernel, VulkanKernel):
            raise TypeError(f"expected a Vulkan kernel, got {type(kernel).__name__}")
        slices = [as_slice(item) for item in buffers]
        packed = _checks.check_dispatch(kernel.code, self.core.adapter.info, slices, constants, groups)
        commands, call = self._open_commands(), self.core.vk
        layout = kernel.layout
        if self._bound is not kernel:
            call.vkCmdBindPipeline(commands, vk.VK_PIPELINE_BIND_POINT_COMPUTE, kernel.pipeline)
            self._keep(kernel)
            self._bound = kernel
        sets = (c_uint64 * 1)(self._descriptor_set(slices))
        call.vkCmdBindDescriptorSets(commands, vk.VK_PIPELINE_BIND_POINT_COMPUTE, layout.value, 0, 1, sets, 0, None)
        if packed:
            stage = vk.VK_SHADER_STAGE_COMPUTE_BIT
            call.vkCmdPushConstants(commands, layout.value, stage, 0, len(packed), packed)
        self._debug_label(commands, label)
        call.vkCmdDispatch(commands, *groups)
        self._end_debug_label(commands)
        self._note(label, slices, code=kernel.code, groups=groups, constants=packed)

    def copy(self, source: Bindable, target: Bindable) -> None:
        """Copy between slices of one size."""
        a, b = as_slice(source), as_slice(target)
        _checks.check_copy(a, b)
        region = vk.VkBufferCopy(srcOffset=a.offset, dstOffset=b.offset, size=a.size)
        self.core.vk.vkCmdCopyBuffer(self._open_commands(), buffer_of(a).native, buffer_of(b).native, 1, byref(region))
        self._note("copy", (a, b))

    def fill(self, target: Bindable, value: int) -> None:
        """Fill with a repeated u32; offset and size are multiples of 4."""
        part = as_slice(target)
        _checks.check_fill(part, value)
        self.core.vk.vkCmdFillBuffer(self._open_commands(), buffer_of(part).native, part.offset, part.size, value)
        self._note("fill", (part,))

    def barrier(self) -> None:
        """What follows sees everything that was written before."""
        self.core.barrier(self._open_commands(), self._family)

    def timestamp(self, label: str) -> None:
        """Note the time at which everything recorded before has ended."""
        self.queries.write(self._open_commands(), label)

    def _close(self) -> None:
        self._end_segment()
        self.commands = (c_void_p * len(self.parts))(*[part.command_buffer for part in self.parts])

    def _give_back(self) -> None:
        self.owner.retire(self._pool, *self._set_pools, *self.queries.pools)
        self._sets.clear()

    def _open_commands(self) -> int | None:
        return self._part().command_buffer

    def _end_segment(self) -> None:
        commands = self.parts[-1].command_buffer
        self.core.barrier(commands, self._family, host=True)
        self.core.check(self.core.vk.vkEndCommandBuffer(commands), "vkEndCommandBuffer")
        self.queries.end_segment()

    def _note(self, label: str, slices: Sequence[BufferSlice], **details: object) -> None:
        """A command has been recorded: which buffers it uses, and what it is."""
        part = self.parts[-1]
        self._notes.add(label, slices, **details)
        if self.core.trail.each_op:
            self.core.barrier(part.command_buffer, self._family, host=True)
            self._mark(part.command_buffer, self._notes.marker())
        self._use(slices)

    def _mark(self, commands: int | None, marker: bytes) -> None:
        """Let the device write a marker once it comes here; a barrier stands before it, and none is needed behind."""
        if self.owner.markers is not None:
            self.core.vk.vkCmdUpdateBuffer(commands, self.owner.markers.native, 0, len(marker), marker)

    def _descriptor_set(self, slices: Sequence[BufferSlice]) -> int:
        """A set with these slices bound; equal ones share it."""
        key = tuple(value for item in slices for value in (buffer_of(item).native, item.offset, item.size))
        if key not in self._sets:
            self._sets[key] = self._new_set(slices)
        return self._sets[key]

    def _new_set(self, slices: Sequence[BufferSlice]) -> int:
        if not self._sets_left:
            size = vk.VkDescriptorPoolSize(
                type=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, descriptorCount=SETS_A_POOL * MAX_BUFFERS
            )
            info = vk.VkDescriptorPoolCreateInfo(
                maxSets=SETS_A_POOL, poolSizeCount=1, pPoolSizes=(vk.VkDescriptorPoolSize * 1)(size)
            )
            self._set_pools.append(self.core.create("VkDescriptorPool", info, self.label))
            self._sets_left = SETS_A_POOL
        request = vk.VkDescriptorSetAllocateInfo(
            descriptorPool=self._set_pools[-1].value,
            descriptorSetCount=1,
            pSetLayouts=(c_uint64 * 1)(self._layouts.sets(len(slices)).value),
        )
        result = (c_uint64 * 1)()
        self.core.check(
            self.core.vk.vkAllocateDescriptorSets(self.core.device, byref(request), result), "vkAllocateDescriptorSets"
        )
        self._sets_left -= 1
        write_storage_buffers(self.core, result[0], slices)
        return int(result[0])

    def _debug_label(self, commands: int | None, label: str) -> None:
        if self.core.debug:
            info = vk.VkDebugUtilsLabelEXT(pLabelName=label.encode())
            self.core.vk.vkCmdBeginDebugUtilsLabelEXT(commands, byref(info))

    def _end_debug_label(self, commands: int | None) -> None:
        if self.core.debug:
            self.core.vk.vkCmdEndDebugUtilsLabelEXT(commands)


def write_storage_buffers(core: Core, descriptor_set: int, slices: Sequence[BufferSlice]) -> None:
    """Bind slices to bindings 0, 1, ... of a set."""
    infos = (vk.VkDescriptorBufferInfo * len(slices))(
        *[vk.VkDescriptorBufferInfo(buffer=buffer_of(s).native, offset=s.offset, range=s.size) for s in slices]
    )
    write = vk.VkWriteDescriptorSet(
        dstSet=descriptor_set,
        dstBinding=0,
        descriptorCount=len(slices),  # runs on over the bindings that follow, which are alike
        descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
        pBufferInfo=infos,
    )
    core.vk.vkUpdateDescriptorSets(core.device, 1, byref(write), 0, None)
