"""A device without hardware: it notes what is recorded, moves bytes as copies and fills say, and runs no kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu import _checks
from xinfer.gpu._meter import Meter
from xinfer.gpu._staging import CHUNK
from xinfer.gpu.api import (
    Bindable,
    BufferKind,
    BufferSlice,
    Bytes,
    DebugMessage,
    DeviceInfo,
    Groups,
    Kernel,
    KernelCode,
    MemoryStatus,
    Recording,
    RemovedReason,
    Ticket,
)

INFO = DeviceInfo(
    api="null",
    index=0,
    name="null",
    kind="other",
    vendor_id=0,
    device_id=0,
    driver="none",
    driver_version="0",
    api_version="1.1",
    heap_bytes=1 << 34,
    subgroup_size_min=32,
    subgroup_size_max=32,
    subgroup_size_default=32,
    max_groups=(65535, 65535, 65535),
    max_workgroup_invocations=1024,
    max_shared_bytes=32768,
    max_storage_range=1 << 27,
    storage_alignment=256,
    max_allocation=1 << 32,
    features=frozenset(),
)


@dataclass(frozen=True, slots=True)
class Op:
    """One recorded command. `parts` are the slices bound, or source and target of a copy, or a fill's target."""

    kind: Literal["dispatch", "copy", "fill", "barrier", "timestamp"]
    segment: str
    label: str = ""
    kernel: KernelCode | None = None
    parts: tuple[BufferSlice, ...] = ()
    constants: bytes = b""
    groups: Groups = (0, 0, 0)
    value: int = 0


class NullBuffer:
    """Bytes in a bytearray; see `api.Buffer`."""

    def __init__(self, device: NullDevice, size: int, kind: BufferKind, label: str) -> None:
        self.device = device
        self.size = size
        self.kind: BufferKind = kind
        self.label = label
        self.bytes = bytearray(size)
        self.released = False

    @property
    def in_place(self) -> bool:
        """Not where it is "device" memory."""
        return self.kind != "device"

    def __getitem__(self, span: slice) -> BufferSlice:
        """`buffer[start:stop]`, in bytes."""
        return BufferSlice(self, 0, self.size)[span]

    def write(self, data: Bytes, offset: int = 0) -> None:
        """Write into a mapped buffer."""
        self._require_mapped()
        source = memoryview(data).cast("B")
        part = BufferSlice(self, offset, len(source))
        self.bytes[part.offset : part.offset + part.size] = source

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Read a mapped buffer."""
        self._require_mapped()
        part = BufferSlice(self, offset, self.size - offset if size is None else size)
        return bytes(self.bytes[part.offset : part.offset + part.size])

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a mapped buffer themselves."""
        self._require_mapped()
        return view_of(BufferSlice(self, offset, size))

    def release(self) -> None:
        """Give it back; may be called twice."""
        if not self.released:
            self.released = True
            self.device.forget_buffer(self)

    def _require_mapped(self) -> None:
        if self.released or self.kind == "device":
            raise DeviceError(f"buffer {self.label!r} is {'released' if self.released else 'device memory'}")


class NullStage:
    """Bytes to be sent; see `api.Stage`."""

    def __init__(self, device: NullDevice, size: int) -> None:
        self._device = device
        self.view = memoryview(bytearray(size))

    def send(self, parts: Sequence[tuple[int, Bindable]]) -> None:
        """Copy at once."""
        for at, target in parts:
            self._device.upload(target, self.view[at : at + as_slice(target).size])
        self.release()

    def release(self) -> None:
        """Give it back; may be called twice."""
        self.view.release()


class NullKernel:
    """A kernel that does nothing; see `api.Kernel`."""

    def __init__(self, device: NullDevice, code: KernelCode) -> None:
        self.device = device
        self.code = code
        self.released = False

    def release(self) -> None:
        """Give it back; may be called twice."""
        if not self.released:
            self.released = True
            self.device.forget("kernel")


