"""Linear layers on the device, every GEMV and GEMM variant, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu.op_bench import UNIT, Array, Bench, assert_close, random_weights, sum_tolerance

from xinfer import ops
from xinfer.model import reference
from xinfer.ops._linear import gemm_candidates, gemv_candidates, gemv_layout
from xinfer.shaders.catalog import Variant, variants

GEMV = [variant for variant in variants().values() if variant.op == "linear_gemv"]
PRODUCTS = [v for v in GEMV if not v.define("SWIGLU") and not v.define("NORM")]
NORMED = [v for v in GEMV if v.define("NORM") and not v.define("SWIGLU")]
GATED = [v for v in GEMV if v.define("SWIGLU")]
GEMM = [variant for variant in variants().values() if variant.source == "linear_gemm.hlsl"]
EPS = 1e-6


def format_of(variant: Variant) -> ops.Format:
    name = variant.id.split(".")[1]
    assert name in ("f32", "f16", "bf16")
    return name  # type: ignore[return-value]


def skip_unless_usable(bench: Bench, variant: Variant) -> None:
    if not bench.kernels.usable(variant.id):
        pytest.skip(f"{bench.device.info.name} cannot run {variant.id}")


class Case:
    """Random activations, weights, bias and residual, what is expected of them, and how far off it may be."""

    def __init__(self, shape: tuple[int, int, int], weight_format: ops.Format, *, seed: int = 0) -> None:
        x_rows, rows, columns = shape
        rng = np.random.default_rng([seed, *shape])
        self.x = rng.standard_normal((x_rows, columns), np.float32)
        self.w = random_weights(rng, (rows, columns), weight_format)
        self.bias = rng.standard_normal(rows, np.float32)
        self.before = rng.standard_normal((x_rows, rows), np.float32)

    def expected(self, *, bias: bool, accumulate: bool) -> Array:
        y = reference.linear(self.x, self.w.astype(np.float32), self.bias if bias else None)
        return y + self.before if accumulate else y

    def tolerance(self) -> Array:
        magnitude = np.abs(self.x) @ np.abs(self.w.astype(np.float32)).T + np.abs(self.bias) + np.abs(self.before)
        return sum_tolerance(self.x.shape[1], magnitude)


def check(
    bench: Bench,
    shape: tuple[int, int, int],
    weight_format: ops.Format,
    *,
    variant: str | None = None,
    bias: bool = False,
    accumulate: bool = False,
    slices: int = 1,
    spread: tuple[int, int] = (0, 0),
) -> None:
    """Run one product; `spread` is the activations' extra stride and offset."""
    case = Case(shape, weight_format)
    x = bench.put_rows(case.x, stride=shape[2] + spread[0], offset=spread[1])
    w = bench.put_matrix(case.w, weight_format, slices=slices)
    out = bench.out(shape[0], shape[1], fill=case.before if accumulate else None)
    add = bench.put(case.bias) if bias else None
    bench.run(ops.linear, x, w, out.rows(), bias=add, accumulate=accumulate, label="y", variant=variant)
    assert_close(out.read(), case.expected(bias=bias, accumulate=accumulate), case.tolerance())


# Rows around the sets and workgroups of every variant, columns around its loads.
GEMV_SHAPES = [(1, 8), (31, 32), (33, 264), (130, 1024), (5, 4864)]
PLAIN_SHAPES = [(1, 1), (31, 31), (32, 33), (33, 4097)]


