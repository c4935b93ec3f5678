"""The Vulkan instance: created, with validation on request, and destroyed."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from ctypes import byref, c_int32, c_uint32, c_uint64, c_void_p, pointer
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu import native
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk.features import Version
from xinfer.gpu.api import DebugMessage, Severity
from xinfer.gpu.native import chain, check

VALIDATION_LAYER = "VK_LAYER_KHRONOS_validation"
NEWEST = (1, 3)  # what the feature table knows
MESSAGES_KEPT = 1000
SEVERITIES: dict[int, Severity] = {
    vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT: "error",
    vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT: "warning",
}


def pack_version(version: Version) -> int:
    """(1, 2) as VK_API_VERSION_1_2."""
    return version[0] << 22 | version[1] << 12


def unpack_version(number: int) -> Version:
    """VK_API_VERSION_1_2 as (1, 2)."""
    return number >> 22 & 0x7F, number >> 12 & 0x3FF


class DebugMessages:
    """What the validation layers say, collected from whatever thread they say it on."""

    def __init__(self) -> None:
        self._messages: deque[DebugMessage] = deque(maxlen=MESSAGES_KEPT)
        self._lock = threading.Lock()
        self.callback = vk.PFN_vkDebugUtilsMessengerCallbackEXT(self._receive)

    def create_info(self) -> vk.VkStructure:
        """A messenger that hears warnings and errors of the layers."""
        return vk.VkDebugUtilsMessengerCreateInfoEXT(
            messageSeverity=vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT
            | vk.VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT,
            messageType=vk.VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT
            | vk.VK_DEBUG_UTILS_MESSAGE_TYPE_PERFORMANCE_BIT_EXT,
            pfnUserCallback=self.callback,
        )

    def drain(self) -> list[DebugMessage]:
        """The messages since the last call."""
        with self._lock:
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def recent(self) -> list[DebugMessage]:
        """The same, and they stay."""
        with self._lock:
            return list(self._messages)

    def _receive(self, severity: int, _types: int, data: Any, _user: Any) -> int:
        name, text = data.contents.pMessageIdName or b"", data.contents.pMessage or b""
        message = DebugMessage(
            SEVERITIES.get(severity, "info"), name.decode(errors="replace"), text.decode(errors="replace")
        )
        with self._lock:
            self._messages.append(message)
        return 0  # let the call go on


class _Handles:
    """VkInstance handles, each made for whoever asks first and destroyed with the last that holds it.

    The drivers are loaded while there is one, and out of memory again with it, which costs up to half a second each.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held around all that is done with the loader and an instance of its own
        self._shared: dict[tuple[int, Version], int] = {}  # by process, for one that was forked off has its own
        self._holders: Counter[int] = Counter()

    def take(self, version: Version, make: Callable[[], int]) -> int:
        """A handle for this version."""
        key = os.getpid(), version
        with self.lock:
            if key not in self._shared:
                self._shared[key] = make()
            self._holders[self._shared[key]] += 1
            return self._shared[key]

    def give_back(self, handle: int, destroy: Callable[[int], None]) -> None:
        """Destroy it where nobody holds it any more."""
        with self.lock:
            self._holders[handle] -= 1
            if self._holders[handle] > 0:
                return
            del self._holders[handle]
            self._forget(handle)
            destroy(handle)

    def forget(self, handle: int) -> None:
        """Whoever asks next gets another one."""
        with self.lock:
            self._forget(handle)

    def _forget(self, handle: int) -> None:
        self._shared = {key: shared for key, shared in self._shared.items() if shared != handle}


_HANDLES = _Handles()
if hasattr(os, "register_at_fork"):  # a child would wait for ever for a lock in use, ours or the loader's own
    os.register_at_fork(
        before=_HANDLES.lock.acquire, after_in_parent=_HANDLES.lock.release, after_in_child=_HANDLES.lock.release
    )