class NullRecording:
    """A list of ops; see `api.Recording`."""

    def __init__(self, device: NullDevice, label: str) -> None:
        self.device = device
        self.label = label
        self.ops: list[Op] = []
        self.names: list[str] = []
        self.finished = False
        self.released = False

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments, in order."""
        return tuple(self.names)

    def segment(self, name: str) -> None:
        """Open the next segment."""
        self._ensure_open()
        if name in self.names:
            raise ValueError(f"recording {self.label!r} has a segment {name!r} already")
        self.names.append(name)

    def dispatch(
        self, kernel: Kernel, buffers: Sequence[Bindable], constants: bytes | Sequence[int], groups: Groups, label: str
    ) -> None:
        """Note a dispatch."""
        parts = tuple(as_slice(item) for item in buffers)
        packed = _checks.check_dispatch(kernel.code, self.device.info, parts, constants, groups)
        self._note("dispatch", label=label, kernel=kernel.code, parts=parts, constants=packed, groups=groups)

    def copy(self, source: Bindable, target: Bindable) -> None:
        """Note a copy."""
        parts = as_slice(source), as_slice(target)
        _checks.check_copy(*parts)
        self._note("copy", parts=parts)

    def fill(self, target: Bindable, value: int) -> None:
        """Note a fill."""
        part = as_slice(target)
        _checks.check_fill(part, value)
        self._note("fill", parts=(part,), value=value)

    def barrier(self) -> None:
        """Note a barrier."""
        self._note("barrier")

    def timestamp(self, label: str) -> None:
        """Note a timestamp."""
        self._note("timestamp", label=label)

    def finish(self) -> None:
        """Close it. Only a finished recording is submitted."""
        self._ensure_open()
        self.finished = True
        if not self.names:
            self.names.append("")

    def release(self) -> None:
        """Give it back; may be called twice."""
        if not self.released:
            self.released = self.finished = True
            self.device.forget("recording")

    def _ensure_open(self) -> None:
        if self.finished:
            raise DeviceError(f"recording {self.label!r} is finished: make a new one")

    def _note(self, kind: Any, **fields: Any) -> None:
        self._ensure_open()
        if not self.names:
            self.names.append("")
        self.ops.append(Op(kind, self.names[-1], **fields))


class NullDevice:
    """See `api.Device`. `submitted` lists what was submitted: (recording, names of segments)."""

    def __init__(self, info: DeviceInfo = INFO) -> None:
        self.info = info
        self.closed = False
        self.submitted: list[tuple[NullRecording, tuple[str, ...]]] = []
        self._alive: Counter[str] = Counter()
        self._bytes = 0
        self.meter = Meter()

    def create_buffer(self, size: int, kind: BufferKind = "device", label: str = "") -> NullBuffer:
        """New memory, zeros."""
        self._ensure_open()
        _checks.check_size(size, self.info, label)
        free = self.memory().free if kind == "device" else self.info.heap_bytes - self._bytes
        if size > free:
            raise OutOfMemoryError(f"{label!r} needs {size} bytes, {free} are free", needed=size, free=free)
        self._alive["buffer"] += 1
        self._bytes += size
        if kind == "device":
            self.meter.count(size)
        return NullBuffer(self, size, kind, label)

    def create_kernel(self, code: KernelCode) -> NullKernel:
        """A kernel, checked against the device."""
        self._ensure_open()
        _checks.check_kernel(code, self.info)
        self._alive["kernel"] += 1
        return NullKernel(self, code)

    def create_recording(self, label: str) -> NullRecording:
        """An empty recording."""
        self._ensure_open()
        self._alive["recording"] += 1
        return NullRecording(self, label)

    def submit(self, recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
        """Note it, and do its copies and fills."""
        self._ensure_open()
        assert isinstance(recording, NullRecording)
        if not recording.finished or recording.released:
            state = "released" if recording.released else "not finished"
            raise DeviceError(f"recording {recording.label!r} cannot be submitted: it is {state}")
        unknown = sorted(set(segments or ()) - set(recording.names))
        if unknown:
            raise ValueError(f"recording {recording.label!r} has no segments {unknown}, only {recording.names}")
        names = tuple(n for n in recording.names if segments is None or n in segments)
        for op in recording.ops:
            if op.segment in names:
                run(op)
        self.submitted.append((recording, names))
        return Ticket(len(self.submitted), recording.label)

    def wait(self, ticket: Ticket, timeout_s: float = 60.0, *, spin_s: float = 0.0) -> None:
        """Nothing: everything has ended."""
        self._ensure_open()

    def poll(self, ticket: Ticket) -> bool:
        """True: everything has ended."""
        self._ensure_open()
        return True

    def upload(self, target: Bindable, data: Bytes) -> None:
        """Write `data` into `target`."""
        source = memoryview(data).cast("B")
        if len(source) != as_slice(target).size:
            raise ValueError(f"cannot upload {len(source)} bytes into {as_slice(target).size}")
        with self._view(target) as view:
            view[:] = source

    @property
    def stage_bytes(self) -> int:
        """As on a GPU."""
        return CHUNK

    def stage(self, size: int, *, wait: bool = True) -> NullStage:
        """New bytes; there are always some."""
        del wait
        self._ensure_open()
        if size > CHUNK:
            raise ValueError(f"a stage has {CHUNK} bytes at most, not {size}")
        return NullStage(self, size)

    def mapped(self, target: Bindable) -> memoryview:
        """The bytes of a buffer that is not "device" memory."""
        self._ensure_open()
        target = as_slice(target)
        return target.buffer.view(target.offset, target.size)

    def transfer(self, source: Bindable, target: Bindable) -> None:
        """Copy at once."""
        _checks.check_transfer(as_slice(source), as_slice(target))
        with self._view(source) as data, self._view(target) as view:
            view[:] = data

    def flush_uploads(self, timeout_s: float = 60.0) -> None:
        """Nothing: everything has arrived."""
        self._ensure_open()

    def download(self, source: Bindable, timeout_s: float = 60.0) -> bytes:
        """The bytes of `source`."""
        with self._view(source) as view:
            return bytes(view)

    def timestamps(self, recording: Recording) -> list[tuple[str, float]]:
        """The labels, each at 0 seconds."""
        assert isinstance(recording, NullRecording)
        return [(op.label, 0.0) for op in recording.ops if op.kind == "timestamp"]

    def memory(self) -> MemoryStatus:
        """How full it is."""
        status = MemoryStatus(budget=self.info.heap_bytes, used=self._bytes, ours=self._bytes)
        return self.meter.applied(status)

    def limit_memory(self, n_bytes: int | None) -> None:
        """Let device buffers take so much at most; the peak begins anew."""
        self.meter.set_limit(n_bytes)

    def live_objects(self) -> dict[str, int]:
        """Objects alive by type."""
        return dict(+self._alive)

    def drain_debug_messages(self) -> list[DebugMessage]:
        """Nothing."""
        return []

    def removed_reason(self) -> RemovedReason:
        """Never lost."""
        return RemovedReason("OK", 0)

    def close(self) -> None:
        """Close it; may be called twice."""
        self.closed = True
        self._alive.clear()

    def forget(self, kind: str, size: int = 0) -> None:
        """An object of this device was released."""
        self._alive[kind] -= 1
        self._bytes -= size

    def forget_buffer(self, buffer: NullBuffer) -> None:
        """A buffer of this device was released."""
        self.forget("buffer", buffer.size)
        if buffer.kind == "device":
            self.meter.count(-buffer.size)

    def _view(self, part: Bindable) -> memoryview:
        self._ensure_open()
        part = as_slice(part)
        return view_of(part)

    def _ensure_open(self) -> None:
        if self.closed:
            raise DeviceError("the null device is closed; open it again")

    def __enter__(self) -> Self:
        """The device itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def as_slice(item: Bindable) -> BufferSlice:
    """A whole buffer as a slice; a slice as it is."""
    return item if isinstance(item, BufferSlice) else item[:]


def view_of(part: BufferSlice) -> memoryview:
    """The bytes under a slice."""
    assert isinstance(part.buffer, NullBuffer)
    if part.buffer.released:
        raise DeviceError(f"buffer {part.buffer.label!r} is released; it cannot be used any more")
    return memoryview(part.buffer.bytes)[part.offset : part.offset + part.size]


def run(op: Op) -> None:
    """Do what a copy or fill says; everything that an op touches must still be there."""
    views = [view_of(part) for part in op.parts]
    if op.kind == "copy":
        views[1][:] = views[0]
    elif op.kind == "fill":
        views[0][:] = op.value.to_bytes(4, "little") * (op.parts[0].size // 4)
