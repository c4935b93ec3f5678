"""Uploads on a copy queue beside compute work, and buffers in heaps, on a Direct3D 12 as unfair as it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.unit.fake_d3d12 import Machine

from xinfer.errors import OutOfMemoryError
from xinfer.gpu import _staging as staging
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12 import heaps
from xinfer.gpu._d3d12.queue import Queue
from xinfer.gpu.d3d12 import D3D12Device

COMPUTE, COPY = d3d.D3D12_COMMAND_LIST_TYPE_COMPUTE, d3d.D3D12_COMMAND_LIST_TYPE_COPY
MIB = 1 << 20
Open = Callable[..., tuple[Machine, D3D12Device]]


@pytest.fixture
def open_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Open]:
    """Devices on made-up machines; in the end nothing is alive, and no rule was broken."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr(staging, "CHUNK", MIB)
    made: list[tuple[Machine, D3D12Device]] = []

    def open_one(*, direct: bool = False, **options: Any) -> tuple[Machine, D3D12Device]:
        machine = Machine(**options)
        made.append((machine, D3D12Device(runtime=machine.runtime, direct=direct)))
        return made[-1]

    yield open_one
    for machine, device in made:
        device.close()
        assert device.live_objects() == {}
        assert machine.used == 0
        assert machine.complaints == []


def play(device: D3D12Device, size: int) -> list[int]:
    """Uploads into one buffer with work between them that reads it: the first byte that each piece of work saw."""
    data, rounds = device.create_buffer(size, label="data"), 3
    seen = [device.create_buffer(size, label=f"seen {i}") for i in range(rounds)]
    source, recordings = device.create_buffer(size, "upload"), []
    for i in range(rounds):
        work = device.create_recording(f"read {i}")
        work.copy(data, seen[i])
        work.finish()
        if i == 1:
            source.write(bytes([i + 1]) * size)
            device.transfer(source, data)
        else:
            device.upload(data, bytes([i + 1]) * size)
        device.submit(work)
        recordings.append(work)
    found = [device.download(item)[-1] for item in seen]
    things: list[Any] = [data, source, *seen, *recordings]
    for item in things:
        item.release()
    return found


@pytest.mark.parametrize("size", [64, staging.SMALL + 4, 3 * MIB])
@pytest.mark.parametrize("favoured", [COMPUTE, COPY])
def test_uploads_run_on_the_copy_queue_in_order(open_machine: Open, favoured: int, size: int) -> None:
    machine, device = open_machine(favoured=favoured)
    assert play(device, size) == [1, 2, 3]
    assert machine.queue(COPY).executed >= 3
    assert machine.queue(COMPUTE).executed >= 6  # the work, and the downloads


@pytest.mark.parametrize("size", [64, staging.SMALL + 4, 3 * MIB, heaps.LARGEST_PLACED + MIB])
@pytest.mark.parametrize("favoured", [COMPUTE, COPY])
def test_memory_of_the_hosts_own_is_written_and_read_in_place(open_machine: Open, favoured: int, size: int) -> None:
    """In the order of the calls all the same; only a transfer runs on the copy queue, and nothing is staged."""
    machine, device = open_machine(favoured=favoured, direct=True)
    assert play(device, size) == [1, 2, 3]
    assert machine.queue(COPY).executed == 1
    assert machine.queue(COMPUTE).executed == 3
    custom = (d3d.D3D12_HEAP_TYPE_CUSTOM, d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_BACK, d3d.D3D12_MEMORY_POOL_L0)
    buffer = device.create_buffer(size)
    assert machine.find(buffer.native).pages == custom
    assert (machine.find(buffer.native).heap is None) == (size > heaps.LARGEST_PLACED)
    buffer.release()


@pytest.mark.parametrize("favoured", [COMPUTE, COPY])
def test_what_is_written_in_place_comes_behind_the_transfer_before(open_machine: Open, favoured: int) -> None:
    _, device = open_machine(favoured=favoured, direct=True)
    source, target = device.create_buffer(256, "upload"), device.create_buffer(256)
    source.write(b"\1" * 256)
    device.transfer(source, target)
    device.upload(target[64:128], b"\2" * 64)
    assert device.download(target) == b"\1" * 64 + b"\2" * 64 + b"\1" * 128
    source.release()
    target.release()


@pytest.mark.parametrize(("favoured", "forgetful"), [(COMPUTE, COMPUTE), (COPY, COPY)])
def test_a_queue_that_does_not_wait_is_found_out(
    open_machine: Open, monkeypatch: pytest.MonkeyPatch, favoured: int, forgetful: int
) -> None:
    """The fault that these tests are there for: no fence between the queues."""
    submit = Queue.submit

    def forget(queue: Queue, lists: Sequence[Any], waits: Sequence[Any] = ()) -> int:
        return submit(queue, lists, () if queue.kind == forgetful else waits)

    monkeypatch.setattr(Queue, "submit", forget)
    _, device = open_machine(favoured=favoured)
    assert play(device, 64) != [1, 2, 3]


def test_queues_wait_only_where_they_must(open_machine: Open) -> None:
    """Streaming depends on it: an upload into one buffer runs beside work on another."""
    machine, device = open_machine()
    a, b = device.create_buffer(4096, label="a"), device.create_buffer(4096, label="b")
    recordings = []
    for buffer in (a, b):
        recordings.append(device.create_recording(buffer.label))
        recordings[-1].fill(buffer, 7)
        recordings[-1].finish()
    copy, compute = machine.queue(COPY), machine.queue(COMPUTE)
    device.submit(recordings[0])  # runs on: nobody has asked yet
    device.upload(b, bytes(4096))
    device._transfers.kick()
    assert not copy.called("Wait")
    device.upload(a, bytes(4096))
    device._transfers.kick()
    assert len(copy.called("Wait")) <= 1
    device.submit(recordings[1])
    assert len(compute.called("Wait")) <= 1
    assert device.download(b) == b"\7\0\0\0" * 1024
    assert device.download(a) == bytes(4096)
    things: list[Any] = [*recordings, a, b]
    for item in things:
        item.release()


