"""What a GPU is to the rest of xinfer: four protocols that every backend implements under the same names.

A `Device` makes `Buffer`s, `Kernel`s and `Recording`s. A recording is made once, finished, and then submitted as often
as wanted. `Device.submit` answers with a `Ticket`; `Device.wait` blocks until the work behind one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

BufferKind = Literal["device", "upload", "readback"]
DeviceKind = Literal["discrete", "integrated", "virtual", "cpu", "other"]
Severity = Literal["corruption", "error", "warning", "info", "message"]
Bytes = bytes | bytearray | memoryview
Groups = tuple[int, int, int]

MAX_BUFFERS = 8  # bindings of one op
MAX_CONSTANTS = 32  # dwords of constants of one op


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One adapter: what it is, its limits, and the features that the engine will use on it."""

    api: str  # "vulkan", "d3d12", "null"
    index: int  # what "vulkan:1" selects
    name: str
    kind: DeviceKind
    vendor_id: int
    device_id: int
    driver: str
    driver_version: str
    pci: str = ""  # "0000:65:00.0", to tell two of a kind apart; "" where the driver does not say
    api_version: str
    heap_bytes: int  # the largest heap of device memory
    subgroup_size_min: int
    subgroup_size_max: int
    subgroup_size_default: int
    max_groups: Groups  # workgroups of one dispatch, by axis
    max_workgroup_invocations: int
    max_workgroup_subgroups: int | None = None  # where a kernel names its subgroups' size; None: no limit of its own
    max_shared_bytes: int  # groupshared memory of one workgroup
    max_storage_range: int  # bytes that one binding may span
    storage_alignment: int  # a binding's offset is a multiple of this
    max_allocation: int  # bytes of one buffer
    features: frozenset[str]
    emulated: bool = False  # one API on top of another: used when asked for, never chosen by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HlslSource:
    """A shader for APIs that compile at run time, its includes already put in."""

    name: str  # of its file, for the compiler's messages
    text: str
    defines: tuple[tuple[str, int], ...] = ()
    views: frozenset[int] = frozenset()  # bindings that are read-only (registers t); the others are writable (u)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCode:
    """A compute shader in the forms that the APIs take, and what has to be known to bind and launch it."""

    id: str
    spirv: bytes
    hlsl: HlslSource | None = None  # None: it exists for Vulkan only
    entry: str = "main"
    n_buffers: int
    n_constants: int  # dwords
    constant_names: tuple[str, ...] = ()  # for messages
    workgroup: Groups
    subgroup_size: int | None = None  # required size; None leaves it to the driver
    needs: frozenset[str] = frozenset()  # names out of DeviceInfo.features


@dataclass(frozen=True, slots=True)
class Ticket:
    """One submission; tickets of a device end in the order of their values."""

    value: int
    label: str


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Bytes of the largest device heap: what may be used at most, what is in use by all, and our part of that."""

    budget: int
    used: int
    ours: int
    peak: int = 0  # the most that our buffers of the kind "device" took at one time since the limit was set
    shared: int | None = None  # that buffers of all kinds may still take, where "upload" ones are of the same heap

    @property
    def free(self) -> int:
        """Bytes that may still be allocated."""
        return max(0, self.budget - self.used)


@dataclass(frozen=True, slots=True)
class DebugMessage:
    """What a debug or validation layer said."""

    severity: Severity
    id: str  # "VUID-vkCmdFillBuffer-size-00026", or the number of a D3D12_MESSAGE_ID; "" where there is none
    text: str

    def __str__(self) -> str:
        return f"{self.severity} {self.id}: {self.text}" if self.id else f"{self.severity}: {self.text}"


@dataclass(frozen=True, slots=True)
class RemovedReason:
    """Why the driver gave a device up, or that it did not."""

    name: str  # "S_OK", "DXGI_ERROR_DEVICE_HUNG", "VK_ERROR_DEVICE_LOST", ...
    code: int  # the HRESULT as an unsigned number, or the VkResult
    details: tuple[str, ...] = ()  # what the driver adds: the last commands that it began and ended, page faults

    @property
    def lost(self) -> bool:
        """Whether the device is gone."""
        return self.code != 0

    def __str__(self) -> str:
        code = f"{self.code:#010x}" if self.code >= 0 else str(self.code)
        return "; ".join([f"{self.name} ({code})", *self.details])


class Buffer(Protocol):
    """A piece of memory. "device" memory is reached by upload, download and copies; the other kinds are mapped."""

    @property
    def size(self) -> int:
        """Bytes, as asked for."""

    @property
    def kind(self) -> BufferKind:
        """Where it lies."""

    @property
    def label(self) -> str:
        """Its name in errors and in a debugger."""

    @property
    def in_place(self) -> bool:
        """Whether the host reaches its memory itself; `Device.mapped` is how."""

    def __getitem__(self, span: slice) -> BufferSlice:
        """`buffer[start:stop]`, in bytes."""

    def write(self, data: Bytes, offset: int = 0) -> None:
        """Write into a mapped buffer; the work submitted afterwards sees it."""

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Read a mapped buffer; it holds what the work that has been waited for wrote."""

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes of a mapped buffer themselves; whoever asks lets the view go before the buffer."""

    def release(self) -> None:
        """Give the memory back, after the work in flight that uses it; may be called twice."""


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """`size` bytes of `buffer` from `offset` on."""

    buffer: Buffer
    offset: int
    size: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.size < 0 or self.offset + self.size > self.buffer.size:
            raise ValueError(
                f"bytes {self.offset} to {self.offset + self.size} do not lie within buffer "
                f"{self.buffer.label!r} of {self.buffer.size} bytes"
            )

    def __getitem__(self, span: slice) -> BufferSlice:
        """A part of this slice, in bytes from its own start."""
        start, stop, step = span.indices(self.size)
        if step != 1 or stop < start:
            raise ValueError(f"a buffer is sliced as [start:stop] with start <= stop, not {span}")
        return BufferSlice(self.buffer, self.offset + start, stop - start)


Bindable = Buffer | BufferSlice


class Kernel(Protocol):
    """A pipeline made from a `KernelCode`."""

    @property
    def code(self) -> KernelCode:
        """What it was made from."""

    def release(self) -> None:
        """Give it back; recordings made with it stay valid."""


class Recording(Protocol):
    """Ordered segments of commands: recorded once, then immutable and replayed."""

    @property
    def label(self) -> str:
        """Its name in errors and in a debugger."""

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments, in order."""

    def segment(self, name: str) -> None:
        """Open the next segment; commands before the first call go to one with the name ""."""

    def dispatch(
        self, kernel: Kernel, buffers: Sequence[Bindable], constants: bytes | Sequence[int], groups: Groups, label: str
    ) -> None:
        """Run `kernel` over `groups` workgroups. Constants are unsigned dwords, or their bytes."""

    def copy(self, source: Bindable, target: Bindable) -> None:
        """Copy between slices of one size."""

    def fill(self, target: Bindable, value: int) -> None:
        """Fill with a repeated u32; offset and size are multiples of 4."""

    def barrier(self) -> None:
        """What follows sees everything that was written before."""

    def timestamp(self, label: str) -> None:
        """Note the time at which everything recorded before has ended."""

    def finish(self) -> None:
        """Close it. Only a finished recording is submitted."""

    def release(self) -> None:
        """Give it back, after the work in flight that uses it; may be called twice."""


