"""Matrix products with stored weights: y = x @ w^T, by GEMV for few rows of activations and by GEMM for many."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from xinfer.gpu.api import Bindable
from xinfer.ops._base import Matrix, MatrixSlice, Recorder, Rows, ceil_div, expect, fold, span
from xinfer.ops._capacity import DISCRETE, Capacity
from xinfer.shaders.catalog import (
    GEMV_FAST,
    GEMV_PLAIN,
    SEVERAL_ROWS,
    GemvShape,
    Variant,
    gemv_id,
    variants,
)

GEMV_ROWS_MAX = 8  # rows of activations up to which the weights are read once by a GEMV
FLAG_BIAS, FLAG_ACCUMULATE = 1, 2

LONG_LOADS = 512  # 16-byte loads from which on a row is long


def linear(
    on: Recorder,
    x: Rows,
    w: Matrix,
    out: Rows,
    *,
    bias: Bindable | None = None,
    accumulate: bool = False,
    alone: bool = False,
    label: str,
    variant: str | None = None,
) -> None:
    """`out = x @ w^T (+ bias) (+ out)`: x (T, columns), w (rows, columns), bias (rows,) float32, out (T, rows).

    A dispatch for each slice of w. `accumulate` adds to what out holds: the residual. `alone` gives each row the bits
    that it gets where it is the only one.
    """
    _check(x, w, out, bias, label)
    few = alone or x.n <= GEMV_ROWS_MAX
    one = x.rows(0, 1) if alone else x
    candidates = gemv_candidates(w, one, capacity=on.kernels.capacity) if few else gemm_candidates(w, x.n)
    chosen = on.choose(candidates, variant)
    for part in w.slices:
        if chosen.op == "linear_gemv":
            _gemv(on, chosen, x, w, part, out, bias=bias, accumulate=accumulate, alone=alone, label=label)
        else:
            constants = _constants(x, w, part, out, bias=bias is not None, accumulate=accumulate)
            buffers = {"x": x.place, "w": part.place, "bias": x.place if bias is None else bias, "y": out.place}
            tiles = (ceil_div(part.n_rows, chosen.define("TILE_N")), ceil_div(x.n, chosen.define("TILE_M")), 1)
            on.dispatch(chosen, buffers, constants, tiles, label)


def norm_linear(
    on: Recorder,
    x: Rows,
    norm_weight: Bindable,
    w: Matrix,
    out: Rows,
    *,
    eps: float,
    bias: Bindable | None = None,
    label: str,
    variant: str | None = None,
) -> None:
    """`out = rms_norm(x, norm_weight) @ w^T (+ bias)` in one dispatch a slice: x (T, columns), out (T, rows).

    Where `can_fuse` says so; else rms_norm and linear. Each row gets the bits that it gets alone.
    """
    _check(x, w, out, bias, label)
    chosen = on.choose(gemv_candidates(w, x.rows(0, 1), norm=True, capacity=on.kernels.capacity), variant)
    for part in w.slices:
        _gemv(on, chosen, x, w, part, out, bias=bias, norm=(norm_weight, eps), alone=True, label=label)


def gate_up(
    on: Recorder,
    x: Rows,
    gate: Matrix,
    up: Matrix,
    out: Rows,
    *,
    norm: tuple[Bindable, float] | None = None,
    label: str,
    variant: str | None = None,
) -> None:
    """`out = silu(x @ gate^T) * (x @ up^T)`, x normalized first where `norm` (weight, eps) is given.

    x (T, columns), gate and up (rows, columns) sliced alike, out (T, rows). Where `can_fuse` says so; else rms_norm,
    linear twice and swiglu. Each row gets the bits that it gets alone.
    """
    _check(x, gate, out, None, label)
    expect_alike(gate, up, label)
    one, capacity = x.rows(0, 1), on.kernels.capacity
    candidates = gemv_candidates(gate, one, norm=norm is not None, swiglu=True, capacity=capacity)
    chosen = on.choose(candidates, variant)
    for part, up_part in zip(gate.slices, up.slices, strict=True):
        _gemv(on, chosen, x, gate, part, out, up=up_part, norm=norm, alone=True, label=label)


def _gemv(
    on: Recorder,
    chosen: Variant,
    x: Rows,
    w: Matrix,
    part: MatrixSlice,
    out: Rows,
    *,
    bias: Bindable | None = None,
    accumulate: bool = False,
    up: MatrixSlice | None = None,
    norm: tuple[Bindable, float] | None = None,
    alone: bool = False,
    label: str,
) -> None:
    """One slice of a product by a GEMV, in one dispatch unless rows are to be as they are `alone`."""
    grid_x, grid_y = fold(ceil_div(part.n_rows, gemv_rows(chosen)))
    for variant, first, n in _alone(on, chosen, x.n) if alone else [(chosen, 0, x.n)]:
        rows, made = x.rows(first, n), out.rows(first, n)
        constants = _constants(rows, w, part, made, bias=bias is not None, accumulate=accumulate)
        constants |= {"grid_x": grid_x, "eps": float(norm[1]) if norm else 0.0}
        buffers = {"x": x.place, "w": part.place, "y": out.place}
        buffers |= {"bias": x.place if bias is None else bias} if up is None else {"w2": up.place}
        if norm:
            buffers["norm_weight"] = norm[0]
        on.dispatch(variant, buffers, constants, (grid_x, grid_y, 1), label)


def _alone(on: Recorder, chosen: Variant, n_rows: int) -> Iterator[tuple[Variant, int, int]]:
    """(variant, first row, rows) of dispatches that give each row the bits that `chosen` gives it by itself."""
    several = chosen if chosen.define("T_MAX") > 1 else _several(chosen.id)
    if several is None or not on.kernels.usable(several.id):
        several = chosen
    step = several.define("T_MAX")
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        yield chosen if n == 1 else several, first, n


@functools.cache
def _several(variant_id: str) -> Variant | None:
    """The GEMV for `SEVERAL_ROWS` rows that sums as one for a single row does; see linear_gemv.hlsl."""

    def order(variant: Variant) -> tuple[tuple[str, int], ...]:
        return tuple((name, value) for name, value in variant.defines if name not in ("T_MAX", "LOADS"))

    one = variants()[variant_id]
    alike = (v for v in variants().values() if v.op == "linear_gemv" and v.define("T_MAX") == SEVERAL_ROWS)
    return next((variant for variant in alike if order(variant) == order(one)), None)


def expect_alike(gate: Matrix, up: Matrix, label: str) -> None:
    """Two matrices that one kernel walks over together."""
    alike = [(part.first_row, part.n_rows) for part in gate.slices] == [(p.first_row, p.n_rows) for p in up.slices]
    same = (gate.columns, gate.format, gate.row_stride) == (up.columns, up.format, up.row_stride)
    expect(alike and same, f"{label}: gate and up must have one shape, format, stride and slicing")


def can_fuse(on: Recorder, x: Rows, w: Matrix, *, norm: bool = False, swiglu: bool = False) -> bool:
    """Whether norm_linear (norm), or gate_up (swiglu, with or without norm), takes these."""
    return any(on.kernels.usable(name) for name in gemv_candidates(w, x, norm=norm, swiglu=swiglu))


def gemv_candidates(
    w: Matrix, x: Rows, *, norm: bool = False, swiglu: bool = False, capacity: Capacity = DISCRETE
) -> list[str]:
    """Variants of a GEMV that fit the shapes, best first.

    Nearest to `gemv_layout` first.
    """
    vector = all(n % 4 == 0 for n in (x.stride, x.offset)) and w.columns % w.values_per_load == 0
    fitting = [
        shape
        for shape in GEMV_FAST
        if vector and w.format != "f32" and x.n <= shape.t_max and (shape.norm, shape.swiglu) == (norm, swiglu)
    ]
    loads = w.columns // w.values_per_load
    layout = gemv_layout(w.rows, loads, x.n, norm=norm, swiglu=swiglu, capacity=capacity)

    def distance(shape: GemvShape) -> tuple[int, ...]:
        own = (shape.set_lanes, shape.rows_per_set, shape.loads)
        return shape.t_max, not shape.wave, *(abs(a - b) for a, b in zip(own, layout, strict=True))

    plain = [] if norm or swiglu else [GEMV_PLAIN]
    return [gemv_id(w.format, shape) for shape in (*sorted(fitting, key=distance), *plain)]


def gemv_layout(
    rows: int, loads: int, x_rows: int, *, norm: bool = False, swiglu: bool = False, capacity: Capacity = DISCRETE
) -> tuple[int, int, int]:
    """(lanes of a set, rows a set walks over, loads of a row at once) for a matrix of `rows` rows of `loads` loads.

    Or for a pair of them. For one row of activations, the best of every layout at the shapes of 0.5B, 1.5B and 7B on an
    H200 (benchmarks/LOG.md): long rows are shared by more lanes; rows that walk together share what is read of x and
    of the norm's weight; where lanes are many, one load of each is enough.
    """
    busy = capacity.lanes
    if x_rows > 1:
        layout = (128, 1, 2) if rows * 32 < busy and loads >= 4 * 32 else (32, 2, 2)
    elif swiglu:
        short = (32, 2, 2) if rows * 64 >= busy else (32, 1, 4)
        layout = (128, 1, 1) if loads > 128 else short
    elif norm:
        layout = (64, 4, 2) if rows * 64 >= 2.5 * busy else (128, 2, 1)
    elif rows * 32 >= 10 * busy:
        layout = (32, 2, 4)
    elif loads >= 4 * LONG_LOADS:
        layout = (128, 2, 1)
    elif loads >= LONG_LOADS:
        layout = (128, 1, 1 if loads >= 2 * LONG_LOADS else 5)
    else:
        layout = (128, 2, 1) if rows * 64 >= busy + busy // 4 else (64, 1, 4)
    lanes, together, at_once = layout
    return max(lanes, capacity.set_lanes), together, at_once


def gemv_rows(variant: Variant) -> int:
    """Rows of weights that one workgroup of a GEMV makes."""
    return variant.workgroup[0] // variant.define("SET_LANES") * variant.define("ROWS_PER_SET")


def gemv_trips(variant_id: str, *, columns: int) -> int:
    """Loop iterations of one lane, every unrolled loop counted as if it were not; for waves of 4 lanes, the worst."""
    variant = variants()[variant_id]
    defines = dict(variant.defines)
    values = 4 if defines["FORMAT"] == 0 else 8
    sums = defines["T_MAX"] * (defines["ROWS_PER_SET"] * (1 + defines["SWIGLU"]) + defines["NORM"])
    lanes, sets_a_lane = defines["SET_LANES"], 1
    if defines["WAVE"]:
        sets = defines["GROUP"] // defines["SET_LANES"]
        sets_a_lane = max(sets // (defines["GROUP"] // 64), 1)  # of waves of 64 there are the fewest
        lanes = 4
    loops = ceil_div(ceil_div(columns, values), defines["LOADS"] * lanes)
    parts = defines["GROUP"] // 4 if defines["WAVE"] else 8 * sums
    return sets_a_lane * loops + parts + 2 * sums


def gemm_candidates(w: Matrix, x_rows: int) -> list[str]:
    """Variants of a GEMM, best first: tiles as large as still make enough workgroups, then what is right but slower."""
    order, slower = ["plain"], []
    if w.format != "f32":
        for tile, size in (("tile64", 64), ("tile128", 128)):
            if ceil_div(w.rows, size) * ceil_div(x_rows, size) >= (1 if size == 64 else 128) and x_rows > size // 2:
                order.insert(0, tile)
            else:
                slower.append(tile)
    return [f"linear_gemm.{w.format}.{tile}" for tile in (*order, *slower)]


def gemm_trips(variant_id: str, *, columns: int) -> int:
    """Loop iterations of one lane."""
    variant = variants()[variant_id]
    defines = dict(variant.defines)
    m, n, k, group = defines["TILE_M"], defines["TILE_N"], defines["TILE_K"], variant.workgroup[0]
    loads = k // (4 if defines["FORMAT"] == 0 else 8)
    a_tile = 1 + ceil_div(m * k, group) + ceil_div(n * loads, group) + k
    return ceil_div(columns, k) * a_tile


def _check(x: Rows, w: Matrix, out: Rows, bias: Bindable | None, label: str) -> None:
    expect(x.width == w.columns, f"{label}: x is {x.width} wide, the matrix {w.columns}")
    expect(out.width == w.rows and out.n == x.n, f"{label}: out is {out.n} x {out.width}, not {x.n} x {w.rows}")
    expect(bias is None or bias.size >= 4 * w.rows, f"{label}: the bias is shorter than {w.rows} floats")


def _constants(
    x: Rows, w: Matrix, part: MatrixSlice, out: Rows, *, bias: bool, accumulate: bool
) -> dict[str, int | float]:
    target = replace(out, offset=out.offset + part.first_row, width=part.n_rows)
    return {
        "columns": w.columns,
        "rows": part.n_rows,
        "row_loads": w.row_loads,
        "x_rows": x.n,
        **span(x, "x"),
        **span(target, "y"),
        "bias_offset": part.first_row,
        "flags": FLAG_BIAS * bias + FLAG_ACCUMULATE * accumulate,
    }
