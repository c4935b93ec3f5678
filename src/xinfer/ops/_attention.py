"""Attention over the paged cache: many splits of the keys in parallel, then their combination."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xinfer.gpu.api import Bindable, Groups
from xinfer.ops._base import MAX_TRIPS, CacheBlocks, Recorder, Rows, ceil_div, expect, span
from xinfer.shaders.catalog import (
    ATTENTION_DIM_MAX,
    ATTENTION_HEADS_A_LOAD,
    ATTENTION_QUERIES,
    ATTENTION_SPLITS_MAX,
    BLOCK_TOKENS,
    Variant,
    attention_tile_keys,
    variants,
)

BUSY_GROUPS = 528  # workgroups that keep a large GPU busy: four on each of an H200's multiprocessors
BUSY_PREFILL_GROUPS = 256
MOST_SPLITS = 132  # more are not faster even where they make fewer workgroups
CPU_GROUPS = 8  # a software driver runs a few at a time
PREFILL_ROWS = 16  # rows from which on a tile of 32 queries pays
ONE_PASS_SPLITS = 8  # up to which the last workgroup puts them together sooner than a second dispatch would


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A kernel, and into how many splits it divides the keys: fixed in a recording, whatever the context's length."""

    variant: Variant
    n_splits: int
    scratch_bytes: int  # float32 partial results; 0 with one split
    counter_bytes: int = 0  # u32, zero before the first use, and again after each; 0 where a second dispatch combines

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
    one_pass: bool = False,
    variant: str | None = None,
    n_splits: int | None = None,
) -> AttentionPlan:
    """Choose the kernel and the number of splits for up to `n_rows` query rows that see up to `max_keys` keys each.

    With `one_pass`, few rows and few splits take one dispatch in place of two: the plan then asks for counters.
    """
    expect(n_heads % cache.n_kv_heads == 0, f"{n_heads} heads on {cache.n_kv_heads} KV heads")
    expect(cache.head_dim <= ATTENTION_DIM_MAX, f"head_dim {cache.head_dim} exceeds {ATTENTION_DIM_MAX}")
    chosen = on.choose(attention_candidates(cache, n_rows, one_pass=one_pass), variant)
    groups = math.prod(_groups(chosen, n_heads, cache.n_kv_heads, n_rows))
    busy = BUSY_GROUPS if n_rows < PREFILL_ROWS else BUSY_PREFILL_GROUPS
    busy = CPU_GROUPS if on.kernels.device.info.kind == "cpu" else busy
    least = attention_tile_keys(chosen) if is_tiled(chosen) else BLOCK_TOKENS
    if n_splits is None:
        n_splits = min(max(busy // groups, 1), ceil_div(max_keys, least), MOST_SPLITS)
    if is_tiled(chosen) and chosen.define("ONE_PASS"):
        if n_splits > ONE_PASS_SPLITS and variant is None:
            return plan_attention(on, cache, n_heads=n_heads, n_rows=n_rows, max_keys=max_keys, n_splits=n_splits)
        n_splits = min(n_splits, least // 2)  # what its last workgroup has room for
    while attention_trips(chosen.id, head_dim=cache.head_dim, max_keys=max_keys, n_splits=n_splits) >= MAX_TRIPS:
        expect(n_splits < ATTENTION_SPLITS_MAX, f"{max_keys} keys are more than {chosen.id} can walk over")
        n_splits = min(2 * n_splits, ATTENTION_SPLITS_MAX)
    scratch = 0 if n_splits == 1 else 4 * n_rows * n_heads * n_splits * (cache.head_dim + 2)
    counters = 4 * groups if "counters" in chosen.buffers else 0
    return AttentionPlan(chosen, n_splits, scratch, counters)


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
    counters: Bindable | None = None,
    label: str,
) -> None:
    """`out = softmax(q @ K^T / sqrt(head_dim)) @ V` for every head, causal: q, out (T, n_heads * head_dim).

    Row t stands at its position in `state` and sees the keys of its sequence up to that position, the last `window` of
    them where one is given; its own key must have been appended. `scratch` holds `plan.scratch_bytes`, and `counters`
    `plan.counter_bytes`; recordings that may run at the same time need their own.
    """
    dim = cache.head_dim
    expect(q.width == out.width and q.width % dim == 0 and q.n == out.n, f"{label}: q and out differ in shape")
    n_heads = q.width // dim
    constants: dict[str, int | float] = {
        "n_heads": n_heads,
        "n_kv_heads": cache.n_kv_heads,
        "head_dim": dim,
        **span(q, "q"),
        **span(out, "out"),
        "table_stride": cache.table_stride,
        "window": window or 0,
        "n_splits": plan.n_splits,
        "n_rows": q.n,
        "scale": dim**-0.5,
    }
    whole = plan.n_splits == 1
    needed = 4 * q.n * n_heads * plan.n_splits * (dim + 2)
    partial = out.place if scratch is None or whole else scratch
    expect(whole or (scratch is not None and scratch.size >= needed), f"{label}: the scratch needs {needed} bytes")
    one_pass = plan.counter_bytes > 0
    buffers = {
        "q": q.place,
        "k_cache": cache.k,
        "v_cache": cache.v,
        "block_table": cache.table,
        "state": state,
        "result": out.place if one_pass else partial,
    }
    if one_pass:
        enough = counters is not None and counters.size >= plan.counter_bytes
        expect(enough, f"{label}: the counters need {plan.counter_bytes} bytes")
        assert counters is not None
        buffers |= {"partial": partial, "counters": counters}
    grid = plan.grid(n_heads=n_heads, n_kv_heads=cache.n_kv_heads, n_rows=q.n)
    on.dispatch(plan.variant, buffers, constants, grid, label)
    if not whole and not one_pass:
        on.recording.barrier()
        tiled = is_tiled(plan.variant)
        name = f"attention.combine_active{attention_tile_keys(plan.variant)}" if tiled else "attention.combine"
        bound = {"partial": partial, "result": out.place} | ({"state": state} if tiled else {})
        on.dispatch(on.choose([name], None), bound, constants, (n_heads, q.n, 1), f"{label}.combine")


def attention_candidates(cache: CacheBlocks, n_rows: int, *, one_pass: bool = False) -> list[str]:
    """Variants that fit, best first: tiles of queries for many rows, shared loads of K and V for few."""
    forms = ["plain"]
    if cache.head_dim % 8 == 0:
        forms = ["decode", "plain"]
        sizes = [dim for dim in (64, 128) if cache.head_dim <= dim]
        if n_rows >= PREFILL_ROWS:
            forms = [f"prefill{dim}" for dim in sizes] + forms
        elif one_pass:
            forms = [*(f"tiled{dim}_one_pass" for dim in sizes), "decode_one_pass", *forms]
        else:
            forms = [f"tiled{dim}" for dim in sizes] + forms
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
    if is_tiled(variant):
        return _tiled_trips(variant, head_dim, max(keys, attention_tile_keys(variant)), n_splits)
    pieces = head_dim // (4 if variant.define("FORMAT") == 0 else 8)
    lanes_a_head = group // ATTENTION_HEADS_A_LOAD
    a_tile = 1 + ceil_div(pieces, 4) + 2 * ATTENTION_HEADS_A_LOAD + lanes_a_head
    a_tile += ceil_div(group, 4 * (group // pieces))
    staging = ceil_div(ATTENTION_HEADS_A_LOAD * head_dim // 4, group)
    end = ATTENTION_HEADS_A_LOAD * (lanes_a_head + ceil_div(head_dim, group) * (1 + group // pieces))
    if variant.define("ONE_PASS"):
        end += ATTENTION_HEADS_A_LOAD * (2 * n_splits + 2 * ceil_div(n_splits, group) + 2 * (1 + n_splits))
    return ceil_div(keys, group) * a_tile + staging + end


def is_tiled(variant: Variant) -> bool:
    """Whether it is one of attention_tiled, whose splits have at least a tile of keys."""
    return variant.source == "attention_tiled.hlsl"


def _tiled_trips(variant: Variant, head_dim: int, keys: int, n_splits: int) -> int:
    a_tile, group, heads = attention_tile_keys(variant), variant.workgroup[0], ATTENTION_HEADS_A_LOAD
    pieces = variant.define("DIM_MAX") // (4 if variant.define("FORMAT") == 0 else 8)
    items = max(heads * pieces // group, 1)
    # Every unrolled loop is counted as if it were not.
    per_tile = 4 * 8 + head_dim // 4 + 3 * a_tile * heads // group + group // heads + items * (a_tile + 8)
    end = 8 + items * (group // heads + 3 * 8)
    if variant.define("ONE_PASS"):
        end += 2 * ceil_div(heads * n_splits, group) + ceil_div(heads * head_dim, group) * 4 * n_splits
    return ceil_div(keys, a_tile) * per_tile + 2 * ceil_div(heads * head_dim // 4, group) + end


def combine_trips(variant_id: str = "attention.combine", *, head_dim: int, n_splits: int) -> int:
    """Loop iterations of one lane of attention.combine, or of attention.combine_active."""
    group = variants()[variant_id].workgroup[0]
    if variant_id != "attention.combine":
        return 2 * ceil_div(n_splits, group) + 5 * n_splits + 8
    return 2 * ceil_div(n_splits, group) + (2 + ceil_div(head_dim, group)) * n_splits + ceil_div(head_dim, group)


def _prefill_trips(variant: Variant, head_dim: int, keys: int) -> int:
    a_tile, group = variant.define("KEYS"), variant.workgroup[0]
    staging = ceil_div(a_tile * head_dim // (4 if variant.define("FORMAT") == 0 else 8), group)
    per_tile = 1 + 2 * staging + head_dim // 4 + 2 * a_tile * ATTENTION_QUERIES // group + a_tile
    sequences = ATTENTION_QUERIES * (ATTENTION_QUERIES + 1)  # at worst, every row of another sequence
    # A tile's rows stand side by side, so that it sees a tile's more keys than its last row; twice for good measure.
    return (ceil_div(keys, a_tile) + 2 * ATTENTION_QUERIES) * per_tile + sequences


def _groups(variant: Variant, n_heads: int, n_kv_heads: int, n_rows: int) -> tuple[int, int]:
    """Workgroups in y (heads) and z (rows)."""
    if variant.source == "attention_prefill.hlsl":
        return n_heads, ceil_div(n_rows, ATTENTION_QUERIES)
    if variant.source in ("attention_decode.hlsl", "attention_tiled.hlsl"):
        # Query heads of one KV head, at most ATTENTION_HEADS_A_LOAD a workgroup.
        return n_kv_heads * ceil_div(n_heads // n_kv_heads, ATTENTION_HEADS_A_LOAD), n_rows
    return n_heads, n_rows
