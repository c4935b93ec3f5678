"""Buffers, kernels, recordings and transfers of a device, on every path that the options of `VulkanDevice` force."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gpu import tiny_spirv
from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu.api import Device, KernelCode
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
SEED = 20240229


@pytest.fixture(params=PATHS)
def path_device(request: pytest.FixtureRequest, open_vulkan: OpenVulkan) -> Iterator[VulkanDevice]:
    """A device on each path; all that the test made has to be gone in the end."""
    device = open_vulkan(PATHS[request.param])
    before = device.live_objects()
    yield device
    device.flush_uploads()
    device.collect()
    after = device.live_objects()
    grown = {kind: after[kind] - before.get(kind, 0) for kind in after if after[kind] > before.get(kind, 0)}
    kept = {"VkDescriptorSetLayout", "VkPipelineLayout", "VkFence", "VkBuffer", "VkDeviceMemory", "VkCommandPool"}
    assert set(grown) <= kept
    assert grown.get("VkBuffer", 0) == grown.get("VkDeviceMemory", 0) == grown.get("VkCommandPool", 0) <= 5  # staging


def words(count: int, seed: int = SEED) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def get(device: Device, part: object) -> NDArray[np.uint32]:
    return np.frombuffer(device.download(part), np.uint32)  # type: ignore[arg-type]


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
