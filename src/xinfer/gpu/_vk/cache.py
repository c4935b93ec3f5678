"""The pipeline cache on disk: one file a driver, safe to delete or to damage, and never a reason to fail."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from ctypes import byref, c_char, c_size_t, c_void_p, cast, sizeof
from pathlib import Path

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk.core import Core

MAGIC = b"xinfer pipelines 1\n"
LARGEST = 256 << 20


def cache_folder() -> Path:
    """Where the platform keeps what can be made again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "xinfer" / "pipelines"


class PipelineCache:
    """A VkPipelineCache, filled from disk when made and saved when the device closes."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.changed = False  # a kernel was made since it was read
        self._saved = self._read()
        buffer = (c_char * max(1, len(self._saved))).from_buffer_copy(self._saved or b"\0")
        info = vk.VkPipelineCacheCreateInfo(initialDataSize=len(self._saved), pInitialData=cast(buffer, c_void_p))
        try:
            self._object = core.create("VkPipelineCache", info, "pipelines")
        except DeviceError:  # the driver did not like the data
            self._object = core.create("VkPipelineCache", vk.VkPipelineCacheCreateInfo(), "pipelines")

    @property
    def handle(self) -> int:
        """The VkPipelineCache."""
        return self._object.value

    @property
    def path(self) -> Path | None:
        """Its file, which belongs to one version of one driver; None where there is no home to put it in."""
        properties, identity = self.core.adapter.properties, self.core.adapter.extra["id"]
        key = bytes(identity.driverUUID).hex()
        name = f"{properties.vendorID:04x}-{properties.deviceID:04x}-{key}-{properties.driverVersion:08x}.bin"
        try:
            return cache_folder() / name
        except RuntimeError:
            return None

    def save(self) -> None:
        """Write it to disk where it has grown; whatever goes wrong is of no consequence."""
        path = self.path
        if not self.changed or path is None:
            return
        try:
            data = self._data()
            if data == self._saved or len(data) > LARGEST:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(MAGIC + hashlib.sha256(data).digest() + data)
            try:
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
        except (OSError, DeviceError):
            return

    def _data(self) -> bytes:
        get, size = self.core.vk.vkGetPipelineCacheData, c_size_t()
        self.core.check(get(self.core.device, self.handle, byref(size), None), "vkGetPipelineCacheData")
        buffer = (c_char * max(1, size.value))()
        self.core.check(get(self.core.device, self.handle, byref(size), buffer), "vkGetPipelineCacheData")
        return buffer.raw[: size.value]

    def _read(self) -> bytes:
        """What the file holds, if it is whole and this driver's; else nothing."""
        path = self.path
        try:
            if path is None or path.stat().st_size > LARGEST + len(MAGIC) + 32:
                return b""
            content = path.read_bytes()
        except OSError:
            return b""
        digest, data = content[len(MAGIC) : len(MAGIC) + 32], content[len(MAGIC) + 32 :]
        whole = content.startswith(MAGIC) and digest == hashlib.sha256(data).digest()
        return data if whole and self._matches(data) else b""

    def _matches(self, data: bytes) -> bool:
        header = vk.VkPipelineCacheHeaderVersionOne
        if len(data) < sizeof(header):
            return False
        found, properties = header.from_buffer_copy(data), self.core.adapter.properties
        return (
            found.headerVersion == vk.VK_PIPELINE_CACHE_HEADER_VERSION_ONE
            and found.vendorID == properties.vendorID
            and found.deviceID == properties.deviceID
            and bytes(found.pipelineCacheUUID) == bytes(properties.pipelineCacheUUID)
        )
