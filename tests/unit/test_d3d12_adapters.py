"""Adapters as Windows lists them, on made-up COM objects."""

from __future__ import annotations

import ctypes
import dataclasses

from tests.unit.fake_com import FakeObject, FakeRuntime, device, fill, give

from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.adapter import list_adapters


@dataclasses.dataclass
class Card:
    name: str
    flags: int = 0
    uma: int = 0
    coherent: int = 0
    memory: int = 8 << 30
    works: bool = True


class FakeDxgi:
    """Windows with some cards: DXGI's objects, and the devices made on them."""

    def __init__(self, cards: list[Card], *, warp: bool = False) -> None:
        self.adapters = [self._adapter(card) for card in cards]
        self.warp = self._adapter(Card("Microsoft Basic Render Driver")) if warp else None
        self.devices = [self._device(card) for card in cards]
        self.cards = cards
        self.factory = FakeObject(
            "IDXGIFactory4", {"EnumAdapters1": self._enumerate, "EnumWarpAdapter": self._enumerate_warp}
        )
        self.runtime = FakeRuntime({"CreateDXGIFactory2": self._make_factory, "D3D12CreateDevice": self._make_device})

    def _adapter(self, card: Card) -> FakeObject:
        desc = d3d.DXGI_ADAPTER_DESC1(VendorId=0x10DE, DeviceId=7, DedicatedVideoMemory=card.memory, Flags=card.flags)
        ctypes.memmove(desc.Description, card.name.encode("utf-16-le"), 2 * len(card.name))
        desc.SharedSystemMemory = 16 << 30
        usage = d3d.DXGI_QUERY_VIDEO_MEMORY_INFO(Budget=7 << 30, CurrentUsage=2 << 30)
        budgets = FakeObject("IDXGIAdapter3", {"QueryVideoMemoryInfo": lambda _node, _group, to: fill(to, usage)})
        version = (ctypes.c_uint16 * 4)(1234, 15, 0, 31)
        return FakeObject(
            "IDXGIAdapter1",
            {
                "GetDesc1": lambda target: fill(target, desc),
                "CheckInterfaceSupport": lambda _iid, target: fill(target, version),
            },
            interfaces=[budgets],
        )

    def _device(self, card: Card) -> FakeObject:
        def check(feature: int, target: int, _size: int) -> int:
            if feature == d3d.D3D12_FEATURE_ARCHITECTURE1:
                return fill(target, d3d.D3D12_FEATURE_DATA_ARCHITECTURE1(UMA=card.uma, CacheCoherentUMA=card.coherent))
            if feature == d3d.D3D12_FEATURE_D3D12_OPTIONS1:
                return fill(target, d3d.D3D12_FEATURE_DATA_D3D12_OPTIONS1(1, 32, 64))
            return d3d.FAILURES["E_INVALIDARG"]

        return device(CheckFeatureSupport=check)

    def _make_factory(self, _flags: int, _iid: int, slot: int) -> int:
        return give(slot, self.factory)

    def _make_device(self, adapter: int, _level: int, _iid: int, slot: int) -> int:
        if self.warp and adapter == self.warp.address:
            return give(slot, self._warp_device())
        i = [item.address for item in self.adapters].index(adapter)
        if not self.cards[i].works:
            return d3d.FAILURES["DXGI_ERROR_UNSUPPORTED"]
        self.devices[i].references += 1
        return give(slot, self.devices[i])

    def _warp_device(self) -> FakeObject:
        self.devices.append(self._device(Card("WARP")))
        self.devices[-1].references += 1
        return self.devices[-1]

    def _enumerate(self, index: int, slot: int) -> int:
        if index >= len(self.adapters):
            return d3d.DXGI_ERROR_NOT_FOUND
        self.adapters[index].references += 1
        return give(slot, self.adapters[index])

    def _enumerate_warp(self, _iid: int, slot: int) -> int:
        if self.warp is None:
            return d3d.DXGI_ERROR_NOT_FOUND
        self.warp.references += 1
        return give(slot, self.warp)

    def everything_is_released(self) -> bool:
        """But for the references that the objects were made with."""
        alive = [*self.adapters, *self.devices, *([self.warp] if self.warp else [])]
        budgets = [item for adapter in self.adapters for item in adapter.interfaces.values()]
        return all(item.references == 1 for item in (*alive, *budgets)) and self.factory.references == 0


def test_adapters_as_windows_lists_them() -> None:
    dxgi = FakeDxgi(
        [
            Card("NVIDIA GeForce RTX 4090"),
            Card("an old card", works=False),
            Card("AMD Radeon 780M", uma=1, memory=1 << 30),
            Card("Microsoft Basic Render Driver", flags=d3d.DXGI_ADAPTER_FLAG_SOFTWARE, memory=0),
        ]
    )
    adapters = list_adapters(dxgi.runtime)
    found = [(a.info.index, a.info.name, a.info.kind, a.info.driver_version, a.info.heap_bytes >> 30) for a in adapters]
    assert found == [
        (0, "NVIDIA GeForce RTX 4090", "discrete", "31.0.15.1234", 8),
        (1, "AMD Radeon 780M", "integrated", "31.0.15.1234", 17),
        (2, "Microsoft Basic Render Driver", "cpu", "31.0.15.1234", 16),
    ]
    info = adapters[0].info
    assert (info.subgroup_size_min, info.subgroup_size_max, sorted(info.features)) == (32, 64, ["memory_budget"])
    assert not info.emulated
    status = adapters[0].memory(ours=1 << 30)
    assert (status.budget, status.used, status.ours) == (7 << 30, 2 << 30, 1 << 30)
    for adapter in adapters:
        adapter.release()
        adapter.release()
    assert dxgi.everything_is_released()


def test_memory_that_is_the_hosts_own_is_mapped() -> None:
    dxgi = FakeDxgi([Card("discrete"), Card("coherent", uma=1, coherent=1), Card("not coherent", uma=1)])
    adapters = list_adapters(dxgi.runtime)
    back, combine = d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_BACK, d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_COMBINE
    assert [adapter.page for adapter in adapters] == [None, back, combine]
    for adapter in adapters:
        adapter.release()


def test_warp_is_found_where_dxgi_does_not_list_it() -> None:
    dxgi = FakeDxgi([], warp=True)
    adapters = list_adapters(dxgi.runtime)
    assert [(a.info.index, a.info.kind, a.info.driver) for a in adapters] == [(0, "cpu", "WARP")]
    for adapter in adapters:
        adapter.release()
