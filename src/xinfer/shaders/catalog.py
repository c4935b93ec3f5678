"""Every compiled form of every op: where its source is, how it is compiled, what it binds.

A variant's id is stable: the manifest, tuning, the quarantine and reports name variants by it. The first variant of an
op and number format is the plain one, which needs nothing beyond Vulkan 1.1 (128 lanes, 16 KiB of groupshared memory)
and is never removed. Binding and constant names are those in the source, in its order; a test compares their numbers
with the compiled SPIR-V. This module imports nothing outside the standard library: the build runs it.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FORMATS = {"f32": 0, "f16": 1, "bf16": 2}  # as common.hlsli has them
FORMAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
LOAD_BYTES = 16  # one load of weights
SPIRV_1_3 = "spirv_1_3"  # what Vulkan 1.1 guarantees
SPIRV_1_5 = "spirv_1_5"

# What common.hlsli calls STATE_WORDS and BLOCK_TOKENS, and attention's limits; a test compares them.
STATE_WORDS = 8
BLOCK_TOKENS = 32
ATTENTION_DIM_MAX = 256
ATTENTION_SPLITS_MAX = 256
ATTENTION_HEADS_A_LOAD = 8
ATTENTION_TILED_SPLITS_MAX = 132  # what its last workgroup has room for
ATTENTION_TILED_SPLIT_KEYS = 128  # the least that a split has
ATTENTION_TILED_ROWS_MAX = 16  # that it has counters for
ATTENTION_QUERIES = 32  # rows of a workgroup of the prefill variants
ATTENTION_COOP_QUERIES = 64  # and of those on matrix cores

PACKED_ROWS = 128  # packed activations have a multiple of so many rows,
PACKED_COLUMNS = 64  # and of so many columns

WAVE_NEEDS = frozenset({"subgroup_arithmetic"})
MATRIX_CORE_NEEDS = frozenset({"coop_matrix", "coop_matrix.f16.f32.16x16x16", "memory_model", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compile one op."""

    id: str
    op: str
    source: str  # file in this folder
    defines: tuple[tuple[str, int], ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    workgroup: tuple[int, int, int]
    shared_bytes: int  # groupshared memory of a workgroup
    needs: frozenset[str] = frozenset()  # names out of DeviceInfo.features
    profile: str = SPIRV_1_3
    subgroup_size: int | None = None  # the one it is written for; None: any
    steering: tuple[str, ...] = ()  # buffers that decide which way a workgroup goes: Direct3D 12 binds them read-only

    @property
    def uses_waves(self) -> bool:
        """Whether lanes compute with the others of their wave, so that a workgroup must be made of whole waves."""
        return self.needs >= WAVE_NEEDS

    @property
    def n_buffers(self) -> int:
        """Bindings, numbered from 0."""
        return len(self.buffers)

    @property
    def n_constants(self) -> int:
        """Dwords of constants."""
        return len(self.constants)

    @property
    def views(self) -> frozenset[int]:
        """Numbers of the steering bindings."""
        return frozenset(self.buffers.index(name) for name in self.steering)

    def define(self, name: str) -> int:
        """The value of one define."""
        return dict(self.defines)[name]

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The constants in order: an int as an unsigned dword, a float as a float32."""
        if values.keys() != set(self.constants):
            raise ValueError(f"{self.id} takes the constants {self.constants}, not {tuple(values)}")
        kinds = "".join("f" if isinstance(values[name], float) else "I" for name in self.constants)
        return struct.pack("<" + kinds, *(values[name] for name in self.constants))


def _elementwise(op: str, buffers: tuple[str, ...], constants: tuple[str, ...]) -> Variant:
    return Variant(
        id=f"{op}.plain",
        op=op,
        source=f"{op}.hlsl",
        defines=(("GROUP", 64),),
        buffers=buffers,
        constants=constants,
        workgroup=(64, 1, 1),
        shared_bytes=0,
    )


def _embed() -> Iterator[Variant]:
    for name, number in FORMATS.items():
        yield Variant(
            id=f"embed.{name}",
            op="embed",
            source="embed.hlsl",
            defines=(("FORMAT", number), ("GROUP", 64)),
            buffers=("state", "table", "result"),
            constants=("width", "row_loads", "first_row", "n_rows", "out_stride", "out_offset"),
            workgroup=(64, 1, 1),
            shared_bytes=0,
        )


def _rms_norm() -> Iterator[Variant]:
    for name, wave, group in (("plain", 0, 64), ("wave", 1, 128)):
        yield Variant(
            id=f"rms_norm.{name}",
            op="rms_norm",
            source="rms_norm.hlsl",
            defines=(("GROUP", group), ("WAVE", wave)),
            buffers=("x", "weight", "result"),
            constants=("width", "x_stride", "x_offset", "out_stride", "out_offset", "eps"),
            workgroup=(group, 1, 1),
            shared_bytes=4 * group,
            needs=WAVE_NEEDS if wave else frozenset(),
        )


def _rope_and_elementwise() -> Iterator[Variant]:
    yield _elementwise("rope", ("state", "table", "x"), ("n_heads", "head_dim", "x_stride", "x_offset"))
    spans = ("gate_stride", "gate_offset", "up_stride", "up_offset", "out_stride", "out_offset")
    yield _elementwise("swiglu", ("gate", "up", "result"), ("width", *spans))
    yield _elementwise("add", ("y", "x"), ("width", "y_stride", "y_offset", "x_stride", "x_offset"))


def _kv_append() -> Iterator[Variant]:
    for name in ("f32", "f16"):
        yield Variant(
            id=f"kv_append.{name}",
            op="kv_append",
            source="kv_append.hlsl",
            defines=(("FORMAT", FORMATS[name]), ("GROUP", 64)),
            buffers=("state", "block_table", "k", "v", "k_cache", "v_cache"),
            constants=("n_kv_heads", "head_dim", "table_stride", "k_stride", "k_offset", "v_stride", "v_offset"),
            workgroup=(64, 1, 1),
            shared_bytes=0,
        )


def _rope_append() -> Iterator[Variant]:
    for name in ("f32", "f16"):
        yield Variant(
            id=f"rope_append.{name}",
            op="rope_append",
            source="rope_append.hlsl",
            defines=(("FORMAT", FORMATS[name]), ("GROUP", 64)),
            buffers=("state", "table", "block_table", "qkv", "k_cache", "v_cache"),
            constants=(
                *("n_heads", "n_kv_heads", "head_dim", "table_stride"),
                *("stride", "q_offset", "k_offset", "v_offset"),
            ),
            workgroup=(64, 1, 1),
            shared_bytes=0,
        )


# --- linear -----------------------------------------------------------------------------------------------------------

GEMM_CONSTANTS = (
    *("columns", "rows", "row_loads", "x_rows", "x_stride", "x_offset"),
    *("y_stride", "y_offset", "bias_offset", "flags"),
)
GEMV_CONSTANTS = (*GEMM_CONSTANTS, "grid_x", "eps")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvShape:
    """How a GEMV is laid over the lanes: see linear_gemv.hlsl."""

    t_max: int
    set_lanes: int
    rows_per_set: int
    loads: int
    norm: bool = False
    swiglu: bool = False
    wave: bool = True
    vector_x: bool = True
    group: int = 128
    named_loads: bool = False  # a second form of a layout, with another number of loads

    @property
    def name(self) -> str:
        """The part of the variant's id behind the format."""
        if not self.vector_x:
            return "plain"
        marks = (".norm" * self.norm) + (".swiglu" * self.swiglu) + (".wave" * self.wave)
        loads = f"u{self.loads}" * self.named_loads
        return f"t{self.t_max}.l{self.set_lanes}r{self.rows_per_set}{loads}{marks}"

    @property
    def shared_bytes(self) -> int:
        """Groupshared memory: partial sums of every set's lanes, or waves of 4 lanes or more."""
        sets = self.group // self.set_lanes
        parts = max(self.group // 4 // sets, 1) if self.wave else self.set_lanes
        sums = self.rows_per_set * (2 if self.swiglu else 1) + (1 if self.norm else 0)
        return 4 * sets * parts * self.t_max * sums


GEMV_PLAIN = GemvShape(t_max=8, set_lanes=16, rows_per_set=1, loads=1, wave=False, vector_x=False, group=64)
# For one row of activations: from many short rows of weights to few long ones. Five loads of 128 lanes walk over the
# 4,864 columns of the 0.5B's down projection at once.
GEMV_ONE = tuple(
    GemvShape(t_max=1, set_lanes=lanes, rows_per_set=rows, loads=loads)
    for lanes, rows, loads in ((32, 1, 4), (32, 2, 4), (32, 4, 2), (128, 1, 5))
)
GEMV_ONE_NORM = tuple(
    GemvShape(t_max=1, set_lanes=lanes, rows_per_set=rows, loads=loads, norm=True)
    for lanes, rows, loads in ((32, 1, 4), (32, 2, 4), (32, 4, 2))
)
GEMV_SWIGLU = tuple(
    GemvShape(t_max=1, set_lanes=lanes, rows_per_set=rows, loads=loads, norm=norm, swiglu=True)
    for lanes, rows, loads in ((32, 1, 4), (32, 2, 2))
    for norm in (False, True)
)
GEMV_FEW = tuple(
    GemvShape(t_max=t_max, set_lanes=lanes, rows_per_set=rows, loads=2)
    for t_max in (4, 8)
    for lanes, rows in ((32, 2), (128, 1))
)
# The same without subgroup operations, as shader model 5.1 has to have it.
GEMV_NO_WAVE = (
    GemvShape(t_max=1, set_lanes=32, rows_per_set=2, loads=4, wave=False),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=1, loads=4, wave=False),
    GemvShape(t_max=1, set_lanes=32, rows_per_set=2, loads=4, norm=True, wave=False),
    GemvShape(t_max=1, set_lanes=32, rows_per_set=1, loads=4, norm=True, swiglu=True, wave=False),
    GemvShape(t_max=8, set_lanes=32, rows_per_set=1, loads=2, wave=False),
)
# More layouts for one row: which is best depends on the GPU, and on the matrix.
GEMV_MORE = (
    *(
        GemvShape(t_max=1, set_lanes=lanes, rows_per_set=rows, loads=4, norm=norm)
        for lanes, rows, norm in ((64, 1, False), (64, 2, False), (128, 2, False), (64, 1, True), (64, 2, True))
    ),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=1, loads=1, named_loads=True),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=2, loads=1, named_loads=True),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=2, loads=1, norm=True),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=1, loads=1, norm=True, swiglu=True),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=1, loads=4, named_loads=True),
    GemvShape(t_max=1, set_lanes=128, rows_per_set=1, loads=10, named_loads=True),
    GemvShape(t_max=1, set_lanes=32, rows_per_set=2, loads=8, named_loads=True),
    GemvShape(t_max=1, set_lanes=32, rows_per_set=1, loads=8, named_loads=True),
    GemvShape(t_max=1, set_lanes=256, rows_per_set=1, loads=5, group=256),
    GemvShape(t_max=1, set_lanes=64, rows_per_set=4, loads=2, norm=True),
    GemvShape(t_max=1, set_lanes=64, rows_per_set=1, loads=4, norm=True, swiglu=True),
    GemvShape(t_max=1, set_lanes=32, rows_per_set=2, loads=4, norm=True, swiglu=True, named_loads=True),
)
# The layouts that are chosen for one row, for several that get the numbers which each of them gets alone; GEMV_FEW has
# the others.
SEVERAL_ROWS = 4
GEMV_SEVERAL = (
    *(
        GemvShape(t_max=SEVERAL_ROWS, set_lanes=lanes, rows_per_set=rows, loads=loads, norm=norm)
        for lanes, rows, loads, norm in ((64, 1, 2, False), (128, 2, 1, False), (64, 4, 1, True), (128, 2, 1, True))
    ),
    *(
        GemvShape(t_max=SEVERAL_ROWS, set_lanes=lanes, rows_per_set=rows, loads=1, norm=True, swiglu=True)
        for lanes, rows in ((32, 1), (32, 2), (64, 1), (128, 1))
    ),
)
GEMV_FAST = (*GEMV_ONE, *GEMV_ONE_NORM, *GEMV_SWIGLU, *GEMV_FEW, *GEMV_NO_WAVE, *GEMV_MORE, *GEMV_SEVERAL)


