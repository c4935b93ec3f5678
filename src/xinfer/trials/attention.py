"""The trial of attention: a kernel's own result, the splits that it leaves, and their combination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import BLOCK_TOKENS, AttentionPlan, CacheBlocks, Recorder, RowState
from xinfer.ops._attention import attention_candidates, is_tiled
from xinfer.shaders.catalog import FORMATS, Variant, attention_tile_keys, variants
from xinfer.trials import expected
from xinfer.trials.base import Check
from xinfer.trials.bench import DTYPES, Bench
from xinfer.trials.cache import CacheFormat
from xinfer.trials.judge import Array, Expected


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
        if variant.op != "attention":
            return False
        cache = self._cache(_NOWHERE)
        considered = {
            name for one_pass in (False, True) for name in attention_candidates(cache, len(self.q), one_pass=one_pass)
        }
        combines = {combiner(variants()[name]) for name in considered} if self.n_splits != 1 else set()
        return variant.id in considered | combines

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.attention`: splits by what they come to, their combination by the splits."""
        state = bench.states([RowState(token=0, position=self.start + t) for t in range(len(self.q))])
        cache = self._put_cache(bench)
        n, heads, dim = self.q.shape
        q, out = bench.put_rows(self.q.reshape(n, heads * dim)), bench.out(n, heads * dim)
        kernel = variant if "q" in variants()[variant].buffers else self._kernel_combined_by(variant, bench)
        max_keys = self.max_keys or len(self.k)
        made: list[Any] = []

        def record(on: Recorder) -> None:
            plan = ops.plan_attention(
                *(on, cache), n_heads=heads, n_rows=n, max_keys=max_keys, variant=kernel, n_splits=self.n_splits
            )
            scratch = bench.out(plan.scratch_bytes // 4) if plan.scratch_bytes else None
            counters = np.zeros(max(1, plan.counter_bytes // 4), np.uint32)
            counted = bench.out(counters.size, dtype=np.uint32, fill=counters)
            ops.attention(
                *(on, plan, state, q, cache, out.rows()),
                window=self.window,
                scratch=None if scratch is None else scratch.place,
                counters=counted.place,
                label="trial",
            )
            made.extend((plan, scratch, counted))

        bench.run(record)
        plan, scratch, counted = made
        wanted = expected.attention(self.q, self.k, self.v, start=self.start, window=self.window)
        left = expected.exact(np.zeros(max(1, plan.counter_bytes // 4)))
        checks = [Check(kernel, "counters", counted.read().astype(np.float32), left)]
        if scratch is None or plan.counter_bytes:
            return [*checks, Check(kernel, "attention", out.read(), wanted)]
        together = self._combined(plan, scratch.read())
        rounding = Expected(together, np.asarray(0.5 * wanted.tolerance, np.float32))
        return [
            *checks,
            Check(kernel, "splits", together, wanted),
            Check(combiner(plan.variant), "combination", out.read(), rounding),
        ]

    def _kernel_combined_by(self, variant: str, bench: Bench) -> str:
        """A kernel that leaves splits for this variant to combine: the plainest that the device can run."""
        names = [name for one in (False, True) for name in attention_candidates(self._cache(_NOWHERE), 1, one_pass=one)]
        every = [v.id for v in variants().values() if v.op == "attention" and "q" in v.buffers]
        for name in [*reversed(names), *every]:
            kernel, defines = variants()[name], dict(variants()[name].defines)
            alike = defines.get("FORMAT") == FORMATS[self.format] and not defines.get("ONE_PASS")
            if alike and combiner(kernel) == variant and bench.kernels.usable(name):
                return name
        raise ValueError(f"nothing on {bench.device.info.name} leaves splits for {variant}")

    def _combined(self, plan: AttentionPlan, partial: Array) -> Array:
        """(T, heads * D): the splits put together as the reference would, from (T, heads, splits, D + 2)."""
        n, heads, dim = self.q.shape
        parts = partial.reshape(n, heads, plan.n_splits, dim + 2).astype(np.float64)
        out = np.empty((n, heads, dim), np.float32)
        for row in range(n):
            own = parts[row, :, : self._active_splits(plan, self.start + row)]
            sums, largest, total = own[..., :dim], own[..., dim], own[..., dim + 1]
            weights = np.where(total == 0, 0, np.exp(largest - largest.max(axis=1, keepdims=True)))  # (heads, splits)
            mixed = np.einsum("hs,hsd->hd", weights, np.where(total[..., np.newaxis] == 0, 0, sums))
            out[row] = mixed / np.sum(weights * total, axis=1, keepdims=True)
        return out.reshape(n, heads * dim)

    def _active_splits(self, plan: AttentionPlan, position: int) -> int:
        """How many splits of a row are written: attention.hlsli's rule, where a kernel leaves out empty ones."""
        if not is_tiled(plan.variant):
            return plan.n_splits
        seen = min(position + 1, self.window or position + 1)
        size = max(-(-seen // plan.n_splits), attention_tile_keys(plan.variant))
        size = -(-size // BLOCK_TOKENS) * BLOCK_TOKENS
        return -(-seen // size)

    def _put_cache(self, bench: Bench) -> CacheBlocks:
        """Blocks in no order; keys that no query sees are NaN: one that is read all the same shows."""
        n_keys, n_kv, dim = self.k.shape
        n_blocks = -(-n_keys // BLOCK_TOKENS)
        table = np.random.default_rng(n_blocks).permutation(n_blocks).astype(np.uint32)
        places = []
        for part in (self.k, self.v):
            rows = np.full((n_blocks * BLOCK_TOKENS, n_kv, dim), np.nan, DTYPES[self.format])
            rows[:n_keys] = part
            if self.window is not None:
                rows[: max(0, self.start - self.window + 1)] = np.nan
            blocks = np.empty((n_blocks, n_kv, BLOCK_TOKENS, dim), rows.dtype)
            blocks[table] = rows.reshape(n_blocks, BLOCK_TOKENS, n_kv, dim).transpose(0, 2, 1, 3)
            places.append(bench.put(blocks))
        return self._cache((places[0], places[1], bench.put(table), n_blocks))

    def _cache(self, places: tuple[Any, Any, Any, int]) -> CacheBlocks:
        k, v, table, stride = places
        n_kv, dim = self.k.shape[1:]
        return CacheBlocks(
            k=k, v=v, table=table, table_stride=stride, n_kv_heads=n_kv, head_dim=dim, format=self.format
        )


_NOWHERE = (None, None, None, 0)  # of a cache that is only asked for its sizes


def combiner(kernel: Variant) -> str:
    """The variant that puts a kernel's splits together, where another dispatch does."""
    return f"attention.combine_active{attention_tile_keys(kernel)}" if is_tiled(kernel) else "attention.combine"


def cache_numbers(values: NDArray[Any], cache_format: CacheFormat) -> Array:
    """Values rounded to what the cache can hold."""
    return np.asarray(values.astype(DTYPES[cache_format]), np.float32)
