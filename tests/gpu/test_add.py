"""add on the device against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.op_bench import Bench

from xinfer import ops


@pytest.mark.parametrize(("n_rows", "width"), [(1, 1), (3, 31), (1, 32), (2, 33), (2, 4097), (70, 65)])
def test_matches_numpy(bench: Bench, n_rows: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((n_rows, width), np.float32)
    y = rng.standard_normal((n_rows, width), np.float32)
    out, rows = bench.out(n_rows, width, fill=x), bench.put_rows(y, stride=width + 2, offset=5)
    bench.run(ops.add, out.rows(), rows, label="add")
    assert np.array_equal(out.read(), x + y)  # one rounding, the same everywhere


def test_shapes_are_checked(bench: Bench) -> None:
    a, b = bench.put_rows(np.ones((2, 8), np.float32)), bench.put_rows(np.ones((1, 8), np.float32))
    with pytest.raises(ValueError, match="x is 2 x 8, y 1 x 8"):
        bench.run(ops.add, a, b, label="add")
