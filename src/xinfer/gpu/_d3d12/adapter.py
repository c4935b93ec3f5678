"""Adapters: what DXGI lists on Windows, and vkd3d's one device on Linux."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterator
from ctypes import c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu import vulkan
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.com import Interface, failed
from xinfer.gpu._d3d12.compiler import Compiler
from xinfer.gpu._d3d12.runtime import Runtime, interface
from xinfer.gpu.api import DeviceInfo, DeviceKind, MemoryStatus

GIB = 1 << 30
# What Direct3D 12 guarantees at feature level 11_0.
MAX_GROUPS = 65_535
MAX_INVOCATIONS = 1024
MAX_SHARED_BYTES = 32 << 10
STRUCTURE_ALIGNMENT = 16  # of the largest element that a shader binds, a uint4
MAX_BINDING = 1 << 29  # D3D12_REQ_BUFFER_RESOURCE_TEXEL_COUNT_2_TO_EXP elements of 4 bytes
MAX_BUFFER = 4 * GIB - 65_536
KINDS_BY_PREFERENCE: tuple[DeviceKind, ...] = ("discrete", "integrated", "virtual", "other", "cpu")


class Adapter:
    """One adapter: what it is, and DXGI's object for it, if there is DXGI."""

    def __init__(
        self, info: DeviceInfo, compiler: Compiler, dxgi: Interface | None = None, *, page: int | None = None
    ) -> None:
        self.info = info
        self.compiler = compiler
        self.page = page  # how the host maps the device's own memory where that is the host's; None: not at all
        self._dxgi = dxgi
        self._budgets = dxgi.query("IDXGIAdapter3") if dxgi else None

    @property
    def address(self) -> int | None:
        """What D3D12CreateDevice is told."""
        return self._dxgi.address if self._dxgi else None

    def memory(self, ours: int, *, unused: int = 0) -> MemoryStatus:
        """How full the device's own memory is.

        Args:
            ours: bytes of this device's buffers.
            unused: bytes that the driver counts as used and that new buffers may have.
        """
        usage = d3d.DXGI_QUERY_VIDEO_MEMORY_INFO()
        group = d3d.DXGI_MEMORY_SEGMENT_GROUP_LOCAL
        if self._budgets is None or failed(self._budgets.call("QueryVideoMemoryInfo", 0, group, usage)):
            return MemoryStatus(budget=self.info.heap_bytes, used=ours, ours=ours)
        return MemoryStatus(budget=usage.Budget, used=max(usage.CurrentUsage - unused, ours), ours=ours)

    def release(self) -> None:
        """Give DXGI's objects back; may be called twice."""
        for item in (self._budgets, self._dxgi):
            if item:
                item.release()
        self._budgets = self._dxgi = None


def list_adapters(runtime: Runtime) -> list[Adapter]:
    """Every adapter that Direct3D 12 can use; whoever asks releases them."""
    return list(_from_dxgi(runtime)) if runtime.windows else [_of_vkd3d(runtime)]


# --- Windows ----------------------------------------------------------------------------------------------------------


def _from_dxgi(runtime: Runtime) -> Iterator[Adapter]:
    factory = interface(runtime, "IDXGIFactory4", "CreateDXGIFactory2", 0)
    try:
        index, software = 0, False
        for dxgi in _enumerate(factory):
            desc = _describe(dxgi)
            software = software or bool(desc.Flags & d3d.DXGI_ADAPTER_FLAG_SOFTWARE)
            if (adapter := _adapter(runtime, dxgi, desc, index)) is not None:
                index += 1
                yield adapter
            else:
                dxgi.release()
        warp = None if software else _slot(factory, "EnumWarpAdapter", d3d.iid("IDXGIAdapter1"))
        if warp and (adapter := _adapter(runtime, warp, _describe(warp), index, software=True)) is not None:
            yield adapter
    finally:
        factory.release()


def _enumerate(factory: Interface) -> Iterator[Interface]:
    number = 0
    while (dxgi := _slot(factory, "EnumAdapters1", number)) is not None:
        yield dxgi
        number += 1


def _slot(factory: Interface, method: str, argument: Any) -> Interface | None:
    slot = c_void_p()
    if failed(factory.call(method, argument, slot)) or not slot.value:
        return None
    return Interface(factory.caller, "IDXGIAdapter1", slot.value)


def _describe(dxgi: Interface) -> Any:
    desc = d3d.DXGI_ADAPTER_DESC1()
    if failed(dxgi.call("GetDesc1", desc)):
        raise DeviceError("DXGI does not describe an adapter (GetDesc1 failed); update the graphics driver")
    return desc


