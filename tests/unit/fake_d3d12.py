"""A Direct3D 12 made in Python: it runs copies and fills, on queues of their own, and checks what Windows would.

Its queues are as unfair as the API allows: the favoured one runs until it has nothing to do or must wait, and only then
does the other take one step. Time goes on when a fence has been asked often enough. Whoever forgets that a queue has
to wait gets the wrong bytes; what is against the rules stands in `complaints`.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable
from ctypes import c_uint64, c_void_p
from typing import Any

from tests.unit.fake_com import FakeObject, FakeRuntime, Function, fill, give

from xinfer.gpu._bindings import d3d12 as d3d

COPY_STATES = (d3d.D3D12_RESOURCE_STATE_COPY_SOURCE, d3d.D3D12_RESOURCE_STATE_COPY_DEST)
COMMON, UAV = d3d.D3D12_RESOURCE_STATE_COMMON, d3d.D3D12_RESOURCE_STATE_UNORDERED_ACCESS
FILL_BYTES = 12  # of its constants
ASKS_A_STEP = 7


class Resource(FakeObject):
    """A buffer, with memory of the host's."""

    def __init__(
        self, machine: Machine, size: int, pages: tuple[int, int, int], heap: Heap | None = None, offset: int = 0
    ) -> None:
        self.machine, self.pages = machine, pages  # its heap's type, CPU pages and pool
        self.memory = (ctypes.c_ubyte * size)(*[0xCD] * min(size, 64))
        self.base = ctypes.addressof(self.memory)
        self.heap, self.offset = heap, offset
        super().__init__(
            "ID3D12Resource",
            {
                "Map": self._map,
                "GetGPUVirtualAddress": lambda: self.base,
            },
        )
        machine.resources.append(self)

    @property
    def size(self) -> int:
        return len(self.memory)

    @property
    def alive(self) -> bool:
        return self.references > 0

    def _map(self, _part: int, _read: int, slot: int) -> int:
        if self.pages[0] != d3d.D3D12_HEAP_TYPE_CUSTOM:
            self.machine.complain("a buffer is mapped whose heap the host does not reach")
        return _write_address(slot, self.base)


class Heap(FakeObject):
    """Memory that buffers are placed in."""

    def __init__(self, machine: Machine, desc: d3d.D3D12_HEAP_DESC) -> None:
        super().__init__("ID3D12Heap", {"Release": self._release})
        self.machine, self.size, self.flags = machine, desc.SizeInBytes, desc.Flags
        self.pages = _pages(desc.Properties)

    def placed(self) -> list[Resource]:
        return [item for item in self.machine.resources if item.heap is self and item.alive]

    def _release(self) -> int:
        if self.references == 1 and self.placed():
            self.machine.complain("a heap was released before what lies in it")
        return self._drop()


