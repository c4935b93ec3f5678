"""Buffers, kernels and transfers on every backend, and on every path that the options of `VulkanDevice` force."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu import tiny_spirv
from tests.gpu.conftest import BACKENDS, VALIDATION, missing, no_messages
from tests.gpu.long_work import start_long_work

from xinfer import gpu
from xinfer.errors import DeviceError
from xinfer.gpu import _staging as staging
from xinfer.gpu._d3d12 import transfer as d3d12_transfer
from xinfer.gpu._vk import transfer as vulkan_transfer
from xinfer.gpu.api import Bindable, BufferSlice, Device, Stage
from xinfer.gpu.d3d12 import D3D12Device
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

PATHS = {
    "direct": VulkanOptions(direct=True),
    "staged": VulkanOptions(direct=False),
    "two clocks": VulkanOptions(direct=False, second_clock=True),
    "fences": VulkanOptions(direct=False, without=frozenset({"timeline"})),
    "Vulkan 1.1": VulkanOptions(newest=(1, 1)),
    "Vulkan 1.1, fences, staged": VulkanOptions(newest=(1, 1), direct=False, without=frozenset({"timeline"})),
}
# What a device keeps to use it again, and what it makes of each for a staging chunk.
KEPT = {"VkDescriptorSetLayout", "VkPipelineLayout", "VkFence", "ID3D12RootSignature", "ID3D12PipelineState"}
STAGING = {
    "Vk": {"VkBuffer", "VkDeviceMemory", "VkCommandPool"},
    "ID": {"ID3D12Resource", "ID3D12CommandAllocator", "ID3D12GraphicsCommandList"},
}
SEED = 20240229

PathDevice = VulkanDevice | D3D12Device


def paths() -> list[str]:
    on_vulkan = [*PATHS] if any(selector.startswith("vulkan") for selector in BACKENDS) else []
    on_d3d12 = [selector for selector in BACKENDS if selector.startswith("d3d12")]
    return on_vulkan + on_d3d12 + [f"{selector} direct" for selector in on_d3d12]


@pytest.fixture(scope="module", params=paths())
def shared_path_device(
    request: pytest.FixtureRequest, open_vulkan_for_module: Callable[..., VulkanDevice]
) -> Iterator[PathDevice]:
    if request.param in PATHS:
        yield open_vulkan_for_module(PATHS[request.param])
        return
    selector, _, direct = request.param.partition(" ")
    with D3D12Device(int(selector.partition(":")[2] or 0), debug=VALIDATION, direct=bool(direct)) as device:
        yield device
    assert device.live_objects() == {}


@pytest.fixture
def path_device(shared_path_device: PathDevice) -> Iterator[PathDevice]:
    """A device on each path; all that the test made has to be gone in the end, and validation has nothing to say."""
    device = shared_path_device
    before = device.live_objects()
    yield device
    device.flush_uploads()
    no_messages(device)
    device.collect()
    grown = {kind: n - before.get(kind, 0) for kind, n in device.live_objects().items() if n > before.get(kind, 0)}
    kinds = STAGING["Vk" if isinstance(device, VulkanDevice) else "ID"]
    assert grown.keys() <= KEPT | kinds
    assert max(grown.get(kind, 0) for kind in kinds) <= device._transfers.most + 1


def test_both_backends_stage_alike() -> None:
    """What the tests find out on one holds on the other."""
    for module in (vulkan_transfer, d3d12_transfer):
        assert module.Transfers.__base__ is staging.Staging
        assert not {"upload", "stage", "mapped", "transfer", "kick", "_take"} & vars(module.Transfers).keys()


def words(count: int, seed: int = SEED) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def get(device: Device, part: Bindable) -> NDArray[np.uint32]:
    return np.frombuffer(device.download(part), np.uint32)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 4097, 300_000])
def test_kernel_computes(path_device: PathDevice, n: int) -> None:
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


def test_constants_as_bytes_and_slices_as_buffers(path_device: PathDevice) -> None:
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


@pytest.mark.parametrize("size", [4, staging.SMALL, staging.SMALL + 4, staging.CHUNK, 5 * staging.CHUNK + 12])
def test_what_is_uploaded_comes_back(path_device: PathDevice, size: int) -> None:
    buffer = path_device.create_buffer(size + 64, label="target")
    path_device.upload(buffer, bytes([0xA5]) * (size + 64))
    data = words(size // 4).tobytes()
    path_device.upload(buffer[32 : 32 + size], data)
    whole = path_device.download(buffer)
    assert whole[32:-32] == data
    assert whole[:32] == whole[-32:] == bytes([0xA5]) * 32
    buffer.release()


def test_a_large_upload_goes_piece_by_piece(path_device: PathDevice) -> None:
    size = 3 * path_device.stage_bytes + 20
    data = words(size // 4).tobytes()
    buffer = path_device.create_buffer(size)
    path_device.upload(buffer, data)
    assert path_device.download(buffer) == data
    buffer.release()


def staged(device: PathDevice, size: int) -> Stage:
    """One that is there."""
    stage = device.stage(size)
    assert stage is not None
    return stage


def test_parts_of_a_stage_go_to_several_places(path_device: PathDevice) -> None:
    """What lies between the parts goes nowhere."""
    size = path_device.stage_bytes
    data = words(size // 4).tobytes()
    first, second = path_device.create_buffer(size), path_device.create_buffer(64)
    path_device.upload(first, bytes(size))
    stage = staged(path_device, size)
    stage.view[:] = data
    stage.send([(0, first[100:132]), (60, second), (1000, first[2000:4000]), (size - 8, first[40:48])])
    expected = bytearray(size)
    expected[100:132], expected[40:48], expected[2000:4000] = data[:32], data[-8:], data[1000:3000]
    assert path_device.download(first) == expected
    assert path_device.download(second) == data[60:124]
    for buffer in (first, second):
        buffer.release()


def test_a_stage_is_used_once(path_device: PathDevice) -> None:
    buffer = path_device.create_buffer(64)
    with pytest.raises(ValueError, match=f"at most, not {path_device.stage_bytes + 1}"):
        path_device.stage(path_device.stage_bytes + 1)
    sent, given_back = staged(path_device, 64), staged(path_device, 64)
    with pytest.raises(ValueError, match="none from 60 to 124"):
        sent.send([(60, buffer)])
    view = given_back.view
    given_back.release()
    given_back.release()
    for stage in (sent, given_back):
        with pytest.raises(DeviceError, match="ask for another"):
            stage.send([(0, buffer)])
        with pytest.raises(DeviceError, match="ask for another"):
            _ = stage.view
    with pytest.raises(ValueError, match="released"):
        view[0] = 1
    buffer.release()


def test_nobody_waits_for_stages_of_their_own(path_device: PathDevice) -> None:
    """A thread that has them all gets none; another waits until one is given back, or does not wait."""
    most = path_device._transfers.most
    stages = [staged(path_device, 64) for _ in range(most)]
    assert path_device.stage(64) is None
    buffer = path_device.create_buffer(staging.SMALL + 4)
    data = words(buffer.size // 4).tobytes()
    if not buffer.in_place:
        for size in (4, buffer.size):
            with pytest.raises(DeviceError, match="give one back"):
                path_device.upload(buffer[:size], data[:size])
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(path_device.stage, 64, wait=False).result() is None
        waiting = threads.submit(path_device.stage, 64)
        assert not wait([waiting], timeout=0.1).done
        stages.pop().release()
        other = waiting.result(timeout=30)
    assert other is not None
    for stage in (*stages, other):
        stage.release()
    path_device.upload(buffer, data)
    assert path_device.download(buffer) == data
    assert len(path_device._transfers._made) == most
    buffer.release()


def test_a_busy_stage_is_not_waited_for_unasked(path_device: PathDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = path_device._transfers
    for _ in range(transfers.most):
        staged(path_device, 64).release()
    stages = [staged(path_device, 64) for _ in range(transfers.most)]
    for stage in stages:
        stage.release()
    path_device.flush_uploads()
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "_ended", lambda _: False)
        assert path_device.stage(64, wait=False) is None
        staged(path_device, 64).release()
    free = path_device.stage(64, wait=False)
    assert free is not None
    free.release()


def test_memory_that_the_host_reaches(path_device: PathDevice) -> None:
    """Upload buffers everywhere, device memory where it is written in place: then behind the work that uses it."""
    source, target = path_device.create_buffer(256, "upload"), path_device.create_buffer(256)
    assert source.in_place
    with path_device.mapped(source[64:128]) as view:
        view[:] = bytes([7]) * 64
    assert source.read(64, 64) == bytes([7]) * 64
    if target.in_place:
        path_device.transfer(source, target)
        with path_device.mapped(target[:4]) as view:
            view[:] = b"abcd"
        assert path_device.download(target)[:4] == b"abcd"
        assert path_device.download(target)[64:128] == bytes([7]) * 64
    else:
        with pytest.raises(DeviceError, match="reached by upload"):
            path_device.mapped(target)
    for buffer in (source, target):
        buffer.release()


def test_threads_have_stages_of_their_own(path_device: PathDevice) -> None:
    """All of them at once, or the barrier breaks; the chunks stay for what is uploaded next."""
    n = staging.FEW_CHUNKS
    size = staging.SMALL + 4
    buffers = [path_device.create_buffer(size) for _ in range(n)]
    data = [words(size // 4, seed=i).tobytes() for i in range(n)]
    all_here = threading.Barrier(n, timeout=30)

    def send(i: int) -> None:
        stage = staged(path_device, size)
        all_here.wait()
        if buffers[i].in_place:
            stage.release()
            path_device.upload(buffers[i], data[i])
            return
        stage.view[:] = data[i]
        stage.send([(0, buffers[i])])

    with ThreadPoolExecutor(n) as threads:
        list(threads.map(send, range(n)))
    path_device.flush_uploads()
    assert len(path_device._transfers._made) <= path_device._transfers.most
    for buffer, expected in zip(buffers, data, strict=True):
        assert path_device.download(buffer) == expected
        buffer.release()


def test_staging_takes_less_where_it_takes_of_the_devices_memory() -> None:
    class Ring(staging.Staging[Any]):
        _make = None  # type: ignore[assignment]

    info = SimpleNamespace(kind="discrete")
    owner = SimpleNamespace(core=SimpleNamespace(adapter=SimpleNamespace(info=info)))
    assert Ring(owner, None, None).most == staging.CHUNKS
    info.kind = "integrated"
    assert Ring(owner, None, None).most == staging.FEW_CHUNKS < staging.CHUNKS


def test_threads_record_at_the_same_time(path_device: PathDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them are within `copy` at once, or the barrier breaks; they take turns only to submit."""
    size = staging.SMALL + 4
    kind: Any = (vulkan_transfer if isinstance(path_device, VulkanDevice) else d3d12_transfer).Chunk
    copy, both_here = kind.copy, threading.Barrier(2, timeout=30)

    def wait_and_copy(chunk: Any, source: BufferSlice, target: BufferSlice) -> None:
        both_here.wait()
        copy(chunk, source, target)

    sources = [path_device.create_buffer(size, "upload") for _ in range(2)]
    targets = [path_device.create_buffer(size) for _ in range(2)]
    data = [words(size // 4, seed=i).tobytes() for i in range(2)]
    for source, part in zip(sources, data, strict=True):
        source.write(part)
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(kind, "copy", wait_and_copy)
        list(threads.map(path_device.transfer, sources, targets))
    assert [path_device.download(target) for target in targets] == data
    for buffer in (*sources, *targets):
        buffer.release()


def test_transfers_take_no_staging_memory(path_device: PathDevice) -> None:
    source, target = path_device.create_buffer(1 << 20, "upload"), path_device.create_buffer(1 << 20)
    data = words(1 << 18).tobytes()
    source.write(data)
    path_device.flush_uploads()
    path_device._transfers.release()
    path_device.collect()
    memory = "VkDeviceMemory" if isinstance(path_device, VulkanDevice) else "ID3D12Resource"
    before = path_device.live_objects()[memory]
    for _ in range(3 * staging.FEW_CHUNKS):
        path_device.transfer(source, target)
    path_device.flush_uploads()
    assert path_device.live_objects()[memory] == before
    assert path_device.download(target) == data
    source.release()
    target.release()


def test_an_upload_comes_behind_the_transfer_before(path_device: PathDevice) -> None:
    """Also where the host writes in place, and the transfer takes its time."""
    size = 4 * staging.CHUNK
    source, target = path_device.create_buffer(size, "upload"), path_device.create_buffer(size)
    data = words(size // 4)
    source.write(data.tobytes())
    for value in (1, 2, 3):
        path_device.transfer(source, target)
        path_device.upload(target[size - 64 :], bytes([value]) * 64)
        data.view(np.uint8)[-64:] = value
        assert path_device.download(target) == data.tobytes()
    source.release()
    target.release()


def test_chunks_that_an_interrupt_lost_are_found(path_device: PathDevice) -> None:
    """An exception out of a signal's handler may come between any two instructions, those that give one back too."""
    transfers, data = path_device._transfers, words(1 << 16).tobytes()
    buffer = path_device.create_buffer(len(data))
    for _ in range(3 * staging.FEW_CHUNKS):
        transfers._take()
        path_device.upload(buffer, data)
    thread = threading.Thread(target=lambda: [transfers._take() for _ in range(staging.FEW_CHUNKS)])
    thread.start()
    thread.join()
    path_device.upload(buffer, data)
    assert path_device.download(buffer) == data
    assert len(transfers._made) <= transfers.most
    buffer.release()


def test_a_stage_is_not_lost_while_it_is_there(path_device: PathDevice) -> None:
    """Although its thread asks for others, any number of times; one that nobody refers to any more is found."""
    buffer, data = path_device.create_buffer(1 << 20), words(1 << 18).tobytes()
    stage = staged(path_device, 64)
    stage.view[:] = bytes([3]) * 64
    for _ in range(3 * staging.CHUNKS):
        staged(path_device, 64).view[:] = bytes(64)
    path_device.upload(buffer, data)
    assert stage.view == bytes([3]) * 64
    stage.release()
    assert path_device.download(buffer) == data
    buffer.release()


def test_small_uploads_that_waited_for_room_all_arrive(path_device: PathDevice) -> None:
    """Threads that wait for a chunk at the same time gather theirs in one."""
    buffers = [path_device.create_buffer(64) for _ in range(3)]
    stages = [staged(path_device, 64) for _ in range(path_device._transfers.most)]
    with ThreadPoolExecutor(3) as threads:
        uploads = [threads.submit(path_device.upload, buffer, b"n" * 64) for buffer in buffers]
        done = wait(uploads, timeout=0.1).done
        assert not done or buffers[0].in_place
        for stage in stages:
            stage.release()
        for upload in uploads:
            upload.result(timeout=30)
    for buffer in buffers:
        assert path_device.download(buffer) == b"n" * 64
        buffer.release()


def test_a_buffer_may_go_before_what_was_uploaded_into_it(path_device: PathDevice) -> None:
    buffers = [path_device.create_buffer(64) for _ in range(3)]
    for buffer in buffers:
        path_device.upload(buffer, b"n" * 64)
    buffers[1].release()
    path_device.upload(buffers[0][:1], b"o")
    path_device.flush_uploads()
    assert path_device.download(buffers[0]) == b"o" + b"n" * 63
    assert path_device.download(buffers[2]) == b"n" * 64
    for buffer in buffers:
        buffer.release()


def test_what_was_uploaded_before_is_there_before(path_device: PathDevice) -> None:
    """A stage is sent behind small uploads, also those that came since it was asked for."""
    buffer, stage = path_device.create_buffer(64), staged(path_device, 64)
    stage.view[:] = b"n" * 64
    path_device.upload(buffer, b"o" * 64)
    stage.send([(0, buffer)])
    assert path_device.download(buffer) == b"n" * 64
    buffer.release()


@pytest.mark.parametrize("behind", [False, True], ids=["before it is submitted", "behind that"])
def test_an_interrupted_submission_of_small_uploads(
    path_device: PathDevice, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """They are uploaded all the same: those who asked for it were told that they had been."""
    buffer, transfers = path_device.create_buffer(64), path_device._transfers
    submit = transfers._submit

    def interrupted(chunk: Any) -> None:
        if behind:
            submit(chunk)
        raise KeyboardInterrupt

    path_device.upload(buffer, b"a" * 64)
    with monkeypatch.context() as patch:
        patch.setattr(transfers, "_submit", interrupted)
        if not buffer.in_place:
            with pytest.raises(KeyboardInterrupt):
                path_device.flush_uploads()
    path_device.upload(buffer[:4], b"bbbb")
    assert path_device.download(buffer) == b"bbbb" + b"a" * 60
    buffer.release()


def test_an_interrupt_while_a_stage_is_given_back(path_device: PathDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives it back twice, so that two would have it."""
    buffer, transfers = path_device.create_buffer(64), path_device._transfers
    stage, give = staged(path_device, 64), transfers.give

    def interrupted(chunk: Any) -> None:
        patch.undo()
        give(chunk)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(transfers, "give", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage.release()
    stage.release()
    stages = [staged(path_device, 64) for _ in range(transfers.most)]
    assert len({id(stage._chunk) for stage in stages}) == transfers.most  # type: ignore[attr-defined]
    for stage in stages:
        stage.release()
    buffer.release()


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="an interrupt may come between taking a lock and the block that gives it back"
)
def test_interrupts_leave_nothing_locked(path_device: PathDevice) -> None:
    transfers, free = path_device._transfers, list[bool]()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def look() -> None:
        free.append(transfers._lock.acquire(timeout=1))
        if free[-1]:
            transfers._lock.release()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 3e-4 + i % 97 * 1e-5)
                while True:
                    staged(path_device, 64).release()
            except KeyboardInterrupt:
                thread = threading.Thread(target=look)
                thread.start()
                thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(free)
    assert len(free) == 200
    stages = [staged(path_device, 64) for _ in range(transfers.most)]
    for stage in stages:
        stage.release()


def opened(selector: str) -> Any:
    """A device that is not the other tests'."""
    try:
        return gpu.open_device(selector)
    except DeviceError as error:
        missing(str(error))


@pytest.mark.parametrize("selector", BACKENDS)
def test_a_stage_of_a_closed_device(selector: str) -> None:
    device = opened(selector)
    stage, other = staged(device, 64), staged(device, 64)
    buffer = device.create_buffer(64)
    _ = other.view
    device.close()
    for use in (lambda: stage.view, lambda: other.send([(0, buffer)]), lambda: device.stage(64)):
        with pytest.raises(DeviceError, match=r"closed|released"):
            use()


@pytest.mark.parametrize("selector", BACKENDS)
def test_closing_waits_for_what_other_threads_have_in_hand(selector: str) -> None:
    device, held, let_go = opened(selector), threading.Event(), threading.Event()

    def hold() -> bool:
        stage = staged(device, 64)
        view = stage.view
        held.set()
        let_go.wait(30)
        view[:] = bytes(64)
        stage.release()
        return bool(device.core.closed)

    with ThreadPoolExecutor(2) as threads:
        holding = threads.submit(hold)
        assert held.wait(30)
        closing = threads.submit(device.close)
        assert not wait([closing], timeout=0.1).done
        let_go.set()
        assert not holding.result(timeout=30)
        closing.result(timeout=30)


def test_uploads_come_in_the_order_of_the_calls(path_device: PathDevice) -> None:
    """Small ones share a chunk, large ones have their own: the last writer of each byte wins all the same."""
    size = 2 * staging.SMALL
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


def test_thousands_of_small_uploads(path_device: PathDevice) -> None:
    count, size = 3000, 12_000  # more than the staging ring holds
    buffer = path_device.create_buffer(16 * size)
    for i in range(count):
        path_device.upload(buffer[i % 16 * size :][:size], i.to_bytes(4, "little") * (size // 4))
    last = np.frombuffer(path_device.download(buffer), np.uint32).reshape(16, -1)
    assert (last == last[:, :1]).all()
    assert sorted(last[:, 0]) == list(range(count - 16, count))
    buffer.release()


def test_an_upload_waits_for_the_work_that_reads_its_target(path_device: PathDevice) -> None:
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


def test_mapped_buffers(path_device: PathDevice) -> None:
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


def test_a_kernel_writes_a_readback_buffer(path_device: PathDevice) -> None:
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
