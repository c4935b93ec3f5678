"""What buffers of device memory take, the most that they took at one time, and how much they may take."""

from __future__ import annotations

import dataclasses
import threading

from xinfer.gpu.api import MemoryStatus


class Meter:
    """Counts bytes of buffers of the kind "device", for every backend alike."""

    def __init__(self) -> None:
        self.used = 0
        self.peak = 0
        self.limit: int | None = None  # None: what the driver allows
        self._lock = threading.Lock()

    def count(self, change: int) -> None:
        """Bytes came, or went."""
        with self._lock:
            self.used += change
            self.peak = max(self.peak, self.used)

    def set_limit(self, n_bytes: int | None) -> None:
        """Allow so much from now on; the peak begins anew."""
        with self._lock:
            self.limit, self.peak = n_bytes, self.used

    def applied(self, status: MemoryStatus, *, shared: bool = False) -> MemoryStatus:
        """The driver's answer, within the limit; `shared`: buffers of all kinds take of that memory."""
        budget = status.budget
        if self.limit is not None:
            budget = min(budget, status.used + max(0, self.limit - self.used))
        return dataclasses.replace(status, budget=budget, peak=self.peak, shared=status.free if shared else None)
