"""Buffers, kernels and transfers of a device, on every path that the options of `VulkanDevice` force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu import tiny_spirv
from tests.gpu.long_work import start_long_work

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk import transfer
from xinfer.gpu._vk.core import Handle
from xinfer.gpu._vk.queue import Queue, TimelineQueue
from xinfer.gpu.api import Bindable, BufferSlice, Device
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

OpenVulkan = Callable[..., VulkanDevice]
PATHS = {
    "direct": VulkanOptions(direct=True),
    "staged": VulkanOptions(direct=False),
    "two clocks": VulkanOptions(direct=False, second_clock=True),
    "fences": VulkanOptions(direct=False, without=frozenset({"timeline"})),
    "Vulkan 1.1": VulkanOptions(newest=(1, 1)),
    "Vulkan 1.1, fences, staged": VulkanOptions(newest=(1, 1), direct=False, without=frozenset({"timeline"})),
}
KEPT = {"VkDescriptorSetLayout", "VkPipelineLayout", "VkFence"}  # by the device, to be used again
STAGING = {"VkBuffer", "VkDeviceMemory", "VkCommandPool"}
SEED = 20240229


@pytest.fixture(scope="module", params=PATHS)
def shared_path_device(request: pytest.FixtureRequest, open_vulkan_for_module: OpenVulkan) -> VulkanDevice:
    return open_vulkan_for_module(PATHS[request.param])


@pytest.fixture
def path_device(shared_path_device: VulkanDevice) -> Iterator[VulkanDevice]:
    """A device on each path; all that the test made has to be gone in the end, and validation has nothing to say."""
    device = shared_path_device
    before = device.live_objects()
    yield device
    device.flush_uploads()
    messages = device.drain_debug_messages()
    assert not messages, "\n\n".join(map(str, messages))
    device.collect()
    grown = {kind: n - before.get(kind, 0) for kind, n in device.live_objects().items() if n > before.get(kind, 0)}
    assert grown.keys() <= KEPT | STAGING
    counts = {grown.get(kind, 0) for kind in STAGING}
    assert len(counts) == 1
    assert counts.pop() <= transfer.CHUNKS + 1


def words(count: int, seed: int = SEED) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def get(device: Device, part: Bindable) -> NDArray[np.uint32]:
    return np.frombuffer(device.download(part), np.uint32)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 4097, 300_000])
def test_kernel_computes(path_device: VulkanDevice, n: int) -> None:
    x, y, a = words(n), words(n, 1), 2654435761
    with_x, with_y = path_device.create_buffer(4 * n, label="x"), path_device.create_buffer(4 * n, label="y")
    path_device.upload(with_x, x.data)
    path_device.upload(with_y, y.data)
    kernel = path_device.create_kernel(tiny_spirv.axpy())
    recording = path_device.create_recording("axpy")
    recording.dispatch(kernel, [with_x, with_y], [n, a], (-(-n // 64), 1, 1), "axpy")
    recording.finish()
    for times in (1, 2):
        path_device.wait(path_device.submit(recording))
        np.testing.assert_array_equal(get(path_device, with_y), y + np.uint32(times * a & 0xFFFFFFFF) * x)
    for item in (recording, kernel, with_x, with_y):
        item.release()


def test_constants_as_bytes_and_slices_as_buffers(path_device: VulkanDevice) -> None:
    align = path_device.info.storage_alignment
    buffer = path_device.create_buffer(3 * max(align, 256))
    step, n = buffer.size // 3, 64
    x, y = words(n), words(n, 1)
    path_device.upload(buffer[step : step + 4 * n], x.data)
    path_device.upload(buffer[2 * step : 2 * step + 4 * n], y.data)
    path_device.upload(buffer[:step], bytes(step))
    kernel = path_device.create_kernel(tiny_spirv.axpy())
    recording = path_device.create_recording("slices")
    constants = np.array([n, 3], np.uint32).tobytes()
    recording.dispatch(kernel, [buffer[step:][: 4 * n], buffer[2 * step :]], constants, (1, 1, 1), "axpy")
    recording.finish()
    path_device.wait(path_device.submit(recording))
    np.testing.assert_array_equal(get(path_device, buffer[2 * step : 2 * step + 4 * n]), y + np.uint32(3) * x)
    assert path_device.download(buffer[:step]) == bytes(step)
    for item in (recording, kernel, buffer):
        item.release()


@pytest.mark.parametrize("size", [4, transfer.SMALL, transfer.SMALL + 4, transfer.CHUNK, 5 * transfer.CHUNK + 12])
def test_what_is_uploaded_comes_back(path_device: VulkanDevice, size: int) -> None:
    buffer = path_device.create_buffer(size + 64, label="target")
    path_device.upload(buffer, bytes([0xA5]) * (size + 64))
    data = words(size // 4).tobytes()
    path_device.upload(buffer[32 : 32 + size], data)
    whole = path_device.download(buffer)
    assert whole[32:-32] == data
    assert whole[:32] == whole[-32:] == bytes([0xA5]) * 32
    buffer.release()


def test_upload_from_fills_front_to_back(path_device: VulkanDevice) -> None:
    size = 3 * transfer.CHUNK + 20
    data = words(size // 4).tobytes()
    buffer = path_device.create_buffer(size)
    pieces: list[int] = []

    def fill(piece: memoryview) -> None:
        start = sum(pieces)
        piece[:] = data[start : start + len(piece)]
        pieces.append(len(piece))

    path_device.upload_from(buffer, fill)
    path_device.flush_uploads()
    assert sum(pieces) == size
    assert path_device.download(buffer) == data
    buffer.release()


def test_a_fill_that_fails_leaves_the_device_usable(path_device: VulkanDevice) -> None:
    buffer = path_device.create_buffer(transfer.CHUNK + 4)

    def fill(piece: memoryview) -> None:
        raise OSError("the disk is gone")

    for _ in range(2 * transfer.CHUNKS):
        with pytest.raises(OSError, match="the disk is gone"):
            path_device.upload_from(buffer, fill)
    data = words(buffer.size // 4).tobytes()
    path_device.upload(buffer, data)
    assert path_device.download(buffer) == data
    buffer.release()


def test_a_view_is_dead_after_its_fill(path_device: VulkanDevice) -> None:
    buffer = path_device.create_buffer(1 << 20)
    views: list[memoryview] = []
    path_device.upload_from(buffer, views.append)
    with pytest.raises(ValueError, match="released"):
        views[0][0] = 1
    buffer.release()


def test_uploads_come_in_the_order_of_the_calls(path_device: VulkanDevice) -> None:
    """Small ones share a chunk, large ones have their own: the last writer of each byte wins all the same."""
    size = 2 * transfer.SMALL
    buffer, expected = path_device.create_buffer(size), bytearray(size)
    generator = np.random.default_rng(SEED)
    for value in range(1, 60):
        start, stop = sorted(4 * int(i) for i in generator.integers(0, size // 4 + 1, 2))
        start, stop = (0, size) if value % 20 == 1 else (start, stop)
        if start == stop:
            continue
        expected[start:stop] = bytes([value]) * (stop - start)
        path_device.upload(buffer[start:stop], bytes([value]) * (stop - start))
    assert path_device.download(buffer) == expected
    buffer.release()


def test_thousands_of_small_uploads(path_device: VulkanDevice) -> None:
    count, size = 3000, 12_000  # more than the staging ring holds
    buffer = path_device.create_buffer(16 * size)
    for i in range(count):
        path_device.upload(buffer[i % 16 * size :][:size], i.to_bytes(4, "little") * (size // 4))
    last = np.frombuffer(path_device.download(buffer), np.uint32).reshape(16, -1)
    assert (last == last[:, :1]).all()
    assert sorted(last[:, 0]) == list(range(count - 16, count))
    buffer.release()


def test_an_upload_waits_for_the_work_that_reads_its_target(path_device: VulkanDevice) -> None:
    n = 100_000
    source, target = path_device.create_buffer(4 * n, label="source"), path_device.create_buffer(4 * n, label="target")
    old, new = words(n), words(n, 1)
    path_device.upload(source, old.data)
    path_device.upload(target, bytes(4 * n))
    recording = path_device.create_recording("copy")
    recording.copy(source, target)
    recording.finish()
    path_device.flush_uploads()
    _, items = start_long_work(path_device, 0.3)
    ticket = path_device.submit(recording)  # queued behind the busy work
    path_device.upload(source, new.data)
    path_device.wait(ticket)
    np.testing.assert_array_equal(get(path_device, target), old)
    np.testing.assert_array_equal(get(path_device, source), new)
    path_device.wait(path_device.submit(recording))
    np.testing.assert_array_equal(get(path_device, target), new)
    for item in (*items, recording, source, target):
        item.release()


def test_two_clocks_wait_for_each_other_only_where_they_must(
    open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streaming depends on it: an upload into one buffer runs beside work on another."""
    device = open_vulkan(PATHS["two clocks"])
    a, b = device.create_buffer(transfer.SMALL + 4, label="a"), device.create_buffer(transfer.SMALL + 4, label="b")
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
    buffer = device.create_buffer(transfer.SMALL + 4)
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


