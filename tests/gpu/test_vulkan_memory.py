"""Which memory a buffer gets, and what happens where there is too little of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._checks import format_bytes
from xinfer.gpu._vk.adapter import Heap, MemoryType
from xinfer.gpu._vk.memory import CACHED, COHERENT, LOCAL, VISIBLE, Allocator
from xinfer.gpu.api import BufferKind
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

OpenVulkan = Callable[..., VulkanDevice]
GIB = 1 << 30
ODD = 1 << 6  # VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD: slower, and asks for a feature

# Heaps and types as such drivers show them.
DISCRETE = (
    [(24 * GIB, True), (64 * GIB, False), (256 << 20, True)],
    [
        (0, 1),
        (LOCAL, 0),
        (VISIBLE | COHERENT, 1),
        (VISIBLE | COHERENT | CACHED, 1),
        (LOCAL | VISIBLE | COHERENT, 2),
    ],
)
RESIZABLE = (
    [(16 * GIB, True), (64 * GIB, False)],
    [
        (LOCAL | VISIBLE | COHERENT, 0),
        (LOCAL, 0),
        (VISIBLE | COHERENT | CACHED, 1),
        (VISIBLE | COHERENT, 1),
        (LOCAL | ODD, 0),
        (VISIBLE | COHERENT | ODD, 1),
    ],
)
INTEGRATED = (
    [(12 * GIB, True)],
    [(LOCAL, 0), (LOCAL | VISIBLE | COHERENT, 0), (LOCAL | VISIBLE | COHERENT | CACHED, 0)],
)
SOFTWARE = ([(2 * GIB, True)], [(LOCAL | VISIBLE | COHERENT | CACHED, 0)])


def allocator(system: tuple[Any, Any], *, direct: bool = False) -> Allocator:
    heaps = [Heap(size, local) for size, local in system[0]]
    types = [MemoryType(i, flags, heap) for i, (flags, heap) in enumerate(system[1])]
    adapter = SimpleNamespace(heaps=heaps, types=types, budgets=lambda: None, info=SimpleNamespace(name="a GPU"))
    return Allocator(SimpleNamespace(adapter=adapter), direct=direct)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("system", "direct", "expected"),
    [
        (DISCRETE, False, {"device": 1, "upload": 2, "readback": 3}),
        (RESIZABLE, False, {"device": 1, "upload": 3, "readback": 2}),
        (INTEGRATED, True, {"device": 2, "upload": 1, "readback": 2}),
        (INTEGRATED, False, {"device": 0, "upload": 1, "readback": 2}),
        (SOFTWARE, True, {"device": 0, "upload": 0, "readback": 0}),
    ],
)
def test_memory_types(system: Any, direct: bool, expected: dict[BufferKind, int]) -> None:
    memory = allocator(system, direct=direct)
    assert {kind: memory.choose(kind, 0xFF).index for kind in expected} == expected


def test_a_type_that_the_buffer_does_not_allow_is_not_chosen() -> None:
    assert allocator(DISCRETE).choose("device", 0b10000).index == 4
    with pytest.raises(DeviceError, match="no memory type for readback buffers"):
        allocator(DISCRETE).choose("readback", 0b00010)


def test_status_is_of_the_largest_heap_of_the_device() -> None:
    assert allocator(DISCRETE).status().budget == 24 * GIB


def test_format_bytes() -> None:
    sizes = [3, 2048, 5 << 20, 3 * GIB // 2]
    assert [format_bytes(size) for size in sizes] == ["3 bytes", "2.0 KiB", "5.0 MiB", "1.5 GiB"]


def test_memory_is_counted(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan()
    start = device.memory()
    buffers = [device.create_buffer(size) for size in (1 << 20, 3 << 20)]
    assert device.memory().ours - start.ours >= 4 << 20
    for buffer in buffers:
        buffer.release()
    assert device.memory().ours == start.ours


@pytest.mark.parametrize(
    ("system", "shared"), [(DISCRETE, None), (RESIZABLE, None), (INTEGRATED, 12 * GIB), (SOFTWARE, 2 * GIB)]
)
def test_whether_the_host_takes_of_the_devices_memory(system: tuple[Any, Any], shared: int | None) -> None:
    """Then a limit on what the device takes does not leave the host less."""
    made = allocator(system)
    assert made.status().shared == shared
    made.meter.set_limit(1000)
    assert made.status().shared == shared
    assert made.status().free == 1000


def budgets(device: VulkanDevice, budget: int, used: int) -> Callable[[], list[tuple[int, int]]]:
    return lambda: [(budget, used)] * len(device.core.adapter.heaps)


def test_the_budget_is_asked_before_each_allocation(open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_vulkan()
    small = device.create_buffer(1 << 20, label="small")
    monkeypatch.setattr(device.core.adapter, "budgets", budgets(device, 8 * GIB, 8 * GIB - (5 << 20)))
    status = device.memory()
    assert (status.budget, status.free) == (8 * GIB, 5 << 20)
    device.create_buffer(5 << 20, label="fits").release()
    monkeypatch.setattr(device.core.vk, "vkAllocateMemory", lambda *_: pytest.fail("the driver was asked"))
    before = device.live_objects()
    with pytest.raises(OutOfMemoryError) as caught:
        device.create_buffer(12 << 20, label="layer 7")
    text = str(caught.value)
    assert "layer 7 needs 12.0 MiB" in text
    assert "only 5.0 MiB of 8.0 GiB are free" in text
    assert "1.0 MiB are in use here, 8.0 GiB by others" in text
    assert "7.0 MiB are missing" in text
    assert (caught.value.needed, caught.value.free, caught.value.missing) == (12 << 20, 5 << 20, 7 << 20)
    assert device.live_objects() == before
    small.release()


def test_without_a_budget_our_own_use_counts(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan(VulkanOptions(without=frozenset({"memory_budget"})))
    if device.info.heap_bytes > 4 * GIB:
        pytest.skip("the heap is too large to fill")
    size = min(device.info.heap_bytes // 8 * 5, device.info.max_allocation)
    first = device.create_buffer(size, label="first")
    with pytest.raises(OutOfMemoryError, match=r"second needs .* missing"):
        device.create_buffer(size, label="second")
    first.release()
    device.create_buffer(size, label="second").release()


@pytest.mark.parametrize("result", [vk.VK_ERROR_OUT_OF_DEVICE_MEMORY, vk.VK_ERROR_OUT_OF_HOST_MEMORY])
def test_a_driver_that_refuses_all_the_same(
    open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch, result: int
) -> None:
    device = open_vulkan()
    before = device.live_objects()
    with monkeypatch.context() as patch:
        patch.setattr(device.core.vk, "vkAllocateMemory", lambda *_: result)
        with pytest.raises(
            OutOfMemoryError, match=r"x needs 1\.0 KiB .* the driver refused although .* are free"
        ) as caught:
            device.create_buffer(1024, label="x")
    assert "failed: VK_ERROR_OUT_OF" in str(caught.value.__cause__)
    assert device.live_objects() == before
    device.create_buffer(1024, label="x").release()
