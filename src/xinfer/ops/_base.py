"""What the ops are given: rows of activations, weight matrices, the cache's blocks, and where to record."""

from __future__ import annotations

import dataclasses
import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from xinfer import shaders
from xinfer.errors import DeviceError
from xinfer.gpu.api import Bindable, Device, Groups, Kernel, Recording
from xinfer.ops._capacity import capacity_of
from xinfer.shaders.catalog import FORMAT_BYTES, LOAD_BYTES, STATE_WORDS, Variant, variants

Format = Literal["f32", "f16", "bf16"]
Made = Callable[[int, int], None]  # kernels made, and how many there are to be made

MAX_GROUPS = 65_535  # workgroups in one dimension of a dispatch
# lavapipe ends a lane's loops after 65,535 iterations in all, silently; each op's `*_trips` function stays below this.
MAX_TRIPS = 60_000

# common.hlsli's words of a row's state, in order.
STATE_FIELDS = ("token", "position", "sequence", "steps", "flags", "bad_step")
STATE_BYTES = 4 * STATE_WORDS
UNUSED_POSITION = 0xFFFF_FFFF  # the position of a row that is padding: nothing is appended, its attention is 0
BAD_TOKEN = 0xFFFF_FFFF  # in the ring of chosen tokens: the logits held NaN or infinity
FLAG_NOT_FINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowState:
    """One row of a step, as it lies in the state buffer (`STATE_BYTES` bytes)."""

    token: int  # to be embedded
    position: int  # of that token: how many tokens its sequence has in the cache before it
    sequence: int = 0  # row of the block table
    steps: int = 0  # tokens chosen so far
    flags: int = 0
    bad_step: int = 0  # which one was NaN or infinity, where flags has FLAG_NOT_FINITE

    def pack(self) -> bytes:
        """Its words."""
        words = [getattr(self, name) for name in STATE_FIELDS]
        return struct.pack(f"<{STATE_WORDS}I", *words, *[0] * (STATE_WORDS - len(words)))

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """A row from its words."""
        words = struct.unpack(f"<{STATE_WORDS}I", data[:STATE_BYTES])
        return cls(**dict(zip(STATE_FIELDS, words, strict=False)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`n` rows of `width` float32 each, `stride` floats apart, the first one `offset` floats into `place`."""

    place: Bindable
    n: int
    width: int
    stride: int
    offset: int = 0

    def __post_init__(self) -> None:
        end = 4 * (self.offset + (self.n - 1) * self.stride + self.width)
        if self.n < 1 or self.width < 1 or self.offset < 0 or end > self.place.size:
            raise ValueError(
                f"{self.n} rows of {self.width} floats, {self.stride} apart from {self.offset} on, "
                f"end at byte {end} of {self.place.size}"
            )

    @classmethod
    def dense(cls, place: Bindable, n: int, width: int) -> Self:
        """Rows side by side from the start of `place` on."""
        return cls(place=place, n=n, width=width, stride=width)

    def columns(self, first: int, width: int) -> Rows:
        """The same rows, `width` columns of them from `first` on."""
        if first < 0 or first + width > self.width:
            raise ValueError(f"columns {first} to {first + width} of rows that are {self.width} wide")
        return dataclasses.replace(self, offset=self.offset + first, width=width)

    def rows(self, first: int, n: int) -> Rows:
        """`n` of the rows from `first` on."""
        if first < 0 or first + n > self.n:
            raise ValueError(f"rows {first} to {first + n} of {self.n}")
        return dataclasses.replace(self, offset=self.offset + first * self.stride, n=n)


@dataclass(frozen=True, slots=True)
class MatrixSlice:
    """Rows `first_row` to `first_row + n_rows` of a matrix, in one binding."""

    place: Bindable
    first_row: int
    n_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Weights (rows, columns) on the device: row slices of one format and row stride.

    `row_stride` is in bytes, a multiple of 16, and padding behind the columns holds zeros. `scales` is for quantized
    formats to come.
    """

    rows: int
    columns: int
    format: Format
    row_stride: int
    slices: tuple[MatrixSlice, ...]
    scales: None = None

    def __post_init__(self) -> None:
        if self.row_stride % LOAD_BYTES or self.row_stride < self.columns * FORMAT_BYTES[self.format]:
            raise ValueError(
                f"a row of {self.columns} {self.format} needs a stride that is a multiple of {LOAD_BYTES} bytes "
                f"and at least {row_stride(self.columns, self.format)}, not {self.row_stride}"
            )
        expected = 0
        for part in self.slices:
            if part.first_row != expected or part.n_rows * self.row_stride > part.place.size:
                raise ValueError(f"slice at row {part.first_row}: rows must follow each other from 0, and fit")
            expected += part.n_rows
        if expected != self.rows:
            raise ValueError(f"the slices hold {expected} rows, the matrix {self.rows}")

    @property
    def row_loads(self) -> int:
        """16-byte loads of a row, padding included."""
        return self.row_stride // LOAD_BYTES

    @property
    def values_per_load(self) -> int:
        """Weights in 16 bytes."""
        return LOAD_BYTES // FORMAT_BYTES[self.format]


def row_stride(columns: int, weight_format: Format) -> int:
    """The smallest row stride in bytes of a matrix that wide."""
    return -(-columns * FORMAT_BYTES[weight_format] // LOAD_BYTES) * LOAD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBlocks:
    """One layer's K and V, in blocks of `BLOCK_TOKENS` tokens behind a block table.

    A block holds (n_kv_heads, BLOCK_TOKENS, head_dim) values; the table holds, at
    [sequence * table_stride + position / BLOCK_TOKENS], a block's number.
    """

    k: Bindable
    v: Bindable
    table: Bindable
    table_stride: int
    n_kv_heads: int
    head_dim: int
    format: Literal["f32", "f16"]

    def __post_init__(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even")


class KernelSet:
    """The kernels of one device, made when first used; a variant in `quarantine` is never used.

    Drivers may take seconds for each kernel: `on_make` is told how far `make` has come.
    """

    def __init__(
        self,
        device: Device,
        *,
        quarantine: Iterable[str] = (),
        on_make: Made | None = None,
    ) -> None:
        self.device = device
        self.capacity = capacity_of(device.info)
        self.quarantine = frozenset(quarantine)
        self._on_make: Made = on_make or (lambda _done, _total: None)
        self._kernels: dict[str, Kernel] = {}
        self._lock = threading.Lock()

    def usable(self, variant_id: str) -> bool:
        """Whether the device can run a variant, and nobody forbade it."""
        variant, info = variants()[variant_id], self.device.info
        lanes = math.prod(variant.workgroup)
        size = self._subgroup_size(variant)
        if (
            size is not None
            and info.max_workgroup_subgroups is not None
            and lanes > size * info.max_workgroup_subgroups
        ):
            return False
        if variant.subgroup_size is not None and variant.subgroup_size != info.subgroup_size_default:
            within = info.subgroup_size_min <= variant.subgroup_size <= info.subgroup_size_max
            if not within or "subgroup_size_control" not in info.features:
                return False
        return (
            variant_id not in self.quarantine
            and variant.needs <= info.features
            and variant.shared_bytes <= info.max_shared_bytes
            and lanes <= info.max_workgroup_invocations
        )

    def first_usable(self, candidates: Sequence[str]) -> Variant:
        """The first usable variant. Raises DeviceError where none is left."""
        for candidate in candidates:
            if self.usable(candidate):
                return variants()[candidate]
        barred = [candidate for candidate in candidates if candidate in self.quarantine]
        others = [candidate for candidate in candidates if candidate not in self.quarantine]
        reasons = [f"it cannot run {', '.join(others)}"] * bool(others)
        reasons += [f"in quarantine are {', '.join(barred)}, and xinfer doctor tries them again"] * bool(barred)
        raise DeviceError(
            f"{self.device.info.name} has no kernel left for {variants()[candidates[0]].op}: {'; '.join(reasons)}; "
            "--device cpu (device='cpu') goes without"
        )

    def kernel(self, variant: Variant) -> Kernel:
        """The variant's kernel."""
        with self._lock:
            if variant.id not in self._kernels:
                code = shaders.load(variant.id)
                code = dataclasses.replace(code, subgroup_size=self._subgroup_size(variant))
                self._kernels[variant.id] = self.device.create_kernel(code)
            return self._kernels[variant.id]

    def make(self, wanted: Iterable[Variant]) -> None:
        """Make those of these that are not made yet."""
        with self._lock:
            missing = [variant for variant in wanted if variant.id not in self._kernels]
        for done, variant in enumerate(missing):
            self._on_make(done, len(missing))
            self.kernel(variant)
        if missing:
            self._on_make(len(missing), len(missing))

    def _subgroup_size(self, variant: Variant) -> int | None:
        """The size that the kernel names; None where it may be any. Naming one asks for whole waves."""
        if variant.subgroup_size is None and variant.uses_waves:
            return self.device.info.subgroup_size_default
        return variant.subgroup_size

    def release(self) -> None:
        """Give every kernel back; may be called twice."""
        with self._lock:
            for kernel in self._kernels.values():
                kernel.release()
            self._kernels.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class WantedKernels:
    """Stands in for a recording, to learn which kernels one would take: nothing is recorded, and none is made."""

    label = "wanted kernels"
    segments = ()

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}  # by id, in the order in which they are first wanted

    def _nothing(self, *_: object) -> None:
        """What a recording does besides dispatches."""

    segment = copy = fill = timestamp = _nothing
    barrier = finish = release = dispatch = _nothing


@dataclass(frozen=True, slots=True)
class Recorder:
    """Where an op records its dispatches: a recording, and the device's kernels."""

    recording: Recording
    kernels: KernelSet

    def choose(self, candidates: Sequence[str], forced: str | None) -> Variant:
        """The variant to use: the one the caller insists on (a test, a tuning run), else the first usable one."""
        return self.kernels.first_usable(candidates) if forced is None else variants()[forced]

    def dispatch(
        self,
        variant: Variant,
        buffers: Mapping[str, Bindable],
        constants: Mapping[str, int | float],
        groups: Groups,
        label: str,
    ) -> None:
        """Record one dispatch, its buffers and constants by their names in the catalog."""
        if buffers.keys() != set(variant.buffers):
            raise ValueError(f"{variant.id} binds {variant.buffers}, not {tuple(buffers)}")
        if not all(1 <= n <= MAX_GROUPS for n in groups):
            raise DeviceError(f"{label}: a grid of {groups} workgroups; each dimension may be 1 to {MAX_GROUPS}")
        if isinstance(self.recording, WantedKernels):
            self.recording.variants[variant.id] = variant
            return
        kernel = self.kernels.kernel(variant)
        places = [buffers[name] for name in variant.buffers]
        self.recording.dispatch(kernel, places, variant.pack(constants), groups, label)


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def fold(groups: int) -> tuple[int, int]:
    """A line of workgroups as (x, y) with x * y >= groups and neither above the limit of a dimension."""
    if groups <= MAX_GROUPS:
        return groups, 1
    y = ceil_div(groups, MAX_GROUPS)
    return ceil_div(groups, y), y


def span(rows: Rows, name: str) -> dict[str, int | float]:
    """The constants `<name>_stride` and `<name>_offset`."""
    return {f"{name}_stride": rows.stride, f"{name}_offset": rows.offset}


def expect(condition: bool, message: str) -> None:
    """Raise ValueError: what an op was given does not fit together."""
    if not condition:
        raise ValueError(message)
