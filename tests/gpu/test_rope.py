"""rope on the device against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu.op_bench import UNIT, Array, Bench, assert_close

from xinfer import ops
from xinfer.model import reference

POSITIONS = 64


def tables(head_dim: int) -> tuple[Array, Array]:
    """cos, sin (POSITIONS, head_dim / 2) of angles that differ for every position and pair."""
    frequency = (10_000.0 ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    angles = np.arange(POSITIONS, dtype=np.float32)[:, None] * frequency
    return np.cos(angles), np.sin(angles)


@pytest.mark.parametrize("head_dim", [2, 6, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("n_heads", [1, 3])
def test_matches_reference(bench: Bench, n_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    positions: NDArray[np.intp] = np.array([0, 1, 63, 17, 5])
    cos, sin = tables(head_dim)
    x = rng.standard_normal((len(positions), n_heads * head_dim), np.float32) * np.float32(100)
    state = bench.state([ops.RowState(token=0, position=int(p)) for p in positions])
    table = bench.put(np.stack([cos, sin], axis=-1))
    wide = np.zeros((len(positions), n_heads * head_dim + 7), np.float32)  # heads lie in the middle of wider rows
    wide[:, 3 : 3 + x.shape[1]] = x
    out = bench.out(*wide.shape, fill=wide)
    heads = out.rows().columns(3, x.shape[1])
    bench.run(ops.rope, state, table, heads, head_dim=head_dim, label="rope")
    found = out.read()
    by_head = x.reshape(len(positions), n_heads, head_dim)
    expected = reference.rope(by_head, cos[positions], sin[positions]).reshape(x.shape)
    swapped = np.roll(np.abs(by_head), head_dim // 2, axis=-1).reshape(x.shape)
    assert_close(found[:, 3 : 3 + x.shape[1]], expected, 4 * UNIT * (np.abs(x) + swapped))
    assert (np.delete(found, range(3, 3 + x.shape[1]), axis=1) == 0).all()


def test_padding_rows_stay(bench: Bench) -> None:
    cos, sin = tables(8)
    x = np.ones((2, 8), np.float32)
    state = bench.state([ops.RowState(token=0, position=ops.UNUSED_POSITION), ops.RowState(token=0, position=9)])
    out, table = bench.out(2, 8, fill=x), bench.put(np.stack([cos, sin], axis=-1))
    bench.run(ops.rope, state, table, out.rows(), head_dim=8, label="rope")
    found = out.read()
    assert np.array_equal(found[0], x[0])
    assert not np.array_equal(found[1], x[1])
