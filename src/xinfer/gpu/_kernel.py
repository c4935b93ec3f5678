"""What a kernel is on every graphics API: what it was made from, and who still needs it. See `api.Kernel`."""

from __future__ import annotations

import threading
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu.api import KernelCode


class NativeKernel:
    """A compute pipeline, which the APIs make. Recordings keep it alive past `release`."""

    _handle: Any  # the pipeline, the backend's own

    def __init__(self, owner: Any, code: KernelCode) -> None:
        self.owner = owner
        self.code = code
        self._uses = 1  # its own, and one for each recording that binds it
        self._released = False
        self._lock = threading.Lock()

    def ensure_alive(self) -> None:
        """Raise DeviceError after release."""
        if self._released:
            raise DeviceError(f"kernel {self.code.id!r} is released; it cannot be recorded any more")

    def release(self) -> None:
        """Give it back; recordings made with it stay valid."""
        if not self._released:
            self._released = True
            self.drop()

    def retain(self) -> None:
        """A recording uses it."""
        with self._lock:
            self._uses += 1

    def drop(self) -> None:
        """A use of it ended."""
        with self._lock:
            self._uses -= 1
            last = self._uses == 0
        if last:
            self.owner.retire(self._handle)
