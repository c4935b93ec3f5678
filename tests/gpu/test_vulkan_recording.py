"""What only Vulkan's recordings and kernels have: validation that would speak up, SPIR-V versions, subgroup sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.gpu import tiny_spirv
from tests.gpu.test_recording import values

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu.api import Device
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

OpenVulkan = Callable[..., VulkanDevice]


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


def test_spirv_newer_than_the_driver_is_refused(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan(VulkanOptions(newest=(1, 1), without=frozenset({"spirv_1_4"})))
    code = tiny_spirv.axpy()
    newer = code.spirv[:4] + bytes([0, 4, 1, 0]) + code.spirv[8:]
    with pytest.raises(DeviceError, match=r"SPIR-V 1\.4, .* takes at most 1\.3"):
        device.create_kernel(dataclasses.replace(code, spirv=newer))


def test_what_is_no_spirv_is_refused(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan()
    with pytest.raises(DeviceError, match="no SPIR-V"):
        device.create_kernel(dataclasses.replace(tiny_spirv.axpy(), spirv=b"not a module, but long enough"))


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


def test_required_subgroup_sizes_are_kept(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan()
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