def gemv_id(weight_format: str, shape: GemvShape) -> str:
    """The id of a GEMV variant."""
    return f"linear_gemv.{weight_format}.{shape.name}"


def _linear_gemv() -> Iterator[Variant]:
    for name, number in FORMATS.items():
        for shape in (GEMV_PLAIN, *(GEMV_FAST if name != "f32" else ())):
            defines = (
                ("FORMAT", number),
                ("GROUP", shape.group),
                ("WAVE", int(shape.wave)),
                ("VECTOR_X", int(shape.vector_x)),
                ("T_MAX", shape.t_max),
                ("SET_LANES", shape.set_lanes),
                ("ROWS_PER_SET", shape.rows_per_set),
                ("LOADS", shape.loads),
                ("NORM", int(shape.norm)),
                ("SWIGLU", int(shape.swiglu)),
            )
            extra = ("norm_weight",) if shape.norm else ()
            yield Variant(
                id=gemv_id(name, shape),
                op="linear_gemv",
                source="linear_gemv.hlsl",
                defines=defines,
                buffers=("x", "w", "w2" if shape.swiglu else "bias", "y", *extra),
                constants=GEMV_CONSTANTS,
                workgroup=(shape.group, 1, 1),
                shared_bytes=shape.shared_bytes,
                needs=WAVE_NEEDS if shape.wave else frozenset(),
            )


