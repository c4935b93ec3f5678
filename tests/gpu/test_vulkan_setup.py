"""Finding devices, saying why there is none, and the pipeline cache on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from ctypes import sizeof
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CheckpointFactory
from tests.gpu import tiny_spirv
from tests.gpu.conftest import PYTHONPATH

import build_shaders
from xinfer import gpu
from xinfer.cache_files import cache_folder
from xinfer.errors import DeviceError
from xinfer.gpu import _probe, native, null, vulkan
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk import cache
from xinfer.gpu._vk.instance import Instance, _Handles
from xinfer.gpu.api import Device, DeviceInfo, DeviceKind
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions
from xinfer.gpu_model import QwenModel
from xinfer.model.weights import ModelWeights

OpenVulkan = Callable[..., VulkanDevice]


def test_what_a_device_says_of_itself(open_vulkan: OpenVulkan) -> None:
    info = open_vulkan().info
    assert info.api == "vulkan"
    assert info.name
    assert info.driver
    assert re.search(r"\d+\.\d+", info.driver_version)
    assert info.kind in ("discrete", "integrated", "virtual", "cpu", "other")
    assert tuple(map(int, info.api_version.split("."))) >= (1, 1)
    assert info.heap_bytes >= 1 << 28
    assert info.subgroup_size_min <= info.subgroup_size_default <= info.subgroup_size_max
    assert info.max_workgroup_invocations >= 128
    if "subgroup_size_control" in info.features:
        assert info.max_workgroup_subgroups is not None
        assert info.max_workgroup_subgroups >= 1
    assert info.max_shared_bytes >= 16384
    assert info.max_storage_range >= 1 << 27
    assert info.storage_alignment in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert all(count >= 65535 for count in info.max_groups)
    assert "subgroup_basic" in info.features


def test_the_software_driver_as_it_is_known(device: Device) -> None:
    """Debian 12's lavapipe, by its own documentation and what vulkaninfo says of it."""
    if "llvmpipe" not in device.info.name or "22.3" not in device.info.driver_version:
        pytest.skip("another driver")
    info = device.info
    assert (info.kind, info.driver, info.vendor_id, info.api_version) == ("cpu", "llvmpipe", 0x10005, "1.3")
    assert info.heap_bytes == 2 << 30
    assert info.max_storage_range == 128 << 20
    expected = {"storage16", "float16", "timeline", "subgroup_size_control", "subgroup_arithmetic", "memory_model"}
    assert expected <= info.features
    assert not {"memory_budget", "coop_matrix", "nv_coop_matrix2", "device_fault", "bfloat16"} & info.features


def test_features_left_alone_are_not_there(open_vulkan: OpenVulkan) -> None:
    device = open_vulkan(VulkanOptions(newest=(1, 1), without=frozenset({"storage16", "timeline"})))
    assert device.info.api_version == "1.1"
    assert not {"storage16", "timeline"} & device.info.features


def adapter(index: int, name: str, kind: DeviceKind) -> DeviceInfo:
    return dataclasses.replace(null.INFO, api="vulkan", index=index, name=name, kind=kind)


ADAPTERS = [
    adapter(0, "llvmpipe (LLVM 15)", "cpu"),
    adapter(1, "Intel Arc Graphics", "integrated"),
    adapter(2, "AMD Radeon RX 7900", "discrete"),
    adapter(3, "NVIDIA GeForce RTX 4090", "discrete"),
]


@pytest.mark.parametrize(
    ("selector", "present", "index"),
    [
        ("auto", [0, 1, 2, 3], 2),
        ("auto", [0, 1], 1),
        ("auto", [0], None),
        ("auto", [], None),
        ("vulkan", [0, 1, 2, 3], 2),
        ("vulkan", [0], 0),
        ("Vulkan:3", [0, 1, 2, 3], 3),
        ("vulkan:0", [0, 1, 2, 3], 0),
        ("geforce", [0, 1, 2, 3], 3),
        ("llvm", [0, 1, 2, 3], 0),
        (" Intel ", [0, 1, 2, 3], 1),
    ],
)
def test_selectors(monkeypatch: pytest.MonkeyPatch, selector: str, present: list[int], index: int | None) -> None:
    monkeypatch.setattr(vulkan, "list_devices", lambda: [ADAPTERS[i] for i in present])
    chosen = gpu.choose_device(selector)
    assert (chosen.index if chosen else None) == index


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("vulkan:4", r"there is no device vulkan:4; there are: vulkan:0 \(llvmpipe .*vulkan:3 \(NVIDIA"),
        ("vulkan:one", "'one' is no index; a device is selected as vulkan, vulkan:0"),
        ("voodoo", r"no device is called 'voodoo'; there are: vulkan:0"),
    ],
)
def test_selectors_that_fit_nothing(monkeypatch: pytest.MonkeyPatch, selector: str, message: str) -> None:
    monkeypatch.setattr(vulkan, "list_devices", lambda: ADAPTERS)
    with pytest.raises(DeviceError, match=message):
        gpu.open_device(selector)


