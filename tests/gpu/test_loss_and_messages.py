"""What devices say of mistakes and of their end, through real drivers; made-up ones: tests/unit/test_d3d12_debug.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu.api import Device
from xinfer.gpu.vulkan import VulkanDevice


def test_removed_reason(device: Device) -> None:
    """A healthy device answers with success, before and after work."""
    buffer = device.create_buffer(64)
    for _ in range(2):
        reason = device.removed_reason()
        assert not reason.lost
        assert (reason.code, reason.details) == (0, ())
        assert reason.name == {"vulkan": "VK_SUCCESS", "d3d12": "S_OK"}[device.info.api]
        device.upload(buffer, bytes(64))
        assert device.download(buffer) == bytes(64)
    buffer.release()


def test_debug_messages(device: Device) -> None:
    """Right use has no messages."""
    recording = device.create_recording("right")
    buffer = device.create_buffer(64)
    recording.fill(buffer, 1)
    recording.barrier()
    recording.finish()
    device.wait(device.submit(recording))
    assert device.drain_debug_messages() == []
    for item in (recording, buffer):
        item.release()


def test_debug_messages_of_validation(open_vulkan: Callable[..., VulkanDevice]) -> None:
    """A fill that is no multiple of 4 and one past the end, made behind our own checks: two errors, by their ids."""
    device = open_vulkan()
    if not device.core.debug:
        pytest.skip("validation is switched off")
    buffer = device.create_buffer(16, label="small")
    recording = device.create_recording("wrong")
    commands = recording._open_commands()
    device.core.vk.vkCmdFillBuffer(commands, buffer.native, 2, 4, 0)
    device.core.vk.vkCmdFillBuffer(commands, buffer.native, 64, vk.VK_WHOLE_SIZE, 0)
    messages = device.drain_debug_messages()
    assert {message.severity for message in messages} == {"error"}
    assert {"VUID-vkCmdFillBuffer-dstOffset-00025", "VUID-vkCmdFillBuffer-dstOffset-00024"} <= {m.id for m in messages}
    assert all("vkCmdFillBuffer" in message.text for message in messages)
    assert device.drain_debug_messages() == []
