"""Memory for uploads that this process makes and the driver imports: what comes over it, and when it goes."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from xinfer.errors import OutOfMemoryError
from xinfer.gpu import _staging as staging
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk import pinned
from xinfer.gpu._vk.pinned import HostPages
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

OpenVulkan = Callable[..., VulkanDevice]
SIZE = pinned.LEAST + 12
OURS = VulkanOptions(direct=False, second_clock=True, imports=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HostPages]]:
    """Every HostPages of the test that was made, as far as it is still there."""
    found: list[weakref.ref[HostPages]] = []

    class Noted(HostPages):
        def __init__(self, size: int, alignment: int = 1) -> None:
            super().__init__(size, alignment)
            found.append(weakref.ref(self))

    monkeypatch.setattr(pinned, "HostPages", Noted)
    return found


@pytest.fixture
def device(open_vulkan: OpenVulkan) -> VulkanDevice:
    opened = open_vulkan(OURS)
    if opened.pinning._chosen[False] is False:
        pytest.skip("the driver imports no memory of the host")
    return opened


def test_what_lies_in_imported_pages_arrives(device: VulkanDevice, made: list[weakref.ref[HostPages]]) -> None:
    data = np.random.default_rng(3).bytes(SIZE)
    source, target = device.create_buffer(SIZE, "upload", "source"), device.create_buffer(SIZE)
    assert len(made) == 1
    source.write(data[5:], 5)
    source.write(data[:5])
    assert source.read() == data
    device.transfer(source, target)
    assert device.download(target) == data
    device.upload(target, bytes(SIZE))  # through the ring, whose chunks are imported likewise
    assert device.download(target) == bytes(SIZE)
    assert len(made) > 1
    source.release()
    target.release()
    device.close()
    gc.collect()
    assert not [reference for reference in made if reference() is not None]


def test_pages_stay_until_the_driver_has_let_go_of_them(
    device: VulkanDevice, made: list[weakref.ref[HostPages]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = device.create_buffer(SIZE, "upload"), device.create_buffer(SIZE)
    source.write(bytes([7]) * SIZE)
    freed, free = [], device.core.vk.vkFreeMemory

    def noted(*arguments: object) -> None:
        freed.append(made[0]() is not None)
        free(*arguments)

    monkeypatch.setattr(device.core.vk, "vkFreeMemory", noted)
    with monkeypatch.context() as patch:  # the transfer is in flight as long as the clock says so
        patch.setattr(device._transfer_queue, "completed", lambda: 0)
        device.transfer(source, target)
        source.release()
        assert made[0]() is not None
        assert not freed
    device.flush_uploads()
    device.collect()
    gc.collect()
    assert freed == [True]
    assert made[0]() is None
    assert device.download(target) == bytes([7]) * SIZE
    target.release()


def test_imported_memory_is_counted(device: VulkanDevice, made: list[weakref.ref[HostPages]]) -> None:
    """In the heap that it lies in: the host's own, or the one that there is where device and host share one."""
    before = list(device.allocator._ours)
    buffer = device.create_buffer(SIZE, "upload")
    grown = [now - then for now, then in zip(device.allocator._ours, before, strict=True)]
    assert SIZE <= sum(grown) == max(grown) <= SIZE + pinned.ROUND
    heap = device.core.adapter.heaps[grown.index(max(grown))]
    assert not heap.device_local or all(other.device_local for other in device.core.adapter.heaps)
    buffer.release()
    device.collect()
    assert device.allocator._ours == before