def _adapter(runtime: Runtime, dxgi: Interface, desc: Any, index: int, *, software: bool = False) -> Adapter | None:
    """What an adapter is; None where it does not know Direct3D 12."""
    try:
        device = interface(runtime, "ID3D12Device", "D3D12CreateDevice", dxgi.address, d3d.D3D_FEATURE_LEVEL_11_0)
    except DeviceError:
        return None
    try:
        compiler = _compiler(runtime, device)
        limits = _limits(device, compiler)
        memory = _feature(device, d3d.D3D12_FEATURE_ARCHITECTURE1, d3d.D3D12_FEATURE_DATA_ARCHITECTURE1())
    finally:
        device.release()
    kind: DeviceKind = "integrated" if memory.UMA else "discrete"
    # As the system's own heaps for uploads are: what has no coherent caches is written past them.
    coherent = d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_BACK
    page = coherent if memory.CacheCoherentUMA else d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_COMBINE
    if software or desc.Flags & d3d.DXGI_ADAPTER_FLAG_SOFTWARE:
        kind = "cpu"
    shared = desc.SharedSystemMemory if kind != "discrete" else 0
    info = DeviceInfo(
        api="d3d12",
        index=index,
        name=bytes(desc.Description).decode("utf-16-le", errors="replace").split("\0")[0].strip(),
        kind=kind,
        vendor_id=desc.VendorId,
        device_id=desc.DeviceId,
        driver="WARP" if kind == "cpu" else "WDDM",
        driver_version=_driver_version(dxgi),
        heap_bytes=desc.DedicatedVideoMemory + shared,
        **limits | {"features": limits["features"] | {"memory_budget"}},
    )
    return Adapter(info, compiler, dxgi, page=page if memory.UMA else None)


def _driver_version(dxgi: Interface) -> str:
    version = c_uint64()
    if failed(dxgi.call("CheckInterfaceSupport", d3d.iid("IDXGIDevice"), version)):
        return "unknown"
    return ".".join(str(part) for part in reversed((c_uint16 * 4).from_buffer(version)))


# --- Linux ------------------------------------------------------------------------------------------------------------


def _of_vkd3d(runtime: Runtime) -> Adapter:
    """vkd3d's device. It does not say which one that is: it takes the best that Vulkan shows."""
    device = interface(runtime, "ID3D12Device", "D3D12CreateDevice", None, d3d.D3D_FEATURE_LEVEL_11_0)
    try:
        compiler = _compiler(runtime, device)
        limits = _limits(device, compiler)
    finally:
        device.release()
    below = _below_vkd3d()
    info = dataclasses.replace(below, api="d3d12", index=0, name=f"vkd3d on {below.name}", emulated=True, **limits)
    return Adapter(info, compiler)


def _below_vkd3d() -> DeviceInfo:
    devices = vulkan.list_devices()
    chosen = os.environ.get("VKD3D_VULKAN_DEVICE", "")
    for device in devices:
        if chosen.isdigit() and device.index == int(chosen):
            return device
    if not devices:
        raise DeviceError("vkd3d needs a Vulkan driver, and there is none")
    return min(devices, key=lambda device: KINDS_BY_PREFERENCE.index(device.kind))


# --- both -------------------------------------------------------------------------------------------------------------


def _feature(device: Interface, number: int, data: Any) -> Any:
    """One of the structs that CheckFeatureSupport fills; all zeros where the system does not know it."""
    if failed(device.call("CheckFeatureSupport", number, data, ctypes.sizeof(data))):
        return type(data)()
    return data


def _compiler(runtime: Runtime, device: Interface) -> Compiler:
    """What compiles for a device: dxcompiler only where it takes what that makes."""
    model = c_uint32(d3d.D3D_SHADER_MODEL_6_0)
    answer = device.call("CheckFeatureSupport", d3d.D3D12_FEATURE_SHADER_MODEL, model, ctypes.sizeof(model))
    takes = not failed(answer) and model.value >= d3d.D3D_SHADER_MODEL_6_0
    return Compiler(runtime, runtime.dxc if takes else None)


def _limits(device: Interface, compiler: Compiler) -> dict[str, Any]:
    waves = _feature(device, d3d.D3D12_FEATURE_D3D12_OPTIONS1, d3d.D3D12_FEATURE_DATA_D3D12_OPTIONS1())
    addresses = _feature(
        device,
        d3d.D3D12_FEATURE_GPU_VIRTUAL_ADDRESS_SUPPORT,
        d3d.D3D12_FEATURE_DATA_GPU_VIRTUAL_ADDRESS_SUPPORT(),
    )
    least = waves.WaveLaneCountMin or 32
    return {
        "api_version": f"12, feature level 11_0, {compiler.name}",
        "features": frozenset({"subgroup_arithmetic"} if compiler.dxc and waves.WaveOps else ()),
        "subgroup_size_min": least,
        "subgroup_size_max": waves.WaveLaneCountMax or least,
        "subgroup_size_default": least,
        "max_groups": (MAX_GROUPS,) * 3,
        "max_workgroup_invocations": MAX_INVOCATIONS,
        "max_shared_bytes": MAX_SHARED_BYTES,
        "max_storage_range": MAX_BINDING,
        "storage_alignment": STRUCTURE_ALIGNMENT,
        "max_allocation": min(1 << (addresses.MaxGPUVirtualAddressBitsPerResource or 31), MAX_BUFFER),
    }
