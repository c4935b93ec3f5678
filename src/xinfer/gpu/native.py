"""Calling native libraries: finding them, resolving their functions, and turning status codes into errors."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from xinfer.errors import DeviceError, DeviceLostError, Loss, OutOfMemoryError
from xinfer.gpu._bindings import vulkan as vk

VULKAN_LIBRARIES = {
    "win32": ("vulkan-1.dll",),
    "darwin": ("libvulkan.1.dylib", "libvulkan.dylib", "libMoltenVK.dylib", "/usr/local/lib/libvulkan.1.dylib"),
}
DEFAULT_LIBRARIES = ("libvulkan.so.1", "libvulkan.so")
RECORDING = ("vkCmd", "vkBeginCommandBuffer", "vkEndCommandBuffer", "vkResetCommandBuffer")  # never wait
OUT_OF_MEMORY = (vk.VK_ERROR_OUT_OF_HOST_MEMORY, vk.VK_ERROR_OUT_OF_DEVICE_MEMORY)


def check(result: int, call: str) -> int:
    """Pass a VkResult that is no error; raise the error that the others stand for."""
    if result >= 0:
        return result
    message = f"{call} failed: {result_name(result)}"
    if result == vk.VK_ERROR_DEVICE_LOST:
        raise DeviceLostError(loss=Loss(call=call, reason=result_name(result), code=result))
    if result in OUT_OF_MEMORY:
        raise OutOfMemoryError(f"{message}; free memory on the device, or ask for less")
    raise DeviceError(message)


def result_name(result: int) -> str:
    """The registry's name of a VkResult, or its number."""
    return vk.RESULT_NAMES.get(result, f"VkResult {result}")


def load_library(names: tuple[str, ...]) -> ctypes.CDLL:
    """The first of these libraries that is there. Raises DeviceError with every name tried."""
    problems = []
    load: type[ctypes.CDLL] = getattr(ctypes, "WinDLL", ctypes.CDLL)  # stdcall on 32-bit Windows
    for name in names:
        try:
            return load(name)
        except OSError as error:
            problems.append(f"{name} ({error})")
    raise DeviceError(f"found none of these libraries: {'; '.join(problems)}")


def load_vulkan() -> Commands:
    """The Vulkan loader's commands that need no instance. Raises DeviceError where there is no loader."""
    library = load_library(VULKAN_LIBRARIES.get(sys.platform, DEFAULT_LIBRARIES))
    try:
        address = ctypes.cast(library.vkGetInstanceProcAddr, ctypes.c_void_p).value
    except AttributeError as error:
        raise DeviceError(f"{library._name} is no Vulkan loader: it lacks vkGetInstanceProcAddr") from error
    return Commands(lambda name: _prototype("vkGetInstanceProcAddr")(address)(None, name))


def _prototype(command: str, *, keep_lock: bool = False) -> Any:
    result, parameters, _ = vk.COMMANDS[command]
    return (ctypes.PYFUNCTYPE if keep_lock else vk.FUNCTYPE)(result, *parameters)


class Commands:
    """Vulkan commands as attributes, resolved when first used: `commands.vkCreateBuffer(...)`.

    Every call releases the interpreter lock while it runs. With `quick`, those that only record keep it: where many
    threads load at a time, each has to wait for its turn after every call that lets the lock go. Not where validation
    layers call back: they wait for the lock with locks of their own in hand.
    """

    def __init__(self, resolve: Callable[[bytes], int | None], *, quick: bool = False) -> None:
        self._resolve = resolve
        self._quick = quick

    def __getattr__(self, command: str) -> Any:
        if command not in vk.COMMANDS:
            raise AttributeError(f"{command} is not among the generated bindings")
        address = self._address(command)
        if not address:
            raise DeviceError(f"the Vulkan driver lacks {command}; a newer driver may have it")
        function = _prototype(command, keep_lock=self._quick and command.startswith(RECORDING))(address)
        setattr(self, command, function)
        return function

    def has(self, command: str) -> bool:
        """Whether the driver has it."""
        return bool(self._address(command))

    def level(self, get_address: str, handle: Any, *, quick: bool = False) -> Commands:
        """The commands of an instance or a device, as `get_address` resolves them for `handle`."""
        get = getattr(self, get_address)
        return Commands(lambda name: get(handle, name), quick=quick)

    def _address(self, command: str) -> int | None:
        for name in (command, *vk.COMMANDS[command][2]):
            address = self._resolve(name.encode())
            if address:
                return address
        return None


def chain(first: vk.VkStructure, *rest: vk.VkStructure) -> vk.VkStructure:
    """Link structs by pNext; the first keeps the others alive."""
    previous = first
    for link in rest:
        previous.pNext = ctypes.addressof(link)
        previous = link
    first.chained = rest
    return first


def strings(names: list[str]) -> Any:
    """`const char* const*` from Python strings."""
    return (ctypes.c_char_p * len(names))(*[name.encode() for name in names])


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """`target[:] = source`, with the interpreter lock released, so that several threads can copy at once."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def memory_at(address: int, size: int) -> memoryview:
    """A writable view of native memory; whoever holds it must not outlive that memory."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
