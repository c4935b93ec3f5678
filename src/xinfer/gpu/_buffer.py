"""What a buffer is on every graphics API: who uses it, and the bytes that the host reaches. See `api.Buffer`."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu.api import BufferKind, BufferSlice, Bytes


class NativeBuffer(ABC):
    """A buffer of a graphics API, which adds how it is made, mapped and given back."""

    def __init__(self, size: int, kind: BufferKind, label: str) -> None:
        self.size = size
        self.kind: BufferKind = kind
        self.label = label
        self.released = False
        self.mapped: memoryview | None = None
        self.cached = False  # the host reads what is mapped at full speed
        self.last_copy = 0  # with which value of the transfer queue's clock the last upload into it ends
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._users_lock = threading.Lock()  # one thread may upload while another records

    @property
    @abstractmethod
    def _native(self) -> int | None:
        """The API's own; None once it is gone."""

    @abstractmethod
    def _retire(self) -> None:
        """Let the device destroy it once the work in flight has ended."""

    def __getitem__(self, span: slice) -> BufferSlice:
        """`buffer[start:stop]`, in bytes."""
        return BufferSlice(self, 0, self.size)[span]

    @property
    def native(self) -> int:
        """The API's own. Raises DeviceError after release."""
        self.ensure_alive()
        native = self._native
        assert native is not None
        return native

    @property
    def in_place(self) -> bool:
        """Whether the host reaches its memory itself."""
        return self.mapped is not None

    def ensure_alive(self) -> None:
        """Raise DeviceError after release."""
        if self.released or not self._native:
            raise DeviceError(f"buffer {self.label!r} is released; it cannot be used any more")

    def users(self) -> list[Any]:
        """The recorded segments that touch it, the backend's own."""
        if not self._users:  # as with most buffers while they are loaded, thousands of times
            return []
        with self._users_lock:
            return list(self._users)

    def add_user(self, segment: Any) -> None:
        """A segment touches it from now on."""
        with self._users_lock:
            self._users.add(segment)

    def drop_user(self, segment: Any) -> None:
        """A segment was released."""
        with self._users_lock:
            self._users.discard(segment)

    def view(self, offset: int, size: int) -> memoryview:
        """The mapped bytes themselves. Whoever asks gives the view back before the buffer goes."""
        if self.released or self.mapped is None:
            state = "released" if self.released else "device memory, reached by upload and download"
            raise DeviceError(f"buffer {self.label!r} is {state}: the host cannot touch it")
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset} to {offset + size} do not lie within {self.label!r} of {self.size} bytes")
        return self.mapped[offset : offset + size]

    def write(self, data: Bytes, offset: int = 0) -> None:
        """Write into a mapped buffer; the work submitted afterwards sees it."""
        self._require_mapped_kind("write")
        source = memoryview(data).cast("B")
        with self.view(offset, len(source)) as target:
            target[:] = source

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Read a mapped buffer; it holds what the work that has been waited for wrote."""
        self._require_mapped_kind("read")
        with self.view(offset, self.size - offset if size is None else size) as source:
            return bytes(source)

    def release(self) -> None:
        """Give the memory back, after the work in flight that uses it; may be called twice."""
        if self.released:
            return
        self.released = True
        for segment in self.users():
            segment.break_off(f"it uses buffer {self.label!r}, which is released")
        if self.mapped is not None:
            self.mapped.release()
            self.mapped = None
        self._retire()

    def _require_mapped_kind(self, verb: str) -> None:
        if self.kind == "device":
            raise DeviceError(f"cannot {verb} device buffer {self.label!r} in place: use Device.upload and download")
