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

from xinfer.errors import DeviceError, DeviceHungError
from xinfer.gpu import _checks
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.core import Handle
from xinfer.gpu._d3d12.kernel import D3D12Kernel
from xinfer.gpu._d3d12.memory import BufferOwner, D3D12Buffer, as_slice, buffer_of
from xinfer.gpu._d3d12.queue import CommandList, Queue
from xinfer.gpu._d3d12.states import States
from xinfer.gpu._trail import HUNG
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


class Segment:
    """The commands of one segment, and its lists."""

    def __init__(self, recording: D3D12Recording, name: str) -> None:
        self.recording = recording
        self.name = name
        self.ops: list[Op] = []
        self.lists: list[CommandList] = []
        self.buffers: set[D3D12Buffer] = set()
        self.ran = False
        self.marker = b""  # where it begins, among the recording's notes

    def break_off(self, reason: str) -> None:
        """A buffer went: the recording must not be submitted again."""
        self.recording.broken = reason

    @property
    def queries(self) -> list[int]:
        """Numbers of its timestamps, which lie side by side."""
        return [op.query for op in self.ops if op.kind == "timestamp"]


class D3D12Recording:
    """See `api.Recording`. Segments end with a barrier, so that one sees what those before it wrote."""

    def __init__(self, owner: BufferOwner, queue: Queue, filler: D3D12Kernel, label: str) -> None:
        self.owner = owner
        self.core = owner.core
        self.queue = queue
        self.label = label
        self.parts: list[Segment] = []
        self.broken: str | None = "it is not finished"
        self._filler = filler
        self._finished = False
        self._stamps: list[str] = []  # labels of the timestamps, in order
        self._query_heap: Handle | None = None
        self._ticks: D3D12Buffer | None = None
        self._own_buffers: list[D3D12Buffer] = []
        self._kernels: list[D3D12Kernel] = []
        self._notes = owner.core.trail.notes(label)

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments, in order."""
        return tuple(part.name for part in self.parts)

    def segment(self, name: str) -> None:
        """Open the next segment; commands before the first call go to one with the name ""."""
        self._ensure_open()
        if name in self.segments:
            raise ValueError(f"recording {self.label!r} has a segment {name!r} already")
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

    def finish(self) -> None:
        """Close it. Only a finished recording is submitted."""
        self._ensure_open()
        if not self.parts:
            self.segment("")
        if self._stamps:
            desc = d3d.D3D12_QUERY_HEAP_DESC(Type=d3d.D3D12_QUERY_HEAP_TYPE_TIMESTAMP, Count=len(self._stamps))
            self._query_heap = self.core.create("ID3D12QueryHeap", "CreateQueryHeap", desc, label=self.label)
            self._ticks = D3D12Buffer(self.owner, TICK_BYTES * len(self._stamps), "readback", f"times of {self.label}")
            self._own_buffers.append(self._ticks)
        for part in self.parts:
            part.lists.append(self._make_list(part))
        self._finished = True
        if self.broken == "it is not finished":
            self.broken = None

    def release(self) -> None:
        """Give it back, after the work in flight that uses it; may be called twice."""
        if self.broken == "it is released":
            return
        self.broken = "it is released"
        self._finished = True
        for part in self.parts:
            for buffer in part.buffers:
                buffer.drop_user(part)
            self.owner.retire(*[handle for item in part.lists for handle in item.handles])
        if self._query_heap:
            self.owner.retire(self._query_heap)
        for buffer in self._own_buffers:
            buffer.release()
        for kernel in self._kernels:
            kernel.drop()
        self._kernels.clear()

    def choose(self, names: Sequence[str] | None) -> list[Segment]:
        """Segments by name, in the order of recording. Raises where it cannot be submitted."""
        if self.broken is not None:
            raise DeviceError(f"recording {self.label!r} cannot be submitted: {self.broken}")
        if names is None:
            return self.parts
        unknown = sorted(set(names) - set(self.segments))
        if unknown:
            raise ValueError(f"recording {self.label!r} has no segments {unknown}, only {list(self.segments)}")
        return [part for part in self.parts if part.name in names]

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
                self.core.loss(repr(self.label), HUNG),
            )
        return oldest

    def times(self) -> list[tuple[str, int]]:
        """(label, ticks) of the last runs' timestamps."""
        if self._ticks is None:
            return []
        ticks = struct.unpack(f"<{len(self._stamps)}Q", self._ticks.read())
        return [(self._stamps[i], ticks[i]) for part in self.parts if part.ran for i in part.queries]

    def _ensure_open(self) -> None:
        if self._finished:
            raise DeviceError(f"recording {self.label!r} is finished: make a new one")
        self.core.ensure_usable()

    def _note(self, op: Op) -> None:
        self._ensure_open()
        if not self.parts:
            self.segment("")
        part = self.parts[-1]
        for item in op.parts:
            buffer = buffer_of(item)
            buffer.ensure_alive()
            if buffer not in part.buffers:
                part.buffers.add(buffer)
                buffer.add_user(part)
        if op.kernel and op.kernel is not self._filler and op.kernel not in self._kernels:
            op.kernel.retain()
            self._kernels.append(op.kernel)
        part.ops.append(op)
        if op.parts:
            code = op.kernel.code if op.kernel and op.kernel is not self._filler else None
            label = op.label or op.kind
            self._notes.add(label, op.parts, code=code, groups=op.groups, constants=op.constants)

    def _make_list(self, part: Segment) -> CommandList:
        made = CommandList(self.core, f"{self.label}/{part.name}")
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
        self._states.need(*[(buffer_of(item), d3d.D3D12_RESOURCE_STATE_UNORDERED_ACCESS) for item in op.parts])
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
        for i, item in enumerate(op.parts, place):
            call("SetComputeRootUnorderedAccessView", i, buffer_of(item).gpu_address + item.offset)
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
