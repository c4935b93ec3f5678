"""Attention over the paged cache: many splits of the keys in parallel, then their combination."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xinfer.gpu.api import Bindable, Groups
from xinfer.ops._base import MAX_TRIPS, CacheBlocks, Recorder, Rows, ceil_div, expect, span
from xinfer.ops._capacity import Capacity
from xinfer.ops._elementwise import can_rope_append
from xinfer.shaders.catalog import (
    ATTENTION_DIM_MAX,
    ATTENTION_HEADS_A_LOAD,
    ATTENTION_QUERIES,
    ATTENTION_SPLITS_MAX,
    ATTENTION_TILED_ROWS_MAX,
    ATTENTION_TILED_SPLIT_KEYS,
    ATTENTION_TILED_SPLITS_MAX,
    BLOCK_TOKENS,
    Variant,
    variants,
)

COUNTER_BYTES = 16
FEW_KEYS = 8192  # of all KV heads, up to which loads that few heads share are no loss


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A kernel, and into how many splits it divides the keys: fixed in a recording, whatever the context's length."""

    variant: Variant
    n_splits: int
    scratch_bytes: int  # counters and float32 partial results; 0 with one split
    counter_bytes: int  # of them, in front: zero before the first use, and again after each

    @property
    def turns(self) -> bool:
        """Whether the kernel takes q, k and v as the projections made them: `turn_attention`."""
        return is_tiled(self.variant) and self.variant.define("TURN") == 1

    def grid(self, *, n_heads: int, n_kv_heads: int, n_rows: int) -> Groups:
        """Workgroups of the kernel."""
        return self.n_splits, *_groups(self.variant, n_heads, n_kv_heads, n_rows)


