"""Trials of products with weights: plain, with the norm or the gate fused in, and on matrix cores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import Matrix, PackedRows, Recorder, Rows
from xinfer.shaders.catalog import FORMATS, LOAD_BYTES, Variant, variants
from xinfer.trials import expected
from xinfer.trials.base import Check
from xinfer.trials.bench import DTYPES, Bench
from xinfer.trials.expected import TINY, UNIT, Weights
from xinfer.trials.judge import Array, Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTrial:
    """x (T, columns) times w (rows, columns), values that the format has, in one of the forms that the network uses.

    `norm` (weight, eps) normalizes x first; `up`, a second matrix, makes it silu(x @ w^T) * (x @ up^T); `bias` (rows,)
    and `before` (T, rows), the residual, are added. Where `rows` is given a matrix has so many: its own, over and over.
    """

    x: Array
    w: NDArray[Any]
    format: ops.Format
    bias: Array | None = None
    before: Array | None = None
    norm: tuple[Array, float] | None = None
    up: NDArray[Any] | None = None
    rows: int | None = None

    @property
    def op(self) -> str:
        """What stands for this form in reports."""
        parts = ["norm"] * (self.norm is not None) + ["linear" if self.up is None else "gate_up"]
        return "_".join(parts)

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.x.shape[0]} x {self.x.shape[1]} by {self.n_rows} {self.format}"

    @property
    def n_rows(self) -> int:
        """Rows of the matrix, of which each row of the result has a number."""
        return len(self.w) if self.rows is None else self.rows

    def fits(self, variant: Variant) -> bool:
        """Of GEMV and GEMM, those whose form, format and room fit."""
        defines = dict(variant.defines)
        if defines.get("FORMAT") != FORMATS[self.format]:
            return False
        fused = (bool(defines.get("NORM")), bool(defines.get("SWIGLU")))
        if fused != (self.norm is not None, self.up is not None):
            return False
        if variant.op == "linear_gemv":
            whole = self.x.shape[1] % (LOAD_BYTES // DTYPES[self.format].itemsize) == 0
            return len(self.x) <= defines["T_MAX"] and (whole or not defines["VECTOR_X"])
        return variant.op == "linear_gemm"

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against the reference's functions on the same weights."""
        chosen = variants()[variant]
        bias = None if self.bias is None else bench.put(self.bias)
        out = bench.out(len(self.x), self.n_rows, fill=self.before)
        if "halves" in chosen.buffers:
            return self._run_packed(bench, chosen, bias, out.rows(), out.read)
        x, w, up = bench.put_rows(self.x), *self._matrices(bench)
        norm = None if self.norm is None else (bench.put(self.norm[0]), self.norm[1])
        named: dict[str, Any] = {"label": "trial", "variant": variant}

        def record(on: Recorder) -> None:
            if up is not None:
                ops.gate_up(on, x, w, up, out.rows(), norm=norm, **named)
            elif norm is not None:
                ops.norm_linear(on, x, norm[0], w, out.rows(), eps=norm[1], bias=bias, **named)
            else:
                ops.linear(on, x, w, out.rows(), bias=bias, accumulate=self.before is not None, **named)

        bench.run(record)
        return [Check(variant, "product", out.read(), self.expected())]

    def _matrices(self, bench: Bench) -> tuple[Matrix, Matrix | None]:
        up = None if self.up is None else bench.put_matrix(self.up, self.format, rows=self.rows)
        return bench.put_matrix(self.w, self.format, rows=self.rows), up

    def expected(self) -> Expected:
        """What the reference makes of it."""
        w = self._weights(self.w)
        if self.up is not None:
            return expected.gate_up(self.x, w, self._weights(self.up), norm=self.norm)
        if self.norm is not None:
            return expected.norm_linear(self.x, self.norm[0], w, eps=self.norm[1], bias=self.bias)
        return expected.linear(self.x, w, bias=self.bias, before=self.before)

    def _weights(self, values: NDArray[Any]) -> Weights:
        return Weights(values.astype(np.float32), self.rows)

    def _run_packed(self, bench: Bench, variant: Variant, bias: Any, out: Rows, read: Any) -> list[Check]:
        """On matrix cores: the product is judged by what was packed, as pack_rows has a trial of its own."""
        n, width = self.x.shape
        exact = bool(variant.define("SPLIT"))
        x, w, up = bench.put_rows(self.x), *self._matrices(bench)
        place = bench.out(ops.packed_bytes(n, width, exact=exact) // 4)
        packed = PackedRows(place.place, n, width, exact)

        def record(on: Recorder) -> None:
            ops.pack_rows(on, x, packed, label="pack")
            on.recording.barrier()
            options: dict[str, Any] = {"label": "trial", "variant": variant.id}
            if up is not None:
                ops.gate_up_packed(on, packed, w, up, out, **options)
            else:
                ops.linear_packed(on, packed, w, out, bias=bias, accumulate=self.before is not None, **options)

        bench.run(record)
        given = dataclasses.replace(self, x=unpack(place.read(), packed))
        return [Check(variant.id, "product", read(), given.expected())]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTrial:
    """x (T, width) as f16 halves and a scale a row: two halves where it is `exact`, else one.

    With `norm` (weight, eps), its rms_norm is packed; with `up`, (T, width), silu(x) * up.
    """

    x: Array
    exact: bool = True
    norm: tuple[Array, float] | None = None
    up: Array | None = None
    op: str = "pack_rows"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.x.shape[0]} x {self.x.shape[1]}"

    def fits(self, variant: Variant) -> bool:
        """Those that pack just this."""
        sources = (1,) if self.norm else (2,) if self.up is not None else (0, 3) if self.x.shape[1] % 8 == 0 else (0,)
        return variant.op == "pack_rows" and variant.define("SOURCE") in sources

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """The halves' sum must be what is to be packed, to 22 or 11 bits of a row's largest value; padding is 0."""
        x, place = bench.put_rows(self.x), bench.out(ops.packed_bytes(*self.x.shape, exact=self.exact) // 4)
        packed = PackedRows(place.place, len(self.x), self.x.shape[1], self.exact)
        named: dict[str, Any] = {"label": "trial", "variant": variant}
        if self.norm:
            named["norm"] = (bench.put(self.norm[0]), self.norm[1])
        if self.up is not None:
            named["up"] = bench.put_rows(self.up)
        bench.run(lambda on: ops.pack_rows(on, x, packed, **named))
        return check_packed(variant, self.expected(), place.read(), packed)

    def expected(self) -> Expected:
        """What is packed."""
        if self.norm:
            return expected.rms_norm(self.x, self.norm[0], eps=self.norm[1])
        return expected.exact(self.x) if self.up is None else expected.swiglu(self.x, self.up)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTrial:
    """parts (n, T, width) whose sum is taken; bias (width,) and before (T, width) are added."""

    parts: Array
    bias: Array | None = None
    before: Array | None = None
    op: str = "sum_parts"

    @property
    def shape(self) -> str:
        """Its sizes."""
        n, rows, width = self.parts.shape
        return f"{n} parts of {rows} x {width}"

    def fits(self, variant: Variant) -> bool:
        """All of them."""
        return variant.op == "sum_parts"

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Against NumPy's sum in float64."""
        n, rows, width = self.parts.shape
        parts, out = bench.put(self.parts.ravel()), bench.out(rows, width, fill=self.before)
        bias = None if self.bias is None else bench.put(self.bias)
        options: dict[str, Any] = {"bias": bias, "accumulate": self.before is not None, "label": "trial"}
        bench.run(lambda on: ops.sum_parts(on, parts, n, out.rows(), **options, variant=variant))
        added = [*self.parts, *(x for x in (self.bias, self.before) if x is not None)]
        total = sum(np.asarray(x, np.float64) for x in added)
        size = sum(np.abs(x, dtype=np.float64) for x in added)
        tolerance = UNIT * len(added) * size + TINY
        wanted = Expected(np.asarray(total, np.float32), np.asarray(tolerance, np.float32))
        return [Check(variant, "sum", out.read(), wanted)]


def check_packed(variant: str, given: Expected, words: Array, packed: PackedRows) -> list[Check]:
    """Checks of packed rows, (T, width), as `unpack` takes them; `given` is what is packed."""
    scales, halves = _parts(words, packed)
    x = given.values
    n, width = x.shape
    whole = halves.sum(axis=0) * scales[:, np.newaxis]
    largest = np.abs(x).max(axis=1)
    # A row's largest value lies in 2,048 to 4,096 scales, unless it is next to nothing; roundings may take it over.
    scaled = np.where(largest > 1e-30, largest / np.where(scales[:n] == 0, 1, scales[:n]), 2048).astype(np.float32)
    padding = np.concatenate([halves[:, :n, width:].ravel(), halves[:, n:].ravel()])
    checks = [
        Check(
            variant,
            "halves",
            whole[:n, :width].astype(np.float32),
            expected.packed(given, scales[:n], exact=packed.exact),
        ),
        Check(variant, "scales", scaled, Expected(np.full(n, 3072, np.float32), np.full(n, 1024.01, np.float32))),
    ]
    if padding.size:  # whole tiles have none
        checks.append(Check(variant, "padding", padding, expected.exact(np.zeros_like(padding))))
    return checks


def unpack(words: Array, packed: PackedRows) -> Array:
    """The activations (T, width) that packed rows stand for."""
    scales, halves = _parts(words, packed)
    total = halves.sum(axis=0)
    return np.asarray((total * scales[:, np.newaxis])[: packed.n, : packed.width], np.float32)


def _parts(words: Array, packed: PackedRows) -> tuple[Array, Array]:
    """Scales (padded,) and halves, (2 or 1, padded, columns)."""
    flat = words.reshape(-1)
    halves = flat[packed.padded :].view(np.float16).astype(np.float32)
    return flat[: packed.padded], halves.reshape(2 if packed.exact else 1, packed.padded, -1)
