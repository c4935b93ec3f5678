"""The Direct3D 12 backend: adapters are listed, and one is opened as a `D3D12Device`.

On Windows through the system's own libraries, on Linux through vkd3d, which is there for tests.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence

from xinfer.errors import DeviceError
from xinfer.gpu import _checks
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.adapter import Adapter, list_adapters
from xinfer.gpu._d3d12.core import Core
from xinfer.gpu._d3d12.kernel import D3D12Kernel, RootSignatures
from xinfer.gpu._d3d12.memory import Allocator, BufferOwner, D3D12Buffer, as_slice
from xinfer.gpu._d3d12.queue import Queue
from xinfer.gpu._d3d12.recording import FILL_GROUPS_X, FILL_LANES, D3D12Recording
from xinfer.gpu._d3d12.runtime import Runtime, load_runtime
from xinfer.gpu._d3d12.transfer import Transfers
from xinfer.gpu._device import NativeDevice
from xinfer.gpu._trail import MARKER
from xinfer.gpu.api import (
    Bindable,
    BufferKind,
    BufferSlice,
    DebugMessage,
    Device,
    DeviceInfo,
    HlslSource,
    KernelCode,
    Recording,
    RemovedReason,
    Ticket,
)

# Direct3D 12 has no command that fills a buffer without a descriptor heap.
FILL = KernelCode(
    id="fill",
    spirv=b"",
    hlsl=HlslSource(
        name="fill.hlsl",
        text="""