@pytest.mark.parametrize("call", ["vkGetMemoryHostPointerPropertiesEXT", "vkAllocateMemory"])
def test_a_driver_that_refuses_makes_its_own(
    device: VulkanDevice, made: list[weakref.ref[HostPages]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real, refused = getattr(device.core.vk, call), list[str]()

    def refuse(*arguments: object) -> int:
        if refused:
            return int(real(*arguments))
        refused.append(call)
        return vk.VK_ERROR_INVALID_EXTERNAL_HANDLE

    monkeypatch.setattr(device.core.vk, call, refuse)
    buffers = [device.create_buffer(SIZE, "upload") for _ in range(2)]
    assert len(refused) == len(made) == 1
    for buffer in buffers:
        buffer.write(b"abc", 9)
        assert buffer.read(9, 3) == b"abc"
        buffer.release()


def test_too_little_memory_is_told_as_ever(device: VulkanDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = len(device.core.adapter.heaps)
    monkeypatch.setattr(device.core.adapter, "budgets", lambda: [(1 << 30, (1 << 30) - 1000)] * heaps)
    before = device.live_objects()
    with pytest.raises(OutOfMemoryError, match=r"layer 7, host needs 4\.\d MiB"):
        device.create_buffer(SIZE, "upload", "layer 7, host")
    assert device.live_objects() == before


def test_small_and_other_buffers_are_the_drivers(device: VulkanDevice, made: list[weakref.ref[HostPages]]) -> None:
    buffers = [
        device.create_buffer(size, kind)  # type: ignore[arg-type]
        for size, kind in ((4096, "upload"), (SIZE, "readback"), (SIZE, "device"))
    ]
    assert not made
    for buffer in buffers:
        buffer.release()


def test_the_faster_way_is_taken(open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is ours: the driver takes 4 s for each buffer, this process 1 s for a small one and 3.5 for a large.

    Both are slow, so that both are timed.
    """
    device, now, ways = open_vulkan(VulkanOptions(direct=False)), [0.0], list[bool]()
    if device.pinning._chosen[False] is False:
        pytest.skip("the driver imports no memory of the host")
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pinned, "HostPages", lambda size, alignment: SimpleNamespace(size=size))
    for size in (pinned.LEAST, pinned.LARGE):
        ways.clear()
        for _ in range(4):
            with device.pinning.pages("upload", size) as pages:
                ways.append(pages is not None)
                now[0] += 4 if pages is None else 1 if size < pinned.LARGE else 3.5
        assert ways == [True, False, *([True, True] if size < pinned.LARGE else [False, False])]


def test_where_importing_is_fast_nothing_else_is_tried(
    open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, now = open_vulkan(VulkanOptions(direct=False)), [0.0]
    if device.pinning._chosen[False] is False:
        pytest.skip("the driver imports no memory of the host")
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pinned, "HostPages", lambda size, alignment: SimpleNamespace(size=size))
    for size in (pinned.LEAST, pinned.LARGE):
        for _ in range(3):
            with device.pinning.pages("upload", size) as pages:
                assert pages is not None
                now[0] += size / pinned.FAST


def test_threads_take_turns_only_until_the_choice_is_made(
    open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four come at once: two are timed one behind the other, both slow, and then the others are within together."""
    pinning = open_vulkan(VulkanOptions(direct=False)).pinning
    if pinning._chosen[False] is False:
        pytest.skip("the driver imports no memory of the host")
    monkeypatch.setattr(pinned, "HostPages", lambda size, alignment: SimpleNamespace(size=size))
    timed, all_here, together = itertools.count(), threading.Barrier(4, timeout=30), threading.Barrier(2, timeout=30)

    def make(_: int) -> None:
        all_here.wait()
        with pinning.pages("upload", pinned.LEAST):
            if next(timed) < 2:
                time.sleep(0.1)  # the others wait at the lock by now
            else:
                together.wait()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(make, range(4)))


def test_never_where_the_device_is_written_in_place_or_nobody_imports(open_vulkan: OpenVulkan) -> None:
    for options in (
        VulkanOptions(direct=True),
        VulkanOptions(imports=False, direct=False),
        VulkanOptions(without=frozenset({"external_memory_host"}), imports=True),
    ):
        with open_vulkan(options).pinning.pages("upload", SIZE) as pages:
            assert pages is None


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux has them")
@pytest.mark.parametrize("size", [1, pinned.ROUND, pinned.HUGE + 1, 5 * pinned.A_THREAD - 3])
def test_pages_are_aligned_and_there(size: int) -> None:
    pages = HostPages(size, 4096)
    assert pages.address % pinned.HUGE == 0
    assert size <= pages.size < size + pinned.ROUND
    assert len(pages.view) == pages.size
    assert np.frombuffer(pages.view, np.uint8).ctypes.data == pages.address
    assert bytes(pages.view) == bytes(pages.size)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_a_child_has_no_part_in_imported_pages() -> None:
    """A fork would share them until one side writes, who then has another page than the device."""
    pages = HostPages(1 << 20, 4096)
    child = os.fork()
    if child == 0:
        spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        os._exit(any(int(start, 16) <= pages.address < int(end, 16) for start, end in spans))
    assert os.waitpid(child, 0)[1] == 0


def test_staging_chunks_are_of_a_size_that_is_imported() -> None:
    assert pinned.LEAST <= staging.CHUNK < pinned.LARGE
