"""One physical device: its properties, memory and queues, and which features the engine will use on it."""

from __future__ import annotations

from ctypes import byref, c_uint32
from dataclasses import dataclass, replace
from typing import Any

from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk.features import FEATURES, SUBGROUP_OPERATIONS, Version, available
from xinfer.gpu._vk.instance import Instance, list_extensions, unpack_version
from xinfer.gpu.api import DeviceInfo, DeviceKind
from xinfer.gpu.native import chain, check

KINDS: dict[int, DeviceKind] = {
    vk.VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU: "discrete",
    vk.VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU: "integrated",
    vk.VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU: "virtual",
    vk.VK_PHYSICAL_DEVICE_TYPE_CPU: "cpu",
}
NVIDIA = 0x10DE
MATRIX_TYPES = {
    vk.VK_COMPONENT_TYPE_FLOAT16_KHR: "f16",
    vk.VK_COMPONENT_TYPE_BFLOAT16_KHR: "bf16",
    vk.VK_COMPONENT_TYPE_FLOAT32_KHR: "f32",
    vk.VK_COMPONENT_TYPE_SINT8_KHR: "s8",
    vk.VK_COMPONENT_TYPE_UINT8_KHR: "u8",
    vk.VK_COMPONENT_TYPE_SINT32_KHR: "s32",
    vk.VK_COMPONENT_TYPE_UINT32_KHR: "u32",
}


@dataclass(frozen=True, slots=True)
class MemoryType:
    """One memory type: its property flags and the heap that it takes from."""

    index: int
    flags: int
    heap: int


@dataclass(frozen=True, slots=True)
class Heap:
    """One memory heap."""

    size: int
    device_local: bool


@dataclass(frozen=True, slots=True)
class QueueFamily:
    """One queue family."""

    index: int
    flags: int
    count: int
    timestamp_bits: int

    @property
    def only_transfers(self) -> bool:
        """Whether it does nothing else: a copy engine."""
        others = vk.VK_QUEUE_GRAPHICS_BIT | vk.VK_QUEUE_COMPUTE_BIT
        return bool(self.flags & vk.VK_QUEUE_TRANSFER_BIT) and not self.flags & others

    @property
    def stages(self) -> int:
        """The pipeline stages that we use on it."""
        compute = vk.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT if self.flags & vk.VK_QUEUE_COMPUTE_BIT else 0
        return compute | vk.VK_PIPELINE_STAGE_TRANSFER_BIT