struct Constants { uint first; uint count; uint value; };
RWStructuredBuffer<uint> target : register(u0);
ConstantBuffer<Constants> constants : register(b0);
[numthreads(LANES, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint i = (group.y * GROUPS_X + group.x) * LANES + lane;
    if (i < constants.count) target[constants.first + i] = constants.value;
}
""",
        defines=(("LANES", FILL_LANES), ("GROUPS_X", FILL_GROUPS_X)),
    ),
    n_buffers=1,
    n_constants=3,
    workgroup=(FILL_LANES, 1, 1),
)


def list_devices() -> list[DeviceInfo]:
    """The adapters that Direct3D 12 shows. Raises DeviceError where it is not installed."""
    adapters = list_adapters(load_runtime())
    try:
        return [adapter.info for adapter in adapters]
    finally:
        for adapter in adapters:
            adapter.release()


def open_device(index: int, *, debug: bool = False, mark_ops: bool = False) -> Device:
    """Open the adapter with this index. Raises DeviceError where there is none."""
    return D3D12Device(index, debug=debug, mark_ops=mark_ops)


def diagnose() -> list[str]:
    """Why Direct3D 12 shows no GPU, and what to do about it; [] where it shows one, and where nobody expects it."""
    if sys.platform != "win32":
        return []  # vkd3d is there for tests
    try:
        devices = list_devices()
    except DeviceError as error:
        return [f"Direct3D 12 cannot be used ({error}); it needs 64-bit Windows 10 or newer and a graphics driver"]
    if any(device.kind != "cpu" for device in devices):
        return []
    names = ", ".join(device.name for device in devices) or "none"
    return [f"Direct3D 12 shows no GPU, only software ({names}): install the graphics card's driver"]


class D3D12Device(NativeDevice, BufferOwner):
    """See `api.Device`."""

    core: Core
    _queue: Queue
    _transfer_queue: Queue
    _transfers: Transfers

    def __init__(
        self,
        index: int = 0,
        *,
        debug: bool = False,
        mark_ops: bool = False,
        runtime: Runtime | None = None,
        direct: bool = False,
    ) -> None:
        """Open an adapter. With `direct`, for tests, the host maps device memory as if it were its own."""
        super().__init__()
        runtime = runtime or load_runtime()
        adapter = _take(list_adapters(runtime), index)
        try:
            self.core = Core(runtime, adapter, debug=debug, mark_ops=mark_ops)
        except BaseException:
            adapter.release()
            raise
        self.info: DeviceInfo = adapter.info
        try:
            self._begun: deque[tuple[int, bytes]] = deque(maxlen=64)  # submissions, and where among notes they begin
            self.core.trail.read = self._oldest
            self._queue = Queue(self.core, d3d.D3D12_COMMAND_LIST_TYPE_COMPUTE, "compute")
            self._transfer_queue = Queue(self.core, d3d.D3D12_COMMAND_LIST_TYPE_COPY, "copy")
            page = d3d.D3D12_CPU_PAGE_PROPERTY_WRITE_BACK if direct else adapter.page
            self.allocator = Allocator(self.core, page)
            self._signatures = RootSignatures(self.core)
            self._filler: D3D12Kernel | None = None
            self._transfers = Transfers(self, self._queue, self._transfer_queue)
        except BaseException:
            self.core.close()
            raise

    def create_buffer(self, size: int, kind: BufferKind = "device", label: str = "") -> D3D12Buffer:
        """New memory, its content undefined. Raises OutOfMemoryError before the driver would."""
        self.core.ensure_usable()
        _checks.check_size(size, self.info, label)
        self.collect()
        return D3D12Buffer(self, size, kind, label)

    def create_kernel(self, code: KernelCode) -> D3D12Kernel:
        """Compile a shader. Raises DeviceError where the device lacks what it needs."""
        self.core.ensure_usable()
        return D3D12Kernel(self, self._signatures, code)

    def create_recording(self, label: str) -> D3D12Recording:
        """An empty recording."""
        self.core.ensure_usable()
        if self._filler is None:
            self._filler = D3D12Kernel(self, self._signatures, FILL)
        return D3D12Recording(self, self._queue, self._filler, label)

    def submit(self, recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
        """Queue a finished recording, or some of its segments; uploads made before come first."""
        if not isinstance(recording, D3D12Recording):
            raise TypeError(f"expected a Direct3D 12 recording, got {type(recording).__name__}")
        self.core.ensure_usable()
        parts = recording.choose(segments)
        self._transfers.kick()
        waits = self._transfers.waits_for(parts)
        if self._trash:
            self.collect()
        value = 0
        try:
            with self._queue.lock:
                value = self._queue.submit([recording.free_list(part) for part in parts], waits)
        finally:
            for part in parts:
                part.last_value = value or self._queue.submitted
        # The list that has the most to do stands for all: the fence tells of whole submissions only.
        if parts:
            self._begun.append((value, max(parts, key=lambda part: len(part.ops)).marker))
        return Ticket(value, recording.label)

    def _oldest(self) -> bytes:
        """The marker of the oldest submission that is not known to have ended. DRED's breadcrumbs say more."""
        running = (marker for value, marker in list(self._begun) if value > self._queue.seen)
        return next(running, bytes(MARKER.size))

    def _slice(self, item: Bindable) -> BufferSlice:
        return as_slice(item)

    def timestamps(self, recording: Recording) -> list[tuple[str, float]]:
        """(label, seconds since the recording's first timestamp) of the last run, which has been waited for."""
        if not isinstance(recording, D3D12Recording):
            raise TypeError(f"expected a Direct3D 12 recording, got {type(recording).__name__}")
        self.core.ensure_usable()
        ticks = recording.times()
        period = 1 / self._queue.frequency()
        return [(label, (tick - ticks[0][1]) * period) for label, tick in ticks]

    def live_objects(self) -> dict[str, int]:
        """COM objects alive by type, those at zero left out: {} once everything is released."""
        return self.core.live_objects()

    def drain_debug_messages(self) -> list[DebugMessage]:
        """What the debug layer said since the last call; empty without `debug`, and with vkd3d, which has none."""
        return self.core.drain_debug_messages()

    def removed_reason(self) -> RemovedReason:
        """What GetDeviceRemovedReason answers, with device removed extended data where there is any."""
        return self.core.removed_reason()


def _take(adapters: list[Adapter], index: int) -> Adapter:
    """The adapter with this index; the others are released."""
    chosen = next((adapter for adapter in adapters if adapter.info.index == index), None)
    for adapter in adapters:
        if adapter is not chosen:
            adapter.release()
    if chosen is None:
        found = ", ".join(f"d3d12:{a.info.index} ({a.info.name})" for a in adapters) or "none"
        raise DeviceError(f"no Direct3D 12 device has the index {index}; there are: {found}")
    return chosen
