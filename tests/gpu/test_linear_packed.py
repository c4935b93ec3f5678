"""pack_rows and the matrix-core GEMM: on devices that have matrix cores, elsewhere with emulated fragments."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.gpu.emulated import emulate
from tests.gpu.op_bench import Array, Bench, assert_close, random_weights, sum_tolerance

from xinfer import ops
from xinfer.model import reference
from xinfer.ops import _packed
from xinfer.shaders.catalog import Variant, variants

COOP = [v for v in variants().values() if v.source == "linear_gemm_coop.slang"]
# Both tile sizes, both forms, both formats.
EMULATED = ("f16.coop64.split", "f16.coop128.half", "bf16.coop64.half")
SHAPES = [(9, 1, 8), (64, 128, 32), (65, 129, 40), (130, 257, 264)]


def unpacked(bench: Bench, packed: ops.PackedRows) -> tuple[Array, Array]:
    """Scales (padded,) and halves (2 or 1, padded, columns) of packed rows."""
    scales = np.frombuffer(bench.device.download(packed.scales), np.float32)
    halves = np.frombuffer(bench.device.download(packed.halves), np.float16).astype(np.float32)
    return scales, halves.reshape(2 if packed.exact else 1, packed.padded, -1)


def pack(bench: Bench, x: Array, *, exact: bool = True, variant: str | None = None) -> ops.PackedRows:
    n, width = x.shape
    out = bench.out(ops.packed_bytes(n, width, exact=exact) // 4)
    packed = ops.PackedRows(out.place, n, width, exact)
    stride, offset = (width + 4, 4) if variant and ".fours." in variant else (width + 3, 1)
    bench.run(ops.pack_rows, bench.put_rows(x, stride=stride, offset=offset), packed, label="pack", variant=variant)
    out.read()  # its guard bands
    return packed


@pytest.mark.parametrize(
    ("form", "n", "width"),
    [("", 1, 1), ("", 3, 31), ("", 129, 33), ("", 2, 4097), ("fours.", 1, 8), ("fours.", 129, 40), ("fours.", 2, 4104)],
)
@pytest.mark.parametrize("lanes", ["plain", "wave"])
def test_pack_rows(bench: Bench, form: str, lanes: str, n: int, width: int) -> None:
    variant = f"pack_rows.{form}{lanes}"
    if not bench.kernels.usable(variant):
        pytest.skip(f"{bench.device.info.name} cannot run {variant}")
    rng = np.random.default_rng(width)
    x = rng.standard_normal((n, width), np.float32) * np.exp(rng.uniform(-40, 40, (n, 1))).astype(np.float32)
    x[0, 0] = 3e38 if n > 1 else x[0, 0]
    packed = pack(bench, x, variant=variant)
    scales, (high, low) = unpacked(bench, packed)
    one_scales, (one,) = unpacked(bench, pack(bench, x, exact=False, variant=variant))
    assert np.array_equal(one, high)
    assert np.array_equal(one_scales, scales)
    assert (np.frexp(scales)[0] == 0.5).all(), "scales are powers of two"
    largest = np.abs(x).max(axis=1) / scales[:n]
    assert ((largest >= 2048) & (largest < 4096)).all()
    # The high half is off by at most half of f16's step of 2 in 2,048 to 4,096, the low one by half of 2^-10.
    assert_close((high + low)[:n, :width] * scales[:n, None], x, 2.0**-11 * scales[:n, None])
    assert_close(high[:n, :width] * scales[:n, None], x, scales[:n, None])
    for part in (high, low):
        assert (part[n:] == 0).all()
        assert (part[:, width:] == 0).all()


def test_rows_of_zeros_and_the_smallest_numbers(bench: Bench) -> None:
    """Subnormal numbers may become 0: Vulkan lets them, Direct3D 12 makes them so."""
    smallest = 2.0**-126
    x = np.array([[0, 0], [smallest / 2, 0], [3 * smallest, -2 * smallest]], np.float32)
    scales, (high, low) = unpacked(bench, pack(bench, x))
    assert np.isfinite(scales).all()
    found = (high + low)[:3, :2] * scales[:3, None]
    assert_close(found[[0, 2]], x[[0, 2]], 0.0)
    assert found[1].tolist() in ([0, 0], x[1].tolist())


@pytest.mark.parametrize("form", ["plain", "wave"])
@pytest.mark.parametrize(("n", "width"), [(1, 8), (3, 64), (129, 72), (2, 4104)])
@pytest.mark.parametrize("exact", [True, False])
def test_packing_with_the_op_before(bench: Bench, form: str, n: int, width: int, exact: bool) -> None:
    """rms_norm, and silu(gate) * up, packed without a stop in between, from rows with gaps."""
    if not bench.kernels.usable(f"pack_rows.norm.{form}"):
        pytest.skip(f"{bench.device.info.name} has no such subgroup operations")
    rng = np.random.default_rng(width)
    x, up = (rng.standard_normal((n, width), np.float32) for _ in range(2))
    x[0] *= np.float32(1e-4)  # where eps matters
    weight = rng.standard_normal(width, np.float32)
    both = bench.put_rows(np.concatenate([x, up], axis=1), stride=2 * width + 4, offset=8)
    mine, other = both.columns(0, width), both.columns(width, width)
    fused: list[tuple[str, dict[str, Any], Array]] = [
        ("norm", {"norm": (bench.put(weight), 1e-6)}, reference.rms_norm(x, weight, eps=1e-6)),
        ("swiglu", {"up": other}, reference.swiglu(x, up)),
    ]
    for name, given, expected in fused:
        out = bench.out(ops.packed_bytes(n, width, exact=exact) // 4)
        packed = ops.PackedRows(out.place, n, width, exact)
        variant = f"pack_rows.{name}.{form}"
        bench.run(ops.pack_rows, mine, packed, **given, label="pack", variant=variant)
        out.read()  # its guard bands
        scales, halves = unpacked(bench, packed)
        whole = halves.sum(axis=0)
        step = (2.0**-11 if exact else 1.0) * scales[:n, None]
        tolerance = np.asarray(step + 1e-5 * np.abs(expected) + 1e-30, np.float32)
        assert_close(whole[:n, :width] * scales[:n, None], expected, tolerance)
        largest = np.abs(whole[:n]).max(axis=1)
        assert ((largest >= 2047) & (largest <= 4096)).all()
        assert (halves[:, n:] == 0).all()
        assert (halves[:, :, width:] == 0).all()


def multiply(bench: Bench, variant: Variant, shape: tuple[int, int, int], *, slices: int = 1, n_parts: int = 1) -> None:
    """One product with bias and residual, against the reference; its sums in parts where there are several."""
    n, rows, columns = shape
    weight_format: ops.Format = "bf16" if ".bf16." in variant.id else "f16"
    rng = np.random.default_rng(shape)
    x = rng.standard_normal((n, columns), np.float32) * np.float32(1e5)  # beyond f16
    w = random_weights(rng, (rows, columns), weight_format)
    bias, before = rng.standard_normal(rows, np.float32), rng.standard_normal((n, rows), np.float32)
    exact = bool(variant.define("SPLIT"))
    packed, out = pack(bench, x, exact=exact), bench.out(n, rows + 3, fill=np.pad(before, ((0, 0), (3, 0))))
    bench.run(
        *(ops.linear_packed, packed, bench.put_matrix(w, weight_format, slices=slices), out.rows().columns(3, rows)),
        bias=bench.put(bias),
        accumulate=True,
        scratch=bench.out(n_parts, n, rows).place if n_parts > 1 else None,
        n_parts=n_parts,
        label="y",
        variant=variant.id,
    )
    wide = w.astype(np.float32)
    expected = reference.linear(x, wide, bias) + before
    magnitude = np.abs(x) @ np.abs(wide).T + np.abs(bias) + np.abs(before)
    # Packing keeps 22 bits (or 11) of a row's largest value.
    step = np.abs(x).max(axis=1, keepdims=True) * (2.0**-22 if exact else 2.0**-11)
    lost = step * np.sqrt((wide**2).sum(axis=1)) * 4  # roundings of random sign: four times their deviation at most
    found = out.read()
    assert_close(found[:, 3:], expected, (sum_tolerance(columns, magnitude) + lost).astype(np.float32))
    assert (found[:, :3] == 0).all()


def multiply_gated(bench: Bench, variant: Variant, shape: tuple[int, int, int], *, slices: int = 1) -> None:
    """silu(x @ gate^T) * (x @ up^T), against the reference on what was packed."""
    n, rows, columns = shape
    weight_format: ops.Format = "bf16" if ".bf16." in variant.id else "f16"
    rng = np.random.default_rng(shape)
    x = rng.standard_normal((n, columns), np.float32)
    gate, up = (random_weights(rng, (rows, columns), weight_format) for _ in range(2))
    packed, out = (
        pack(bench, x, exact=bool(variant.define("SPLIT"))),
        bench.out(n, rows + 3, fill=np.zeros((n, rows + 3))),
    )
    matrices = [bench.put_matrix(w, weight_format, slices=slices) for w in (gate, up)]
    target = out.rows().columns(3, rows)
    bench.run(ops.gate_up_packed, packed, matrices[0], matrices[1], target, label="gate_up", variant=variant.id)
    scales, halves = unpacked(bench, packed)
    given = (halves.sum(axis=0) * scales[:, None])[:n, :columns]
    a, b = (reference.linear(given, w.astype(np.float32)) for w in (gate, up))
    lost_a, lost_b = (sum_tolerance(columns, np.abs(given) @ np.abs(w.astype(np.float32)).T) for w in (gate, up))
    # silu's slope is at most 1.1, and its own rounding a few units of its last place.
    tolerance = 1.1 * lost_a * np.abs(b) + lost_b * np.abs(a) + lost_a * lost_b + 1e-6 * np.abs(a * b)
    found = out.read()
    assert_close(found[:, 3:], reference.swiglu(a, b), tolerance.astype(np.float32))
    assert (found[:, :3] == 0).all()


def multiply_what_is_no_number(bench: Bench, variant: Variant) -> None:
    """Rows with a NaN or an infinity come out as such, all of them, and no other row does."""
    n, rows, columns = 70, 40, 72
    bad = {3: np.nan, 17: np.inf, 18: -np.inf, 69: np.nan}
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, columns), np.float32)
    for row, value in bad.items():
        x[row, 11 + row % 50] = value
    x[30] = 0
    w = random_weights(rng, (rows, columns), "bf16" if ".bf16." in variant.id else "f16")
    out = bench.out(n, rows)
    packed = pack(bench, x, exact=bool(variant.define("SPLIT")))
    matrix = bench.put_matrix(w, "bf16" if ".bf16." in variant.id else "f16", slices=2)
    bench.run(ops.linear_packed, packed, matrix, out.rows(), label="y", variant=variant.id)
    finite = np.isfinite(out.read())
    assert not finite[list(bad)].any()
    assert finite[[row for row in range(n) if row not in bad]].all()


def multiply_all(bench: Bench, variant: Variant) -> None:
    """Products of every kind that a variant makes."""
    if variant.define("SWIGLU"):
        for shape in SHAPES:
            multiply_gated(bench, variant, shape)
        multiply_gated(bench, variant, (70, 200, 64), slices=3)
        return
    for shape in SHAPES:
        multiply(bench, variant, shape)
    multiply(bench, variant, (70, 200, 64), slices=3)
    for n_parts in (2, 3, 4):  # of 5 tiles of columns
        multiply(bench, variant, (70, 200, 5 * 64), n_parts=n_parts, slices=2)
    multiply(bench, variant, (70, 201, 3 * 64 + 8), n_parts=4, slices=3)  # the last part has few columns
    multiply_what_is_no_number(bench, variant)


@pytest.mark.parametrize("name", [*EMULATED, *(f"{name}.swiglu" for name in EMULATED)])
def test_emulated(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = variants()[f"linear_gemm.{name}"]
    if bench.kernels.usable(variant.id):
        pytest.skip("it has the real ones")
    with ops.KernelSet(bench.device) as kernels:
        own = dataclasses.replace(bench, kernels=kernels)
        emulate(own, variant, monkeypatch)
        multiply_all(own, variant)
        own.release()


@pytest.mark.parametrize("variant", COOP, ids=lambda variant: variant.id)
def test_on_matrix_cores(bench: Bench, variant: Variant) -> None:
    if not bench.kernels.usable(variant.id):
        pytest.skip(f"{bench.device.info.name} has no matrix cores that {variant.id} can use")
    multiply_all(bench, variant)
    large = multiply_gated if variant.define("SWIGLU") else multiply
    for shape in ((512, 896, 4864), (512, 4864, 896)):
        large(bench, variant, shape)


def test_parts_of_sums_are_taken_where_tiles_are_few() -> None:
    """The down projection of 512 rows of a 7B, and what a whole prompt's takes."""
    assert ops.parts_bytes(512, 3584, 18_944) == 4 * 3 * 512 * 3584
    assert ops.parts_bytes(1, 3584, 3584) == 4 * 4 * 3584
    assert ops.parts_bytes(4096, 37_888, 896) == 4 * 4096 * 37_888  # never in parts


