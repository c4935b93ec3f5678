"""Devices for the tests: the same tests on every backend, with validation on and not one message.

A driver that is missing skips visibly; with XINFER_REQUIRE_GPU=1 it fails. XINFER_TEST_VALIDATION=0 goes without the
validation layers, for machines that have none. The backends are Vulkan and, where it can be loaded, Direct3D 12;
XINFER_TEST_BACKENDS names others ("d3d12"), and XINFER_TEST_DEVICE one adapter ("vulkan:1"). XINFER_TEST_CACHE is where
compiled kernels are kept from run to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.gpu.op_bench import Bench

import build_shaders
from xinfer import gpu, ops
from xinfer.errors import DeviceError
from xinfer.gpu._d3d12.runtime import load_runtime
from xinfer.gpu.api import Buffer, BufferKind, Device
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions

ROOT = Path(__file__).resolve().parent.parent.parent
# Of processes that tests start.
PYTHONPATH = os.pathsep.join([*map(str, (ROOT / "src", ROOT, ROOT / "tools")), os.environ.get("PYTHONPATH", "")])
BETWEEN_SUBMISSIONS = "VALIDATION_CHECK_ENABLE_SYNCHRONIZATION_VALIDATION_QUEUE_SUBMIT"
VALIDATION = os.environ.get("XINFER_TEST_VALIDATION", "1") != "0"


def _backends() -> list[str]:
    named = os.environ.get("XINFER_TEST_DEVICE") or os.environ.get("XINFER_TEST_BACKENDS")
    if named:
        return named.split(",")
    try:
        load_runtime()
    except DeviceError:
        return ["vulkan"]
    return ["vulkan", "d3d12"]


BACKENDS = _backends()  # selectors, one for each device that the tests run on


def missing(reason: str) -> None:
    """Skip, or fail where a GPU is required."""
    if os.environ.get("XINFER_REQUIRE_GPU") == "1":
        pytest.fail(f"XINFER_REQUIRE_GPU=1, but {reason}")
    pytest.skip(reason)


def no_messages(device: Device) -> None:
    """Fail on anything that the validation layers said."""
    messages = device.drain_debug_messages()
    assert not messages, "\n\n".join(map(str, messages))


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Pipeline caches of the tests' own; hazards between submissions are looked for, too.

    Debian 12's layer does that only when asked, and knows no timeline semaphores: not where there are several queues.
    """
    with pytest.MonkeyPatch.context() as patch:
        if all(info.kind == "cpu" for info in gpu.list_devices()):
            patch.setenv("VK_LAYER_ENABLES", BETWEEN_SUBMISSIONS)
        folder = os.environ.get("XINFER_TEST_CACHE") or str(tmp_path_factory.mktemp("cache"))
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setenv("LOCALAPPDATA", folder)
        yield


@pytest.fixture(scope="session", params=BACKENDS)
def shared_device(request: pytest.FixtureRequest, _environment: None) -> Iterator[Device]:
    """One device of each backend for the whole run."""
    try:
        device = gpu.open_device(request.param, debug=VALIDATION)
    except DeviceError as error:
        missing(str(error))
        raise
    assert device is not None
    with device:
        yield device
    no_messages(device)
    assert device.live_objects() == {}


@pytest.fixture
def device(shared_device: Device) -> Iterator[Device]:
    """The shared device; nothing that the test does may upset the validation layers."""
    no_messages(shared_device)
    yield shared_device
    no_messages(shared_device)


@pytest.fixture
def made_buffers(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, BufferKind, str]]:
    """(bytes, kind, label) of each buffer that is made on the test's device."""
    create, made = device.create_buffer, list[tuple[int, BufferKind, str]]()

    def noted(size: int, kind: BufferKind = "device", label: str = "") -> Buffer:
        made.append((size, kind, label))
        return create(size, kind, label)

    monkeypatch.setattr(device, "create_buffer", noted)
    return made


@contextmanager
def vulkan_devices() -> Iterator[Callable[..., VulkanDevice]]:
    """A function that opens Vulkan devices with `VulkanOptions`; closed and checked afterwards."""
    devices: list[VulkanDevice] = []

    def open_one(options: VulkanOptions | None = None, *, debug: bool = VALIDATION) -> VulkanDevice:
        try:
            info = gpu.choose_device("vulkan")
        except DeviceError as error:
            missing(str(error))
            raise
        assert info is not None
        with pytest.MonkeyPatch.context() as patch:
            if options and options.second_clock:
                patch.delenv("VK_LAYER_ENABLES", raising=False)
            devices.append(VulkanDevice(info.index, debug=debug, options=options))
        return devices[-1]

    try:
        yield open_one
    finally:
        for device in devices:
            device.close()
    for device in devices:
        no_messages(device)
        assert device.live_objects() == {}


@pytest.fixture
def open_vulkan(_environment: None) -> Iterator[Callable[..., VulkanDevice]]:
    """Open Vulkan devices of the test's own."""
    with vulkan_devices() as open_one:
        yield open_one


@pytest.fixture(scope="module")
def open_vulkan_for_module(_environment: None) -> Iterator[Callable[..., VulkanDevice]]:
    """Open Vulkan devices that the tests of a module share."""
    with vulkan_devices() as open_one:
        yield open_one


@pytest.fixture
def run_with_subgroups(_environment: None) -> Callable[..., str]:
    """Run Python arguments (["-m", "pytest", ...] or ["-c", code]) in a process of its own, where the software driver
    has subgroups of 4, 8 or 16; what it printed. Skips where the device is no software driver.
    """
    try:
        info = gpu.choose_device("vulkan")
    except DeviceError as error:
        missing(str(error))
    if info is None or info.kind != "cpu":
        pytest.skip("only the software driver has a choice of subgroup sizes")

    def run(size: int, *arguments: str, timeout_s: float = 300) -> str:
        environment = {**os.environ, "LP_NATIVE_VECTOR_WIDTH": str(32 * size), "PYTHONPATH": PYTHONPATH}
        result = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
        assert result.returncode == 0, f"with subgroups of {size}:\n{result.stdout}\n{result.stderr}"
        return result.stdout

    return run


@pytest.fixture(scope="session")
def shared_kernels(shared_device: Device) -> Iterator[ops.KernelSet]:
    """The shared device's kernels; shaders whose sources changed are compiled first."""
    build_shaders.build()
    with ops.KernelSet(shared_device) as kernels:
        yield kernels


@pytest.fixture
def bench(device: Device, shared_kernels: ops.KernelSet) -> Iterator[Bench]:
    """A bench for single ops on the shared device."""
    made = Bench(device, shared_kernels)
    yield made
    made.release()
