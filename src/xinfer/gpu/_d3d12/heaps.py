"""Heaps of device memory, of which small buffers are placed parts.

An allocation of its own costs the system more than its bytes: each is made resident, paged and tracked by itself, and
a model has hundreds of buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from xinfer.errors import OutOfMemoryError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.core import Core, Handle

HEAP_BYTES = 64 << 20
LARGEST_PLACED = HEAP_BYTES // 4  # what is larger has an allocation of its own, and leaves no holes
ALIGNMENT = d3d.D3D12_DEFAULT_RESOURCE_PLACEMENT_ALIGNMENT


@dataclass(eq=False)
class Heap:
    """One heap, and its parts that are free: (first byte, end), in order, no two of which touch."""

    handle: Handle
    free: list[tuple[int, int]] = field(default_factory=lambda: [(0, HEAP_BYTES)])

    @property
    def free_bytes(self) -> int:
        """All of its free parts together."""
        return sum(end - start for start, end in self.free)

    @property
    def empty(self) -> bool:
        """Whether no buffer lies in it."""
        return self.free_bytes == HEAP_BYTES

    def take(self, size: int) -> int | None:
        """The first byte of the first free part that is large enough; None where there is none."""
        for i, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Free a part again, and join it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for part in sorted([*self.free, (start, start + size)]):
            if merged and merged[-1][1] == part[0]:
                merged[-1] = merged[-1][0], part[1]
            else:
                merged.append(part)
        self.free = merged


class Heaps:
    """Makes placed buffers. A heap comes with the first of its buffers, and goes with the last.

    Args:
        core: the device.
        properties: of the heaps.
    """

    def __init__(self, core: Core, properties: d3d.D3D12_HEAP_PROPERTIES) -> None:
        self.core = core
        self._properties = properties
        self._heaps: list[Heap] = []
        self._lock = threading.RLock()

    @property
    def free_bytes(self) -> int:
        """Bytes of the heaps that no buffer has: the driver counts them as used."""
        with self._lock:
            return sum(heap.free_bytes for heap in self._heaps)

    def place(
        self, desc: d3d.D3D12_RESOURCE_DESC, label: str, may_grow: Callable[[int], bool], on_destroy: Callable[[], None]
    ) -> Handle | None:
        """A buffer in a heap; None where it is too large for that, or `may_grow` refuses the bytes of a new heap."""
        size = -(-desc.Width // ALIGNMENT) * ALIGNMENT
        if size > LARGEST_PLACED:
            return None
        with self._lock:
            found = self._room(size, may_grow)
            if found is None:
                return None
            heap, start = found
            given = False

            def give() -> None:
                nonlocal given
                if not given:
                    given = True
                    self._give(heap, start, size)

            def destroyed() -> None:
                give()
                on_destroy()

            state = d3d.D3D12_RESOURCE_STATE_COMMON
            try:
                return self.core.create(
                    *("ID3D12Resource", "CreatePlacedResource", heap.handle.address, start, desc, state, None),
                    label=label,
                    on_destroy=destroyed,
                )
            except BaseException:
                give()
                raise

    def _room(self, size: int, may_grow: Callable[[int], bool]) -> tuple[Heap, int] | None:
        """A heap, and the first byte of so many in it."""
        for heap in self._heaps:
            start = heap.take(size)
            if start is not None:
                return heap, start
        if not may_grow(HEAP_BYTES):
            return None
        try:
            heap = Heap(self._make())
        except OutOfMemoryError:
            return None  # the buffer itself may still fit
        self._heaps.append(heap)
        start = heap.take(size)
        assert start is not None
        return heap, start

    def _make(self) -> Handle:
        flags = d3d.D3D12_HEAP_FLAG_ALLOW_ONLY_BUFFERS
        desc = d3d.D3D12_HEAP_DESC(
            SizeInBytes=HEAP_BYTES, Properties=self._properties, Alignment=ALIGNMENT, Flags=flags
        )
        return self.core.create("ID3D12Heap", "CreateHeap", desc, label=f"heap {len(self._heaps)}")

    def _give(self, heap: Heap, start: int, size: int) -> None:
        with self._lock:
            heap.give(start, size)
            if heap.empty:
                self._heaps.remove(heap)
                self.core.destroy(heap.handle)
