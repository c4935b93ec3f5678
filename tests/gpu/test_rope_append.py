"""rope_append, the fused form, against the ops that it stands for."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from tests.gpu.op_bench import DTYPES, Bench
from tests.gpu.test_rope import POSITIONS, tables

from xinfer import ops

PLACES = [(0, 0), (0, 31), (1, 32), (1, POSITIONS - 1), (0, 33), (0, ops.UNUSED_POSITION), (1, 0)]
TABLE = np.array([[3, 1], [2, 0]], np.uint32)


@pytest.mark.parametrize("cache_format", ["f32", "f16"])
@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(1, 1, 4), (6, 2, 64), (4, 4, 80), (7, 1, 128)])
def test_every_form_leaves_the_same_bits(
    bench: Bench, cache_format: Literal["f32", "f16"], n_heads: int, n_kv_heads: int, head_dim: int
) -> None:
    """rope and kv_append, both in one, the same without q, and attention that turns: rows look back on any of them."""
    rng = np.random.default_rng(head_dim)
    q_size, kv_size = n_heads * head_dim, n_kv_heads * head_dim
    qkv = rng.standard_normal((len(PLACES), q_size + 2 * kv_size), np.float32)
    state = bench.state([ops.RowState(token=0, sequence=s, position=p) for s, p in PLACES])
    table = bench.put(np.stack(tables(head_dim), axis=-1))
    found = {}
    for form in ("apart", "fused", "cache only", *(["turning"] if head_dim % 8 == 0 else [])):
        shape = (4, n_kv_heads, ops.BLOCK_TOKENS, head_dim)
        rows = bench.out(*qkv.shape, fill=qkv)
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
        q, k = rows.rows().columns(0, q_size), rows.rows().columns(q_size, kv_size)
        v, out = rows.rows().columns(q_size + kv_size, kv_size), bench.out(len(PLACES), q_size)

        def record(on: ops.Recorder) -> None:
            if form == "turning":  # noqa: B023
                options: dict[str, Any] = {"n_heads": n_heads, "max_keys": POSITIONS, "turn": True}
                one = ops.plan_attention(on, cache, n_rows=1, **options)  # noqa: B023
                options |= {"variant": one.variant.id, "n_splits": 1}
                plan = ops.plan_attention(on, cache, n_rows=len(PLACES), **options)  # noqa: B023
                ops.turn_attention(on, plan, state, table, q, k, v, cache, out.rows(), label="turning")  # noqa: B023
            elif form == "apart":  # noqa: B023
                qk = rows.rows().columns(0, q_size + kv_size)  # noqa: B023
                ops.rope(on, state, table, qk, head_dim=head_dim, label="rope")
                on.recording.barrier()
                ops.kv_append(on, state, k, v, cache, label="kv")  # noqa: B023
            else:
                assert ops.can_rope_append(on, cache)  # noqa: B023
                queries = q if form == "fused" else None  # noqa: B023
                ops.rope_append(on, state, table, queries, k, v, cache, label=form)  # noqa: B023

        bench.run(record)
        found[form] = (rows.read(), k_out.read(), v_out.read())
    (apart, *caches) = found.pop("apart")
    assert not np.isnan(caches[0]).all()
    for form, (left, *found_caches) in found.items():
        expected = apart if form == "fused" else qkv
        assert np.array_equal(left[:, :q_size], expected[:, :q_size]), form
        assert np.array_equal(left[:, q_size:], qkv[:, q_size:]), form  # k and v stay
        for part, wanted in zip(found_caches, caches, strict=True):
            assert np.array_equal(part, wanted, equal_nan=True), form


def test_k_elsewhere_is_refused(bench: Bench) -> None:
    a, b = bench.put_rows(np.ones((1, 24), np.float32)), bench.put_rows(np.ones((1, 24), np.float32))
    cache = ops.CacheBlocks(k=a.place, v=a.place, table=a.place, table_stride=1, n_kv_heads=1, head_dim=8, format="f32")
    with pytest.raises(ValueError, match="must lie in the same rows"):
        bench.run(
            lambda on: ops.rope_append(
                *(on, a.place, a.place, a.columns(0, 8), b.columns(8, 8), a.columns(16, 8), cache), label="fused"
            )
        )