@pytest.mark.parametrize("favoured", [COMPUTE, COPY])
def test_of_uploads_that_overlap_the_later_wins(open_machine: Open, favoured: int) -> None:
    machine, device = open_machine(favoured=favoured)
    buffer = device.create_buffer(256)
    device.upload(buffer, bytes(256))
    device.upload(buffer[64:128], b"\1" * 64)
    device.upload(buffer[96:160], b"\2" * 64)
    assert device.download(buffer) == bytes(64) + b"\1" * 32 + b"\2" * 64 + bytes(96)
    (uploads,) = [item for item in machine.lists if item.type == COPY]
    assert len(uploads.called("ResourceBarrier")) >= 2  # else nothing orders the copies
    buffer.release()


def test_what_is_released_in_flight_stays_until_both_queues_are_done(open_machine: Open) -> None:
    machine, device = open_machine(favoured=COPY)
    buffer = device.create_buffer(1 << 16)
    device.upload(buffer, bytes(1 << 16))
    work = device.create_recording("fill")
    work.fill(buffer, 3)
    work.finish()
    device.submit(work)
    resource = machine.find(buffer.native)
    buffer.release()
    work.release()
    assert resource.alive
    device.flush_uploads()
    for _ in range(10):
        machine.step()
    device.collect()
    assert not resource.alive


# --- heaps ------------------------------------------------------------------------------------------------------------


def test_small_buffers_are_placed_and_large_ones_committed(open_machine: Open) -> None:
    machine, device = open_machine()
    before = machine.used
    small = [device.create_buffer(100_000) for _ in range(200)]
    assert len(machine.heaps) == 1
    assert machine.used - before == heaps.HEAP_BYTES
    large = device.create_buffer(heaps.LARGEST_PLACED + 1)
    assert machine.find(large.native).heap is None
    mapped = [device.create_buffer(64, "upload"), device.create_buffer(64, "readback")]
    assert all(machine.find(item.native).heap is None for item in mapped)
    assert device.memory().ours == 200 * 100_000 + large.size + 15  # rounded up to 16
    for item in (*small, large, *mapped):
        item.release()
    assert machine.used == before
    assert device.memory().ours == 0
    assert device.memory().peak == 200 * 100_000 + large.size + 15


def test_heaps_come_and_go_and_no_two_buffers_share_a_byte(open_machine: Open) -> None:
    """Against the made-up driver's own bookkeeping, which complains of overlaps and of heaps that go too early."""
    machine, device = open_machine()
    rng = np.random.default_rng(20260801)
    alive: list[Any] = []
    for _ in range(600):
        if alive and rng.random() < 0.45:
            alive.pop(int(rng.integers(len(alive)))).release()
        else:
            alive.append(device.create_buffer(int(rng.choice([1, 65_536, 65_537, 3 * MIB, 9 * MIB, 16 * MIB]))))
        held = sum(-(-item.size // 65_536) * 65_536 for item in alive)
        assert sum(heap.size for heap in machine.heaps if heap.references) - device.allocator.heaps.free_bytes == held
    assert len(machine.heaps) > 3
    for item in alive:
        item.release()
    assert not any(heap.references for heap in machine.heaps)


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_neighbours_that_are_free_again_are_one_place(open_machine: Open, order: tuple[int, int]) -> None:
    machine, device = open_machine()
    buffers = [device.create_buffer(8 * MIB) for _ in range(8)]
    for i in order:
        buffers[i].release()
    buffers.append(device.create_buffer(16 * MIB))
    assert len(machine.heaps) == 1
    assert machine.find(buffers[-1].native).offset == 16 * MIB
    for buffer in buffers:
        buffer.release()


def test_what_a_heap_has_left_counts_as_free(open_machine: Open) -> None:
    machine, device = open_machine()
    machine.budget = machine.used + heaps.HEAP_BYTES
    kept = [device.create_buffer(16 * MIB)]
    assert machine.used == machine.budget
    assert device.memory().free == 48 * MIB
    kept += [device.create_buffer(16 * MIB) for _ in range(3)]
    assert device.memory().free == 0
    with pytest.raises(OutOfMemoryError, match=r"needs 1\.0 MiB .* only 0 bytes of .* 1\.0 MiB are missing"):
        device.create_buffer(MIB)
    for item in kept:
        item.release()


def test_without_room_for_a_heap_a_buffer_has_memory_of_its_own(open_machine: Open) -> None:
    for options in ({}, {"largest_heap": 0}):
        machine, device = open_machine(**options)
        if not options:
            machine.budget = machine.used + 20 * MIB
        buffer = device.create_buffer(10 * MIB)
        assert machine.find(buffer.native).heap is None
        if not options:
            with pytest.raises(OutOfMemoryError, match=r"'?big'? needs 11\.0 MiB .* 1\.0 MiB are missing"):
                device.create_buffer(11 * MIB, label="big")
        buffer.release()


def test_the_limit_is_of_buffers_and_not_of_heaps(open_machine: Open) -> None:
    _, device = open_machine()
    device.limit_memory(3 * MIB)
    buffer = device.create_buffer(2 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"1\.0 MiB are missing"):
        device.create_buffer(2 * MIB)
    buffer.release()
