"""A whole layer of a decode step in one dispatch, by workgroups that stay: for one row of activations.

Its workgroups wait for one another within the dispatch, so all of them must be running at the same time. No API
promises that; it holds where there are no more of them than the GPU has multiprocessors, and it is relied upon only on
the GPUs of `RESIDENT_GROUPS`, and there only where `xinfer doctor` has seen it. A barrier that is not complete in time
is given up: `RowState.arrived` says so, and argmax gives BAD_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from xinfer.gpu.api import Bindable, BufferSlice, DeviceInfo
from xinfer.ops._attention import COUNTER_BYTES, FEW_KEYS, attention_trips
from xinfer.ops._base import MAX_TRIPS, CacheBlocks, KernelSet, Matrix, Recorder, Rows, ceil_div, expect
from xinfer.shaders.catalog import (
    ATTENTION_TILED_ROWS_MAX,
    ATTENTION_TILED_SPLIT_KEYS,
    ATTENTION_TILED_SPLITS_MAX,
    LAYER_PARTS,
    LAYER_STAGE_LOADS,
    LOAD_BYTES,
    Variant,
    layer_id,
    variants,
)

NVIDIA = 0x10DE
# GPUs on which it pays (benchmarks/layer_kernel.py), by vendor and a part of the name, and how many workgroups stay
# there: one on each multiprocessor.
RESIDENT_GROUPS = {(NVIDIA, "H200"): 132}

POLLS = 8 * 9_000  # looks at a dispatch's barriers: some tens of milliseconds, and few enough for MAX_TRIPS
POLLS_A_TRIP = 8
VALUES_PER_LOAD = 8


class Phase(IntEnum):
    """What the kernel does one after the other, as decode_layer.slang numbers it."""

    QKV = 0
    ATTENTION = 1
    OUTPUT = 2
    GATE_UP = 3
    DOWN = 4


ALL_PHASES = (Phase.QKV, Phase.DOWN)


class LayerTensors(Protocol):
    """A layer's weights, all of them in one buffer."""

    @property
    def input_ln(self) -> BufferSlice:
        """float32 (hidden,)."""

    @property
    def qkv(self) -> Matrix:
        """(q_size + 2 * kv_size, hidden)."""

    @property
    def qkv_b(self) -> BufferSlice:
        """float32 (q_size + 2 * kv_size,)."""

    @property
    def o(self) -> Matrix:
        """(hidden, q_size)."""

    @property
    def post_ln(self) -> BufferSlice:
        """float32 (hidden,)."""

    @property
    def gate(self) -> Matrix:
        """(inner, hidden)."""

    @property
    def up(self) -> Matrix:
        """(inner, hidden)."""

    @property
    def down(self) -> Matrix:
        """(hidden, inner)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """One row of each activation, all of them in one buffer: what a layer reads, leaves, and writes on its way."""

    x: Rows  # (1, hidden): the residual stream, in and out
    qkv: Rows  # (1, q_size + 2 * kv_size)
    attn: Rows  # (1, q_size)
    gated: Rows  # (1, inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """A kernel, how many workgroups stay, and into how many splits its attention divides the keys."""

    variant: Variant
    n_groups: int
    n_splits: int
    scratch_bytes: int  # counters of splits and float32 partial results
    counter_bytes: int  # of them, in front: zero before the first use, and again after each


def resident_groups(info: DeviceInfo) -> int | None:
    """How many workgroups stay on a GPU of the list; None on others."""
    found = [n for (vendor, name), n in RESIDENT_GROUPS.items() if vendor == info.vendor_id and name in info.name]
    return found[0] if found and info.kind == "discrete" else None


def plan_layer(
    kernels: KernelSet,
    layers: Sequence[LayerTensors],
    cache: CacheBlocks,
    *,
    n_heads: int,
    max_keys: int,
    variant: str | None = None,
    n_groups: int | None = None,
    n_splits: int | None = None,
) -> LayerPlan | None:
    """How decode steps run `layers` whole, with up to `max_keys` keys; None where they cannot, or it is not wanted.

    It is wanted on the GPUs of the list, where the kernel is usable; `variant` and `n_groups`, for tests and measuring,
    insist on it. What it cannot run are layers in several bindings, of float32 weights, of columns that are no multiple
    of 8, or wider than a workgroup can hold.
    """
    if variant is not None and variant in kernels.quarantine:
        return None
    groups = n_groups or resident_groups(kernels.device.info)
    if groups is None or not layers:
        return None
    few = max_keys * cache.n_kv_heads <= FEW_KEYS
    candidates = layer_candidates(layers[0], cache, few_keys=few) if variant is None else [variant]
    usable = [name for name in candidates if variant is not None or kernels.usable(name)]
    if not usable or cache.head_dim % VALUES_PER_LOAD or n_heads % cache.n_kv_heads:
        return None
    chosen = variants()[usable[0]]
    subgroup = kernels.device.info.subgroup_size_max
    if not all(_fits(w, layers[0], chosen, subgroup, kernels.device.info.max_storage_range) for w in layers):
        return None
    bundles = cache.n_kv_heads * ceil_div(n_heads // cache.n_kv_heads, chosen.define("HEADS"))
    splits = n_splits or min(max(groups // bundles, 1), ceil_div(max_keys, ATTENTION_TILED_SPLIT_KEYS))
    splits = min(splits, ATTENTION_TILED_SPLITS_MAX)
    while layer_trips(chosen.id, layers[0], cache, n_heads, max_keys, groups, splits) >= MAX_TRIPS:
        if splits == ATTENTION_TILED_SPLITS_MAX:
            return None
        splits = min(2 * splits, ATTENTION_TILED_SPLITS_MAX)
    counters = COUNTER_BYTES * n_heads * ATTENTION_TILED_ROWS_MAX
    partial = 4 * n_heads * splits * (cache.head_dim + 4)
    return LayerPlan(
        variant=chosen,
        n_groups=groups,
        n_splits=splits,
        scratch_bytes=counters + partial,
        counter_bytes=counters,
    )


def layer_candidates(w: LayerTensors, cache: CacheBlocks, *, few_keys: bool) -> list[str]:
    """Variants that fit, best first: with few keys few heads share the loads of keys, and more workgroups attend."""
    if w.qkv.format == "f32" or cache.head_dim > 128:
        return []
    dim_max = 64 if cache.head_dim <= 64 else 128
    return [layer_id(w.qkv.format, cache.format, dim_max, heads) for heads in ((2, 8) if few_keys else (8, 2))]


def decode_layer(
    on: Recorder,
    plan: LayerPlan,
    state: Bindable,
    table: Bindable,
    w: LayerTensors,
    rows: LayerRows,
    cache: CacheBlocks,
    *,
    eps: float,
    scratch: Bindable,
    window: int | None = None,
    phases: tuple[Phase, Phase] = ALL_PHASES,
    arrivals: int = 0,
    label: str,
) -> int:
    """`rows.x` through a layer, with `norm_linear`, `turn_attention`, `linear`, `gate_up` and `linear` in one dispatch.

    `phases` are the first and the last that run; what those before would have made must be there. `arrivals` is how
    many workgroups have come to barriers since the state was loaded, or argmax has run: 0, or what the dispatch before
    returned; several dispatches of one phase each do the same without a barrier. `scratch` holds `plan.scratch_bytes`,
    of which the first `plan.counter_bytes` are zero before the first use. The new row of the cache is written.
    """
    first, last = phases
    floats, offsets = _one_buffer(rows, label)
    q_size = rows.attn.width
    kv_size = (rows.qkv.width - q_size) // 2
    expect(0 <= first <= last <= Phase.DOWN, f"{label}: no phases {first} to {last}")
    expect(kv_size == cache.n_kv_heads * cache.head_dim, f"{label}: k and v are {kv_size} wide")
    expect(scratch.size >= plan.scratch_bytes, f"{label}: the scratch needs {plan.scratch_bytes} bytes")
    layer, at = _places(w)
    shifts = [
        _set_shift(columns // VALUES_PER_LOAD, plan.variant, on.kernels.device.info.subgroup_size_max)
        for columns in (w.qkv.columns, w.o.columns, w.down.columns)
    ]
    constants: dict[str, int | float] = {
        "n_heads": q_size // cache.head_dim,
        "n_kv_heads": cache.n_kv_heads,
        "head_dim": cache.head_dim,
        "q_stride": 0,
        "q_offset": offsets["qkv"],
        "out_stride": 0,
        "out_offset": offsets["attn"],
        "table_stride": cache.table_stride,
        "window": window or 0,
        "n_splits": plan.n_splits,
        "scale": cache.head_dim**-0.5,
        "k_offset": offsets["qkv"] + q_size,
        "v_offset": offsets["qkv"] + q_size + kv_size,
        "hidden": w.qkv.columns,
        "inner": w.down.columns,
        "x_offset": offsets["x"],
        "gated_offset": offsets["gated"],
        **at,
        "eps": float(eps),
        "set_shifts": shifts[0] | shifts[1] << 8 | shifts[2] << 16,
        "first_phase": int(first),
        "n_phases": last - first + 1,
        "arrivals": arrivals,
        "polls": POLLS,
        "n_groups": plan.n_groups,
    }
    buffers = {
        "layer": layer,
        "floats": floats,
        "k_cache": cache.k,
        "v_cache": cache.v,
        "block_table": cache.table,
        "state": state,
        "scratch": scratch,
        "table": table,
    }
    on.dispatch(plan.variant, buffers, constants, (plan.n_groups, 1, 1), label)
    return arrivals + (last - first) * plan.n_groups


def layer_trips(
    variant_id: str,
    w: LayerTensors,
    cache: CacheBlocks,
    n_heads: int,
    max_keys: int,
    n_groups: int,
    n_splits: int,
) -> int:
    """Loop iterations of one lane in all phases, waiting included; for waves of 4 lanes, the worst."""
    variant = variants()[variant_id]
    twin = f"attention.{cache.format}.tiled{variant.define('DIM_MAX')}_turn"
    heads = variant.define("HEADS")
    jobs = ceil_div(n_splits * cache.n_kv_heads * ceil_div(n_heads // cache.n_kv_heads, heads), n_groups)
    # A tile takes as many trips as that of the twin, whose heads are as many or more, times the lanes it has more.
    factor = ceil_div(512, variant.workgroup[0])
    trips = factor * jobs * attention_trips(twin, head_dim=cache.head_dim, max_keys=max_keys, n_splits=n_splits)
    matrices = ((w.qkv, 1), (w.o, 1), (w.gate, 2), (w.down, 1))
    trips += sum(_product_trips(variant, m.columns, m.rows * n, n_groups) for m, n in matrices)
    return trips + POLLS // POLLS_A_TRIP


def _product_trips(variant: Variant, columns: int, rows: int, n_groups: int) -> int:
    lanes, set_rows, loads = (variant.workgroup[0], variant.define("WEIGHT_ROWS"), variant.define("WEIGHT_LOADS"))
    a_row = columns // VALUES_PER_LOAD
    set_lanes = 1 << _set_shift(a_row, variant, 4)
    chunks = ceil_div(a_row, min(LAYER_STAGE_LOADS, set_lanes * loads))
    batches = ceil_div(ceil_div(rows, n_groups), lanes // set_lanes * set_rows)
    blocks = ceil_div(batches, max(LAYER_PARTS // (set_rows * (lanes // 4)), 1))
    a_chunk = ceil_div(LAYER_STAGE_LOADS * VALUES_PER_LOAD, lanes) + 1
    sums = lanes // 4 + 2 * (1 + set_lanes // 4)  # of squares, and of a row's parts
    outputs = ceil_div(LAYER_PARTS, lanes * (set_lanes // 4))  # a lane's, of a block
    return batches * chunks * 2 + blocks * (chunks * a_chunk + outputs * sums + 2) + a_chunk


def _set_shift(loads: int, variant: Variant, subgroup: int) -> int:
    """Lanes that share a row of so many loads, as a power of two: whole waves, and no more than its loads keep busy.

    Longer rows than a workgroup holds are walked through in chunks as long as there is room for.
    """
    at_once = variant.define("WEIGHT_LOADS")
    shift = max(5, (subgroup - 1).bit_length())
    while (2 << shift) <= variant.workgroup[0] and at_once << shift < loads:
        if loads > LAYER_STAGE_LOADS and at_once << shift + 1 > LAYER_STAGE_LOADS:
            break
        shift += 1
    return shift


def _fits(w: LayerTensors, first: LayerTensors, variant: Variant, subgroup: int, most_bytes: int) -> bool:
    """Whether a layer is what the kernel can run: see `plan_layer`."""
    matrices = (w.qkv, w.o, w.gate, w.up, w.down)
    alike = all(m.format == first.qkv.format and len(m.slices) == 1 for m in matrices)
    dense = all(m.columns % VALUES_PER_LOAD == 0 and m.row_loads * VALUES_PER_LOAD == m.columns for m in matrices)
    if not alike or not dense or variant.workgroup[0] < subgroup:
        return False
    loads = w.qkv.columns // VALUES_PER_LOAD
    at_once = variant.define("WEIGHT_LOADS") << _set_shift(loads, variant, subgroup)
    if loads > min(LAYER_STAGE_LOADS, at_once):  # a norm needs all of its row
        return False
    places = _slices(w)
    one = len({place.buffer for place in places}) == 1
    aligned = all(place.offset % LOAD_BYTES == 0 for place in places)
    return one and aligned and places[0].buffer.size <= most_bytes


def _slices(w: LayerTensors) -> list[BufferSlice]:
    """Where a layer's tensors lie, in the order of the kernel's constants."""
    matrices = [w.qkv, w.o, w.gate, w.up, w.down]
    qkv, o, gate, up, down = (_slice(matrix.slices[0].place) for matrix in matrices)
    return [_slice(w.input_ln), qkv, _slice(w.qkv_b), o, _slice(w.post_ln), gate, up, down]


def _slice(place: Bindable) -> BufferSlice:
    return place if isinstance(place, BufferSlice) else BufferSlice(place, 0, place.size)


def _places(w: LayerTensors) -> tuple[Bindable, dict[str, int]]:
    """The whole layer, and where its tensors begin in it, in 16-byte loads."""
    places = _slices(w)
    names = ("input_ln", "qkv", "qkv_bias", "o", "post_ln", "gate", "up", "down")
    return places[0].buffer, {name: place.offset // LOAD_BYTES for name, place in zip(names, places, strict=True)}


def _one_buffer(rows: LayerRows, label: str) -> tuple[Bindable, dict[str, int]]:
    """What the activations lie in, and where in it, in floats."""
    parts = {"x": rows.x, "qkv": rows.qkv, "attn": rows.attn, "gated": rows.gated}
    places = {name: _slice(part.place) for name, part in parts.items()}
    one = len({place.buffer for place in places.values()}) == 1 and all(part.n == 1 for part in parts.values())
    expect(one, f"{label}: one row of each activation in one buffer")
    offsets = {name: place.offset // 4 + parts[name].offset for name, place in places.items()}
    return places["x"].buffer, offsets
