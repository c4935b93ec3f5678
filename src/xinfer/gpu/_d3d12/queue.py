"""Queues: work is handed to them, and their fences tell what has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from ctypes import c_uint64, c_void_p

from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._clock import Clock
from xinfer.gpu._d3d12.core import Core, Handle

FIRST_NAP_S = 20e-6
LONGEST_NAP_S = 1e-3
GONE = (1 << 64) - 1  # what a fence says once the device is lost


class CommandList:
    """A list of commands with its allocator, and the value with which its last run ends."""

    def __init__(self, core: Core, label: str, kind: int) -> None:
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


class Queue(Clock):
    """A queue for lists of one kind, with a fence that grows by one with each submission."""

    core: Core

    def __init__(self, core: Core, kind: int, label: str) -> None:
        super().__init__()
        self.core = core
        self.kind = kind  # D3D12_COMMAND_LIST_TYPE
        self.lock = threading.RLock()
        self._signalled = 0
        self._seen = 0
        desc = d3d.D3D12_COMMAND_QUEUE_DESC(Type=kind)
        self.handle = core.create("ID3D12CommandQueue", "CreateCommandQueue", desc, label=f"{label} queue")
        self.fence = core.create("ID3D12Fence", "CreateFence", 0, 0, label=f"clock of the {label} queue")

    def submit(self, lists: Sequence[CommandList], waits: Sequence[tuple[Queue, int]] = ()) -> int:
        """Queue closed lists, each of which runs after those before it; the value that they end with.

        They start after the values of other queues in `waits`. Each goes by itself: buffers then are back in the state
        from which any list may take them.
        """
        for queue, value in waits:
            queue.ensure_signalled(value)  # not under our own lock
        with self.lock:
            for queue, value in waits:
                self.handle.run("Wait", queue.fence.address, value)
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
            self.ensure_signalled(self.submitted)
            value = self.fence.call("GetCompletedValue")
            if value == GONE:
                self.core.lose("ID3D12Fence::GetCompletedValue", d3d.REMOVED["DXGI_ERROR_DEVICE_REMOVED"])
            self._seen = max(self._seen, value)
        return self._seen

    @property
    def seen(self) -> int:
        """The highest value that is known to have ended, without asking the device."""
        return self._seen

    def _wait_slice(self, value: int, timeout_ns: int) -> bool:
        deadline, nap = time.monotonic() + 1e-9 * timeout_ns, FIRST_NAP_S
        while self.completed() < value:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(nap, left))
            nap = min(1.5 * nap, LONGEST_NAP_S)
        return True

    def ensure_signalled(self, value: int) -> None:
        """See that the fence will come to `value`: an interrupt may have come between a submission and its signal."""
        if self._signalled < value:
            self._signal()

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
