"""Buffers: parts of heaps or, where they are large or the host maps them, allocations of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

from xinfer.errors import OutOfMemoryError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._buffer import NativeBuffer
from xinfer.gpu._checks import too_little
from xinfer.gpu._d3d12.core import Core, Handle
from xinfer.gpu._d3d12.heaps import Heaps
from xinfer.gpu._meter import Meter
from xinfer.gpu.api import BufferKind, BufferSlice, MemoryStatus
from xinfer.gpu.native import memory_at

ROUND = 16  # native sizes, so that a shader may load the last bytes as a uint4
# Mapped buffers lie in custom heaps: shaders may write those, as they may not write upload and readback heaps.
PAGES: dict[BufferKind, int] = {
    "upload": d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_COMBINE,
    "readback": d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_BACK,
}


def heap_properties(page: int | None) -> d3d.D3D12_HEAP_PROPERTIES:
    """Memory that the host maps with such pages; with None the device's own, which it does not map."""
    if page is None:
        return d3d.D3D12_HEAP_PROPERTIES(Type=d3d.D3D12_HEAP_TYPE_DEFAULT)
    return d3d.D3D12_HEAP_PROPERTIES(
        Type=d3d.D3D12_HEAP_TYPE_CUSTOM, CPUPageProperty=page, MemoryPoolPreference=d3d.D3D12_MEMORY_POOL_L0
    )


class Allocator:
    """Makes native buffers, after a look at what is free.

    Args:
        core: the device.
        page: with which pages the host maps device buffers, where their memory is its own; None: not at all.
    """

    def __init__(self, core: Core, page: int | None) -> None:
        self.core = core
        self.meter = Meter()
        self.pages: dict[BufferKind, int | None] = {"device": page, **PAGES}
        self.heaps = Heaps(core, heap_properties(page))
        self._ours = 0
        self._lock = threading.Lock()

    def status(self) -> MemoryStatus:
        """How full the device's own memory is."""
        return self.meter.applied(self._driver_status(), shared=self.core.adapter.info.kind != "discrete")

    def _driver_status(self) -> MemoryStatus:
        with self._lock:
            ours = self._ours
        return self.core.adapter.memory(ours, unused=self.heaps.free_bytes)

    def allocate(self, kind: BufferKind, size: int, label: str) -> Handle:
        """A native buffer."""
        counted = size if kind == "device" or self.core.adapter.info.kind != "discrete" else 0
        status = self.status() if kind == "device" else self._driver_status()
        if counted > status.free:
            raise self._too_little(size, label)
        desc = d3d.D3D12_RESOURCE_DESC(
            Dimension=d3d.D3D12_RESOURCE_DIMENSION_BUFFER,
            Width=size,
            Height=1,
            DepthOrArraySize=1,
            MipLevels=1,
            SampleDesc=d3d.DXGI_SAMPLE_DESC(Count=1),
            Layout=d3d.D3D12_TEXTURE_LAYOUT_ROW_MAJOR,
            Flags=d3d.D3D12_RESOURCE_FLAG_ALLOW_UNORDERED_ACCESS,
        )

        def gone() -> None:
            self._count(kind, size, -counted)

        handle = self.heaps.place(desc, label, self._has_room, gone) if kind == "device" else None
        if handle is None:
            if not self._has_room(counted):
                raise self._too_little(size, label)
            handle = self._commit(kind, desc, label, gone)
        self._count(kind, size, counted)
        return handle

    def _has_room(self, size: int) -> bool:
        """Whether the device has so much outside the heaps that are there."""
        return size <= self._driver_status().free - self.heaps.free_bytes

    def _commit(
        self, kind: BufferKind, desc: d3d.D3D12_RESOURCE_DESC, label: str, on_destroy: Callable[[], None]
    ) -> Handle:
        heap = heap_properties(self.pages[kind])
        state = d3d.D3D12_RESOURCE_STATE_COMMON
        try:
            return self.core.create(
                *("ID3D12Resource", "CreateCommittedResource", heap, d3d.D3D12_HEAP_FLAG_NONE, desc, state, None),
                label=label,
                on_destroy=on_destroy,
            )
        except OutOfMemoryError as error:
            raise self._too_little(desc.Width, label) from error

    def _count(self, kind: BufferKind, size: int, change: int) -> None:
        with self._lock:
            self._ours += change
        if kind == "device":
            self.meter.count(size if change > 0 else -size)

    def _too_little(self, size: int, label: str) -> OutOfMemoryError:
        status = self.status()
        free = max(0, min(status.free, self._driver_status().free - self.heaps.free_bytes))
        return too_little(self.core.adapter.info.name, label, size, status, free=free)


class D3D12Buffer(NativeBuffer):
    """An ID3D12Resource; see `api.Buffer`."""

    def __init__(self, owner: BufferOwner, size: int, kind: BufferKind, label: str) -> None:
        super().__init__(size, kind, label)
        self.owner = owner
        self.handle = owner.allocator.allocate(kind, -(-size // ROUND) * ROUND, label)
        try:
            self.gpu_address = self.handle.call("GetGPUVirtualAddress")
            page = owner.allocator.pages[kind]
            if page is not None:
                self._map()
                self.cached = page == d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_BACK
        except BaseException:
            owner.core.destroy(self.handle)
            raise

    @property
    def _native(self) -> int | None:
        return self.handle.address

    def _retire(self) -> None:
        self.owner.retire(self.handle)

    def _map(self) -> None:
        address = c_void_p()
        self.handle.run("Map", 0, None, address)
        assert address.value
        self.mapped = memory_at(address.value, self.size)


class BufferOwner:
    """What buffers ask of their device."""

    core: Core
    allocator: Allocator

    def retire(self, *handles: Handle) -> None:
        """Destroy these once the work in flight has ended."""
        raise NotImplementedError


def as_slice(item: Any) -> BufferSlice:
    """A whole buffer as a slice; a slice as it is. Raises TypeError for another backend's."""
    part = item if isinstance(item, BufferSlice) else item[:]
    if not isinstance(part.buffer, D3D12Buffer):
        raise TypeError(f"expected a Direct3D 12 buffer, got {type(part.buffer).__name__}")
    return part


def buffer_of(part: BufferSlice) -> D3D12Buffer:
    """The buffer under a slice that `as_slice` made."""
    assert isinstance(part.buffer, D3D12Buffer)
    return part.buffer
