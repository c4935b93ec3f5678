"""A queue and its clock: every submission gets the next value, and values end in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from ctypes import Array, byref, c_uint32, c_uint64, c_void_p

from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._clock import Clock
from xinfer.gpu._vk.adapter import QueueFamily
from xinfer.gpu._vk.core import Core, Handle
from xinfer.gpu.native import chain

MAX_WAITS = 2


class Queue(Clock):
    """A VkQueue. Values count up from 1; the subclasses tell how far the device has come."""

    core: Core

    def __init__(self, core: Core, family: QueueFamily) -> None:
        super().__init__()
        self.core = core
        self.family = family
        self.lock = threading.Lock()
        self._results: list[int] = []
        handle = c_void_p()
        core.vk.vkGetDeviceQueue(core.device, family.index, 0, byref(handle))
        self.handle = handle.value

    def submit(self, buffers: Array[c_void_p], waits: Sequence[tuple[Queue, int]] = ()) -> int:
        """Queue command buffers, to start after the values of other queues in `waits`; the value that they end with."""
        raise NotImplementedError

    def _submit(self, info: vk.VkStructure, fence: int) -> None:
        # The interpreter looks for signals after calls and at jumps: between the native call, made by the slice
        # assignment, and the count of it there is neither, so that Ctrl-C cannot leave a submission uncounted.
        submit = self.core.vk.vkQueueSubmit
        results = self._results
        results[:] = map(submit, (self.handle,), (1,), (byref(info),), (fence,))
        if results[0] == 0:
            self.submitted += 1
        self.core.check(results[0], "vkQueueSubmit")


class TimelineQueue(Queue):
    """Tells time by a timeline semaphore (Vulkan 1.2)."""

    def __init__(self, core: Core, family: QueueFamily, lock: threading.Lock | None = None) -> None:
        super().__init__(core, family)
        if lock:
            self.lock = lock  # two clocks on one native queue
        kind = vk.VkSemaphoreTypeCreateInfo(semaphoreType=vk.VK_SEMAPHORE_TYPE_TIMELINE)
        info = chain(vk.VkSemaphoreCreateInfo(), kind)
        self.semaphore = core.create("VkSemaphore", info, f"clock of queue family {family.index}")
        self._seen = 0
        # One set of submit structs for all submissions, guarded by the lock: replaying costs no allocation.
        self._signals = (c_uint64 * 1)(self.semaphore.value)
        self._signal_values = (c_uint64 * 1)()
        self._waits = (c_uint64 * MAX_WAITS)()
        self._wait_values = (c_uint64 * MAX_WAITS)()
        self._stages = (c_uint32 * MAX_WAITS)(*[family.stages] * MAX_WAITS)
        self._values = vk.VkTimelineSemaphoreSubmitInfo(
            pWaitSemaphoreValues=self._wait_values,
            signalSemaphoreValueCount=1,
            pSignalSemaphoreValues=self._signal_values,
        )
        self._info = vk.VkSubmitInfo(
            pWaitSemaphores=self._waits,
            pWaitDstStageMask=self._stages,
            signalSemaphoreCount=1,
            pSignalSemaphores=self._signals,
        )
        chain(self._info, self._values)

    def submit(self, buffers: Array[c_void_p], waits: Sequence[tuple[Queue, int]] = ()) -> int:
        """Queue command buffers; see `Queue`."""
        with self.lock:
            for i, (queue, value) in enumerate(waits):
                assert isinstance(queue, TimelineQueue)
                self._waits[i] = queue.semaphore.value
                self._wait_values[i] = value
            self._values.waitSemaphoreValueCount = self._info.waitSemaphoreCount = len(waits)
            self._signal_values[0] = self.submitted + 1
            self._info.commandBufferCount = len(buffers)
            self._info.pCommandBuffers = buffers
            self._submit(self._info, 0)
            return self.submitted

    def completed(self) -> int:
        """The highest value that has ended."""
        if self._seen < self.submitted:
            value = c_uint64()
            call = "vkGetSemaphoreCounterValue"
            self.core.check(getattr(self.core.vk, call)(self.core.device, self.semaphore.value, byref(value)), call)
            if value.value > self.submitted + 1:  # one may be under way in another thread; this is a lost device
                self.core.check(vk.VK_ERROR_DEVICE_LOST, call)
            self._seen = max(self._seen, value.value)
        return self._seen

    def _wait_slice(self, value: int, timeout_ns: int) -> bool:
        info = vk.VkSemaphoreWaitInfo(semaphoreCount=1, pSemaphores=self._signals, pValues=(c_uint64 * 1)(value))
        result = self.core.vk.vkWaitSemaphores(self.core.device, byref(info), timeout_ns)
        return self.core.check(result, "vkWaitSemaphores") != vk.VK_TIMEOUT


class FenceQueue(Queue):
    """Tells time by one fence a submission (Vulkan 1.1)."""

    def __init__(self, core: Core, family: QueueFamily) -> None:
        super().__init__(core, family)
        self._pending: deque[tuple[int, Handle]] = deque()  # in order of value
        self._free: list[Handle] = []
        self._waiters: set[int] = set()  # threads: fences are not reused while anyone may be waiting for them
        self._seen = 0

    def submit(self, buffers: Array[c_void_p], waits: Sequence[tuple[Queue, int]] = ()) -> int:
        """Queue command buffers; there is no other queue to wait for."""
        assert not waits
        info = vk.VkSubmitInfo(commandBufferCount=len(buffers), pCommandBuffers=buffers)
        with self.lock:
            while self._pending and self._pending[-1][0] > self.submitted:  # an interrupted submission
                self._free.append(self._pending.pop()[1])
            fence = self._free.pop() if self._free else self.core.create("VkFence", vk.VkFenceCreateInfo())
            self._pending.append((self.submitted + 1, fence))
            self._submit(info, fence.value)
            return self.submitted

    def completed(self) -> int:
        """The highest value that has ended."""
        with self.lock:
            for value, fence in self._pending:
                result = self.core.vk.vkGetFenceStatus(self.core.device, fence.value)
                if self.core.check(result, "vkGetFenceStatus") == vk.VK_NOT_READY:
                    break
                self._seen = value
            while not self._waiters and self._pending and self._pending[0][0] <= self._seen:
                fences = (c_uint64 * 1)(self._pending[0][1].value)
                self.core.check(self.core.vk.vkResetFences(self.core.device, 1, fences), "vkResetFences")
                self._free.append(self._pending.popleft()[1])
            return self._seen

    def _wait_slice(self, value: int, timeout_ns: int) -> bool:
        if self.completed() >= value:
            return True
        thread = threading.get_ident()
        try:
            with self.lock:
                fence = next((fence for number, fence in self._pending if number >= value), None)
                if fence is None:
                    return True
                self._waiters.add(thread)
            result = self.core.vk.vkWaitForFences(self.core.device, 1, (c_uint64 * 1)(fence.value), 1, timeout_ns)
            return self.core.check(result, "vkWaitForFences") != vk.VK_TIMEOUT
        finally:
            with self.lock:
                self._waiters.discard(thread)