@pytest.mark.parametrize("variant", PRODUCTS, ids=lambda variant: variant.id)
def test_gemv(bench: Bench, variant: Variant) -> None:
    skip_unless_usable(bench, variant)
    plain = not variant.define("VECTOR_X")
    for x_rows in {variant.define("T_MAX") // 2 + 1, variant.define("T_MAX")}:
        for number, (rows, columns) in enumerate(PLAIN_SHAPES if plain else GEMV_SHAPES):
            check(
                *(bench, (x_rows, rows, columns), format_of(variant)),
                variant=variant.id,
                bias=number % 2 == 1,
                accumulate=number % 3 == 2,
                spread=(3, 1) if plain else (4, 8),
            )


@pytest.mark.parametrize("variant", GEMM, ids=lambda variant: variant.id)
def test_gemm(bench: Bench, variant: Variant) -> None:
    skip_unless_usable(bench, variant)
    shapes = [(5, 32, 64), (1, 1, 1), (33, 31, 33), (130, 129, 72)]
    for number, shape in enumerate(shapes):
        check(
            *(bench, shape, format_of(variant)),
            variant=variant.id,
            bias=number % 2 == 0,
            accumulate=number % 3 == 0,
            spread=(3, 1),
        )


def norm_tolerance(x: Array, weight: Array, w: NDArray[Any], bias: Array | float) -> tuple[Array, Array]:
    """The reference's normalized activations, and the tolerance of their product with w."""
    normed = reference.rms_norm(x, weight, eps=EPS)
    magnitude = np.abs(normed) @ np.abs(w.astype(np.float32)).T + np.abs(bias)
    # The norm adds the roundings of its own sum, relative to every product.
    return normed, sum_tolerance(x.shape[1], 2 * magnitude)


@pytest.mark.parametrize("variant", NORMED, ids=lambda variant: variant.id)
def test_norm_linear(bench: Bench, variant: Variant) -> None:
    skip_unless_usable(bench, variant)
    for rows, columns in GEMV_SHAPES:
        case = Case((1, rows, columns), format_of(variant), seed=1)
        weight = np.random.default_rng(columns).standard_normal(columns, np.float32)
        x, w = bench.put_rows(case.x * np.float32(20)), bench.put_matrix(case.w, format_of(variant))
        scale, bias, out = bench.put(weight), bench.put(case.bias), bench.out(1, rows)
        bench.run(ops.norm_linear, x, scale, w, out.rows(), eps=EPS, bias=bias, label="y", variant=variant.id)
        normed, tolerance = norm_tolerance(case.x * np.float32(20), weight, case.w, case.bias)
        assert_close(out.read(), reference.linear(normed, case.w.astype(np.float32), case.bias), tolerance)


@pytest.mark.parametrize("variant", GATED, ids=lambda variant: variant.id)
def test_gate_up(bench: Bench, variant: Variant) -> None:
    skip_unless_usable(bench, variant)
    for rows, columns in GEMV_SHAPES:
        rng = np.random.default_rng([rows, columns])
        x, weight = rng.standard_normal((1, columns), np.float32), rng.standard_normal(columns, np.float32)
        gate, up = (random_weights(rng, (rows, columns), format_of(variant)) for _ in range(2))
        activations, gates = bench.put_rows(x), bench.put_matrix(gate, format_of(variant))
        ups, out = bench.put_matrix(up, format_of(variant)), bench.out(1, rows)
        norm = (bench.put(weight), EPS) if variant.define("NORM") else None
        bench.run(ops.gate_up, activations, gates, ups, out.rows(), norm=norm, label="y", variant=variant.id)
        if norm is not None:
            x, gate_tolerance = norm_tolerance(x, weight, gate, 0.0)
            _, up_tolerance = norm_tolerance(rng.standard_normal((1, columns), np.float32), weight, up, 0.0)
            up_tolerance = sum_tolerance(columns, 2 * np.abs(x) @ np.abs(up.astype(np.float32)).T)
        else:
            gate_tolerance, up_tolerance = (
                sum_tolerance(columns, np.abs(x) @ np.abs(m.astype(np.float32)).T) for m in (gate, up)
            )
        a, b = reference.linear(x, gate.astype(np.float32)), reference.linear(x, up.astype(np.float32))
        expected = reference.swiglu(a, b)
        # silu's slope is at most 1.1; its own error as in test_swiglu.
        own = 2 * UNIT * (8 + 2 * np.abs(a)) * np.abs(expected)
        tolerance = 1.1 * gate_tolerance * np.abs(b) + up_tolerance * np.abs(a) + own + gate_tolerance * up_tolerance
        assert_close(out.read(), expected, np.asarray(tolerance, np.float32))


@pytest.mark.parametrize("x_rows", [1, 9])
def test_slices_follow_each_other(bench: Bench, x_rows: int) -> None:
    check(bench, (x_rows, 100, 64), "f16", bias=True, slices=3)


@pytest.mark.parametrize(("x_rows", "columns"), [(1, 4096), (1, 33), (3, 64), (5, 31), (9, 33), (70, 64)])
def test_chosen_variant(bench: Bench, x_rows: int, columns: int) -> None:
    check(bench, (x_rows, 67, columns), "bf16", bias=True)


def test_vocabulary_needs_two_dimensions(bench: Bench) -> None:
    """151,936 rows: more workgroups than one dimension holds, with a row a workgroup."""
    shape = (1, 151_936, 8)
    wave = "linear_gemv.f16.t1.l128r1.wave"
    check(bench, shape, "f16", variant=wave if bench.kernels.usable(wave) else wave.removesuffix(".wave"))
    check(bench, shape, "f16")


def test_rule_of_the_layout() -> None:
    """Qwen2's own matrices; loads are 16 bytes, so columns / 8."""
    assert gemv_layout(896, 4864 // 8, 1) == (128, 1, 5)  # 0.5B down: long rows
    assert gemv_layout(1536, 8960 // 8, 1) == (128, 1, 1)  # 1.5B down
    assert gemv_layout(3584, 18_944 // 8, 1) == (128, 2, 1)  # 7B down: longer ones
    assert gemv_layout(896, 896 // 8, 1) == (64, 1, 4)  # 0.5B o: neither long nor many
    assert gemv_layout(1536, 1536 // 8, 1) == (64, 1, 4)  # 1.5B o
    assert gemv_layout(3584, 3584 // 8, 1) == (128, 2, 1)  # 7B o: more of them
    assert gemv_layout(1152, 896 // 8, 1, norm=True) == (128, 2, 1)  # 0.5B qkv
    assert gemv_layout(2048, 1536 // 8, 1, norm=True) == (128, 2, 1)  # 1.5B qkv
    assert gemv_layout(4608, 3584 // 8, 1, norm=True) == (64, 4, 2)  # 7B qkv
    assert gemv_layout(4864, 896 // 8, 1, norm=True, swiglu=True) == (32, 2, 2)  # 0.5B gate and up
    assert gemv_layout(8960, 1536 // 8, 1, norm=True, swiglu=True) == (128, 1, 1)  # 1.5B gate and up
    assert gemv_layout(18_944, 3584 // 8, 1, norm=True, swiglu=True) == (128, 1, 1)  # 7B gate and up
    assert gemv_layout(151_936, 896 // 8, 1, norm=True) == (64, 4, 2)  # 0.5B head: many rows
    assert gemv_layout(152_064, 3584 // 8, 1, norm=True) == (64, 4, 2)  # 7B head
    assert gemv_layout(151_936, 896 // 8, 4) == (32, 2, 2)


# What is chosen for a row of activations at the shapes above, and for formats and widths that only plain kernels take.
ALONE = [
    *((900, 4864, {}), (1536, 8960, {}), (1100, 16_400, {}), (40, 896, {}), (2000, 640, {}), (31, 33, {})),
    *((40, 896, {"norm": True}), (4000, 64, {"norm": True})),
    *((40, 896, {"norm": True, "gated": True}), (2000, 64, {"norm": True, "gated": True})),
    (30, 1536, {"norm": True, "gated": True}),
]


@pytest.mark.parametrize("weight_format", ["f16", "bf16", "f32"])
@pytest.mark.parametrize(("rows", "columns", "form"), ALONE)
def test_rows_together_get_the_bits_of_each_alone(
    bench: Bench, rows: int, columns: int, form: dict[str, bool], weight_format: ops.Format
) -> None:
    """And are read together: fewer dispatches than rows, where waves are whole."""
    n, rng = 7, np.random.default_rng([rows, columns])
    norm, gated = form.get("norm", False), form.get("gated", False)
    x = bench.put_rows(rng.standard_normal((n, columns), np.float32))
    w, up = (bench.put_matrix(random_weights(rng, (rows, columns), weight_format), weight_format) for _ in range(2))
    scale, bias = (bench.put(rng.standard_normal(k, np.float32)) for k in (columns, rows))
    before = rng.standard_normal((n, rows), np.float32)
    if (norm or gated) and not any(
        map(bench.kernels.usable, gemv_candidates(w, x.rows(0, 1), norm=norm, swiglu=gated))
    ):
        pytest.skip("nothing is fused")

    def run(given: ops.Rows, out: ops.Rows) -> None:
        if gated:
            bench.run(ops.gate_up, given, w, up, out, norm=(scale, EPS), label="y")
        elif norm:
            bench.run(ops.norm_linear, given, scale, w, out, eps=EPS, bias=bias, label="y")
        else:
            bench.run(ops.linear, given, w, out, bias=bias, accumulate=True, alone=True, label="y")

    one_by_one, together = bench.out(n, rows, fill=before), bench.out(n, rows, fill=before)
    for row in range(n):
        run(x.rows(row, 1), one_by_one.rows().rows(row, 1))
    run(x, together.rows())
    assert np.array_equal(together.read(), one_by_one.read())
    assert np.abs(together.read() - before).min() > 0


def test_plain_is_always_a_candidate_and_quarantine_is_honoured(bench: Bench) -> None:
    case = Case((1, 16, 64), "f16")
    x, w = bench.put_rows(case.x), bench.put_matrix(case.w, "f16")
    assert gemv_candidates(w, x)[-1] == "linear_gemv.f16.plain"
    assert gemm_candidates(w, 100) == [f"linear_gemm.f16.{tile}" for tile in ("tile64", "plain", "tile128")]
    assert gemm_candidates(w, 17)[0] == "linear_gemm.f16.plain"
    fast = [name for name in gemv_candidates(w, x) if not name.endswith("plain")]
    with ops.KernelSet(bench.device, quarantine=fast) as kernels:
        assert kernels.first_usable(gemv_candidates(w, x)).id == "linear_gemv.f16.plain"


def test_misaligned_activations_take_the_plain_variant(bench: Bench) -> None:
    case = Case((2, 16, 64), "f16")
    w = bench.put_matrix(case.w, "f16")
    assert gemv_candidates(w, bench.put_rows(case.x, stride=66)) == ["linear_gemv.f16.plain"]
    assert gemv_candidates(w, bench.put_rows(case.x, offset=2)) == ["linear_gemv.f16.plain"]