def _linear_gemm() -> Iterator[Variant]:
    tiles = (("plain", 32, 32, 16, 4, 4), ("tile64", 64, 64, 16, 4, 4), ("tile128", 128, 128, 16, 8, 8))
    for name, number in FORMATS.items():
        for tile, m, n, k, lane_m, lane_n in tiles:
            if name == "f32" and tile != "plain":
                continue
            group = m // lane_m * (n // lane_n)
            yield Variant(
                id=f"linear_gemm.{name}.{tile}",
                op="linear_gemm",
                source="linear_gemm.hlsl",
                defines=(
                    *(("FORMAT", number), ("TILE_M", m), ("TILE_N", n), ("TILE_K", k)),
                    *(("LANE_M", lane_m), ("LANE_N", lane_n), ("GROUP", group)),
                ),
                buffers=("x", "w", "bias", "y"),
                constants=GEMM_CONSTANTS,
                workgroup=(group, 1, 1),
                shared_bytes=4 * k * (m + 1 + n + 1),
            )


COOP_CONSTANTS = (
    *("rows", "row_loads", "x_rows", "x_loads", "low_offset"),
    *("y_stride", "y_offset", "bias_offset", "flags", "part_loads", "part_stride"),
)


# Edge of a square tile, 16-byte loads of its row, and waves down and across, by the halves of x that count. On an H200
# a wave of 64 x 64 reads groupshared memory least for what it multiplies (benchmarks/LOG.md).
COOP_TILES = {(64, 0): (8, 2, 2), (128, 0): (8, 2, 2), (64, 1): (4, 2, 2), (128, 1): (4, 2, 2)}