class Instance:
    """A Vulkan instance. `debug` switches on the validation layer with synchronization validation.

    Those without `debug` share what is native in them.
    """

    def __init__(self, *, debug: bool = False, newest: Version = NEWEST) -> None:
        self.messages = DebugMessages() if debug else None
        with _HANDLES.lock:
            self.loader = native.load_vulkan()
            self.version = min(self._loader_version(), newest)
            if self.version < (1, 1):
                raise DeviceError("the Vulkan loader is of version 1.0; xinfer needs 1.1: update it")
            self.handle: int | None = self._create() if debug else _HANDLES.take(self.version, self._create)
            self.vk = self.loader.level("vkGetInstanceProcAddr", self.handle)
        self._messenger = 0
        if self.messages:
            self._messenger = self._create_messenger(self.messages)

    def close(self) -> None:
        """Destroy it; may be called twice."""
        if self.handle is None:
            return
        if self._messenger:
            self.vk.vkDestroyDebugUtilsMessengerEXT(self.handle, self._messenger, None)
        handle, self.handle = self.handle, None
        if self.messages:
            self._destroy(handle)
        else:
            _HANDLES.give_back(handle, self._destroy)

    def abandon(self) -> None:
        """Leave it as it is, for a device on it hangs: instances that are made from now on share nothing with it."""
        if self.handle is not None:
            _HANDLES.forget(self.handle)

    def physical_devices(self) -> list[int]:
        """Handles of the adapters that speak Vulkan 1.1, in the loader's order."""
        count = c_uint32()
        check(self.vk.vkEnumeratePhysicalDevices(self.handle, byref(count), None), "vkEnumeratePhysicalDevices")
        handles = (c_void_p * count.value)()
        check(self.vk.vkEnumeratePhysicalDevices(self.handle, byref(count), handles), "vkEnumeratePhysicalDevices")
        return [handle for handle in handles[: count.value] if handle]

    def _loader_version(self) -> Version:
        if not self.loader.has("vkEnumerateInstanceVersion"):
            return 1, 0
        version = c_uint32()
        check(self.loader.vkEnumerateInstanceVersion(byref(version)), "vkEnumerateInstanceVersion")
        return unpack_version(version.value)

    def _destroy(self, handle: int) -> None:
        self.vk.vkDestroyInstance(handle, None)

    def _create(self) -> int:
        handle = c_void_p()
        check(self.loader.vkCreateInstance(byref(self._create_info()), None, byref(handle)), "vkCreateInstance")
        assert handle.value
        return handle.value

    def _create_info(self) -> vk.VkStructure:
        application = vk.VkApplicationInfo(pApplicationName=b"xinfer", apiVersion=pack_version(self.version))
        extensions, layers = [], []
        if "VK_KHR_portability_enumeration" in self._extensions():
            extensions.append("VK_KHR_portability_enumeration")  # MoltenVK shows itself only to those who ask
        if self.messages:
            self._require_validation()
            layers.append(VALIDATION_LAYER)
            extensions += ["VK_EXT_debug_utils", "VK_EXT_validation_features"]
        info = vk.VkInstanceCreateInfo(
            flags=vk.VK_INSTANCE_CREATE_ENUMERATE_PORTABILITY_BIT_KHR if "portability" in str(extensions) else 0,
            pApplicationInfo=pointer(application),
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=native.strings(layers),
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=native.strings(extensions),
        )
        if self.messages:
            enable = (c_int32 * 1)(vk.VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT)
            validation = vk.VkValidationFeaturesEXT(enabledValidationFeatureCount=1, pEnabledValidationFeatures=enable)
            chain(info, validation, self.messages.create_info())
        return info

    def _extensions(self, layer: str | None = None) -> set[str]:
        return list_extensions(
            self.loader.vkEnumerateInstanceExtensionProperties,
            layer.encode() if layer else None,
            name="vkEnumerateInstanceExtensionProperties",
        )

    def _require_validation(self) -> None:
        count = c_uint32()
        check(self.loader.vkEnumerateInstanceLayerProperties(byref(count), None), "vkEnumerateInstanceLayerProperties")
        layers = (vk.VkLayerProperties * count.value)()
        check(
            self.loader.vkEnumerateInstanceLayerProperties(byref(count), layers), "vkEnumerateInstanceLayerProperties"
        )
        if VALIDATION_LAYER not in {layer.layerName.decode() for layer in layers}:
            raise DeviceError(
                f"debug needs {VALIDATION_LAYER}, which is not installed: "
                "install the Vulkan validation layers (Debian: vulkan-validationlayers)"
            )

    def _create_messenger(self, messages: DebugMessages) -> int:
        messenger = c_uint64()
        info = messages.create_info()
        check(
            self.vk.vkCreateDebugUtilsMessengerEXT(self.handle, byref(info), None, byref(messenger)),
            "vkCreateDebugUtilsMessengerEXT",
        )
        return int(messenger.value)


def list_extensions(enumerate_: Any, *first: Any, name: str) -> set[str]:
    """Extension names, as one of the two vkEnumerate...ExtensionProperties tells them."""
    count = c_uint32()
    check(enumerate_(*first, byref(count), None), name)
    properties = (vk.VkExtensionProperties * count.value)()
    check(enumerate_(*first, byref(count), properties), name)
    return {item.extensionName.decode() for item in properties[: count.value]}
