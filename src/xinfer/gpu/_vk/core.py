"""An opened device, and the ledger of native objects made on it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from ctypes import Array, byref, c_float, c_uint32, c_uint64, c_void_p, pointer
from functools import cache
from typing import Any

from xinfer.errors import DeviceError, DeviceLostError, Loss
from xinfer.gpu import native
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._trail import HUNG, Trail
from xinfer.gpu._vk.adapter import Adapter, QueueFamily
from xinfer.gpu._vk.features import extensions_for
from xinfer.gpu.native import chain

# What destroys an object, by its type; the order is that in which what is left goes when the device closes.
DESTROY = {
    "VkCommandPool": "vkDestroyCommandPool",
    "VkDescriptorPool": "vkDestroyDescriptorPool",
    "VkQueryPool": "vkDestroyQueryPool",
    "VkPipeline": "vkDestroyPipeline",
    "VkPipelineLayout": "vkDestroyPipelineLayout",
    "VkDescriptorSetLayout": "vkDestroyDescriptorSetLayout",
    "VkShaderModule": "vkDestroyShaderModule",
    "VkPipelineCache": "vkDestroyPipelineCache",
    "VkBuffer": "vkDestroyBuffer",
    "VkDeviceMemory": "vkFreeMemory",
    "VkFence": "vkDestroyFence",
    "VkSemaphore": "vkDestroySemaphore",
}
OBJECT_TYPES = {
    "VkCommandPool": vk.VK_OBJECT_TYPE_COMMAND_POOL,
    "VkDescriptorPool": vk.VK_OBJECT_TYPE_DESCRIPTOR_POOL,
    "VkQueryPool": vk.VK_OBJECT_TYPE_QUERY_POOL,
    "VkPipeline": vk.VK_OBJECT_TYPE_PIPELINE,
    "VkPipelineLayout": vk.VK_OBJECT_TYPE_PIPELINE_LAYOUT,
    "VkDescriptorSetLayout": vk.VK_OBJECT_TYPE_DESCRIPTOR_SET_LAYOUT,
    "VkShaderModule": vk.VK_OBJECT_TYPE_SHADER_MODULE,
    "VkPipelineCache": vk.VK_OBJECT_TYPE_PIPELINE_CACHE,
    "VkBuffer": vk.VK_OBJECT_TYPE_BUFFER,
    "VkDeviceMemory": vk.VK_OBJECT_TYPE_DEVICE_MEMORY,
    "VkFence": vk.VK_OBJECT_TYPE_FENCE,
    "VkSemaphore": vk.VK_OBJECT_TYPE_SEMAPHORE,
}


class Handle:
    """One native object, from before it is made until it is destroyed."""

    __slots__ = ("kind", "on_destroy", "slot")

    def __init__(self, kind: str, on_destroy: Callable[[], None] | None = None) -> None:
        self.kind = kind
        self.slot = c_uint64()
        self.on_destroy = on_destroy

    @property
    def value(self) -> int:
        """The native handle; 0 where there is none."""
        return int(self.slot.value)


class Core:
    """The native device and all that was made on it."""

    def __init__(self, adapter: Adapter, features: frozenset[str], families: list[QueueFamily]) -> None:
        self.adapter = adapter
        self.features = features
        self.debug = adapter.instance.messages is not None
        self.lost: Loss | None = None
        self.trail = Trail()
        self.fault: tuple[str, ...] = ()  # what the driver said about the loss
        self.closed = False
        self._process = os.getpid()
        self._handles: dict[int, Handle] = {}  # by identity, in the order of making
        self._results: list[None] = []
        self._lock = threading.Lock()
        handle = c_void_p()
        info = self._create_info(families)
        native.check(
            adapter.instance.vk.vkCreateDevice(adapter.handle, byref(info), None, byref(handle)), "vkCreateDevice"
        )
        self.device = handle.value
        self.vk = adapter.instance.vk.level("vkGetDeviceProcAddr", handle.value, quick=not self.debug)

    def _create_info(self, families: list[QueueFamily]) -> vk.VkStructure:
        priority = (c_float * 1)(1.0)
        queues = (vk.VkDeviceQueueCreateInfo * len(families))(
            *[
                vk.VkDeviceQueueCreateInfo(queueFamilyIndex=f.index, queueCount=1, pQueuePriorities=priority)
                for f in families
            ]
        )
        extensions = extensions_for(self.features, self.adapter.extensions, self.adapter.version)
        if "VK_KHR_portability_subset" in self.adapter.extensions:
            extensions.append("VK_KHR_portability_subset")  # must be switched on where it is listed
        info = vk.VkDeviceCreateInfo(
            queueCreateInfoCount=len(families),
            pQueueCreateInfos=queues,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=native.strings(extensions),
        )
        return chain(info, *self.adapter.feature_structs(self.features))

    def ensure_usable(self) -> None:
        """Raise where the device is closed, lost, or belongs to the parent of this process."""
        if self.lost is not None:
            raise DeviceLostError(loss=self.lost)
        if self.closed:
            raise DeviceError(f"the device {self.adapter.info.name!r} is closed; open it again")
        if os.getpid() != self._process:
            raise DeviceError("the device was opened before this process was forked; open it again in this process")

    @property
    def forked(self) -> bool:
        """Whether this process only inherited the device: it must not touch it."""
        return os.getpid() != self._process

    def check(self, result: int, call: str) -> int:
        """`native.check`, which remembers a lost device and adds what the driver says about it."""
        if result == vk.VK_ERROR_DEVICE_LOST:
            if self.lost is None:
                self.fault = self._ask_fault()
                self.lost = self.loss(call, native.result_name(result), result)
            raise DeviceLostError(loss=self.lost)
        return native.check(result, call)

    def loss(self, call: str, reason: str, code: int = 0) -> Loss:
        """What can be told about a loss that `call` has just noticed."""
        messages = self.adapter.instance.messages
        return self.trail.loss(
            self.adapter.info,
            call=call,
            reason=reason,
            code=code,
            details=self.fault,
            messages=messages.recent() if messages else (),
        )

    def hung(self, work: str) -> Loss:
        """What can be told where work has not ended in its time."""
        return self.loss(work, HUNG.name)

    def create(
        self, kind: str, info: vk.VkStructure, label: str = "", on_destroy: Callable[[], None] | None = None
    ) -> Handle:
        """Make an object with the vkCreate command that its type is named after."""
        call = f"vkCreate{kind.removeprefix('Vk')}" if kind != "VkDeviceMemory" else "vkAllocateMemory"
        handle = self.reserve(kind, on_destroy)
        try:
            self.check(getattr(self.vk, call)(self.device, byref(info), None, byref(handle.slot)), call)
        except BaseException:
            self.destroy(handle)
            raise
        self.name(handle, label)
        return handle

    def reserve(self, kind: str, on_destroy: Callable[[], None] | None = None) -> Handle:
        """A ledger entry to be filled by the driver: an interrupt right after the call then leaves nothing unowned."""
        handle = Handle(kind, on_destroy)
        with self._lock:
            self._handles[id(handle)] = handle
        return handle

    def destroy(self, handle: Handle) -> None:
        """Destroy an object that no work in flight uses; the second call does nothing."""
        destroy = getattr(self.vk, DESTROY[handle.kind])
        with self._lock:
            if handle.value:
                # As in `Queue._submit`: no signal is looked for between the call and the note of it.
                self._results[:] = map(destroy, (self.device,), (handle.slot,), (None,))
                handle.slot.value = 0
                if handle.on_destroy:
                    handle.on_destroy()
            self._handles.pop(id(handle), None)

    def name(self, handle: Handle, label: str) -> None:
        """Give an object the name that validation and debuggers show."""
        if self.debug and label:
            info = vk.VkDebugUtilsObjectNameInfoEXT(
                objectType=OBJECT_TYPES[handle.kind], objectHandle=handle.value, pObjectName=label.encode()
            )
            self.check(self.vk.vkSetDebugUtilsObjectNameEXT(self.device, byref(info)), "vkSetDebugUtilsObjectNameEXT")

    def live_objects(self) -> dict[str, int]:
        """Objects alive, by type."""
        with self._lock:
            counts = Counter(handle.kind for handle in self._handles.values() if handle.value)
        if not self.closed:
            counts["VkDevice"] += 1
        return dict(counts)

    def close(self) -> None:
        """Destroy what is left, then the device. Nothing may be in flight."""
        if self.closed:
            return
        self.closed = True
        order = list(DESTROY)
        with self._lock:
            left = sorted(self._handles.values(), key=lambda handle: order.index(handle.kind))
        for handle in left:
            self.destroy(handle)
        self.vk.vkDestroyDevice(self.device, None)

    def abandon(self) -> None:
        """Forget the device without touching it: it is busy beyond patience, or another process's."""
        self.closed = True

    def command_pool(self, family: QueueFamily, label: str, flags: int = 0) -> Handle:
        """A pool of command buffers for one queue family."""
        info = vk.VkCommandPoolCreateInfo(flags=flags, queueFamilyIndex=family.index)
        return self.create("VkCommandPool", info, label)

    def command_buffers(self, pool: Handle, count: int) -> Array[c_void_p]:
        """Primary command buffers; they go with their pool."""
        info = vk.VkCommandBufferAllocateInfo(
            commandPool=pool.value, level=vk.VK_COMMAND_BUFFER_LEVEL_PRIMARY, commandBufferCount=count
        )
        buffers = (c_void_p * count)()
        self.check(self.vk.vkAllocateCommandBuffers(self.device, byref(info), buffers), "vkAllocateCommandBuffers")
        return buffers

    def begin(self, command_buffer: int | None, flags: int) -> None:
        """Start recording into a command buffer that is fresh or has ended."""
        info = vk.VkCommandBufferBeginInfo(flags=flags)
        self.check(self.vk.vkBeginCommandBuffer(command_buffer, byref(info)), "vkBeginCommandBuffer")

    def barrier(self, command_buffer: int | None, family: QueueFamily, *, host: bool = False) -> None:
        """What follows, on the host too if asked, sees what the stages of this queue family wrote before."""
        seen_by, memory = _memory_barrier(family.stages, host)
        self.vk.vkCmdPipelineBarrier(command_buffer, family.stages, seen_by, 0, 1, memory, 0, None, 0, None)

    def _ask_fault(self) -> tuple[str, ...]:
        """What VK_EXT_device_fault tells about the loss."""
        if "device_fault" not in self.features:
            return ()
        counts, info = vk.VkDeviceFaultCountsEXT(), vk.VkDeviceFaultInfoEXT()
        get = self.vk.vkGetDeviceFaultInfoEXT
        if get(self.device, byref(counts), None) < 0:
            return ()
        addresses = (vk.VkDeviceFaultAddressInfoKHR * max(1, counts.addressInfoCount))()
        vendors = (vk.VkDeviceFaultVendorInfoKHR * max(1, counts.vendorInfoCount))()
        counts.vendorBinarySize = 0
        info.pAddressInfos, info.pVendorInfos = addresses, vendors
        if get(self.device, byref(counts), byref(info)) < 0:
            return ()
        parts = [info.description.decode(errors="replace")]
        parts += [f"address {a.reportedAddress:#x}" for a in addresses[: counts.addressInfoCount]]
        parts += [v.description.decode(errors="replace") for v in vendors[: counts.vendorInfoCount]]
        return tuple(part for part in parts if part)


def u32(*values: int) -> Array[c_uint32]:
    """A C array of uint32_t."""
    return (c_uint32 * len(values))(*values)


@cache
def _memory_barrier(stages: int, host: bool) -> tuple[int, Any]:
    """The stages that see what `stages` wrote, and the barrier that makes it so: made once, and only read."""
    writes, reads = vk.VK_ACCESS_TRANSFER_WRITE_BIT, vk.VK_ACCESS_TRANSFER_READ_BIT
    if stages & vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT:
        writes |= vk.VK_ACCESS_SHADER_WRITE_BIT
        reads |= vk.VK_ACCESS_SHADER_READ_BIT
    if host:
        reads |= vk.VK_ACCESS_HOST_READ_BIT
    memory = vk.VkMemoryBarrier(srcAccessMask=writes, dstAccessMask=reads | writes)
    return stages | (vk.VK_PIPELINE_STAGE_HOST_BIT if host else 0), pointer(memory)
