"""Recordings: segments, order, timestamps, and what is refused; and that validation would speak up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.gpu import tiny_spirv

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu.api import Bindable, Device, KernelCode
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

OpenVulkan = Callable[..., VulkanDevice]


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


def test_a_missing_barrier_is_reported(open_vulkan: OpenVulkan) -> None:
    """The proof that synchronization validation is on: it is what keeps every other test honest."""
    device = open_vulkan()
    if not device.core.debug:
        pytest.skip("validation is switched off")
    x, y = device.create_buffer(256), device.create_buffer(256)
    kernel = device.create_kernel(tiny_spirv.axpy())
    recording = device.create_recording("hazard")
    recording.fill(x, 1)
    recording.dispatch(kernel, [x, y], [64, 1], (1, 1, 1), "reads what the fill writes")
    recording.finish()
    messages = [str(message) for message in device.drain_debug_messages()]
    assert any("SYNC-HAZARD-READ-AFTER-WRITE" in message for message in messages), messages
    assert any("hazard" in message or "test.axpy" in message for message in messages)  # objects have names


def test_an_invalid_call_is_reported(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan()
    if not device.core.debug:
        pytest.skip("validation is switched off")
    buffer = device.create_buffer(16, label="too small")
    recording = device.create_recording("bad")
    device.core.vk.vkCmdFillBuffer(recording._open_commands(), buffer.native, 0, 64, 0)
    messages = device.drain_debug_messages()
    assert any("too small" in message.text for message in messages), messages
    assert [(m.severity, m.id) for m in messages] == [("error", "VUID-vkCmdFillBuffer-size-00027")]


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
        ({"spirv": b""}, "no SPIR-V; build the shaders again"),
        ({"spirv": b"not a module, but long enough"}, "no SPIR-V"),
        ({"needs": frozenset({"wings", "storage16"})}, "needs wings, which .* does not offer"),
        ({"workgroup": (1 << 16, 1, 1)}, "workgroups of 65536 invocations"),
        ({"subgroup_size": 4096}, "needs subgroups of 4096"),
    ],
)
def test_kernels_that_cannot_run_here(device: Device, change: dict[str, object], message: str) -> None:
    code: KernelCode = dataclasses.replace(tiny_spirv.axpy(), **change)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=message):
        device.create_kernel(code)


def test_spirv_newer_than_the_driver_is_refused(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan(VulkanOptions(newest=(1, 1), without=frozenset({"spirv_1_4"})))
    code = tiny_spirv.axpy()
    newer = code.spirv[:4] + bytes([0, 4, 1, 0]) + code.spirv[8:]
    with pytest.raises(DeviceError, match=r"SPIR-V 1\.4, .* takes at most 1\.3"):
        device.create_kernel(dataclasses.replace(code, spirv=newer))


def test_too_many_buffers_or_constants(device: Device) -> None:
    for n_buffers, n_constants in ((9, 0), (0, 1), (1, 33)):
        code = dataclasses.replace(tiny_spirv.axpy(), n_buffers=n_buffers, n_constants=n_constants)
        with pytest.raises(ValueError, match="1 to 8 and at most 32 are allowed"):
            device.create_kernel(code)


def subgroup_sizes(device: Device, required: int | None) -> set[int]:
    buffer = device.create_buffer(256)
    kernel = device.create_kernel(tiny_spirv.subgroup_size(required))
    recording = device.create_recording("subgroups")
    recording.dispatch(kernel, [buffer], [], (1, 1, 1), "size")
    recording.finish()
    device.wait(device.submit(recording))
    sizes = set(values(device, buffer))
    for item in (recording, kernel, buffer):
        item.release()
    return sizes


def test_required_subgroup_sizes_are_kept(device: Device) -> None:
    assert subgroup_sizes(device, None) == {device.info.subgroup_size_default}
    size = device.info.subgroup_size_min
    while size <= device.info.subgroup_size_max:
        assert subgroup_sizes(device, size) == {size}
        size *= 2


def test_a_required_subgroup_size_reaches_the_driver(open_vulkan: OpenVulkan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver with one size obeys by itself, so look at what it is told."""
    device = open_vulkan()
    if not {"subgroup_size_control", "full_subgroups"} <= device.info.features:
        pytest.skip("the driver cannot be told")
    size = device.info.subgroup_size_max
    told: list[tuple[int, int]] = []
    create = device.core.vk.vkCreateComputePipelines

    def watch(*arguments: Any) -> Any:
        stage = arguments[3]._obj.stage
        kind = vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo
        told.append((kind.from_address(stage.pNext).requiredSubgroupSize if stage.pNext else 0, stage.flags))
        return create(*arguments)

    monkeypatch.setattr(device.core.vk, "vkCreateComputePipelines", watch)
    for required in (None, size):
        device.create_kernel(tiny_spirv.subgroup_size(required)).release()
    assert told == [(0, 0), (size, vk.VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT)]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_software_driver_has_three_subgroup_sizes(run_with_subgroups: Callable[..., str], size: int) -> None:
    code = (
        "from tests.gpu.test_vulkan_recording import subgroup_sizes; from xinfer import gpu\n"
        "with gpu.open_device('vulkan') as device:\n"
        f"    print(subgroup_sizes(device, {size}), subgroup_sizes(device, None))"
    )
    assert run_with_subgroups(size, "-c", code).split() == [f"{{{size}}}", f"{{{size}}}"]