def plan_attention(
    on: Recorder,
    cache: CacheBlocks,
    *,
    n_heads: int,
    n_rows: int,
    max_keys: int,
    turn: bool = False,
    exact: bool = True,
    variant: str | None = None,
    n_splits: int | None = None,
) -> AttentionPlan:
    """Choose the kernel and the number of splits for up to `n_rows` query rows that see up to `max_keys` keys each.

    With `turn` a kernel may be chosen that does rope and kv_append as well: see `turn_attention`. It is none where
    `rope_append` cannot be used, so that rows are the same whether they see only their own keys or each other's.
    Without `exact`, matrix cores may take weights as f16.
    """
    expect(n_heads % cache.n_kv_heads == 0, f"{n_heads} heads on {cache.n_kv_heads} KV heads")
    expect(cache.head_dim <= ATTENTION_DIM_MAX, f"head_dim {cache.head_dim} exceeds {ATTENTION_DIM_MAX}")
    turn = turn and can_rope_append(on, cache)
    few_keys = max_keys * cache.n_kv_heads <= FEW_KEYS
    chosen = on.choose(attention_candidates(cache, n_rows, turn=turn, few_keys=few_keys, exact=exact), variant)
    groups = math.prod(_groups(chosen, n_heads, cache.n_kv_heads, n_rows))
    busy = _busy_groups(chosen, n_rows, on.kernels.capacity)
    least = ATTENTION_TILED_SPLIT_KEYS if is_tiled(chosen) else BLOCK_TOKENS
    most = ATTENTION_TILED_SPLITS_MAX if is_tiled(chosen) else ATTENTION_SPLITS_MAX
    if not is_tiled(chosen) and not on.kernels.usable("attention.combine"):
        most = 1  # nothing is there to put splits together
    if n_splits is None:
        # More than the tiled kernels' most are not faster even where they make fewer workgroups.
        n_splits = min(max(busy // groups, 1), ceil_div(max_keys, least), ATTENTION_TILED_SPLITS_MAX)
    n_splits = min(n_splits, most)
    while attention_trips(chosen.id, head_dim=cache.head_dim, max_keys=max_keys, n_splits=n_splits) >= MAX_TRIPS:
        expect(n_splits < most, f"{max_keys} keys are more than {chosen.id} can walk over")
        n_splits = min(2 * n_splits, most)
    if n_splits == 1:
        return AttentionPlan(chosen, 1, 0, 0)
    # Counters for as many rows as there may be, and for every kernel: so that all recordings can use one scratch.
    counters = COUNTER_BYTES * n_heads * ATTENTION_TILED_ROWS_MAX
    partial = 4 * n_rows * n_heads * n_splits * (cache.head_dim + (4 if is_tiled(chosen) else 2))
    return AttentionPlan(chosen, n_splits, counters + partial, counters)


def attention(
    on: Recorder,
    plan: AttentionPlan,
    state: Bindable,
    q: Rows,
    cache: CacheBlocks,
    out: Rows,
    *,
    window: int | None = None,
    scratch: Bindable | None = None,
    label: str,
) -> None:
    """`out = softmax(q @ K^T / sqrt(head_dim)) @ V` for every head, causal: q, out (T, n_heads * head_dim).

    Row t stands at its position in `state` and sees the keys of its sequence up to that position, the last `window` of
    them where one is given; its own key must have been appended. `scratch` holds `plan.scratch_bytes`, the first
    `plan.counter_bytes` of them zero before the first use; recordings that may run at the same time need their own.
    """
    expect(not plan.turns, f"{label}: {plan.variant.id} turns q and k itself: turn_attention")
    constants = _constants(plan, q, cache, out, window=window, label=label)
    partial = _scratch(plan, scratch, out, label)
    buffers, grid = _buffers(state, q, cache, out), _grid(plan, q, cache)
    if is_tiled(plan.variant):
        on.dispatch(plan.variant, buffers | {"scratch": partial}, constants, grid, label)
        return
    partial = partial[plan.counter_bytes :]
    on.dispatch(plan.variant, buffers | {"result": partial}, constants, grid, label)
    if plan.n_splits > 1:
        on.recording.barrier()
        combine = on.choose(["attention.combine"], None)
        bound = {"partial": partial, "result": out.place}
        on.dispatch(combine, bound, constants, (q.width // cache.head_dim, q.n, 1), f"{label}.combine")


def turn_attention(
    on: Recorder,
    plan: AttentionPlan,
    state: Bindable,
    table: Bindable,
    q: Rows,
    k: Rows,
    v: Rows,
    cache: CacheBlocks,
    out: Rows,
    *,
    window: int | None = None,
    scratch: Bindable | None = None,
    label: str,
) -> None:
    """`rope` of q and k, `kv_append` of k and v, and `attention`, in one dispatch; q and k themselves stay.

    For a plan that `turns`. q (T, n_heads * head_dim), k, v (T, n_kv_heads * head_dim) are columns of the same rows,
    where a row sees another's key, that has been appended (`rope_append`). The rest is as in `attention` and `rope`.
    """
    expect(plan.turns, f"{label}: {plan.variant.id} takes q and k that have been turned")
    width = cache.n_kv_heads * cache.head_dim
    expect(k.width == v.width == width, f"{label}: k and v are {k.width} and {v.width} wide, not {width}")
    one = len({(rows.place, rows.n, rows.stride) for rows in (q, k, v)}) == 1
    expect(one, f"{label}: q, k and v must lie in the same rows")
    constants = _constants(plan, q, cache, out, window=window, label=label)
    constants |= {"k_offset": k.offset, "v_offset": v.offset}
    buffers = _buffers(state, q, cache, out) | {"scratch": _scratch(plan, scratch, out, label), "table": table}
    grid = _grid(plan, q, cache)
    on.dispatch(plan.variant, buffers, constants, grid, label)


def _buffers(state: Bindable, q: Rows, cache: CacheBlocks, out: Rows) -> dict[str, Bindable]:
    return {
        "q": q.place,
        "k_cache": cache.k,
        "v_cache": cache.v,
        "block_table": cache.table,
        "state": state,
        "result": out.place,
    }


def _grid(plan: AttentionPlan, q: Rows, cache: CacheBlocks) -> Groups:
    return plan.grid(n_heads=q.width // cache.head_dim, n_kv_heads=cache.n_kv_heads, n_rows=q.n)


def _constants(
    plan: AttentionPlan, q: Rows, cache: CacheBlocks, out: Rows, *, window: int | None, label: str
) -> dict[str, int | float]:
    dim = cache.head_dim
    expect(q.width == out.width and q.width % dim == 0 and q.n == out.n, f"{label}: q and out differ in shape")
    few = q.n <= ATTENTION_TILED_ROWS_MAX or not is_tiled(plan.variant)
    expect(few, f"{label}: {plan.variant.id} takes {ATTENTION_TILED_ROWS_MAX} rows at most, not {q.n}")
    return {
        "n_heads": q.width // dim,
        "n_kv_heads": cache.n_kv_heads,
        "head_dim": dim,
        **span(q, "q"),
        **span(out, "out"),
        "table_stride": cache.table_stride,
        "window": window or 0,
        "n_splits": plan.n_splits,
        "n_rows": q.n,
        "scale": dim**-0.5,
        "k_offset": 0,
        "v_offset": 0,
    }


def _scratch(plan: AttentionPlan, scratch: Bindable | None, out: Rows, label: str) -> Bindable:
    """What partial results go to; with one split there are none, and something has to be bound."""
    if plan.n_splits == 1:
        return out.place
    enough = scratch is not None and scratch.size >= plan.scratch_bytes
    expect(enough, f"{label}: the scratch needs {plan.scratch_bytes} bytes")
    assert scratch is not None
    return scratch


def attention_candidates(
    cache: CacheBlocks, n_rows: int, *, turn: bool = False, few_keys: bool = False, exact: bool = True
) -> list[str]:
    """Variants that fit, best first: tiles of queries for many rows, shared loads of K and V for few."""
    forms = ["plain"]
    if cache.head_dim % 8 == 0:
        forms = ["decode", "plain"]
        sizes = [dim for dim in (64, 128) if cache.head_dim <= dim]
        if n_rows >= ATTENTION_TILED_ROWS_MAX:
            forms = [f"prefill{dim}" for dim in sizes] + forms
            if cache.format == "f16":
                forms = [f"coop{dim}.{'split' if exact else 'half'}" for dim in sizes] + forms
        else:
            forms = [f"tiled{dim}" for dim in sizes] + forms
            if turn:
                names = ["turn2", "turn"] if few_keys else ["turn", "turn2"]
                forms = [f"tiled{dim}_{name}" for dim in sizes for name in names] + forms
    return [f"attention.{cache.format}.{form}" for form in forms]


def attention_trips(variant_id: str, *, head_dim: int, max_keys: int, n_splits: int) -> int:
    """Loop iterations of one lane."""
    variant = variants()[variant_id]
    group = variant.workgroup[0]
    keys = ceil_div(ceil_div(max_keys, n_splits), BLOCK_TOKENS) * BLOCK_TOKENS
    if variant.id.endswith(".plain"):
        return keys // group * (1 + head_dim // 2 + 2 * group) + head_dim // 2 + 2 * group + 1
    if variant.source == "attention_prefill.hlsl":
        return _prefill_trips(variant, head_dim, keys)
    if is_coop(variant):
        return _coop_trips(variant, keys)
    if is_tiled(variant):
        return _tiled_trips(variant, head_dim, max(keys, ATTENTION_TILED_SPLIT_KEYS), n_splits)
    pieces = head_dim // _values(variant)
    lanes_a_head = group // ATTENTION_HEADS_A_LOAD
    a_tile = 1 + ceil_div(pieces, 4) + 2 * ATTENTION_HEADS_A_LOAD + lanes_a_head
    a_tile += ceil_div(group, 4 * (group // pieces))
    staging = ceil_div(ATTENTION_HEADS_A_LOAD * head_dim // 4, group)
    end = ATTENTION_HEADS_A_LOAD * (lanes_a_head + ceil_div(head_dim, group) * (1 + group // pieces))
    return ceil_div(keys, group) * a_tile + staging + end


def is_tiled(variant: Variant) -> bool:
    """Whether it is one of attention_tiled, whose splits have at least a tile of keys."""
    return variant.source == "attention_tiled.hlsl"


def is_coop(variant: Variant) -> bool:
    """Whether it runs on matrix cores."""
    return variant.source == "attention_coop.slang"


def has_half_weights(variant_id: str) -> bool:
    """Whether an attention kernel rounds the weights of values to f16."""
    variant = variants()[variant_id]
    return is_coop(variant) and not variant.define("SPLIT")


def _coop_trips(variant: Variant, keys: int) -> int:
    queries = 16 * variant.define("WAVES")
    sequences = 4 * queries * queries  # at worst, every row of another one; what is done to a tile is unrolled
    return sequences + ceil_div(keys, variant.define("KEYS")) + 2 * queries + 2 * variant.define("DIM_MAX")


def _values(variant: Variant) -> int:
    """Values of a 16-byte load."""
    return 4 if variant.define("FORMAT") == 0 else 8


def _tiled_trips(variant: Variant, head_dim: int, keys: int, n_splits: int) -> int:
    a_tile, group, heads = variant.define("KEYS"), variant.workgroup[0], variant.define("HEADS")
    shares = group // (heads * variant.define("DIM_MAX") // _values(variant))
    weighers, loads = 16, 4
    # Every unrolled loop is counted as if it were not.
    a_score = head_dim // _values(variant) * (1 + 4 * ceil_div(heads * a_tile, group))
    per_tile = 5 * loads + a_score + 2 * a_tile // weighers + weighers + ceil_div(a_tile, shares) * 9 + 8
    combine = 2 * ceil_div(n_splits, weighers) + weighers + 3 * n_splits + 16
    end = 4 * weighers + shares * 10 + 16 + combine
    return ceil_div(keys, a_tile) * per_tile + 6 * ceil_div(heads * head_dim // 4, group) + end


def combine_trips(*, head_dim: int, n_splits: int) -> int:
    """Loop iterations of one lane of attention.combine."""
    group = variants()["attention.combine"].workgroup[0]
    return 2 * ceil_div(n_splits, group) + (2 + ceil_div(head_dim, group)) * n_splits + ceil_div(head_dim, group)


def _prefill_trips(variant: Variant, head_dim: int, keys: int) -> int:
    a_tile, group = variant.define("KEYS"), variant.workgroup[0]
    staging = ceil_div(a_tile * head_dim // _values(variant), group)
    per_tile = 1 + 2 * staging + head_dim // 4 + 2 * a_tile * ATTENTION_QUERIES // group + a_tile
    sequences = ATTENTION_QUERIES * (ATTENTION_QUERIES + 1)  # at worst, every row of another sequence
    # A tile's rows stand side by side, so that it sees a tile's more keys than its last row; twice for good measure.
    return (ceil_div(keys, a_tile) + 2 * ATTENTION_QUERIES) * per_tile + sequences


def _busy_groups(variant: Variant, n_rows: int, capacity: Capacity) -> int:
    if n_rows >= ATTENTION_TILED_ROWS_MAX:
        return capacity.prefill_groups
    return capacity.groups if variant.workgroup[0] >= 512 else capacity.small_groups


def _groups(variant: Variant, n_heads: int, n_kv_heads: int, n_rows: int) -> tuple[int, int]:
    """Workgroups in y (heads) and z (rows)."""
    if variant.source == "attention_prefill.hlsl":
        return n_heads, ceil_div(n_rows, ATTENTION_QUERIES)
    if is_coop(variant):
        return n_heads, ceil_div(n_rows, 16 * variant.define("WAVES"))
    if variant.source in ("attention_decode.hlsl", "attention_tiled.hlsl"):
        a_load = variant.define("HEADS") if is_tiled(variant) else ATTENTION_HEADS_A_LOAD
        return n_kv_heads * ceil_div(n_heads // n_kv_heads, a_load), n_rows
    return n_heads, n_rows
