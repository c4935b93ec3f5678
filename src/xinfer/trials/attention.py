"""Trials of attention: a kernel's own result, the splits that it leaves and their combination, and with rope in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import BLOCK_TOKENS, AttentionPlan, CacheBlocks, Recorder, RowState
from xinfer.ops._attention import attention_candidates, has_half_weights, is_tiled
from xinfer.shaders.catalog import Variant, variants
from xinfer.trials import expected
from xinfer.trials.base import Check
from xinfer.trials.bench import DTYPES, Bench, Output
from xinfer.trials.cache import CacheFormat, sequence_of
from xinfer.trials.judge import Array, Expected

COMBINE = "attention.combine"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTrial:
    """q (T, heads, D) from position `start` on; k and v (S, KV heads, D), S = start + T, numbers that the cache holds.

    `n_splits` of the keys, or as many as the op chooses; `max_keys` is what the op plans for.
    """

    q: Array
    k: Array
    v: Array
    format: CacheFormat
    window: int | None = None
    n_splits: int | None = None
    max_keys: int | None = None
    op: str = "attention"

    @property
    def shape(self) -> str:
        """Its sizes."""
        n, heads, dim = self.q.shape
        splits = "" if self.n_splits is None else f", {self.n_splits} splits"
        return f"{n} rows of {heads} heads on {self.k.shape[1]} of {dim}, {len(self.k)} keys {self.format}{splits}"

    @property
    def start(self) -> int:
        """The first query's position."""
        return len(self.k) - len(self.q)

    def fits(self, variant: Variant) -> bool:
        """Those that the op would consider for so many rows, and what combines their splits."""
        sizes, n = _sizes(self.k, self.format), len(self.q)
        considered = {name for exact in (True, False) for name in attention_candidates(sizes, n, exact=exact)}
        return variant.id in considered or (variant.id == COMBINE and self.n_splits != 1)

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.attention`: splits by what they come to, their combination by the splits."""
        state = bench.states([RowState(token=0, position=self.start + t) for t in range(len(self.q))])
        cache = put_cache(bench, self.k, self.v, self.format, first=self._first_seen)[0]
        n, heads, dim = self.q.shape
        q, out = bench.put_rows(self.q.reshape(n, heads * dim)), bench.out(n, heads * dim)
        kernel = self._kernel_that_splits(bench) if variant == COMBINE else variant
        made: list[Any] = []

        def record(on: Recorder) -> None:
            plan = ops.plan_attention(
                *(on, cache),
                n_heads=heads,
                n_rows=n,
                max_keys=self.max_keys or len(self.k),
                variant=kernel,
                n_splits=self.n_splits,
            )
            scratch = put_scratch(bench, plan)
            place = None if scratch is None else scratch.place
            ops.attention(*(on, plan, state, q, cache, out.rows()), window=self.window, scratch=place, label="trial")
            made.extend((plan, scratch))

        bench.run(record)
        plan, scratch = made
        half = has_half_weights(plan.variant.id)
        options: dict[str, Any] = {"start": self.start, "window": self.window, "half_weights": half}
        wanted = expected.attention(self.q, self.k, self.v, **options)
        if scratch is None:
            return [Check(kernel, "attention", out.read(), wanted)]
        counters, partial = read_scratch(scratch, plan)
        left = Check(kernel, "counters", counters, expected.exact(np.zeros_like(counters)))
        if is_tiled(plan.variant):
            return [left, Check(kernel, "attention", out.read(), wanted)]
        together = _combined(partial.reshape(n, heads, plan.n_splits, dim + 2))
        rounding = Expected(together, np.asarray(0.5 * wanted.tolerance, np.float32))
        return [
            left,
            Check(kernel, "splits", together, wanted),
            Check(COMBINE, "combination", out.read(), rounding),
        ]

    @property
    def _first_seen(self) -> int:
        return 0 if self.window is None else max(0, self.start - self.window + 1)

    def _kernel_that_splits(self, bench: Bench) -> str:
        """A kernel that leaves splits to be combined: the one that the op would choose, which it judges by itself."""
        names = attention_candidates(_sizes(self.k, self.format), len(self.q))
        usable = [name for name in names if not is_tiled(variants()[name]) and bench.kernels.usable(name)]
        if not usable:
            raise ValueError(f"nothing on {bench.device.info.name} leaves splits for {COMBINE}")
        return usable[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTrial:
    """Attention of a sequence's newest token, its q and k turned and its k and v cached on the way.

    q (heads, D), new_k and new_v (KV heads, D) as the projections made them, at the position behind k and v
    (S, KV heads, D); cos and sin (positions, D / 2).
    """

    q: Array
    new_k: Array
    new_v: Array
    k: Array
    v: Array
    cos: Array
    sin: Array
    format: CacheFormat
    window: int | None = None
    n_splits: int | None = None
    max_keys: int | None = None
    op: str = "turn_attention"

    @property
    def shape(self) -> str:
        """Its sizes."""
        heads, dim = self.q.shape
        splits = "" if self.n_splits is None else f", {self.n_splits} splits"
        return f"{heads} heads on {self.k.shape[1]} of {dim}, {len(self.k) + 1} keys {self.format}{splits}"

    def fits(self, variant: Variant) -> bool:
        """The kernels that turn."""
        turning = "table" in variant.buffers and variant.op == "attention"
        return turning and variant.id in attention_candidates(_sizes(self.k, self.format), 1, turn=True)

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.rope` and `reference.attention`, on the keys and values that it left in the cache."""
        position, (heads, dim), n_kv = len(self.k), self.q.shape, self.k.shape[1]
        state = bench.states([RowState(token=0, position=position)])
        cache, stored, order = put_cache(bench, self.k, self.v, self.format, spare=1)
        row = np.concatenate([part.reshape(1, -1) for part in (self.q, self.new_k, self.new_v)], axis=1)
        rows, out = bench.put_rows(row), bench.out(1, heads * dim)
        q, k = rows.columns(0, heads * dim), rows.columns(heads * dim, n_kv * dim)
        v = rows.columns((heads + n_kv) * dim, n_kv * dim)
        table = bench.put(np.stack([self.cos, self.sin], axis=-1))
        made: list[Any] = []

        def record(on: Recorder) -> None:
            plan = ops.plan_attention(
                *(on, cache),
                n_heads=heads,
                n_rows=1,
                max_keys=self.max_keys or position + 1,
                turn=True,
                variant=variant,
                n_splits=self.n_splits,
            )
            scratch = put_scratch(bench, plan)
            place = None if scratch is None else scratch.place
            ops.turn_attention(
                *(on, plan, state, table, q, k, v, cache, out.rows()), window=self.window, scratch=place, label="trial"
            )
            made.extend((plan, scratch))

        bench.run(record)
        plan, scratch = made
        keys, values = (sequence_of(part.read(), order)[: position + 1] for part in stored)
        cos, sin = self.cos[position : position + 1], self.sin[position : position + 1]
        turned_k = expected.cached(expected.rope(self.new_k.reshape(1, -1), cos, sin), self.format)
        kept_v = expected.cached(expected.exact(self.new_v.reshape(1, -1)), self.format)
        wanted = expected.turned_attention(
            self.q[np.newaxis], cos, sin, keys, values, start=position, window=self.window
        )
        checks = [
            Check(variant, "keys", keys[position:].reshape(1, -1), turned_k),
            Check(variant, "values", values[position:].reshape(1, -1), kept_v),
            Check(variant, "earlier keys", keys[:position], expected.exact(self.k)),
            Check(variant, "earlier values", values[:position], expected.exact(self.v)),
            Check(variant, "attention", out.read(), wanted),
        ]
        if scratch is not None:
            counters = read_scratch(scratch, plan)[0]
            checks.append(Check(variant, "counters", counters, expected.exact(np.zeros_like(counters))))
        return [check for check in checks if check.found.size]


def put_scratch(bench: Bench, plan: AttentionPlan) -> Output | None:
    """What a plan asks for: its counters zero, the rest NaN."""
    if not plan.scratch_bytes:
        return None
    words = np.full(plan.scratch_bytes // 4, np.nan, np.float32)
    words[: plan.counter_bytes // 4] = 0
    return bench.out(len(words), fill=words)


def read_scratch(scratch: Output, plan: AttentionPlan) -> tuple[Array, Array]:
    """Its counters as numbers, and its partial results."""
    words = scratch.read()
    n = plan.counter_bytes // 4
    return words[:n].view(np.uint32).astype(np.float32), words[n:]


def put_cache(
    bench: Bench, k: Array, v: Array, cache_format: CacheFormat, *, first: int = 0, spare: int = 0
) -> tuple[CacheBlocks, tuple[Output, Output], NDArray[np.uint32]]:
    """A sequence's keys and values in blocks of no order, with room for `spare` more; its blocks' numbers.

    Keys before `first`, and what lies behind the last, are NaN: one that is read all the same shows.
    """
    n_keys, n_kv, dim = k.shape
    n_blocks = -(-(n_keys + spare) // BLOCK_TOKENS)
    order = np.random.default_rng(n_blocks).permutation(n_blocks).astype(np.uint32)
    stored = []
    for part in (k, v):
        rows = np.full((n_blocks * BLOCK_TOKENS, n_kv, dim), np.nan, DTYPES[cache_format])
        rows[first:n_keys] = part[first:]
        blocks = np.empty((n_blocks, n_kv, BLOCK_TOKENS, dim), rows.dtype)
        blocks[order] = rows.reshape(n_blocks, BLOCK_TOKENS, n_kv, dim).transpose(0, 2, 1, 3)
        stored.append(bench.out(*blocks.shape, dtype=blocks.dtype, fill=blocks))
    cache = CacheBlocks(
        k=stored[0].place,
        v=stored[1].place,
        table=bench.put(order),
        table_stride=n_blocks,
        n_kv_heads=n_kv,
        head_dim=dim,
        format=cache_format,
    )
    return cache, (stored[0], stored[1]), order


def cache_numbers(values: NDArray[Any], cache_format: CacheFormat) -> Array:
    """Values rounded to what the cache can hold."""
    return np.asarray(values.astype(DTYPES[cache_format]), np.float32)


def _combined(partial: Array) -> Array:
    """(T, heads * D): (T, heads, splits, D + 2) put together; behind the D sums, the largest score and the weights'."""
    sums, largest, total = (part.astype(np.float64) for part in (partial[..., :-2], partial[..., -2], partial[..., -1]))
    empty = total == 0  # a split without keys
    highest = np.where(empty, -np.inf, largest).max(axis=-1, keepdims=True)
    weights = np.where(empty, 0, np.exp(largest - highest))  # (T, heads, splits)
    mixed = np.einsum("ths,thsd->thd", weights, np.where(empty[..., np.newaxis], 0, sums))
    whole = mixed / np.sum(weights * total, axis=-1, keepdims=True)
    return np.asarray(whole.reshape(len(partial), -1), np.float32)


def _sizes(k: Array, cache_format: CacheFormat) -> CacheBlocks:
    """A cache that is only asked for its sizes."""
    nowhere: Any = None
    n_kv, dim = k.shape[1:]
    return CacheBlocks(
        k=nowhere, v=nowhere, table=nowhere, table_stride=0, n_kv_heads=n_kv, head_dim=dim, format=cache_format
    )