class Fence(FakeObject):
    """A fence; asking for its value lets time pass, slowly."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("ID3D12Fence", {"GetCompletedValue": self._completed})
        self.machine, self.value = machine, 0

    def _completed(self) -> int:
        self.machine.asked += 1
        if self.machine.asked % ASKS_A_STEP == 0:
            self.machine.step()
        return self.value


class CommandList(FakeObject):
    """A list: what it does, as functions, and the states of the buffers that it has touched."""

    def __init__(self, machine: Machine, kind: int) -> None:
        self.machine, self.type = machine, kind
        self.open, self.in_flight = True, 0
        self.does: list[Callable[[], None]] = []
        self.states: dict[Resource, int] = {}
        self.constants, self.bound = b"", 0
        methods: dict[str, Function] = {
            "Close": self._close,
            "Reset": self._reset,
            "CopyBufferRegion": self._copy,
            "ResourceBarrier": self._barrier,
            "SetComputeRoot32BitConstants": self._set_constants,
            "SetComputeRootUnorderedAccessView": self._bind,
            "Dispatch": self._dispatch,
        }
        methods |= {name: lambda *_: 0 for name in ("SetComputeRootSignature", "SetPipelineState")}
        super().__init__("ID3D12GraphicsCommandList", methods)

    def _close(self) -> int:
        self.open = False
        return d3d.S_OK

    def _reset(self, _allocator: int, _pipeline: int) -> int:
        if self.in_flight:
            self.machine.complain("a list was reset while it is in flight")
        self.open = True
        self.does, self.states = [], {}
        return d3d.S_OK

    def _use(self, resource: Resource, state: int) -> None:
        if self.states.setdefault(resource, state) != state:  # promoted out of the common state by its first use
            self.machine.complain(f"a buffer in state {self.states[resource]:#x} is used as {state:#x}")
        if self.type == d3d.D3D12_COMMAND_LIST_TYPE_COPY and state not in COPY_STATES:
            self.machine.complain(f"state {state:#x} on a copy list")

    def _copy(self, target: int, to: int, source: int, at: int, size: int) -> int:
        a, b = self.machine.find(source), self.machine.find(target)
        self._use(a, d3d.D3D12_RESOURCE_STATE_COPY_SOURCE)
        self._use(b, d3d.D3D12_RESOURCE_STATE_COPY_DEST)

        def run() -> None:
            for item, end in ((a, at + size), (b, to + size)):
                if not item.alive or end > item.size:
                    self.machine.complain("a copy reaches past its buffer, or the buffer is gone")
                    return
            ctypes.memmove(b.base + to, a.base + at, size)

        self.does.append(run)
        return 0

    def _barrier(self, count: int, address: int) -> int:
        for barrier in (d3d.D3D12_RESOURCE_BARRIER * count).from_address(address):
            if barrier.Type == d3d.D3D12_RESOURCE_BARRIER_TYPE_UAV:
                if self.type == d3d.D3D12_COMMAND_LIST_TYPE_COPY:
                    self.machine.complain("a UAV barrier on a copy list")
                continue
            change = barrier.Transition
            resource = self.machine.find(change.pResource)
            if self.states.get(resource, COMMON) != change.StateBefore:
                self.machine.complain("a transition from a state that the buffer is not in")
            if self.type == d3d.D3D12_COMMAND_LIST_TYPE_COPY and change.StateAfter not in (COMMON, *COPY_STATES):
                self.machine.complain(f"a transition to {change.StateAfter:#x} on a copy list")
            self.states[resource] = change.StateAfter
        return 0

    def _set_constants(self, _parameter: int, count: int, words: int, _offset: int) -> int:
        self.constants = ctypes.string_at(words, 4 * count)
        return 0

    def _bind(self, _parameter: int, address: int) -> int:
        self.bound = address
        return 0

    def _dispatch(self, *_groups: int) -> int:
        """Whatever the pipeline is, it is taken for the one that fills."""
        target = next(item for item in self.machine.resources if item.alive and item.base == self.bound)
        self._use(target, UAV)
        first, count, value = struct.unpack("<3I", self.constants[:FILL_BYTES])

        def run() -> None:
            if not target.alive:
                self.machine.complain("a fill of a buffer that is gone")
                return
            ctypes.memmove(target.base + 4 * first, struct.pack("<I", value) * count, 4 * count)

        self.does.append(run)
        return 0


class Queue(FakeObject):
    """A queue of what is still to be done."""

    def __init__(self, machine: Machine, kind: int) -> None:
        self.machine, self.type = machine, kind
        self.waiting: deque[tuple[str, Any, int]] = deque()
        self.executed = 0
        super().__init__(
            "ID3D12CommandQueue",
            {"ExecuteCommandLists": self._execute, "Signal": self._signal, "Wait": self._wait},
        )

    def _execute(self, count: int, lists: int) -> int:
        for address in (c_void_p * count).from_address(lists):
            item = next(known for known in self.machine.lists if known.address == address)
            if item.open or item.type != self.type or item.in_flight:
                self.machine.complain("a list is open, in flight, or of another kind than its queue")
            item.in_flight += 1
            self.waiting.append(("execute", item, 0))
        return 0

    def _signal(self, fence: int, value: int) -> int:
        self.waiting.append(("signal", self.machine.fence(fence), value))
        return d3d.S_OK

    def _wait(self, fence: int, value: int) -> int:
        self.waiting.append(("wait", self.machine.fence(fence), value))
        return d3d.S_OK

    def step(self) -> bool:
        """Do one thing; whether there was one that need not wait."""
        if not self.waiting:
            return False
        what, item, value = self.waiting[0]
        if what == "wait" and item.value < value:
            return False
        self.waiting.popleft()
        if what == "signal":
            item.value = value
        elif what == "execute":
            for run in item.does:
                run()
            item.in_flight -= 1
            self.executed += 1
        return True


class Machine:
    """The device and all that it makes. `favoured`: the kind of queue that runs first."""

    def __init__(self, *, favoured: int = d3d.D3D12_COMMAND_LIST_TYPE_COMPUTE, largest_heap: int = 1 << 62) -> None:
        self.favoured = favoured
        self.largest_heap = largest_heap  # where CreateHeap begins to answer E_OUTOFMEMORY
        self.complaints: list[str] = []
        self.asked = 0
        self.resources: list[Resource] = []
        self.heaps: list[Heap] = []
        self.lists: list[CommandList] = []
        self.queues: list[Queue] = []
        self.fences: list[Fence] = []
        self._others: list[FakeObject] = []
        self.device = FakeObject(
            "ID3D12Device",
            {
                "GetDeviceRemovedReason": lambda: d3d.S_OK,
                "CheckFeatureSupport": lambda *_: d3d.FAILURES["E_INVALIDARG"],
                "CreateCommandQueue": self._create_queue,
                "CreateCommandAllocator": lambda _kind, _iid, slot: self._give_plain("ID3D12CommandAllocator", slot),
                "CreateCommandList": self._create_list,
                "CreateFence": lambda _value, _flags, _iid, slot: self._give(self.fences, Fence(self), slot),
                "CreateCommittedResource": self._create_committed,
                "CreateHeap": self._create_heap,
                "CreatePlacedResource": self._create_placed,
                "CreateRootSignature": lambda *a: self._give_plain("ID3D12RootSignature", a[-1]),
                "CreateComputePipelineState": lambda _d, _i, slot: self._give_plain("ID3D12PipelineState", slot),
            },
        )
        self.budget = 8 << 30
        self.runtime = FakeRuntime(
            {
                "CreateDXGIFactory2": lambda _flags, _iid, slot: give(slot, self._factory()),
                "D3D12CreateDevice": self._create_device,
                "D3D12SerializeRootSignature": lambda _desc, _version, blob, _errors: self._give_blob(blob),
                "D3DCompile": lambda *a: self._give_blob(a[-2]),
            }
        )

    def complain(self, what: str) -> None:
        """Something is against the rules."""
        self.complaints.append(what)

    def step(self) -> None:
        """Let time pass: the favoured queue first, another one only where that has nothing to do."""
        for queue in sorted(self.queues, key=lambda item: item.type != self.favoured):
            if queue.step():
                return

    def find(self, address: int) -> Resource:
        """The living buffer with this address as an object."""
        return next(item for item in self.resources if item.address == address and item.alive)

    def fence(self, address: int) -> Fence:
        """The fence with this address."""
        return next(item for item in self.fences if item.address == address)

    def queue(self, kind: int) -> Queue:
        """The queue for lists of this kind."""
        return next(item for item in self.queues if item.type == kind)

    @property
    def used(self) -> int:
        """Bytes that the driver has given out: heaps, and buffers with memory of their own."""
        heaps: int = sum(item.size for item in self.heaps if item.references)
        committed: int = sum(item.size for item in self.resources if item.alive and item.heap is None)
        return heaps + committed

    def _give(self, kept: list[Any], item: FakeObject, slot: int) -> int:
        kept.append(item)
        return give(slot, item)

    def _give_plain(self, kind: str, slot: int) -> int:
        methods: dict[str, Function] = {"Reset": lambda: d3d.S_OK} if kind == "ID3D12CommandAllocator" else {}
        return self._give(self._others, FakeObject(kind, methods), slot)

    def _give_blob(self, slot: int) -> int:
        data = ctypes.create_string_buffer(b"code")
        methods: dict[str, Function] = {
            "GetBufferPointer": lambda: ctypes.addressof(data),
            "GetBufferSize": lambda: 4,
        }
        return self._give(self._others, FakeObject("ID3D10Blob", methods), slot)

    def _create_device(self, _adapter: int, _level: int, _iid: int, slot: int) -> int:
        self.device.references += 1
        return give(slot, self.device)

    def _create_queue(self, desc: int, _iid: int, slot: int) -> int:
        return self._give(self.queues, Queue(self, d3d.D3D12_COMMAND_QUEUE_DESC.from_address(desc).Type), slot)

    def _create_list(self, _node: int, kind: int, _allocator: int, _pipeline: int, _iid: int, slot: int) -> int:
        return self._give(self.lists, CommandList(self, kind), slot)

    def _create_committed(self, heap: int, _flags: int, desc: int, _state: int, _clear: int, _i: int, slot: int) -> int:
        size = d3d.D3D12_RESOURCE_DESC.from_address(desc).Width
        if self.used + size > self.budget:
            return d3d.E_OUTOFMEMORY
        return give(slot, Resource(self, size, _pages(d3d.D3D12_HEAP_PROPERTIES.from_address(heap))))

    def _create_heap(self, desc: int, _iid: int, slot: int) -> int:
        found = d3d.D3D12_HEAP_DESC.from_address(desc)
        if found.SizeInBytes > self.largest_heap or self.used + found.SizeInBytes > self.budget:
            return d3d.E_OUTOFMEMORY
        return self._give(self.heaps, Heap(self, found), slot)

    def _create_placed(self, heap: int, offset: int, desc: int, _state: int, _clear: int, _i: int, slot: int) -> int:
        size = d3d.D3D12_RESOURCE_DESC.from_address(desc).Width
        home: Heap = next(item for item in self.heaps if item.address == heap and item.references)
        if home.flags != d3d.D3D12_HEAP_FLAG_ALLOW_ONLY_BUFFERS:
            self.complain("a heap that holds not only buffers")
        if offset % 65_536 or offset + size > home.size:
            self.complain(f"a buffer of {size} bytes placed at {offset}")
        if any(item.offset < offset + size and offset < item.offset + item.size for item in home.placed()):
            self.complain("two buffers in one place")
        return give(slot, Resource(self, size, home.pages, home, offset))

    def _factory(self) -> FakeObject:
        desc = d3d.DXGI_ADAPTER_DESC1(DedicatedVideoMemory=self.budget)
        ctypes.memmove(desc.Description, "made up".encode("utf-16-le"), 14)
        usage = FakeObject("IDXGIAdapter3", {"QueryVideoMemoryInfo": self._query_memory})
        adapter = FakeObject(
            "IDXGIAdapter1",
            {
                "GetDesc1": lambda to: fill(to, desc),
                "CheckInterfaceSupport": lambda _iid, to: fill(to, c_uint64(1)),
            },
            interfaces=[usage],
        )
        missing = d3d.DXGI_ERROR_NOT_FOUND
        factory = FakeObject(
            "IDXGIFactory4",
            {
                "EnumAdapters1": lambda index, slot: missing if index else give(slot, adapter),
                "EnumWarpAdapter": lambda *_: missing,
            },
        )
        self._others += [usage, adapter, factory]
        return factory

    def _query_memory(self, _node: int, _group: int, to: int) -> int:
        return fill(to, d3d.DXGI_QUERY_VIDEO_MEMORY_INFO(Budget=self.budget, CurrentUsage=self.used))


def _pages(properties: d3d.D3D12_HEAP_PROPERTIES) -> tuple[int, int, int]:
    return properties.Type, properties.CPUPageProperty, properties.MemoryPoolPreference


def _write_address(slot: int, address: int) -> int:
    c_void_p.from_address(slot).value = address
    return d3d.S_OK