class Stage(Protocol):
    """Memory that the device copies from, for uploads. It is for the thread that asked for it, `view` for any."""

    @property
    def view(self) -> memoryview:
        """Its bytes, until it is sent or given back."""

    def send(self, parts: Sequence[tuple[int, Bindable]]) -> None:
        """Copy to each target the bytes that begin at a place in the stage, in order as an upload; it is given back."""

    def release(self) -> None:
        """Give it back; may be called twice."""


class Device(Protocol):
    """An opened adapter. Safe to use from several threads; one recording is recorded by one thread."""

    @property
    def info(self) -> DeviceInfo:
        """What it is."""

    def create_buffer(self, size: int, kind: BufferKind = "device", label: str = "") -> Buffer:
        """New memory, its content undefined. Raises OutOfMemoryError before the driver would."""

    def create_kernel(self, code: KernelCode) -> Kernel:
        """Compile a shader. Raises DeviceError where the device lacks what it needs."""

    def create_recording(self, label: str) -> Recording:
        """An empty recording."""

    def submit(self, recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
        """Queue a finished recording, or some of its segments; uploads made before come first."""

    def wait(self, ticket: Ticket, timeout_s: float = 60.0, *, spin_s: float = 0.0) -> None:
        """Block until `ticket` has ended. Raises DeviceHungError after `timeout_s`, DeviceLostError with the device.

        For the first `spin_s` it asks again and again rather than sleep: a core is busy, and the answer comes sooner
        (by about 70 us with NVIDIA's driver).
        """

    def poll(self, ticket: Ticket) -> bool:
        """Whether `ticket` has ended."""

    def upload(self, target: Bindable, data: Bytes) -> None:
        """Write `data` (as long as `target`), in place where the host reaches it; `data` may be reused on return."""

    @property
    def stage_bytes(self) -> int:
        """The size of the largest stage."""

    def stage(self, size: int, *, wait: bool = True) -> Stage | None:
        """`size` bytes that are filled by whoever can, and then sent.

        None where all stages are in use and `wait` is not set. None, too, where the thread that asks has some itself
        and others the rest: it has to send one first, since they may be waiting for that.
        """

    def mapped(self, target: Bindable) -> memoryview:
        """The bytes themselves of a buffer that is `in_place`, behind the submitted work that uses it.

        Whoever asks lets the view go before the buffer.
        """

    def transfer(self, source: Bindable, target: Bindable) -> None:
        """As `upload`, from an "upload" buffer, without a copy by the host; `source` must stay as it is until then."""

    def flush_uploads(self, timeout_s: float = 60.0) -> None:
        """Block until every upload has arrived."""

    def download(self, source: Bindable, timeout_s: float = 60.0) -> bytes:
        """Read device memory after everything submitted before."""

    def timestamps(self, recording: Recording) -> list[tuple[str, float]]:
        """(label, seconds since the recording's first timestamp) of the last run, which has been waited for."""

    def memory(self) -> MemoryStatus:
        """How full the device memory is."""

    def limit_memory(self, n_bytes: int | None) -> None:
        """Let buffers of the kind "device" take so much at most, all together; None lifts the limit.

        `memory().peak` begins anew.
        """

    def live_objects(self) -> dict[str, int]:
        """Native objects alive by type, those at zero left out: {} once everything is released."""

    def drain_debug_messages(self) -> list[DebugMessage]:
        """What the validation layers said since the last call; empty without `debug`."""

    def removed_reason(self) -> RemovedReason:
        """Why the device was lost; its `lost` is False as long as it is not. Also to be asked of a closed device."""

    def close(self) -> None:
        """Wait (bounded) for the work in flight and give everything back; may be called twice."""

    def __enter__(self) -> Self:
        """The device itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
