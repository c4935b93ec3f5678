"""Recordings: an ordered note of commands, put into command lists, of which a segment has one for each run in flight.

A Direct3D 12 list may not run again before its last run has ended. So a segment that is submitted faster than it ends
gets up to LISTS_A_SEGMENT lists of the same commands; then its submission waits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_uint32
from dataclasses import dataclass
from typing import Literal

from xinfer.errors import DeviceHungError
from xinfer.gpu import _checks
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.core import Handle
from xinfer.gpu._d3d12.kernel import D3D12Kernel
from xinfer.gpu._d3d12.memory import BufferOwner, D3D12Buffer, as_slice, buffer_of
from xinfer.gpu._d3d12.queue import CommandList, Queue
from xinfer.gpu._d3d12.states import UAV, VIEW, States
from xinfer.gpu._record import NativeRecording, NativeSegment
from xinfer.gpu.api import Bindable, BufferSlice, Groups, Kernel

LISTS_A_SEGMENT = 4
LIST_TIMEOUT_S = 60.0
FILL_LANES, FILL_GROUPS_X = 256, 65_535
TICK_BYTES = 8


@dataclass(frozen=True, slots=True)
class Op:
    """One noted command. `parts` are the slices bound, or source and target of a copy."""

    kind: Literal["dispatch", "copy", "barrier", "timestamp"]
    label: str = ""
    kernel: D3D12Kernel | None = None
    parts: tuple[BufferSlice, ...] = ()
    constants: bytes = b""
    groups: Groups = (0, 0, 0)
    query: int = 0


class Segment(NativeSegment):
    """The commands of one segment, and its lists."""

    def __init__(self, recording: D3D12Recording, name: str) -> None:
        super().__init__(recording, name)
        self.ops: list[Op] = []
        self.lists: list[CommandList] = []
        self.marker = b""  # where it begins, among the recording's notes

    @property
    def queries(self) -> list[int]:
        """Numbers of its timestamps, which lie side by side."""
        return [op.query for op in self.ops if op.kind == "timestamp"]


class D3D12Recording(NativeRecording[Segment]):
    """Commands in command lists; see `api.Recording`."""

    owner: BufferOwner

    def __init__(self, owner: BufferOwner, queue: Queue, filler: D3D12Kernel, label: str) -> None:
        super().__init__(owner, label)
        self.queue = queue
        self._filler = filler
        self._stamps: list[str] = []  # labels of the timestamps, in order
        self._query_heap: Handle | None = None
        self._ticks: D3D12Buffer | None = None
        self._own_buffers: list[D3D12Buffer] = []

    def _open(self, name: str) -> None:
        self.parts.append(Segment(self, name))
        self.parts[-1].marker = self._notes.begin(name)

    def dispatch(
        self, kernel: Kernel, buffers: Sequence[Bindable], constants: bytes | Sequence[int], groups: Groups, label: str
    ) -> None:
        """Run `kernel` over `groups` workgroups. Constants are unsigned dwords, or their bytes."""
        if not isinstance(kernel, D3D12Kernel):
            raise TypeError(f"expected a Direct3D 12 kernel, got {type(kernel).__name__}")
        parts = tuple(as_slice(item) for item in buffers)
        packed = _checks.check_dispatch(kernel.code, self.core.adapter.info, parts, constants, groups)
        kernel.ensure_alive()
        self._note(Op("dispatch", label, kernel, parts, packed, groups))

    def copy(self, source: Bindable, target: Bindable) -> None:
        """Copy between slices of one size."""
        a, b = as_slice(source), as_slice(target)
        _checks.check_copy(a, b)
        if a.buffer is not b.buffer:
            self._note(Op("copy", parts=(a, b)))
            return
        # A buffer cannot be a copy's source and target at once: go through another one.
        between = D3D12Buffer(self.owner, a.size, "device", f"copy within {a.buffer.label}")
        self._note(Op("copy", parts=(a, between[:])))
        self._note(Op("copy", parts=(between[:], b)))
        self._own_buffers.append(between)

    def fill(self, target: Bindable, value: int) -> None:
        """Fill with a repeated u32; offset and size are multiples of 4."""
        part = as_slice(target)
        _checks.check_fill(part, value)
        whole = -(-part.size // (4 * FILL_LANES))
        groups = min(whole, FILL_GROUPS_X), -(-whole // FILL_GROUPS_X), 1
        # The whole buffer is bound, and where to begin is a constant: addresses that are bound are aligned.
        constants = struct.pack("<3I", part.offset // 4, part.size // 4, value)
        self._note(Op("dispatch", "fill", self._filler, (part.buffer[:],), constants, groups))

    def barrier(self) -> None:
        """What follows sees everything that was written before."""
        self._note(Op("barrier"))

    def timestamp(self, label: str) -> None:
        """Note the time at which everything recorded before has ended."""
        self._note(Op("timestamp", label, query=len(self._stamps)))
        self._stamps.append(label)

    def _close(self) -> None:
        if self._stamps:
            desc = d3d.D3D12_QUERY_HEAP_DESC(Type=d3d.D3D12_QUERY_HEAP_TYPE_TIMESTAMP, Count=len(self._stamps))
            self._query_heap = self.core.create("ID3D12QueryHeap", "CreateQueryHeap", desc, label=self.label)
            self._ticks = D3D12Buffer(self.owner, TICK_BYTES * len(self._stamps), "readback", f"times of {self.label}")
            self._own_buffers.append(self._ticks)
        for part in self.parts:
            part.lists.append(self._make_list(part))

    def _give_back(self) -> None:
        for part in self.parts:
            self.owner.retire(*[handle for item in part.lists for handle in item.handles])
        if self._query_heap:
            self.owner.retire(self._query_heap)
        for buffer in self._own_buffers:
            buffer.release()

    def free_list(self, part: Segment) -> CommandList:
        """A list of a segment that is not in flight; waits for one where there are enough of them."""
        done = self.queue.completed()
        for item in part.lists:
            if item.value <= done:
                return item
        if len(part.lists) < LISTS_A_SEGMENT:
            part.lists.append(self._make_list(part))
            return part.lists[-1]
        oldest = min(part.lists, key=lambda item: item.value)
        if not self.queue.wait(oldest.value, LIST_TIMEOUT_S):
            raise DeviceHungError(
                f"{self.label!r} was submitted {LISTS_A_SEGMENT} times, and the first run has not ended after "
                f"{LIST_TIMEOUT_S:.0f} s; the device may be hung",
                self.core.hung(repr(self.label)),
            )
        return oldest

    def times(self) -> list[tuple[str, int]]:
        """(label, ticks) of the last runs' timestamps."""
        if self._ticks is None:
            return []
        ticks = struct.unpack(f"<{len(self._stamps)}Q", self._ticks.read())
        return [(self._stamps[i], ticks[i]) for part in self.parts if part.last_value for i in part.queries]

    def _note(self, op: Op) -> None:
        part = self._part()
        for item in op.parts:
            buffer_of(item).ensure_alive()
        self._use(op.parts)
        if op.kernel and op.kernel is not self._filler:
            self._keep(op.kernel)
        part.ops.append(op)
        if op.parts:
            code = op.kernel.code if op.kernel and op.kernel is not self._filler else None
            label = op.label or op.kind
            self._notes.add(label, op.parts, code=code, groups=op.groups, constants=op.constants)

    def _make_list(self, part: Segment) -> CommandList:
        made = CommandList(self.core, f"{self.label}/{part.name}", self.queue.kind)
        try:
            made.begin()
            Writer(made, self._query_heap, self._ticks, marks=self.core.marks).write(part)
            made.end()
        except BaseException:
            for handle in made.handles:
                self.core.destroy(handle)
            raise
        return made