def coop_id(weight_format: str, tile: int, *, split: bool, swiglu: bool = False) -> str:
    """The id of a matrix-core GEMM; split: the accurate form; swiglu: of two matrices, the one gated by the other."""
    return f"linear_gemm.{weight_format}.coop{tile}.{'split' if split else 'half'}{'.swiglu' if swiglu else ''}"


def _linear_coop() -> Iterator[Variant]:
    forms = itertools.product(("f16", "bf16"), COOP_TILES.items(), (0, 1))
    for name, ((tile, split), (loads, waves_m, waves_n)), swiglu in forms:
        waves = waves_m * waves_n
        staged = ((1 + split) * tile + tile) * (loads + 1)
        results = waves * 16 * (tile // waves_n // 4 + 1)
        yield Variant(
            id=coop_id(name, tile, split=bool(split), swiglu=bool(swiglu)),
            op="linear_gemm",
            source="linear_gemm_coop.slang",
            defines=(
                *(("FORMAT", FORMATS[name]), ("WAVE", 1), ("EMULATE", 0), ("SPLIT", split)),
                ("SWIGLU", swiglu),
                *(
                    ("TILE_M", tile),
                    ("TILE_N", tile),
                    ("TILE_LOADS", loads),
                    ("WAVES_M", waves_m),
                    ("WAVES_N", waves_n),
                ),
            ),
            buffers=("scales", "halves", "w", "w2" if swiglu else "bias", "y"),
            constants=COOP_CONSTANTS,
            workgroup=(32 * waves, 1, 1),
            shared_bytes=16 * max(staged, results),
            needs=MATRIX_CORE_NEEDS,
            profile=SPIRV_1_5,
            subgroup_size=32,
        )


def _sum_parts() -> Iterator[Variant]:
    yield Variant(
        id="sum_parts.plain",
        op="sum_parts",
        source="sum_parts.hlsl",
        defines=(("GROUP", 128),),
        buffers=("parts", "bias", "y"),
        constants=("width", "n_parts", "part_stride", "y_stride", "y_offset", "flags"),
        workgroup=(128, 1, 1),
        shared_bytes=0,
    )


def _pack_rows() -> Iterator[Variant]:
    for (source, form), (name, wave) in itertools.product(
        enumerate(("", "norm.", "swiglu.", "fours.")), (("plain", 0), ("wave", 1))
    ):
        yield Variant(
            id=f"pack_rows.{form}{name}",
            op="pack_rows",
            source="pack_rows.hlsl",
            defines=(("GROUP", 128), ("WAVE", wave), ("SOURCE", source)),
            buffers=("x", *(("other",) if form in ("norm.", "swiglu.") else ()), "scales", "halves"),
            constants=("width", "x_rows", "x_stride", "x_offset", "up_offset", "row_loads", "low_offset", "eps"),
            workgroup=(128, 1, 1),
            shared_bytes=4 * 128,
            needs=WAVE_NEEDS if wave else frozenset(),
        )


# --- attention, argmax and sample -------------------------------------------------------------------------------------

ATTENTION_CONSTANTS = (
    *("n_heads", "n_kv_heads", "head_dim", "q_stride", "q_offset", "out_stride", "out_offset"),
    *("table_stride", "window", "n_splits", "n_rows", "scale", "k_offset", "v_offset"),
)


def _attention() -> Iterator[Variant]:
    buffers = ("q", "k_cache", "v_cache", "block_table", "state", "result")
    for name in ("f32", "f16"):
        number = ("FORMAT", FORMATS[name])
        yield _attention_kernel(f"{name}.plain", "plain", (number, ("GROUP", 64)), buffers, 64, 2 * 64)
        lanes = 128
        floats = ATTENTION_HEADS_A_LOAD * (ATTENTION_DIM_MAX + lanes + 1) + 2 * lanes
        yield _attention_kernel(f"{name}.decode", "decode", (number, ("GROUP", lanes)), buffers, lanes, floats)
        for dim_max, (turn, heads) in itertools.product((64, 128), ((0, 8), (1, 8), (1, 2))):
            yield _attention_tiled(name, dim_max, turn, heads, buffers)
        for dim_max, keys in ((64, 32), (128, 16)):
            rows, defines = ATTENTION_QUERIES, (number, ("DIM_MAX", dim_max), ("KEYS", keys))
            floats = 4 * (rows + keys) * (dim_max // 4 + 1) + rows * (keys + 2 + 4 + 1)
            yield _attention_kernel(f"{name}.prefill{dim_max}", "prefill", defines, buffers, 128, floats)
    for dim, split in itertools.product((64, 128), (0, 1)):
        yield _attention_coop(dim, split, buffers)
    yield _attention_kernel("combine", "combine", (("GROUP", 64),), ("partial", "result"), 64, ATTENTION_SPLITS_MAX)


def _attention_tiled(name: str, dim_max: int, turn: int, heads: int, buffers: tuple[str, ...]) -> Variant:
    lanes = 512 if heads == ATTENTION_HEADS_A_LOAD else 256
    pieces = dim_max // (4 if name == "f32" else 8)
    keys = 1024 // pieces  # 16 KiB
    floats = 4 * keys * (pieces + 1) + heads * dim_max + heads * max(keys + 1, ATTENTION_TILED_SPLITS_MAX)
    floats += heads * 16 + heads + 1 + turn * 2 * 4 * pieces
    defines = (
        *(("FORMAT", FORMATS[name]), ("GROUP", lanes), ("DIM_MAX", dim_max)),
        *(("HEADS", heads), ("KEYS", keys), ("TURN", turn)),
    )
    form = f"tiled{dim_max}" + "_turn" * turn + f"{heads}" * (heads != ATTENTION_HEADS_A_LOAD)
    bound = (*buffers, "scratch", *(("table",) if turn else ()))
    return _attention_kernel(f"{name}.{form}", "tiled", defines, bound, lanes, floats)


def _attention_coop(dim: int, split: int, buffers: tuple[str, ...]) -> Variant:
    keys, waves = 4096 // dim, ATTENTION_COOP_QUERIES // 16
    weights = (1 + split) * 16 * (keys // 8 + 1) + 64
    tiles = max(2 * keys, ATTENTION_COOP_QUERIES) * (dim // 8 + 1)
    loads = tiles + waves * max(16 * (keys // 4 + 2), weights)
    return Variant(
        id=f"attention.f16.coop{dim}.{'split' if split else 'half'}",
        op="attention",
        source="attention_coop.slang",
        defines=(
            *(("FORMAT", FORMATS["f16"]), ("WAVE", 1), ("EMULATE", 0), ("SPLIT", split)),
            *(("DIM_MAX", dim), ("KEYS", keys), ("WAVES", waves)),
        ),
        buffers=buffers,
        constants=ATTENTION_CONSTANTS,
        workgroup=(32 * waves, 1, 1),
        shared_bytes=16 * loads + 2 * 4 * ATTENTION_COOP_QUERIES,
        needs=MATRIX_CORE_NEEDS | {"subgroup_shuffle"},
        profile=SPIRV_1_5,
        subgroup_size=32,
    )


def _attention_kernel(
    name: str, source: str, defines: tuple[tuple[str, int], ...], buffers: tuple[str, ...], lanes: int, floats: int
) -> Variant:
    return Variant(
        id=f"attention.{name}",
        op="attention",
        source=f"attention_{source}.hlsl",
        defines=defines,
        buffers=buffers,
        constants=ATTENTION_CONSTANTS,
        workgroup=(lanes, 1, 1),
        shared_bytes=4 * floats,
        steering=("state",) if "state" in buffers else (),
    )


def _argmax() -> Iterator[Variant]:
    stages: tuple[tuple[str, int, tuple[str, ...], tuple[str, ...]], ...] = (
        (
            *("chunk", 0, ("logits", "candidates")),
            ("n_valid", "chunk", "n_chunks", "logits_stride", "logits_offset"),
        ),
        ("pick", 1, ("candidates", "state", "ring"), ("n_chunks", "ring_size", "advance")),
    )
    for name, stage, buffers, constants in stages:
        yield Variant(
            id=f"argmax.{name}",
            op="argmax",
            source="argmax.hlsl",
            defines=(("GROUP", 128), ("STAGE", stage)),
            buffers=buffers,
            constants=constants,
            workgroup=(128, 1, 1),
            shared_bytes=4 * 2 * 128,
        )


# What sample.hlsli calls by these names.
SAMPLE_PARAM_WORDS = 16
SAMPLE_CHUNKS_MAX = 512
SAMPLE_CANDIDATES_MAX = 256


def _sample() -> Iterator[Variant]:
    spread = ("vocab", "chunk_shift", "n_chunks", "scratch_stride", "ring_size", "advance")
    chosen = ("params", "scratch", "state", "ring", "counts")
    logits = ("params", "logits", "counts", "bias", "scratch")
    strides = ("vocab", "chunk_shift", "scratch_stride", "logits_stride", "logits_offset")
    few = 4 * (2 * SAMPLE_CHUNKS_MAX + 7 * SAMPLE_CANDIDATES_MAX + 11)
    yield _sample_stage("chunk", "sample.hlsl", 128, logits, strides, 4, stage=0)
    yield _sample_stage("sum", "sample.hlsl", 128, ("params", "scratch"), spread[:4], 12, stage=1)
    for name, lanes in (("", 128), (".wide", 512)):
        yield _sample_stage(f"few{name}", "sample_few.hlsl", lanes, chosen, spread, few)
        whole = tuple(constant for constant in spread if constant != "chunk_shift")
        yield _sample_stage(f"all{name}", "sample_all.hlsl", lanes, chosen, whole, 4 * (2 * 256 + lanes + 7))


def _sample_stage(
    name: str,
    source: str,
    lanes: int,
    buffers: tuple[str, ...],
    constants: tuple[str, ...],
    shared_bytes: int,
    *,
    stage: int | None = None,
) -> Variant:
    return Variant(
        id=f"sample.{name}",
        op="sample",
        source=source,
        defines=(("GROUP", lanes), *((("STAGE", stage),) if stage is not None else ())),
        buffers=buffers,
        constants=constants,
        workgroup=(lanes, 1, 1),
        shared_bytes=shared_bytes,
        steering=("params", "scratch") if source == "sample_all.hlsl" else ("params",),
    )


@functools.cache
def variants() -> Mapping[str, Variant]:
    """Every variant by its id, in the catalog's order."""
    families = (
        *(_embed, _rms_norm, _rope_and_elementwise, _kv_append, _rope_append),
        *(_linear_gemv, _linear_gemm, _linear_coop, _sum_parts, _pack_rows, _attention, _argmax),
        _sample,
    )
    made = [variant for family in families for variant in family()]
    by_id = {variant.id: variant for variant in made}
    assert len(by_id) == len(made), "two variants have one id"
    return by_id