class Adapter:
    """A physical device, as far as it can be known without opening it."""

    def __init__(self, instance: Instance, handle: int, index: int) -> None:
        self.instance = instance
        self.handle = handle
        properties = vk.VkPhysicalDeviceProperties2()
        instance.vk.vkGetPhysicalDeviceProperties2(handle, byref(properties))
        self.properties: Any = properties.properties
        self.limits: Any = self.properties.limits
        self.version: Version = min(unpack_version(self.properties.apiVersion), instance.version)
        self.extensions = frozenset(
            list_extensions(
                instance.vk.vkEnumerateDeviceExtensionProperties,
                handle,
                None,
                name="vkEnumerateDeviceExtensionProperties",
            )
        )
        self.extra: dict[str, Any] = self._more_properties()
        self.families = self._queue_families()
        self.heaps, self.types = self._memory()
        self.info = self._info(index)

    def restrict(self, without: frozenset[str]) -> None:
        """Leave features alone that are there."""
        self.info = replace(self.info, features=self.info.features - without)

    def budgets(self) -> list[tuple[int, int]] | None:
        """(budget, usage) of each heap as the driver sees them now; None where it does not say."""
        if "memory_budget" not in self.info.features:
            return None
        budget = vk.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
        memory = chain(vk.VkPhysicalDeviceMemoryProperties2(), budget)
        self.instance.vk.vkGetPhysicalDeviceMemoryProperties2(self.handle, byref(memory))
        return [(budget.heapBudget[i], budget.heapUsage[i]) for i in range(len(self.heaps))]

    def feature_structs(self, names: frozenset[str]) -> list[vk.VkStructure]:
        """The structs that switch the named features on, for a pNext chain."""
        first = vk.VkPhysicalDeviceFeatures2()
        structs: dict[type[vk.VkStructure], Any] = {vk.VkPhysicalDeviceFeatures: first.features}
        for feature in FEATURES:
            if feature.name in names and feature.struct:
                struct = structs.setdefault(feature.struct, feature.struct())
                for member in feature.members:
                    setattr(struct, member, 1)
        return [first, *[s for kind, s in structs.items() if kind is not vk.VkPhysicalDeviceFeatures]]

    def _features(self) -> frozenset[str]:
        """Names of the features that are there, each with all of its members."""
        listed = [f for f in FEATURES if available(f, self.extensions, self.version)]
        structs = {f.struct: f.struct() for f in listed if f.struct and f.struct is not vk.VkPhysicalDeviceFeatures}
        query = chain(vk.VkPhysicalDeviceFeatures2(), *structs.values())
        self.instance.vk.vkGetPhysicalDeviceFeatures2(self.handle, byref(query))
        structs[vk.VkPhysicalDeviceFeatures] = query.features
        names = {
            f.name for f in listed if not f.struct or all(getattr(structs[f.struct], member) for member in f.members)
        }
        if "timeline" in names and any(family.only_transfers for family in self.families):
            names.add("transfer_queue")
        subgroup = self.extra["subgroup"]
        if subgroup.supportedStages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
            names.update(name for name, bit in SUBGROUP_OPERATIONS.items() if subgroup.supportedOperations & bit)
        if "coop_matrix" in names:
            names.update(self._matrix_shapes())
        return frozenset(names)

    def _matrix_shapes(self) -> set[str]:
        """The shapes that one subgroup multiplies, as in "coop_matrix.f16.f32.16x16x16": factors, sum, M x N x K."""
        call = "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR"
        get, count = getattr(self.instance.vk, call), c_uint32()
        check(get(self.handle, byref(count), None), call)
        items = (vk.VkCooperativeMatrixPropertiesKHR * count.value)()
        for item in items:
            item.sType = vk.VkCooperativeMatrixPropertiesKHR.S_TYPE
        check(get(self.handle, byref(count), items), call)
        return {
            f"coop_matrix.{MATRIX_TYPES[item.AType]}.{MATRIX_TYPES[item.CType]}.{item.MSize}x{item.NSize}x{item.KSize}"
            for item in items[: count.value]
            if item.scope == vk.VK_SCOPE_SUBGROUP_KHR
            and item.AType == item.BType
            and item.CType == item.ResultType
            and {item.AType, item.CType} <= MATRIX_TYPES.keys()
        }

    def _more_properties(self) -> dict[str, Any]:
        structs: dict[str, Any] = {
            "subgroup": vk.VkPhysicalDeviceSubgroupProperties(),
            "maintenance3": vk.VkPhysicalDeviceMaintenance3Properties(),
            "id": vk.VkPhysicalDeviceIDProperties(),
        }
        if self.version >= (1, 2) or "VK_KHR_driver_properties" in self.extensions:
            structs["driver"] = vk.VkPhysicalDeviceDriverProperties()
        if self.version >= (1, 3) or "VK_KHR_maintenance4" in self.extensions:
            structs["maintenance4"] = vk.VkPhysicalDeviceMaintenance4Properties()
        if self.version >= (1, 3) or "VK_EXT_subgroup_size_control" in self.extensions:
            structs["subgroup_size"] = vk.VkPhysicalDeviceSubgroupSizeControlProperties()
        if "VK_EXT_external_memory_host" in self.extensions:
            structs["host_import"] = vk.VkPhysicalDeviceExternalMemoryHostPropertiesEXT()
        if "VK_EXT_pci_bus_info" in self.extensions:
            structs["pci"] = vk.VkPhysicalDevicePCIBusInfoPropertiesEXT()
        query = chain(vk.VkPhysicalDeviceProperties2(), *structs.values())
        self.instance.vk.vkGetPhysicalDeviceProperties2(self.handle, byref(query))
        return structs

    def _queue_families(self) -> list[QueueFamily]:
        count = c_uint32()
        self.instance.vk.vkGetPhysicalDeviceQueueFamilyProperties2(self.handle, byref(count), None)
        items = (vk.VkQueueFamilyProperties2 * count.value)()
        for item in items:
            item.sType = vk.VkQueueFamilyProperties2.S_TYPE
        self.instance.vk.vkGetPhysicalDeviceQueueFamilyProperties2(self.handle, byref(count), items)
        families = [item.queueFamilyProperties for item in items]
        return [QueueFamily(i, f.queueFlags, f.queueCount, f.timestampValidBits) for i, f in enumerate(families)]

    def _memory(self) -> tuple[list[Heap], list[MemoryType]]:
        query = vk.VkPhysicalDeviceMemoryProperties2()
        self.instance.vk.vkGetPhysicalDeviceMemoryProperties2(self.handle, byref(query))
        memory = query.memoryProperties
        heaps = [
            Heap(heap.size, bool(heap.flags & vk.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT))
            for heap in memory.memoryHeaps[: memory.memoryHeapCount]
        ]
        types = [
            MemoryType(i, kind.propertyFlags, kind.heapIndex)
            for i, kind in enumerate(memory.memoryTypes[: memory.memoryTypeCount])
        ]
        return heaps, types

    def _driver(self) -> tuple[str, str]:
        """Name and version of the driver, in its own words where it has any."""
        number = self.properties.driverVersion
        if self.properties.vendorID == NVIDIA:
            version = f"{number >> 22}.{number >> 14 & 0xFF}.{number >> 6 & 0xFF}"
        else:
            version = f"{number >> 22}.{number >> 12 & 0x3FF}.{number & 0xFFF}"
        driver = self.extra.get("driver")
        if driver is None:
            return "unknown", version
        return driver.driverName.decode(errors="replace"), driver.driverInfo.decode(errors="replace") or version

    def _pci(self) -> str:
        pci = self.extra.get("pci")
        return f"{pci.pciDomain:04x}:{pci.pciBus:02x}:{pci.pciDevice:02x}.{pci.pciFunction}" if pci else ""

    def _max_allocation(self) -> int:
        limits = [self.extra["maintenance3"].maxMemoryAllocationSize]
        if "maintenance4" in self.extra:
            limits.append(self.extra["maintenance4"].maxBufferSize)
        return int(min(limits))

    def _info(self, index: int) -> DeviceInfo:
        driver, driver_version = self._driver()
        default = self.extra["subgroup"].subgroupSize
        sizes = self.extra.get("subgroup_size")
        local = [heap.size for heap in self.heaps if heap.device_local]
        return DeviceInfo(
            api="vulkan",
            index=index,
            name=self.properties.deviceName.decode(errors="replace"),
            kind=KINDS.get(self.properties.deviceType, "other"),
            vendor_id=self.properties.vendorID,
            device_id=self.properties.deviceID,
            driver=driver,
            driver_version=driver_version,
            pci=self._pci(),
            api_version=".".join(map(str, self.version)),
            heap_bytes=max(local, default=0),
            subgroup_size_min=sizes.minSubgroupSize if sizes else default,
            subgroup_size_max=sizes.maxSubgroupSize if sizes else default,
            subgroup_size_default=default,
            max_groups=tuple(self.limits.maxComputeWorkGroupCount),
            max_workgroup_invocations=self.limits.maxComputeWorkGroupInvocations,
            max_workgroup_subgroups=sizes.maxComputeWorkgroupSubgroups if sizes else None,
            max_shared_bytes=self.limits.maxComputeSharedMemorySize,
            max_storage_range=self.limits.maxStorageBufferRange,
            storage_alignment=self.limits.minStorageBufferOffsetAlignment,
            max_allocation=self._max_allocation(),
            features=self._features(),
        )


def list_adapters(instance: Instance) -> list[Adapter]:
    """The adapters with Vulkan 1.1 and a queue for compute; the index counts all that the loader shows."""
    adapters = []
    for index, handle in enumerate(instance.physical_devices()):
        properties = vk.VkPhysicalDeviceProperties2()
        instance.vk.vkGetPhysicalDeviceProperties2(handle, byref(properties))
        if unpack_version(properties.properties.apiVersion) >= (1, 1):
            adapter = Adapter(instance, handle, index)
            if any(family.flags & vk.VK_QUEUE_COMPUTE_BIT for family in adapter.families):
                adapters.append(adapter)
    return adapters
