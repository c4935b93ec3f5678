"""swiglu on the device against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.op_bench import UNIT, Bench, assert_close

from xinfer import ops
from xinfer.model import reference


@pytest.mark.parametrize(("n_rows", "width"), [(1, 1), (3, 31), (1, 32), (2, 33), (2, 4097), (70, 65)])
def test_matches_reference(bench: Bench, n_rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    gate = rng.standard_normal((n_rows, width), np.float32) * np.float32(5)
    up = rng.standard_normal((n_rows, width), np.float32)
    out = bench.out(n_rows, width)
    gates, ups = bench.put_rows(gate, stride=width + 3, offset=1), bench.put_rows(up)
    bench.run(ops.swiglu, gates, ups, out.rows(), label="swiglu")
    expected = reference.swiglu(gate, up)
    # Vulkan's precision of exp(x) is 3 + 2 |x| units, of a division 2.5; two products and a sum come to it.
    assert_close(out.read(), expected, 2 * UNIT * (8 + 2 * np.abs(gate)) * np.abs(expected))


def test_large_gates(bench: Bench) -> None:
    gate = np.array([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4, 3e38]], np.float32)
    up = np.ones_like(gate)
    out = bench.out(*gate.shape)
    gates, ups = bench.put_rows(gate), bench.put_rows(up)
    bench.run(ops.swiglu, gates, ups, out.rows(), label="swiglu")
    # exp of -88 is about to leave float32's normal numbers, where a device may flush.
    tolerance = np.where(gate > -1, 1e-5 * np.abs(gate), 0) + 1e-35
    assert_close(out.read(), reference.swiglu(gate, up), tolerance.astype(np.float32))


def test_shapes_are_checked(bench: Bench) -> None:
    a, b = bench.put_rows(np.ones((2, 8), np.float32)), bench.put_rows(np.ones((2, 9), np.float32))
    with pytest.raises(ValueError, match="gate, up and out have different shapes"):
        bench.run(ops.swiglu, a, b, a, label="swiglu")
