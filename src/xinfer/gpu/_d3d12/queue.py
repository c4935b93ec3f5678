"""The queue: work is handed to it, and its fence tells what has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from ctypes import c_uint64, c_void_p

from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.core import Core, Handle

FIRST_NAP_S = 20e-6
LONGEST_NAP_S = 1e-3
GONE = (1 << 64) - 1  # what a fence says once the device is lost


class CommandList:
    """A list of commands with its allocator, and the value with which its last run ends."""

    def __init__(self, core: Core, label: str) -> None:
        kind = d3d.D3D12_COMMAND_LIST_TYPE_COMPUTE
        self.allocator = core.create("ID3D12CommandAllocator", "CreateCommandAllocator", kind, label=label)
        try:
            self.list = core.create(
                *("ID3D12GraphicsCommandList", "CreateCommandList", 0, kind, self.allocator.address, None), label=label
            )
        except BaseException:
            core.destroy(self.allocator)
            raise
        self.value = 0
        self._open = self._fresh = True

    @property
    def handles(self) -> tuple[Handle, ...]:
        """What it holds, to be retired."""
        return self.list, self.allocator

    def begin(self) -> None:
        """Record anew; nothing of it may be in flight."""
        if self._open and not self._fresh:  # an interrupt left it open
            self.list.call("Close")
        if not self._fresh:
            self.allocator.run("Reset")
            self.list.run("Reset", self.allocator.address, None)
        self._open, self._fresh = True, False

    def end(self) -> None:
        """Close it: it can now be submitted."""
        self.list.run("Close")
        self._open = False


class Queue:
    """A compute queue with a fence that grows by one with each submission."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.lock = threading.RLock()
        self.submitted = 0
        self._signalled = 0
        self._seen = 0
        desc = d3d.D3D12_COMMAND_QUEUE_DESC(Type=d3d.D3D12_COMMAND_LIST_TYPE_COMPUTE)
        self.handle = core.create("ID3D12CommandQueue", "CreateCommandQueue", desc, label="queue")
        self.fence = core.create("ID3D12Fence", "CreateFence", 0, 0, label="clock")

    def submit(self, lists: Sequence[CommandList]) -> int:
        """Queue closed lists, each of which runs after those before it; the value that they end with.

        Each goes by itself: buffers then are back in the state from which any list may take them.
        """
        with self.lock:
            value = self.submitted + 1
            done = self.completed() if any(item.value > self._seen for item in lists) else self._seen
            assert all(item.value <= done for item in lists), "a list may not run again while it is in flight"
            self.submitted = value  # from here on it counts, also where an interrupt comes in between
            for item in lists:
                item.value = value
                self.handle.call("ExecuteCommandLists", 1, (c_void_p * 1)(item.list.address))
            self._signal()
            return value

    def completed(self) -> int:
        """The highest value that has ended."""
        if self._seen < self.submitted:
            if self._signalled < self.submitted:
                self._signal()
            value = self.fence.call("GetCompletedValue")
            if value == GONE:
                self.core.lose("ID3D12Fence::GetCompletedValue", d3d.REMOVED["DXGI_ERROR_DEVICE_REMOVED"])
            self._seen = max(self._seen, value)
        return self._seen

    @property
    def seen(self) -> int:
        """The highest value that is known to have ended, without asking the device."""
        return self._seen

    def spin(self, value: int, spin_s: float) -> bool:
        """Ask until `value` has ended or the time is up, at least once."""
        deadline = time.perf_counter() + spin_s
        while self.completed() < value:
            if time.perf_counter() >= deadline:
                return False
        return True

    def wait(self, value: int, timeout_s: float) -> bool:
        """Block until `value` has ended or the time is up, asking at growing intervals."""
        deadline, nap = time.monotonic() + timeout_s, FIRST_NAP_S
        while True:
            self.core.ensure_usable()
            if self.completed() >= value:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(nap, left))
            nap = min(1.5 * nap, LONGEST_NAP_S)

    def frequency(self) -> int:
        """Ticks of a timestamp in a second."""
        ticks = c_uint64()
        self.handle.run("GetTimestampFrequency", ticks)
        return ticks.value

    def _signal(self) -> None:
        with self.lock:
            value = self.submitted
            self.handle.run("Signal", self.fence.address, value)
            self._signalled = value
