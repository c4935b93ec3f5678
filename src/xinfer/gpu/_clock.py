"""How a queue tells time on every graphics API: each submission gets the next value, and values end in order."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

SLICE_NS = 100_000_000  # longest native wait, so that Ctrl-C is heard


class Clock(ABC):
    """A queue as those see it who wait for it; the APIs add how work is handed to it."""

    core: Any  # the backend's own

    def __init__(self) -> None:
        self.submitted = 0  # the value of the last submission; they count up from 1

    @abstractmethod
    def completed(self) -> int:
        """The highest value that has ended."""

    @abstractmethod
    def _wait_slice(self, value: int, timeout_ns: int) -> bool:
        """Block until `value` has ended, or for so long; whether it has ended."""

    def spin(self, value: int, spin_s: float) -> bool:
        """Ask until `value` has ended or the time is up, at least once."""
        deadline = time.perf_counter() + spin_s
        while self.completed() < value:
            if time.perf_counter() >= deadline:
                return False
        return True

    def wait(self, value: int, timeout_s: float) -> bool:
        """Block until `value` has ended or the time is up, in slices that let a signal handler run between them."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.core.ensure_usable()
            left = int((deadline - time.monotonic()) * 1e9)
            if self._wait_slice(value, max(0, min(left, SLICE_NS))):
                return True
            if left <= 0:
                return False
