"""Recordings: segments, order, timestamps, and what is refused, on every backend."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.gpu import tiny_spirv

from xinfer.errors import DeviceError
from xinfer.gpu.api import Bindable, Device, KernelCode


def values(device: Device, buffer: Bindable) -> list[int]:
    return [int(value) for value in np.frombuffer(device.download(buffer), np.uint32)]


def test_segments_run_together_or_one_by_one(device: Device) -> None:
    buffer = device.create_buffer(12)
    recording = device.create_recording("three fills")
    for i, name in enumerate(("a", "b", "c")):
        recording.segment(name)
        recording.fill(buffer[4 * i :][:4], i + 1)
    recording.finish()
    assert recording.segments == ("a", "b", "c")
    for chosen, expected in (
        (None, [1, 2, 3]),
        (["b"], [0, 2, 0]),
        (["c", "a"], [1, 0, 3]),
        ([], [0, 0, 0]),
    ):
        device.upload(buffer, bytes(12))
        device.wait(device.submit(recording, chosen))
        assert values(device, buffer) == expected
    with pytest.raises(ValueError, match=r"no segments \['d'\], only \['a', 'b', 'c'\]"):
        device.submit(recording, ["d"])
    recording.release()
    buffer.release()


def test_segments_and_submissions_see_each_other_without_a_barrier(device: Device) -> None:
    """y doubles (y += 1 * y') through three segments of a recording that is replayed: 2 ** (3 * 5)."""
    n = 100_000
    x, y = device.create_buffer(4 * n), device.create_buffer(4 * n)
    device.upload(y, np.ones(n, np.uint32).data)
    kernel = device.create_kernel(tiny_spirv.axpy())
    recording = device.create_recording("double")
    for name in ("1", "2", "3"):
        recording.segment(name)
        recording.copy(y, x)
        recording.barrier()
        recording.dispatch(kernel, [x, y], [n, 1], (-(-n // 64), 1, 1), "double")
    recording.finish()
    tickets = [device.submit(recording) for _ in range(5)]
    device.wait(tickets[-1])
    assert all(device.poll(ticket) for ticket in tickets)
    assert set(values(device, y)) == {2**15}
    for item in (recording, kernel, x, y):
        item.release()


def test_timestamps_grow_and_are_in_order(device: Device) -> None:
    groups = 300
    buffer = device.create_buffer(256 * groups)
    kernel = device.create_kernel(tiny_spirv.spin())
    recording = device.create_recording("timed")
    recording.timestamp("start")
    for trips, name in ((10, "short"), (20_000, "long")):
        recording.segment(name)
        recording.dispatch(kernel, [buffer], [trips], (groups, 1, 1), name)
        recording.barrier()
        recording.timestamp(name)
    recording.finish()
    for _ in range(2):
        device.wait(device.submit(recording))
        labels, times = zip(*device.timestamps(recording), strict=True)
        assert labels == ("start", "short", "long")
        assert times[0] == 0
        assert 0 < times[1] < times[2]
    assert times[2] - times[1] > 5 * times[1]  # the second time round, when a software driver has compiled the shader
    for item in (recording, kernel, buffer):
        item.release()


def test_more_timestamps_than_a_pool_holds(device: Device) -> None:
    recording = device.create_recording("many")
    for segment in ("a", "b"):
        recording.segment(segment)
        for i in range(150):
            recording.timestamp(f"{segment}{i}")
    recording.finish()
    device.wait(device.submit(recording))
    stamps = device.timestamps(recording)
    assert [label for label, _ in stamps] == [f"{segment}{i}" for segment in ("a", "b") for i in range(150)]
    assert [time for _, time in stamps] == sorted(time for _, time in stamps)
    recording.release()


def test_many_dispatches_and_sets(device: Device) -> None:
    """More descriptor sets than a pool holds; equal bindings share theirs."""
    n, step = 64, 256
    count = 200
    x, y = device.create_buffer(4 * n), device.create_buffer(step * count)
    device.upload(x, np.arange(n, dtype=np.uint32).data)
    device.upload(y, bytes(y.size))
    kernel = device.create_kernel(tiny_spirv.axpy())
    recording = device.create_recording("many")
    for i in range(count):
        for _ in range(2):
            recording.dispatch(kernel, [x, y[i * step :][:step]], [n, i], (1, 1, 1), f"{i}")
            recording.barrier()
    recording.finish()
    device.wait(device.submit(recording))
    expected = 2 * np.arange(count, dtype=np.uint32)[:, None] * np.arange(n, dtype=np.uint32)
    assert values(device, y) == expected.ravel().tolist()
    for item in (recording, kernel, x, y):
        item.release()


def test_what_a_recording_refuses(device: Device) -> None:
    n = 64
    x, y = device.create_buffer(4 * n, label="x"), device.create_buffer(4 * n, label="y")
    kernel = device.create_kernel(tiny_spirv.axpy())
    recording = device.create_recording("refusals")
    with pytest.raises(ValueError, match="takes 2 buffers, not 1"):
        recording.dispatch(kernel, [x], [n, 1], (1, 1, 1), "")
    with pytest.raises(ValueError, match="takes 8 bytes of constants, not 4"):
        recording.dispatch(kernel, [x, y], [n], (1, 1, 1), "")
    with pytest.raises(ValueError, match="workgroups"):
        recording.dispatch(kernel, [x, y], [n, 1], (0, 1, 1), "")
    with pytest.raises(ValueError, match="workgroups"):
        recording.dispatch(kernel, [x, y], [n, 1], (1, device.info.max_groups[1] + 1, 1), "")
    with pytest.raises(ValueError, match="offset is a multiple of"):
        recording.dispatch(kernel, [x[2:], y], [n, 1], (1, 1, 1), "")
    with pytest.raises(ValueError, match="cannot copy 8 bytes into 4"):
        recording.copy(x[:8], y[:4])
    with pytest.raises(ValueError, match="overlap"):
        recording.copy(x[:8], x[4:12])
    with pytest.raises(ValueError, match="multiples of 4"):
        recording.fill(x[2:6], 0)
    with pytest.raises(ValueError, match="no u32"):
        recording.fill(x, -1)
    recording.segment("one")
    with pytest.raises(ValueError, match="has a segment 'one' already"):
        recording.segment("one")
    with pytest.raises(DeviceError, match="not finished"):
        device.submit(recording)
    recording.finish()
    with pytest.raises(DeviceError, match="is finished"):
        recording.barrier()
    with pytest.raises(DeviceError, match="is finished"):
        recording.finish()
    device.wait(device.submit(recording))
    recording.release()
    recording.release()
    with pytest.raises(DeviceError, match="released"):
        device.submit(recording)
    for item in (kernel, x, y):
        item.release()


def test_a_recording_breaks_with_its_buffer_and_outlives_its_kernel(device: Device) -> None:
    n = 64
    x, y = device.create_buffer(4 * n, label="x"), device.create_buffer(4 * n, label="y")
    device.upload(x, np.arange(n, dtype=np.uint32).data)
    device.upload(y, bytes(4 * n))
    kernel = device.create_kernel(tiny_spirv.axpy())
    recording = device.create_recording("axpy")
    recording.dispatch(kernel, [x, y], [n, 5], (1, 1, 1), "axpy")
    recording.finish()
    kernel.release()
    device.wait(device.submit(recording))
    assert values(device, y) == [5 * i for i in range(n)]
    other = device.create_recording("late")
    with pytest.raises(DeviceError, match=r"kernel 'test\.axpy' is released"):
        other.dispatch(kernel, [x, y], [n, 5], (1, 1, 1), "axpy")
    other.release()
    x.release()
    with pytest.raises(DeviceError, match="it uses buffer 'x', which is released"):
        device.submit(recording)
    with pytest.raises(DeviceError, match="'x' is released"):
        device.create_recording("later").copy(x, y)
    recording.release()
    y.release()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spirv": b"", "hlsl": None}, r"no SPIR-V; build the shaders again|written for Vulkan only"),
        ({"needs": frozenset({"wings"})}, "needs wings, which .* does not offer"),
        ({"workgroup": (1 << 16, 1, 1)}, "workgroups of 65536 invocations"),
        ({"subgroup_size": 4096}, "needs subgroups of 4096"),
    ],
)
def test_kernels_that_cannot_run_here(device: Device, change: dict[str, object], message: str) -> None:
    code: KernelCode = dataclasses.replace(tiny_spirv.axpy(), **change)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=message):
        device.create_kernel(code)


def test_too_many_buffers_or_constants(device: Device) -> None:
    for n_buffers, n_constants in ((9, 0), (0, 1), (1, 33)):
        code = dataclasses.replace(tiny_spirv.axpy(), n_buffers=n_buffers, n_constants=n_constants)
        with pytest.raises(ValueError, match="1 to 8 and at most 32 are allowed"):
            device.create_kernel(code)
