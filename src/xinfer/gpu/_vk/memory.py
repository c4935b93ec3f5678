"""Device memory: which type serves a kind of buffer, whether there is enough of it, and the buffers themselves."""

from __future__ import annotations

import threading
from ctypes import byref, c_void_p, pointer
from typing import Any

from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._buffer import NativeBuffer
from xinfer.gpu._checks import too_little
from xinfer.gpu._meter import Meter
from xinfer.gpu._vk.adapter import MemoryType
from xinfer.gpu._vk.core import Core, Handle, u32
from xinfer.gpu._vk.pinned import HANDLE, HostPages, Pinning
from xinfer.gpu.api import BufferKind, BufferSlice, MemoryStatus
from xinfer.gpu.native import chain, memory_at

LOCAL = vk.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT
VISIBLE = vk.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
COHERENT = vk.VK_MEMORY_PROPERTY_HOST_COHERENT_BIT
CACHED = vk.VK_MEMORY_PROPERTY_HOST_CACHED_BIT
PLAIN = LOCAL | VISIBLE | COHERENT | CACHED  # types with other flags have strings attached

# Flags that a kind must have, and then its wishes: each (flags, wanted or not), the most important first.
REQUIRED: dict[BufferKind, int] = {"device": 0, "upload": VISIBLE | COHERENT, "readback": VISIBLE | COHERENT}
WISHES: dict[BufferKind, tuple[tuple[int, bool], ...]] = {
    "device": ((LOCAL, True), (VISIBLE, False)),
    "upload": ((LOCAL, False), (CACHED, False)),
    "readback": ((CACHED, True), (LOCAL, False)),
}
DIRECT_WISHES = ((LOCAL, True), (VISIBLE | COHERENT, True), (CACHED, True))

USAGE = (
    vk.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | vk.VK_BUFFER_USAGE_TRANSFER_DST_BIT
    | vk.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT
)
ANY_TYPE = (1 << 32) - 1  # bits of memory types
ROUND = 16  # native sizes, so that a shader may load the last bytes as a uint4


class Allocator:
    """Allocates, after a look at what is free."""

    def __init__(self, core: Core, *, direct: bool) -> None:
        self.core = core
        self.direct = direct  # the host writes device memory in place: integrated and software devices
        self.meter = Meter()
        self._ours = [0] * len(core.adapter.heaps)
        self._lock = threading.Lock()

    def status(self) -> MemoryStatus:
        """How full the largest of the device's own heaps is."""
        heaps = self.core.adapter.heaps
        own = max(range(len(heaps)), key=lambda i: (heaps[i].device_local, heaps[i].size))
        return self.meter.applied(self._heap(own), shared=self.choose("upload", ANY_TYPE).heap == own)

    def _heap(self, heap: int) -> MemoryStatus:
        heaps = self.core.adapter.heaps
        budgets = self.core.adapter.budgets()
        with self._lock:
            ours = self._ours[heap]
        if budgets is None:
            return MemoryStatus(budget=heaps[heap].size, used=ours, ours=ours)
        budget, used = budgets[heap]
        return MemoryStatus(budget=budget, used=used, ours=ours)

    def choose(self, kind: BufferKind, type_bits: int) -> MemoryType:
        """The best memory type for `kind` among those that a buffer allows."""
        types = self.core.adapter.types
        allowed = [t for t in types if type_bits >> t.index & 1 and t.flags & REQUIRED[kind] == REQUIRED[kind]]
        allowed = [t for t in allowed if not t.flags & ~PLAIN] or allowed
        if not allowed:
            raise DeviceError(f"the driver offers no memory type for {kind} buffers")
        wishes = DIRECT_WISHES if kind == "device" and self.direct else WISHES[kind]
        sizes = self.core.adapter.heaps
        return max(
            allowed,
            key=lambda t: (
                *[(t.flags & flags == flags) == wanted for flags, wanted in wishes],
                sizes[t.heap].size,
                -t.index,
            ),
        )

    def allocate(
        self, kind: BufferKind, buffer: Handle, label: str, pages: HostPages | None = None
    ) -> tuple[Handle, MemoryType]:
        """Memory of its own for a native buffer: new, or these pages."""
        dedicated = vk.VkMemoryDedicatedRequirements()
        requirements = chain(vk.VkMemoryRequirements2(), dedicated)
        query = vk.VkBufferMemoryRequirementsInfo2(buffer=buffer.value)
        self.core.vk.vkGetBufferMemoryRequirements2(self.core.device, byref(query), byref(requirements))
        size, type_bits = requirements.memoryRequirements.size, requirements.memoryRequirements.memoryTypeBits
        if pages is not None:
            if size > pages.size:
                raise DeviceError(f"{label or 'a buffer'} needs {size} bytes, and has pages of {pages.size}")
            size, type_bits = pages.size, type_bits & self._importable(pages)
        memory_type = self.choose(kind, type_bits)
        self._ensure_free(size, kind, memory_type.heap, label)
        info = vk.VkMemoryAllocateInfo(allocationSize=size, memoryTypeIndex=memory_type.index)
        if pages is not None:
            chain(info, vk.VkImportMemoryHostPointerInfoEXT(handleType=HANDLE, pHostPointer=pages.address))
        elif dedicated.prefersDedicatedAllocation or dedicated.requiresDedicatedAllocation:
            chain(info, vk.VkMemoryDedicatedAllocateInfo(buffer=buffer.value))
        heap, held = memory_type.heap, [pages]

        def gone() -> None:
            self._count(kind, heap, -size)
            held.clear()  # not before the driver has let go of them

        try:
            memory = self.core.create("VkDeviceMemory", info, label, gone)
        except OutOfMemoryError as error:
            raise self._too_little(size, self._heap(heap), label) from error
        self._count(kind, heap, size)
        return memory, memory_type

    def _importable(self, pages: HostPages) -> int:
        """The memory types that pages can be imported as, a bit each."""
        found = vk.VkMemoryHostPointerPropertiesEXT()
        call = "vkGetMemoryHostPointerPropertiesEXT"
        self.core.check(getattr(self.core.vk, call)(self.core.device, HANDLE, pages.address, byref(found)), call)
        return int(found.memoryTypeBits)

    def _count(self, kind: BufferKind, heap: int, change: int) -> None:
        with self._lock:
            self._ours[heap] += change
        if kind == "device":
            self.meter.count(change)

    def _ensure_free(self, size: int, kind: BufferKind, heap: int, label: str) -> None:
        status = self._heap(heap)
        if kind == "device":
            status = self.meter.applied(status)
        if size > status.free:
            raise self._too_little(size, status, label)

    def _too_little(self, size: int, status: MemoryStatus, label: str) -> OutOfMemoryError:
        return too_little(self.core.adapter.info.name, label, size, status)


