"""embed on the device against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.op_bench import DTYPES, Bench, random_weights

from xinfer import ops
from xinfer.model import reference


@pytest.mark.parametrize("weight_format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("width", "slices"), [(1, 1), (31, 2), (32, 3), (33, 1), (896, 2), (4097, 1)])
def test_matches_reference(bench: Bench, weight_format: ops.Format, width: int, slices: int) -> None:
    rng = np.random.default_rng(width)
    table = random_weights(rng, (101, width), weight_format)
    tokens = np.array([0, 100, 50, 33, 34, 66, 67, 7], np.uint32)  # the slices' borders among them
    state = bench.state([ops.RowState(token=int(token), position=i) for i, token in enumerate(tokens)])
    out = bench.out(len(tokens), width)
    matrix = bench.put_matrix(table, weight_format, slices=slices)
    bench.run(ops.embed, state, matrix, out.rows())
    assert np.array_equal(out.read(), reference.embed(tokens, table))  # unpacking is exact


@pytest.mark.parametrize("weight_format", ["f16", "bf16"])
def test_every_number_is_exact(bench: Bench, weight_format: ops.Format) -> None:
    """All 65,536 patterns: subnormal, infinite and, as NaN, the rest."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[weight_format]).reshape(256, 256)
    state = bench.state([ops.RowState(token=token, position=0) for token in range(256)])
    out = bench.out(256, 256)
    matrix = bench.put_matrix(patterns, weight_format)
    bench.run(ops.embed, state, matrix, out.rows())
    assert np.array_equal(out.read(), patterns.astype(np.float32), equal_nan=True)


def test_tokens_outside_the_table_leave_their_row(bench: Bench) -> None:
    table = random_weights(np.random.default_rng(0), (10, 8), "f16")
    state = bench.state([ops.RowState(token=token, position=0) for token in (10, 3, ops.BAD_TOKEN)])
    out = bench.out(3, 8)
    matrix = bench.put_matrix(table, "f16")
    bench.run(ops.embed, state, matrix, out.rows())
    found = out.read()
    assert np.isnan(found[[0, 2]]).all()
    assert np.array_equal(found[1], table[3].astype(np.float32))


def test_out_may_have_a_stride(bench: Bench) -> None:
    table = random_weights(np.random.default_rng(1), (4, 8), "f16")
    state = bench.state([ops.RowState(token=3, position=0), ops.RowState(token=1, position=1)])
    out = bench.out(2, 20)
    matrix = bench.put_matrix(table, "f16")
    bench.run(ops.embed, state, matrix, out.rows().columns(7, 8))
    found = out.read()
    assert np.array_equal(found[:, 7:15], table[[3, 1]].astype(np.float32))
    assert np.isnan(np.delete(found, range(7, 15), axis=1)).all()