@pytest.mark.parametrize(
    ("n_rows", "rows", "columns", "tile", "n_parts"),
    [
        (512, 896, 4864, 64, 4),  # down of a 0.5B: 28 large tiles, 112 small ones
        (512, 1536, 8960, 128, 4),  # of a 1.5B: 48 large tiles
        (256, 1536, 8960, 64, 4),
        (128, 3584, 18_944, 64, 4),  # of a 7B
        (512, 3584, 18_944, 128, 3),
        (512, 896, 896, 64, 1),  # o of a 0.5B: a short sum
        (4096, 3584, 3584, 128, 1),
    ],
)
def test_tiles_and_parts_go_by_how_many_tiles_there_are(
    n_rows: int, rows: int, columns: int, tile: int, n_parts: int
) -> None:
    matrix: Any = SimpleNamespace(format="f16", rows=rows, columns=columns)
    first = variants()[_packed.packed_candidates(matrix, n_rows, exact=False)[0]]
    assert first.define("TILE_M") == tile
    assert _packed._parts_of(n_rows, rows, columns, tile) == n_parts


def test_can_pack_asks_the_device(bench: Bench) -> None:
    w = bench.put_matrix(np.zeros((4, 8), np.float16), "f16")
    recording = bench.device.create_recording("none")
    on = ops.Recorder(recording, bench.kernels)
    assert ops.can_pack(on, w, 512) == ("coop_matrix.f16.f32.16x16x16" in bench.device.info.features)
    assert not ops.can_pack(on, w, 8)
    recording.release()
