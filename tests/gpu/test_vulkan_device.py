"""What only Vulkan's devices have: a transfer queue, and what its clock has to do with the compute queue's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.gpu.test_device import PATHS, words

from xinfer.gpu import _staging as staging
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk.core import Handle
from xinfer.gpu._vk.queue import Queue, TimelineQueue
from xinfer.gpu.vulkan import VulkanDevice

OpenVulkan = Callable[..., VulkanDevice]


def test_two_clocks_wait_for_each_other_only_where_they_must(
    open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming depends on it: an upload into one buffer runs beside work on another."""
    device = open_vulkan(PATHS["two clocks"])
    a, b = device.create_buffer(staging.SMALL + 4, label="a"), device.create_buffer(staging.SMALL + 4, label="b")
    recordings = []
    for buffer in (a, b):
        recordings.append(device.create_recording(buffer.label))
        recordings[-1].fill(buffer, 7)
        recordings[-1].finish()
    waits: list[tuple[str, int]] = []

    def watch(queue: Queue, name: str) -> None:
        original = queue.submit

        def submit(buffers: Any, after: Sequence[tuple[Queue, int]] = ()) -> int:
            waits.append((name, len(after)))
            return original(buffers, after)

        monkeypatch.setattr(queue, "submit", submit)

    watch(device._queue, "compute")
    watch(device._transfer_queue, "transfer")
    monkeypatch.setattr(device._queue, "completed", lambda: 0)  # as if the device were slow
    monkeypatch.setattr(device._transfer_queue, "completed", lambda: 0)
    device.submit(recordings[0])
    device.upload(b, bytes(b.size))
    device.upload(a, bytes(a.size))
    device.submit(recordings[0])
    monkeypatch.undo()
    assert waits == [("compute", 0), ("transfer", 0), ("transfer", 1), ("compute", 1)]
    device.submit(recordings[1])
    assert device.download(a[:4]) == device.download(b[:4]) == b"\7\0\0\0"


def test_a_transfer_queue_knows_no_compute(open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue for transfers alone refuses the stages and accesses of shaders; the drivers of such are not at hand."""
    device = open_vulkan(PATHS["two clocks"])
    barriers: list[tuple[int, ...]] = []
    original = device.core.vk.vkCmdPipelineBarrier

    def watch(*arguments: Any) -> None:
        memory = arguments[5].contents
        barriers.append((*arguments[1:3], memory.srcAccessMask, memory.dstAccessMask))
        original(*arguments)

    monkeypatch.setattr(device.core.vk, "vkCmdPipelineBarrier", watch)
    buffer = device.create_buffer(staging.SMALL + 4)
    device.upload(buffer, bytes(buffer.size))
    device.upload(buffer[:4], b"1234")
    device.flush_uploads()
    assert barriers
    only, write, read = (
        vk.VK_PIPELINE_STAGE_TRANSFER_BIT,
        vk.VK_ACCESS_TRANSFER_WRITE_BIT,
        vk.VK_ACCESS_TRANSFER_READ_BIT,
    )
    assert set(barriers) == {(only, only, write, read | write)}
    assert isinstance(device._transfer_queue, TimelineQueue)
    assert set(device._transfer_queue._stages) == {only}
    buffer.release()


@pytest.mark.parametrize("path", PATHS)
def test_a_buffer_may_go_before_its_upload_has_arrived(
    open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    device = open_vulkan(PATHS[path])
    kept, going = device.create_buffer(256), device.create_buffer(64)
    handle, order = going.handle, []
    submit, destroy = device._transfer_queue.submit, device.core.destroy

    def watch_submit(*arguments: Any) -> int:
        order.append("submit")
        return submit(*arguments)

    def watch_destroy(item: Handle) -> None:
        if item is handle:
            order.append("destroy")
        destroy(item)

    monkeypatch.setattr(device._transfer_queue, "submit", watch_submit)
    monkeypatch.setattr(device.core, "destroy", watch_destroy)
    device.upload(going, bytes(64))
    device.upload(kept, words(64).data)
    going.release()
    assert device.download(kept) == words(64).tobytes()
    device.collect()
    assert order.count("destroy") == 1
    assert kept.mapped is not None or order.index("submit") < order.index("destroy")
    kept.release()
