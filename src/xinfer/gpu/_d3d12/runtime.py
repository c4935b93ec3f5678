"""The libraries that Direct3D 12 is made of: Windows' own, or vkd3d's on Linux."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from ctypes import c_void_p
from typing import Protocol

from xinfer.errors import DeviceError
from xinfer.gpu import native
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.com import Caller, FfiCaller, Interface, NativeCaller, failed, hresult_name
from xinfer.gpu._d3d12.dxc import Dxc, load_dxc

VKD3D = ("libvkd3d-utils.so.1",)
LIBFFI = ("libffi.so.8", "libffi.so.7")


class Runtime(Protocol):
    """What every Direct3D 12 offers beside its COM objects; tests make up their own."""

    @property
    def name(self) -> str:
        """As it stands in messages, and in the names of cached files."""

    @property
    def windows(self) -> bool:
        """Whether it is Windows' own, with DXGI and a debug layer."""

    @property
    def dxc(self) -> Dxc | None:
        """The user's dxcompiler, if there is one."""

    @property
    def caller(self) -> Caller:
        """What calls its objects' methods."""

    def call(self, function: str, *arguments: object) -> int:
        """Call an exported function by its name; its answer as an unsigned 64-bit word."""


def interface(runtime: Runtime, kind: str, function: str, *arguments: object) -> Interface:
    """An object out of a function that takes an interface's id and a place for it as its last arguments.

    Raises DeviceError where the function fails.
    """
    slot = c_void_p()
    result = runtime.call(function, *arguments, d3d.iid(kind), slot)
    if failed(result) or not slot.value:
        raise DeviceError(f"{function} failed: {hresult_name(result)}")
    return Interface(runtime.caller, kind, slot.value)


class Exports:
    """Exported functions of several libraries."""

    def __init__(self, caller: Caller, libraries: dict[str, tuple[str, ...]]) -> None:
        self.caller = caller
        self.dxc = load_dxc()
        self._addresses: dict[str, int] = {}
        for library, functions in libraries.items():
            loaded = native.load_library((library,))
            for function in functions:
                try:
                    address = ctypes.cast(getattr(loaded, function), c_void_p).value
                except AttributeError:
                    continue  # told when it is called
                assert address
                self._addresses[function] = address

    def call(self, function: str, *arguments: object) -> int:
        """Call an exported function by its name."""
        if function not in self._addresses:
            raise DeviceError(f"this system's Direct3D 12 lacks {function}; a newer one may have it")
        return self.caller(self._addresses[function], *arguments)


class WindowsRuntime(Exports):
    """d3d12.dll, dxgi.dll, and the HLSL compiler that Windows brings."""

    name = "Direct3D 12"
    windows = True

    def __init__(self) -> None:
        if ctypes.sizeof(c_void_p) != 8:
            raise DeviceError("this Python is a 32-bit program; Direct3D 12 needs a 64-bit one here: install that")
        super().__init__(
            NativeCaller(),
            {
                "d3d12.dll": ("D3D12CreateDevice", "D3D12GetDebugInterface", "D3D12SerializeRootSignature"),
                "dxgi.dll": ("CreateDXGIFactory2",),
                "d3dcompiler_47.dll": ("D3DCompile",),
            },
        )


class Vkd3dRuntime(Exports):
    """vkd3d: Direct3D 12 by way of Vulkan."""

    name = "vkd3d"
    windows = False

    def __init__(self) -> None:
        if platform.machine() != "x86_64":
            raise DeviceError(f"vkd3d is used on x86_64 Linux only; this machine is {platform.machine()}: use Vulkan")
        for variable in ("VKD3D_DEBUG", "VKD3D_SHADER_DEBUG"):
            os.environ.setdefault(variable, "none")  # else it tells on stderr of every flag that it passes over
        try:
            libffi = native.load_library(LIBFFI)
            native.load_library(VKD3D)
        except DeviceError as error:
            raise DeviceError(
                f"Direct3D 12 on Linux is there for tests and needs vkd3d 1.14 or newer, and libffi ({error}); "
                "use Vulkan, or install them (Debian 13 or newer: libvkd3d-utils1, libffi8), or go by way of "
                "scripts/vkd3d-env of the repository, which makes a place that has them"
            ) from error
        functions = ("D3D12CreateDevice", "D3D12GetDebugInterface", "D3D12SerializeRootSignature", "D3DCompile")
        super().__init__(FfiCaller(libffi), {VKD3D[0]: functions})


def load_runtime() -> Runtime:
    """This system's Direct3D 12. Raises DeviceError where there is none."""
    if sys.platform == "win32":
        return WindowsRuntime()
    if sys.platform != "linux":
        raise DeviceError("there is no Direct3D 12 on this system: use Vulkan")
    return Vkd3dRuntime()
