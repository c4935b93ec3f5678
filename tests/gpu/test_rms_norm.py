"""rms_norm on the device against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.op_bench import UNIT, Bench, assert_close

from xinfer import ops
from xinfer.model import reference


@pytest.mark.parametrize("variant", ["rms_norm.plain", "rms_norm.wave"])
@pytest.mark.parametrize(("n_rows", "width"), [(1, 1), (3, 31), (1, 32), (2, 33), (5, 64), (2, 896), (3, 4097)])
def test_matches_reference(bench: Bench, variant: str, n_rows: int, width: int) -> None:
    if not bench.kernels.usable(variant):
        pytest.skip(f"{bench.device.info.name} cannot run {variant}")
    rng = np.random.default_rng(width)
    x = rng.standard_normal((n_rows, width), np.float32) * np.float32(30)
    weight = rng.standard_normal(width, np.float32)
    out = bench.out(n_rows, width)
    rows, scale = bench.put_rows(x, stride=width + 5, offset=3), bench.put(weight)
    bench.run(ops.rms_norm, rows, scale, out.rows(), eps=1e-6, label="norm", variant=variant)
    expected = reference.rms_norm(x, weight, eps=1e-6)
    # All terms of the sum are positive: its relative error is that of the sum; a root halves it, and division,
    # root and products add a few roundings.
    tolerance = 2 * UNIT * (np.sqrt(width) + 8) * np.abs(expected)
    assert_close(out.read(), expected, tolerance)


def test_eps_counts(bench: Bench) -> None:
    x = np.full((1, 64), 1e-4, np.float32)
    out = bench.out(1, 64)
    rows, ones = bench.put_rows(x), bench.put(np.ones(64, np.float32))
    bench.run(ops.rms_norm, rows, ones, out.rows(), eps=1e-5, label="norm")
    assert_close(out.read(), reference.rms_norm(x, np.ones(64, np.float32), eps=1e-5), 1e-7)


def test_shapes_are_checked(bench: Bench) -> None:
    rows, weight = bench.put_rows(np.ones((2, 8), np.float32)), bench.put(np.ones(2, np.float32), spare_bytes=0)
    with pytest.raises(ValueError, match="x is 2 x 8, out 1 x 8"):
        bench.run(ops.rms_norm, rows, rows.place, bench.out(1, 8).rows(), eps=1e-6, label="norm")
    with pytest.raises(ValueError, match="norm: the weight has 8 bytes, 32 are read"):
        bench.run(ops.rms_norm, rows, weight, bench.out(2, 8).rows(), eps=1e-6, label="norm")
