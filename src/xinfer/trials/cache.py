"""Trials of what writes the KV cache: kv_append and rope_append."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import BLOCK_TOKENS, CacheBlocks, Recorder, RowState
from xinfer.shaders.catalog import FORMATS, Variant
from xinfer.trials import expected
from xinfer.trials.base import Check
from xinfer.trials.bench import DTYPES, Bench, Output
from xinfer.trials.judge import Array, Expected

CacheFormat = Literal["f32", "f16"]

MARK = -1.5  # in every place of a cache that nothing should write to


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendTrial:
    """q (T, heads * D), k and v (T, KV heads * D) at positions (T,) of one sequence.

    With cos and sin, (positions, D / 2), rope_append turns q and k on the way; without, kv_append writes k and v as
    they are. The first row besides is padding: nothing of it is written.
    """

    k: Array
    v: Array
    positions: NDArray[np.integer]
    n_kv_heads: int
    format: CacheFormat
    q: Array | None = None
    cos: Array | None = None
    sin: Array | None = None

    @property
    def op(self) -> str:
        """Which of the two."""
        return "kv_append" if self.cos is None else "rope_append"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{len(self.k)} rows, {self.n_kv_heads} KV heads of {self.head_dim} {self.format}"

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.k.shape[1]) // self.n_kv_heads

    def fits(self, variant: Variant) -> bool:
        """The op's variants of the cache's format; the fused one takes a head_dim that is a multiple of 4."""
        right = variant.op == self.op and variant.define("FORMAT") == FORMATS[self.format]
        return right and (self.cos is None or self.head_dim % 4 == 0)

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.rope`, and the rounding to f16; everything else in the cache must stay."""
        places = [ops.UNUSED_POSITION, *map(int, self.positions)]
        state = bench.states([RowState(token=0, position=position) for position in places])
        n_blocks = int(self.positions.max()) // BLOCK_TOKENS + 2
        table = np.random.default_rng(n_blocks).permutation(n_blocks).astype(np.uint32)
        shape = (n_blocks, self.n_kv_heads, BLOCK_TOKENS, self.head_dim)
        mark = np.full(shape, MARK, DTYPES[self.format])
        k_out, v_out = (bench.out(*shape, dtype=DTYPES[self.format], fill=mark) for _ in range(2))
        cache = CacheBlocks(
            k=k_out.place,
            v=v_out.place,
            table=bench.put(table),
            table_stride=n_blocks,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            format=self.format,
        )
        parts = [self.k, self.v] if self.q is None else [self.q, self.k, self.v]
        rows = np.concatenate([np.concatenate([part[:1], part]) for part in parts], axis=1)
        qkv = bench.out(*rows.shape, fill=rows)
        self._record(bench, variant, state, qkv, cache)
        k, v = self._wanted(self.k, turn=True), self._wanted(self.v, turn=False)
        checks = [
            Check(variant, name, _in_order(out, table), self._laid_out(wanted, n_blocks))
            for name, out, wanted in (("keys", k_out, k), ("values", v_out, v))
        ]
        if self.q is not None and self.cos is not None and self.sin is not None:
            turned = expected.rope(self.q, self.cos[self.positions], self.sin[self.positions])
            checks.append(Check(variant, "queries", qkv.read()[1:, : self.q.shape[1]], turned))
        return checks

    def _record(self, bench: Bench, variant: str, state: Any, qkv: Output, cache: CacheBlocks) -> None:
        q_size, kv_size = 0 if self.q is None else self.q.shape[1], self.k.shape[1]
        rows = qkv.rows()
        k, v = rows.columns(q_size, kv_size), rows.columns(q_size + kv_size, kv_size)
        turns = None if self.cos is None or self.sin is None else np.stack([self.cos, self.sin], axis=-1)
        turn = None if turns is None else bench.put(turns)

        def record(on: Recorder) -> None:
            options: dict[str, Any] = {"label": "trial", "variant": variant}
            if turn is None:
                ops.kv_append(on, state, k, v, cache, **options)
            else:
                ops.rope_append(on, state, turn, rows.columns(0, q_size), k, v, cache, **options)

        bench.run(record)

    def _wanted(self, part: Array, *, turn: bool) -> Expected:
        if turn and self.cos is not None and self.sin is not None:
            values = expected.rope(part, self.cos[self.positions], self.sin[self.positions])
        else:
            values = expected.exact(part)
        return expected.cached(values, self.format)

    def _laid_out(self, wanted: Expected, n_blocks: int) -> Expected:
        """As the whole cache should be, (positions, KV heads, D)."""
        values = np.full((n_blocks * BLOCK_TOKENS, self.n_kv_heads, self.head_dim), MARK, np.float32)
        tolerance = np.zeros_like(values)
        rows = (len(self.k), self.n_kv_heads, self.head_dim)
        values[self.positions] = wanted.values.reshape(rows)
        tolerance[self.positions] = np.broadcast_to(wanted.tolerance, self.k.shape).reshape(rows)
        return Expected(values, tolerance)


def _in_order(out: Output, table: NDArray[np.uint32]) -> Array:
    return sequence_of(out.read(), table)


def sequence_of(blocks: NDArray[Any], table: NDArray[np.integer] | Sequence[int]) -> Array:
    """(positions, KV heads, D) of one sequence, from blocks (n, KV heads, BLOCK_TOKENS, D)."""
    own = blocks[np.asarray(table, np.intp)].transpose(0, 2, 1, 3)
    return np.asarray(own.reshape(-1, blocks.shape[1], blocks.shape[3]), np.float32)