class Writer:
    """Puts noted commands into a command list."""

    def __init__(
        self, target: CommandList, query_heap: Handle | None, ticks: D3D12Buffer | None, *, marks: bool
    ) -> None:
        self._list = target.list
        self._states = States(target.list)
        self._query_heap = query_heap
        self._ticks = ticks
        self._marks = marks
        self._kernel: D3D12Kernel | None = None
        self._signature: Handle | None = None

    def write(self, part: Segment) -> None:
        """All of a segment."""
        self._states.barrier()
        for op in part.ops:
            if op.kind == "dispatch":
                self._dispatch(op)
            elif op.kind == "copy":
                self._copy(*op.parts)
            elif op.kind == "barrier":
                self._states.barrier()
            else:
                assert self._query_heap
                kind = d3d.D3D12_QUERY_TYPE_TIMESTAMP
                self._list.call("EndQuery", self._query_heap.address, kind, op.query)
        self._resolve(part.queries)
        self._states.barrier()

    def _dispatch(self, op: Op) -> None:
        assert op.kernel
        call = self._list.call
        views = op.kernel.views
        self._states.need(*[(buffer_of(item), VIEW if i in views else UAV) for i, item in enumerate(op.parts)])
        if op.kernel.signature is not self._signature:
            call("SetComputeRootSignature", op.kernel.signature.address)
            self._signature = op.kernel.signature
        if op.kernel is not self._kernel:
            call("SetPipelineState", op.kernel.pipeline)
            self._kernel = op.kernel
        place = 0
        if op.constants:
            words = (c_uint32 * (len(op.constants) // 4)).from_buffer_copy(op.constants)
            call("SetComputeRoot32BitConstants", 0, len(words), words, 0)
            place = 1
        for i, item in enumerate(op.parts):
            method = "SetComputeRootShaderResourceView" if i in views else "SetComputeRootUnorderedAccessView"
            call(method, place + i, buffer_of(item).gpu_address + item.offset)
        if self._marks:
            self._mark(op.label)
        call("Dispatch", *op.groups)

    def _mark(self, label: str) -> None:
        """A marker, which breadcrumbs name: UTF-16, which PIX's events call version 0."""
        data = label.encode("utf-16-le", errors="replace") + b"\0\0"
        self._list.call(
            "SetMarker", 0, (c_uint32 * (len(data) // 4 + 1)).from_buffer_copy(data + b"\0\0\0\0"), len(data)
        )

    def _copy(self, source: BufferSlice, target: BufferSlice) -> None:
        a, b = buffer_of(source), buffer_of(target)
        self._states.need((a, d3d.D3D12_RESOURCE_STATE_COPY_SOURCE), (b, d3d.D3D12_RESOURCE_STATE_COPY_DEST))
        self._list.call("CopyBufferRegion", b.native, target.offset, a.native, source.offset, source.size)

    def _resolve(self, queries: list[int]) -> None:
        if not queries:
            return
        assert self._query_heap
        assert self._ticks
        self._states.need((self._ticks, d3d.D3D12_RESOURCE_STATE_COPY_DEST))
        self._list.call(
            *("ResolveQueryData", self._query_heap.address, d3d.D3D12_QUERY_TYPE_TIMESTAMP, queries[0], len(queries)),
            *(self._ticks.native, TICK_BYTES * queries[0]),
        )