def test_auto_opens_no_software_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulkan, "list_devices", lambda: ADAPTERS[:1])
    assert gpu.open_device("auto") is None


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend to be another system."""

    def pretend(
        *,
        devices: list[DeviceInfo] | None = None,
        loader: bool = True,
        nodes: tuple[tuple[str, bool], ...] = (),
        wsl: bool = False,
        nvidia: bool = False,
        platform: str = "linux",
    ) -> None:
        def list_devices() -> list[DeviceInfo]:
            if devices is None:
                raise DeviceError("vkCreateInstance failed: VK_ERROR_INCOMPATIBLE_DRIVER")
            return devices

        def load_vulkan() -> None:
            if not loader:
                raise DeviceError("found none of these libraries")

        monkeypatch.setattr(vulkan, "list_devices", list_devices)
        monkeypatch.setattr(native, "load_vulkan", load_vulkan)
        monkeypatch.setattr(_probe, "render_nodes", lambda: list(nodes))
        monkeypatch.setattr(_probe, "is_wsl", lambda: wsl)
        monkeypatch.setattr(_probe, "has_nvidia_kernel_driver", lambda: nvidia)
        monkeypatch.setattr(_probe, "platform", lambda: platform)
        monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
        monkeypatch.delenv("VK_ICD_FILENAMES", raising=False)

    return pretend


NODE = "/dev/dri/renderD128"


@pytest.mark.parametrize(
    ("situation", "reasons"),
    [
        ({"devices": ADAPTERS}, []),
        ({"loader": False}, ["no Vulkan loader: install it .*libvulkan1"]),
        ({"loader": False, "platform": "win32"}, ["no Vulkan loader: vulkan-1.dll comes with the graphics driver"]),
        ({"loader": False, "platform": "darwin"}, ["no Vulkan loader: install MoltenVK"]),
        ({}, ["shows no driver .*INCOMPATIBLE_DRIVER", "the kernel shows no GPU"]),
        ({"devices": []}, ["no Vulkan driver offers a device with Vulkan 1.1", "the kernel shows no GPU"]),
        ({"devices": ADAPTERS[:1]}, ["only a software driver .*llvmpipe", "the kernel shows no GPU"]),
        (
            {"devices": ADAPTERS[:1], "nodes": ((NODE, False),)},
            ["only a software", f"no permission on {NODE}: .*render"],
        ),
        ({"devices": ADAPTERS[:1], "nodes": ((NODE, True),)}, ["only a software driver"]),
        ({"nodes": ((NODE, True),), "nvidia": True}, ["shows no driver", "NVIDIA_DRIVER_CAPABILITIES=all"]),
        ({"nvidia": True}, ["shows no driver", "NVIDIA's kernel driver is loaded"]),
        ({"wsl": True}, ["shows no driver", "this is WSL: .*dzn", "the kernel shows no GPU"]),
        ({"platform": "win32"}, ["shows no driver"]),
    ],
)
def test_why_there_is_no_gpu(system: Callable[..., None], situation: dict[str, Any], reasons: list[str]) -> None:
    system(**situation)
    found = vulkan.diagnose()
    assert len(found) == len(reasons), found
    for line, pattern in zip(found, reasons, strict=True):
        assert re.search(pattern, line), line
    assert gpu.diagnose() == ({"vulkan": found} if found else {})


def test_a_driver_that_is_named_but_absent(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """With the real loader: it is told to use nothing but a file that is not there."""
    if device.info.api != "vulkan":
        pytest.skip("another API")
    monkeypatch.setenv("VK_DRIVER_FILES", "/nowhere/icd.json")
    assert gpu.list_devices() == []
    said = "VK_DRIVER_FILES=/nowhere/icd.json: there is no file /nowhere/icd.json; correct it, or unset VK_DRIVER_FILES"
    assert vulkan.diagnose()[0].startswith(said)
    with pytest.raises(DeviceError, match=f"vulkan is not to be had: {said}"):
        gpu.open_device("vulkan")
    with pytest.raises(DeviceError, match=f"no device is called 'nvidia'; there is none: {said}"):
        gpu.open_device("nvidia")
    assert gpu.open_device("auto") is None


def test_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "DEFAULT_LIBRARIES", ("libnothing.so.7",))
    monkeypatch.setattr(native, "VULKAN_LIBRARIES", {})
    with pytest.raises(DeviceError, match=r"none of these libraries: libnothing.so.7 \("):
        native.load_vulkan()
    assert "no Vulkan loader" in vulkan.diagnose()[0]
    with pytest.raises(DeviceError, match="vulkan is not to be had: there is no Vulkan loader: install it"):
        gpu.open_device("vulkan")


def test_a_library_that_is_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "DEFAULT_LIBRARIES", ("libc.so.6",))
    monkeypatch.setattr(native, "VULKAN_LIBRARIES", {})
    with pytest.raises(DeviceError, match="is no Vulkan loader: it lacks vkGetInstanceProcAddr"):
        native.load_vulkan()


def test_probes_read_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "DRI", tmp_path)
    assert _probe.render_nodes() == []
    for name in ("card0", "renderD129", "renderD128"):
        (tmp_path / name).touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path.endswith("128") and mode == os.R_OK | os.W_OK)
    assert _probe.render_nodes() == [(f"{tmp_path}/renderD128", True), (f"{tmp_path}/renderD129", False)]
    monkeypatch.setattr(_probe, "_read", lambda path: "Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert _probe.is_wsl()
    assert _probe.has_nvidia_kernel_driver()
    monkeypatch.setattr(_probe, "_read", lambda path: "")
    assert not _probe.is_wsl()
    assert not _probe.has_nvidia_kernel_driver()


GOOD, LOST = '{"ICD": {"library_path": "libvulkan_lvp.so"}}', '{"ICD": {"library_path": "./gone.so"}}'


@pytest.mark.parametrize("variable", ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"])
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "there is no file"),
        ("{bad", "is not the JSON of a driver"),
        ("[]", "names no ICD with a library_path"),
        ('{"ICD": {"library_path": 3}}', "its library_path is 3"),
        (LOST, "names the library ./gone.so, which does not exist"),
    ],
)
def test_a_variable_that_hides_every_driver_is_named(
    tmp_path: Path, variable: str, content: str | None, fault: str
) -> None:
    """By a real loader, which says that the host's memory is full, or nothing."""
    path = tmp_path / "driver.json"
    if content is not None:
        path.write_text(content)
    others = {name: value for name, value in os.environ.items() if name not in _probe.DRIVER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "xinfer", "generate", "x", "--device", "vulkan"],
        env={**others, variable: str(path), "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"{variable}={path}: " in done.stderr
    assert fault in done.stderr
    assert f"unset {variable} to use the drivers that are installed" in done.stderr
    assert "memory" not in done.stderr


def test_a_variable_that_hides_some_drivers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _probe.DRIVER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not any("unset" in hint for hint in vulkan._driver_hints())
    (tmp_path / "good.json").write_text(GOOD)
    for value in (tmp_path / "good.json", tmp_path):
        monkeypatch.setenv("VK_DRIVER_FILES", str(value))
        assert vulkan._driver_hints()[0].startswith(f"VK_DRIVER_FILES={value} lets Vulkan see these drivers only")
    (tmp_path / "good.json").unlink()
    assert vulkan._driver_hints()[0].startswith(f"VK_DRIVER_FILES={tmp_path}: the folder {tmp_path} holds no .json")


def test_debug_without_the_layers_says_what_to_install(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    del device
    monkeypatch.setattr("xinfer.gpu._vk.instance.VALIDATION_LAYER", "VK_LAYER_absent")
    with pytest.raises(DeviceError, match=r"debug needs VK_LAYER_absent, .*vulkan-validationlayers"):
        Instance(debug=True)


@pytest.fixture
def created(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The native instances that are created, by their handles; those that came before are not shared."""
    del device
    handles: list[int] = []
    create = Instance._create

    def counted(self: Instance) -> int:
        handles.append(create(self))
        return handles[-1]

    monkeypatch.setattr(Instance, "_create", counted)
    monkeypatch.setattr("xinfer.gpu._vk.instance._HANDLES", _Handles())
    return handles


def test_instances_share_the_native_one(created: list[int]) -> None:
    """Each costs the loading of all drivers; it goes with the last of them, and a second `close` counts for nothing."""
    one, two = Instance(), Instance()
    assert len(created) == 1
    assert one.physical_devices() == two.physical_devices()
    one.close()
    one.close()
    assert two.physical_devices()
    two.close()
    Instance(newest=(1, 1)).close()
    assert len(created) == 2, "another version is another instance"


def test_the_last_instance_takes_the_native_one_with_it(created: list[int]) -> None:
    for _ in range(3):
        one, two = Instance(), Instance()
        one.close()
        two.close()
    assert len(created) == 3


def test_validation_hears_of_one_device_alone(created: list[int]) -> None:
    plain = Instance()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Instance, "_require_validation", lambda self: None)
        try:
            watched = Instance(debug=True)
        except DeviceError:
            pytest.skip("the validation layers are not installed")
    assert watched.handle != plain.handle
    assert len(created) == 2
    watched.close()
    assert plain.physical_devices()
    plain.close()


def test_a_device_that_hangs_is_left_its_instance(created: list[int]) -> None:
    hung, other = VulkanDevice(), Instance()
    hung._abandoned()
    after = Instance()
    assert after.handle != other.handle
    for one in (after, other):
        one.close()
    hung.close()
    assert len(created) == 2


def test_opening_a_device_loads_the_drivers_once(created: list[int]) -> None:
    with gpu.drivers_loading("vulkan"):
        device = gpu.open_device("vulkan")
        assert device is not None
        device.close()
    assert len(created) == 1
    device = gpu.open_device("vulkan")
    assert device is not None
    device.close()
    assert len(created) == 2
    for selector in ("cpu", "D3D12", "d3d12:1"):
        with gpu.drivers_loading(selector):
            assert len(created) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_waits_until_no_thread_is_within_the_loader(device: Device) -> None:
    """Else the child has the locks of a thread that it does not have, and its first instance waits for ever."""
    del device
    code = """
        import os, threading, time
        from xinfer.gpu._vk.instance import Instance
        ended = False
        def work():
            while not ended:
                Instance().close()
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                Instance().close()
                os._exit(0)
            until = time.monotonic() + 20
            while (found := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
                time.sleep(0.01)
            if found == (0, 0):
                os.kill(child, 9)
            print(found[1] if found[0] else "hangs", flush=True)
        ended = True
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split() == ["0"] * 10


def test_drivers_that_cannot_be_loaded_are_told_where_a_device_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise DeviceError("no loader")

    monkeypatch.setattr(vulkan, "hold_driver", fail)
    monkeypatch.setattr(native, "load_vulkan", fail)
    with gpu.drivers_loading("vulkan"), pytest.raises(DeviceError, match="vulkan is not to be had"):
        gpu.open_device("vulkan")


def test_check_passes_success_and_raises_the_rest() -> None:
    assert native.check(vk.VK_SUCCESS, "vkX") == vk.VK_SUCCESS
    assert native.check(vk.VK_TIMEOUT, "vkX") == vk.VK_TIMEOUT
    with pytest.raises(DeviceError, match="vkX failed: VK_ERROR_EXTENSION_NOT_PRESENT"):
        native.check(vk.VK_ERROR_EXTENSION_NOT_PRESENT, "vkX")
    with pytest.raises(DeviceError, match="vkX failed: VkResult -123456"):
        native.check(-123456, "vkX")


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    return tmp_path


def use_kernel(open_vulkan: OpenVulkan) -> bytes:
    """Open a device, make a kernel, close; the pipeline data that the device began with."""
    device = open_vulkan()
    loaded = device._cache._saved
    device.create_kernel(tiny_spirv.axpy()).release()
    device.close()
    return loaded


def cache_files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file() and "xinfer" in path.parts)


def test_pipelines_are_kept_on_disk(open_vulkan: OpenVulkan, cache_home: Path) -> None:
    device = open_vulkan()
    device.close()
    assert cache_files(cache_home) == []  # nothing was made
    assert use_kernel(open_vulkan) == b""
    (file,) = cache_files(cache_home)
    assert file.parent == cache_folder("pipelines")
    data = file.read_bytes()[len(cache.MAGIC) + 32 :]
    assert use_kernel(open_vulkan) == data
    assert cache_files(cache_home) == [file]


def test_a_model_loaded_again_makes_no_pipeline_anew(
    open_vulkan: OpenVulkan, cache_home: Path, checkpoint: CheckpointFactory
) -> None:
    """What was not in the cache of pipelines would make it larger."""
    build_shaders.build()

    def used() -> tuple[int, int]:
        """Bytes of pipelines before a model was used, and behind that."""
        device = open_vulkan()
        before = len(device._cache._saved)
        with ModelWeights.open(checkpoint("f16")) as weights, QwenModel.load(weights, device) as model:
            cache = model.make_cache(20)
            model.forward(range(10), cache, last_only=True)
            assert len(list(model.greedy(1, cache, limit=2))) == 2
        after = len(device._cache._data())
        device.close()
        return before, after

    none, made = used()
    assert none == 0
    if made <= sizeof(vk.VkPipelineCacheHeaderVersionOne):
        pytest.skip("this driver keeps no pipelines")
    assert used() == (made, made)


def sealed(data: bytes) -> bytes:
    return cache.MAGIC + hashlib.sha256(data).digest() + data


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"?" + content[1:],
        lambda content: cache.MAGIC + bytes(32) + content[len(cache.MAGIC) + 32 :],  # the right data, another digest
        lambda content: sealed(b""),
        lambda content: sealed(content[len(cache.MAGIC) + 32 :][: sizeof(vk.VkPipelineCacheHeaderVersionOne) - 1]),
        lambda content: sealed(bytes(4096)),
    ],
)
def test_a_damaged_cache_is_made_anew(
    open_vulkan: OpenVulkan, cache_home: Path, damage: Callable[[bytes], bytes]
) -> None:
    use_kernel(open_vulkan)
    (file,) = cache_files(cache_home)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert use_kernel(open_vulkan) == b""
    assert use_kernel(open_vulkan) != b""


def test_another_drivers_cache_is_not_used(open_vulkan: OpenVulkan, cache_home: Path) -> None:
    use_kernel(open_vulkan)
    (file,) = cache_files(cache_home)
    data = bytearray(file.read_bytes()[len(cache.MAGIC) + 32 :])
    offset = vk.VkPipelineCacheHeaderVersionOne.pipelineCacheUUID.offset
    data[offset] ^= 1
    file.write_bytes(sealed(bytes(data)))
    assert use_kernel(open_vulkan) == b""


def test_a_cache_that_cannot_be_written_does_no_harm(
    open_vulkan: OpenVulkan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file, no folder"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setenv("LOCALAPPDATA", str(blocked))
    assert use_kernel(open_vulkan) == b""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))

    def replace(self: Path, target: Path) -> None:
        raise PermissionError("held by another process")

    monkeypatch.setattr(Path, "replace", replace)
    assert use_kernel(open_vulkan) == b""
    assert cache_files(tmp_path) == []  # nor is a temporary file left


def test_the_cache_folder_of_each_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("LOCALAPPDATA", "/l")
    monkeypatch.setenv("HOME", "/h")
    for platform, folder in (("linux", "/x"), ("win32", "/l"), ("darwin", "/h/Library/Caches")):
        monkeypatch.setattr("sys.platform", platform)
        assert cache_folder("pipelines") == Path(folder) / "xinfer" / "pipelines"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder("pipelines") == Path("/h/.cache/xinfer/pipelines")


def test_cache_files_are_private(open_vulkan: OpenVulkan, cache_home: Path) -> None:
    """What a driver is fed is only this user's to write."""
    use_kernel(open_vulkan)
    (file,) = cache_files(cache_home)
    assert not file.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
