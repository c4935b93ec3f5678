"""Trials of what is done to each row, or each element, by itself: embed, rms_norm, rope, swiglu and add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import Recorder, RowState
from xinfer.shaders.catalog import FORMATS, Variant
from xinfer.trials import expected
from xinfer.trials.base import Check
from xinfer.trials.bench import Bench
from xinfer.trials.judge import Array, Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedTrial:
    """Rows of the embedding: tokens (T,), table (vocab, width) of the format's type.

    Where `rows` is given the vocabulary has so many: the table's, over and over.
    """

    tokens: NDArray[np.integer]
    table: NDArray[Any]
    format: ops.Format
    rows: int | None = None
    op: str = "embed"

    @property
    def shape(self) -> str:
        """Its sizes."""
        vocab = len(self.table) if self.rows is None else self.rows
        return f"{len(self.tokens)} of {vocab} x {self.table.shape[1]} {self.format}"

    def fits(self, variant: Variant) -> bool:
        """The variants of the table's format."""
        return variant.op == "embed" and variant.define("FORMAT") == FORMATS[self.format]

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Exact: numbers are only unpacked."""
        state = bench.states([RowState(token=int(token), position=0) for token in self.tokens])
        table, out = (
            bench.put_matrix(self.table, self.format, rows=self.rows),
            bench.out(len(self.tokens), self.table.shape[1]),
        )
        bench.run(lambda on: ops.embed(on, state, table, out.rows(), variant=variant))
        return [Check(variant, "embedding", out.read(), expected.exact(self.table[self.tokens % len(self.table)]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTrial:
    """x (T, width), weight (width,)."""

    x: Array
    weight: Array
    eps: float
    op: str = "rms_norm"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.x.shape[0]} x {self.x.shape[1]}"

    def fits(self, variant: Variant) -> bool:
        """All of them."""
        return variant.op == "rms_norm"

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.rms_norm`."""
        x, weight, out = bench.put_rows(self.x), bench.put(self.weight), bench.out(*self.x.shape)
        bench.run(lambda on: ops.rms_norm(on, x, weight, out.rows(), eps=self.eps, label="trial", variant=variant))
        return [Check(variant, "norm", out.read(), expected.rms_norm(self.x, self.weight, eps=self.eps))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTrial:
    """x (T, heads * D) at positions (T,); cos and sin (positions, D / 2). One row more is padding, and stays."""

    x: Array
    positions: NDArray[np.integer]
    cos: Array
    sin: Array
    op: str = "rope"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.x.shape[0]} x {self.x.shape[1]}, heads of {2 * self.cos.shape[1]}"

    def fits(self, variant: Variant) -> bool:
        """All of them."""
        return variant.op == "rope"

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.rope`."""
        x = np.concatenate([self.x[:1], self.x])
        places = [ops.UNUSED_POSITION, *map(int, self.positions)]
        state = bench.states([RowState(token=0, position=position) for position in places])
        table = bench.put(np.stack([self.cos, self.sin], axis=-1))
        out, dim = bench.out(*x.shape, fill=x), 2 * self.cos.shape[1]
        bench.run(lambda on: ops.rope(on, state, table, out.rows(), head_dim=dim, label="trial", variant=variant))
        turned = expected.rope(self.x, self.cos[self.positions], self.sin[self.positions])
        found = out.read()
        return [
            Check(variant, "turned", found[1:], turned),
            Check(variant, "padding", found[:1], expected.exact(x[:1])),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwigluTrial:
    """gate and up, (T, width) each."""

    gate: Array
    up: Array
    op: str = "swiglu"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.gate.shape[0]} x {self.gate.shape[1]}"

    def fits(self, variant: Variant) -> bool:
        """All of them."""
        return variant.op == "swiglu"

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against `reference.swiglu`."""
        gate, up, out = bench.put_rows(self.gate), bench.put_rows(self.up), bench.out(*self.gate.shape)
        bench.run(lambda on: ops.swiglu(on, gate, up, out.rows(), label="trial", variant=variant))
        return [Check(variant, "gated", out.read(), expected.swiglu(self.gate, self.up))]


@dataclass(frozen=True, slots=True, kw_only=True)
class AddTrial:
    """x and y, (T, width) each."""

    x: Array
    y: Array
    op: str = "add"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.x.shape[0]} x {self.x.shape[1]}"

    def fits(self, variant: Variant) -> bool:
        """All of them."""
        return variant.op == "add"

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """One rounding, which is the same everywhere."""
        out, y = bench.out(*self.x.shape, fill=self.x), bench.put_rows(self.y)

        def record(on: Recorder) -> None:
            ops.add(on, out.rows(), y, label="trial", variant=variant)

        bench.run(record)
        total = self.x + self.y
        tolerance = np.asarray(expected.UNIT * np.abs(total) + expected.TINY, np.float32)
        return [Check(variant, "sum", out.read(), Expected(total, tolerance))]