def test_a_buffer_may_go_before_its_upload_has_arrived(
    path_device: VulkanDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = path_device
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


def test_mapped_buffers(path_device: VulkanDevice) -> None:
    n = 1000
    upload, back = path_device.create_buffer(4 * n, "upload"), path_device.create_buffer(4 * n, "readback")
    data = words(n).tobytes()
    upload.write(data)
    upload.write(data[:8], offset=16)
    recording = path_device.create_recording("copy")
    recording.copy(upload, back)
    recording.finish()
    path_device.wait(path_device.submit(recording))
    expected = data[:16] + data[:8] + data[24:]
    assert back.read() == expected
    assert back.read(16, 8) == data[:8]
    upload.write(data)
    path_device.wait(path_device.submit(recording))
    assert back.read() == data
    for item in (recording, upload, back):
        item.release()
    with pytest.raises(DeviceError, match="released"):
        back.read()
    with pytest.raises(DeviceError, match="released"):
        upload.write(data)


def test_a_kernel_writes_a_readback_buffer(path_device: VulkanDevice) -> None:
    """As the argmax does with the ring of tokens."""
    x, back = path_device.create_buffer(256), path_device.create_buffer(256, "readback")
    path_device.upload(x, words(64).data)
    kernel = path_device.create_kernel(tiny_spirv.axpy())
    recording = path_device.create_recording("into readback")
    recording.fill(back, 0)
    recording.barrier()
    recording.dispatch(kernel, [x, back], [64, 1], (1, 1, 1), "axpy")
    recording.finish()
    path_device.wait(path_device.submit(recording))
    assert back.read() == words(64).tobytes()
    for item in (recording, kernel, x, back):
        item.release()


def test_errors_of_use(device: Device) -> None:
    buffer = device.create_buffer(100, label="some buffer")
    with pytest.raises(ValueError, match="bytes 90 to 110 do not lie within buffer 'some buffer' of 100"):
        device.upload(BufferSlice(buffer, 90, 20), bytes(20))
    with pytest.raises(ValueError, match="cannot upload 3 bytes into 4"):
        device.upload(buffer[:4], bytes(3))
    with pytest.raises(ValueError, match="start <= stop"):
        buffer[0:10:2]
    with pytest.raises(DeviceError, match="use Device"):
        buffer.write(b"1234")
    with pytest.raises(DeviceError, match="in place"):
        buffer.read()
    with pytest.raises(ValueError, match="at least 1"):
        device.create_buffer(0, label="nothing")
    with pytest.raises(DeviceError, match="slice it"):
        device.create_buffer(device.info.max_allocation + 1)
    buffer.release()
    buffer.release()
    with pytest.raises(DeviceError, match="released"):
        device.upload(buffer, bytes(100))
    with pytest.raises(DeviceError, match="released"):
        device.download(buffer)
