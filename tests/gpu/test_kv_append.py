"""kv_append on the device against NumPy's own rounding and indexing."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from tests.gpu.op_bench import DTYPES, Bench

from xinfer import ops

# (sequence, position): borders of blocks, two sequences, one row of padding.
PLACES = [(0, 0), (0, 31), (1, 32), (1, 63), (0, 33), (0, ops.UNUSED_POSITION), (1, 0)]
TABLE = np.array([[4, 1, 0], [2, 3, 5]], np.uint32)  # (sequence, block): not in order


@pytest.mark.parametrize("cache_format", ["f32", "f16"])
@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(1, 2), (2, 6), (2, 64), (3, 80), (1, 128)])
def test_matches_numpy(bench: Bench, cache_format: Literal["f32", "f16"], n_kv_heads: int, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    width = n_kv_heads * head_dim
    qkv = rng.standard_normal((len(PLACES), 5 + 2 * width), np.float32) * np.float32(800)
    rows = bench.put_rows(qkv)
    state = bench.state([ops.RowState(token=0, sequence=s, position=p) for s, p in PLACES])
    shape = (6, n_kv_heads, ops.BLOCK_TOKENS, head_dim)
    k_out, v_out = (bench.out(*shape, dtype=DTYPES[cache_format]) for _ in range(2))
    cache = ops.CacheBlocks(
        k=k_out.place,
        v=v_out.place,
        table=bench.put(TABLE),
        table_stride=TABLE.shape[1],
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        format=cache_format,
    )
    k, v = rows.columns(5, width), rows.columns(5 + width, width)
    bench.run(ops.kv_append, state, k, v, cache, label="kv")
    for found, first in ((k_out.read(), 5), (v_out.read(), 5 + width)):
        expected = found.copy()
        expected.fill(np.nan)
        for row, (sequence, position) in enumerate(PLACES):
            if position != ops.UNUSED_POSITION:
                values = qkv[row, first : first + width].reshape(n_kv_heads, head_dim)
                block = TABLE[sequence, position // ops.BLOCK_TOKENS]
                expected[block, :, position % ops.BLOCK_TOKENS] = values.astype(found.dtype)
        assert np.array_equal(found, expected, equal_nan=True)


def test_rounding_to_f16_is_numpys(bench: Bench) -> None:
    """Ties, subnormals, overflow, and one step to either side of every f16's midpoint."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate(
        [halves, middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))]
    )
    special = [65519.9, 65520, 1e6, np.inf, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-26, 1e-30, 0.0]
    values = np.concatenate([values, np.array(special, np.float32)])
    values = np.concatenate([values, -values]).astype(np.float32)
    width = 512
    n = -(-len(values) // width)
    padded = np.zeros(n * width, np.float32)
    padded[: len(values)] = values
    rows = bench.put_rows(padded.reshape(n, width))
    state = bench.state([ops.RowState(token=0, position=i) for i in range(n)])
    n_blocks = -(-n // ops.BLOCK_TOKENS)
    k_out, v_out = (bench.out(n_blocks, 2, ops.BLOCK_TOKENS, width // 2, dtype=np.float16) for _ in range(2))
    cache = ops.CacheBlocks(
        k=k_out.place,
        v=v_out.place,
        table=bench.put(np.arange(n_blocks, dtype=np.uint32)),
        table_stride=n_blocks,
        n_kv_heads=2,
        head_dim=width // 2,
        format="f16",
    )
    bench.run(ops.kv_append, state, rows, rows, cache, label="kv")
    with np.errstate(over="ignore"):
        expected = padded.astype(np.float16).reshape(n, 2, width // 2)
    found = k_out.read().transpose(0, 2, 1, 3).reshape(-1, 2, width // 2)[:n]
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))
    assert np.array_equal(k_out.read().view(np.uint16), v_out.read().view(np.uint16))
