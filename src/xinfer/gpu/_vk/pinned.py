"""Memory of the host that the device copies from: the driver makes it, or this process does and the driver imports it.

Drivers make such pages one behind the other, 2.7 GB a second on an H200. Several threads make huge pages faster, and
then the driver only has to pin them (VK_EXT_external_memory_host). Where that is not fast, both ways are timed.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import byref

import numpy as np

from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk.core import Core
from xinfer.gpu.api import BufferKind

HANDLE = vk.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
LEAST = 4 << 20  # bytes: what is smaller the driver makes
LARGE = 128 << 20  # from here on the two ways are timed anew: what starting costs matters less
FAST = 3e9  # bytes a second, as drivers make them at best: importing at this speed is not compared with anything
MARGIN = 1.25  # by so much importing must be faster
HUGE = 2 << 20  # bytes of a huge page
ROUND = 64 << 10
A_THREAD = 32 << 20  # bytes that are worth a thread: chunks of staging are made by many threads as it is
MOST_THREADS = 16


class HostPages:
    """Private memory of this process, every page of it made. It goes when nobody refers to it or its view any more."""

    def __init__(self, size: int, alignment: int = 1) -> None:
        self.size = -(-size // max(ROUND, alignment)) * max(ROUND, alignment)
        edge = max(HUGE, alignment)
        mapping = mmap.mmap(-1, self.size + edge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # a fork would move pages away under the device
            with suppress(OSError):
                mapping.madvise(advice)
        start = np.frombuffer(mapping, np.uint8).ctypes.data
        self.address = -(-start // edge) * edge
        self.view = memoryview(mapping)[self.address - start :][: self.size]
        self._touch()

    def _touch(self) -> None:
        """Let several threads make the pages: NumPy lets go of the interpreter lock while it writes."""
        a_page = np.frombuffer(self.view, np.uint8)[:: mmap.PAGESIZE]
        n = max(1, min(MOST_THREADS, os.cpu_count() or 1, self.size // A_THREAD))
        if n == 1:
            a_page[:] = 0
            return
        with ThreadPoolExecutor(n) as threads:
            list(threads.map(lambda part: part.fill(0), np.array_split(a_page, n)))


class Pinning:
    """Which way memory for uploads is made on a device.

    Args:
        core: the opened device.
        wanted: import always, or never; None: the faster way.
    """

    def __init__(self, core: Core, *, wanted: bool | None = None) -> None:
        possible = wanted is not False and self._possible(core)
        host = core.adapter.extra.get("host_import")
        self._alignment = int(host.minImportedHostPointerAlignment) if host else 1
        self._lock = threading.Lock()
        # By whether it is large: the way that was chosen, and until then the bytes a second of those timed.
        self._chosen: dict[bool, bool | None] = dict.fromkeys((False, True), wanted if possible else False)
        self._speeds: dict[bool, dict[bool, float]] = {False: {}, True: {}}

    @staticmethod
    def _possible(core: Core) -> bool:
        if "external_memory_host" not in core.features or not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        info = vk.VkPhysicalDeviceExternalBufferInfo(usage=vk.VK_BUFFER_USAGE_TRANSFER_SRC_BIT, handleType=HANDLE)
        found = vk.VkExternalBufferProperties()
        adapter = core.adapter
        adapter.instance.vk.vkGetPhysicalDeviceExternalBufferProperties(adapter.handle, byref(info), byref(found))
        flags = found.externalMemoryProperties.externalMemoryFeatures
        importable = flags & vk.VK_EXTERNAL_MEMORY_FEATURE_IMPORTABLE_BIT
        return bool(importable and not flags & vk.VK_EXTERNAL_MEMORY_FEATURE_DEDICATED_ONLY_BIT)

    @contextmanager
    def pages(self, kind: BufferKind, size: int) -> Iterator[HostPages | None]:
        """Pages to import for a buffer, which is made within; None where the driver is to make them.

        Until the way is chosen one buffer is made at a time, and timed: importing first.
        """
        large = size >= LARGE
        if kind != "upload" or size < LEAST:
            yield None
            return
        if self._chosen[large] is None:
            with self._lock:
                if self._chosen[large] is None:  # not decided by another thread meanwhile
                    speeds = self._speeds[large]
                    ours, began = not speeds, time.perf_counter()
                    yield self._made(size) if ours else None
                    speeds[ours] = size / (time.perf_counter() - began)
                    if self._chosen[large] is None and (speeds[True] >= FAST or len(speeds) == 2):
                        self._chosen[large] = speeds[True] >= FAST or speeds[True] > MARGIN * speeds[False]
                    return
        yield self._made(size) if self._chosen[large] else None

    def give_up(self) -> None:
        """The driver has refused pages of ours: no more of them."""
        self._chosen = dict.fromkeys(self._chosen, False)

    def _made(self, size: int) -> HostPages | None:
        try:
            return HostPages(size, self._alignment)
        except (OSError, MemoryError):
            self.give_up()
            return None
