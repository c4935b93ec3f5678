"""The pipeline cache on disk: one file a driver, safe to delete or to damage, and never a reason to fail."""

from __future__ import annotations

from ctypes import byref, c_char, c_size_t, c_void_p, cast, sizeof
from pathlib import Path

from xinfer import cache_files
from xinfer.errors import DeviceError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk.core import Core

MAGIC = b"xinfer pipelines 1\n"
LARGEST = 256 << 20


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
        folder = cache_files.cache_folder("pipelines")
        return folder / name if folder else None

    def save(self) -> None:
        """Write it to disk where it has grown; whatever goes wrong is of no consequence."""
        if not self.changed or self.path is None:
            return
        try:
            data = self._data()
        except DeviceError:
            return
        if data != self._saved and len(data) <= LARGEST:
            cache_files.write(self.path, MAGIC, data)

    def _data(self) -> bytes:
        get, size = self.core.vk.vkGetPipelineCacheData, c_size_t()
        self.core.check(get(self.core.device, self.handle, byref(size), None), "vkGetPipelineCacheData")
        buffer = (c_char * max(1, size.value))()
        self.core.check(get(self.core.device, self.handle, byref(size), buffer), "vkGetPipelineCacheData")
        return buffer.raw[: size.value]

    def _read(self) -> bytes:
        """What the file holds, if it is whole and this driver's; else nothing."""
        data = cache_files.read(self.path, MAGIC, LARGEST)
        return data if data is not None and self._matches(data) else b""

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