class VulkanBuffer(NativeBuffer):
    """A VkBuffer with memory of its own; see `api.Buffer`."""

    def __init__(self, owner: BufferOwner, size: int, kind: BufferKind, label: str) -> None:
        super().__init__(size, kind, label)
        self.owner = owner
        with owner.pinning.pages(kind, size) as pages:
            try:
                self._make(pages)
            except (DeviceError, OutOfMemoryError):
                if pages is None:
                    raise
                owner.pinning.give_up()
                self._make(None)

    def _make(self, pages: HostPages | None) -> None:
        """The native buffer and its memory: new, or these pages."""
        owner, core = self.owner, self.owner.core
        info = vk.VkBufferCreateInfo(
            size=-(-self.size // ROUND) * ROUND, usage=USAGE, sharingMode=vk.VK_SHARING_MODE_EXCLUSIVE
        )
        if len(owner.families) > 1:
            info.sharingMode = vk.VK_SHARING_MODE_CONCURRENT
            info.queueFamilyIndexCount = len(owner.families)
            info.pQueueFamilyIndices = u32(*owner.families)
        if pages is not None:
            chain(info, vk.VkExternalMemoryBufferCreateInfo(handleTypes=HANDLE))
        self.handle = core.create("VkBuffer", info, self.label)
        self.memory: Handle | None = None
        try:
            self.memory, memory_type = owner.allocator.allocate(self.kind, self.handle, self.label, pages)
            core.check(
                core.vk.vkBindBufferMemory(core.device, self.handle.value, self.memory.value, 0), "vkBindBufferMemory"
            )
            if pages is None:
                self._map(memory_type)
            else:
                self.mapped, self.cached = pages.view[: self.size], True
        except BaseException:
            core.destroy(self.handle)
            if self.memory:
                core.destroy(self.memory)
            raise

    @property
    def _native(self) -> int | None:
        return self.handle.value

    def _retire(self) -> None:
        assert self.memory
        self.owner.retire(self.handle, self.memory)

    def _map(self, memory_type: MemoryType) -> None:
        wanted = self.kind != "device" or self.owner.allocator.direct
        if not wanted or memory_type.flags & (VISIBLE | COHERENT) != VISIBLE | COHERENT:
            return
        assert self.memory
        core, address = self.owner.core, c_void_p()
        core.check(
            core.vk.vkMapMemory(core.device, self.memory.value, 0, vk.VK_WHOLE_SIZE, 0, pointer(address)), "vkMapMemory"
        )
        assert address.value
        self.mapped = memory_at(address.value, self.size)
        self.cached = bool(memory_type.flags & CACHED)


class BufferOwner:
    """What buffers ask of their device."""

    core: Core
    allocator: Allocator
    pinning: Pinning
    families: list[int]  # queue families that touch buffers
    markers: VulkanBuffer | None = None  # where recordings mark how far they have come

    def retire(self, *handles: Handle) -> None:
        """Destroy these once the work in flight has ended."""
        raise NotImplementedError


def as_slice(item: Any) -> BufferSlice:
    """A whole buffer as a slice; a slice as it is. Raises TypeError for another backend's."""
    part = item if isinstance(item, BufferSlice) else item[:]
    if not isinstance(part.buffer, VulkanBuffer):
        raise TypeError(f"expected a Vulkan buffer, got {type(part.buffer).__name__}")
    return part


def buffer_of(part: BufferSlice) -> VulkanBuffer:
    """The Vulkan buffer under a slice that `as_slice` made."""
    assert isinstance(part.buffer, VulkanBuffer)
    return part.buffer
