"""Attention over the paged cache on the device, every variant, against the reference."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu.emulated import emulate
from tests.gpu.op_bench import DTYPES, UNIT, Array, Bench, Output, assert_close, cache_array

from xinfer import ops
from xinfer.model import reference
from xinfer.ops._attention import attention_candidates, attention_trips, is_coop, is_tiled
from xinfer.ops._base import MAX_TRIPS
from xinfer.shaders.catalog import ATTENTION_SPLITS_MAX, ATTENTION_TILED_SPLITS_MAX, Variant, variants

VARIANTS = [v for v in variants().values() if v.op == "attention" and ".combine" not in v.id]
PREFILL = [v for v in VARIANTS if v.source in ("attention_prefill.hlsl", "attention_coop.slang")]
HALF_WEIGHTS = [v.id for v in VARIANTS if is_coop(v) and not v.define("SPLIT")]  # weights are f16 numbers
CacheFormat = Literal["f32", "f16"]


TURNING = [v for v in VARIANTS if "_turn" in v.id]  # they take q, k and v as the projections made them


@pytest.fixture(autouse=True)
def fragments(request: pytest.FixtureRequest, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for matrix cores run on every device, in plain code where there are none."""
    variant = getattr(request.node, "callspec", None) and request.node.callspec.params.get("variant")
    if variant and is_coop(variant) and not bench.kernels.usable(variant.id):
        emulate(bench, variant, monkeypatch)


def format_of(variant: Variant) -> CacheFormat:
    return "f16" if ".f16." in variant.id else "f32"


class Case:
    """Two sequences in a cache whose blocks lie in no order, and queries at given positions of them."""

    def __init__(
        self,
        places: list[tuple[int, int]],  # (sequence, position) a query row
        *,
        heads: tuple[int, int],  # query and KV heads
        head_dim: int,
        cache_format: CacheFormat,
        spread: float = 1.0,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng([seed, head_dim, len(places)])
        self.places, self.heads, self.head_dim, self.format = places, heads, head_dim, cache_format
        longest = max(position for _, position in places if position != ops.UNUSED_POSITION) + 1
        blocks = -(-longest // ops.BLOCK_TOKENS)
        self.table = rng.permutation(2 * blocks).astype(np.uint32).reshape(2, blocks)
        shape = (2 * blocks, heads[1], ops.BLOCK_TOKENS, head_dim)
        self.k, self.v = (rng.standard_normal(shape, np.float32).astype(DTYPES[cache_format]) for _ in range(2))
        self.q = rng.standard_normal((len(places), heads[0] * head_dim), np.float32) * np.float32(spread)
        self.angles = rng.uniform(-3, 3, (longest, head_dim // 2)).astype(np.float32)

    def put(self, bench: Bench) -> tuple[Any, ops.Rows, ops.CacheBlocks]:
        """For kernels whose q has been turned, and whose keys are all in the cache."""
        q = bench.put_rows(self.q, stride=self.q.shape[1] + 6, offset=2)
        return self.put_state(bench), q, self._put_cache(bench, *(self._hide(part) for part in (self.k, self.v)))

    def put_state(self, bench: Bench) -> Any:
        return bench.state([ops.RowState(token=0, sequence=s, position=p) for s, p in self.places])

    def _put_cache(self, bench: Bench, k: NDArray[Any], v: NDArray[Any]) -> ops.CacheBlocks:
        return ops.CacheBlocks(
            k=bench.put(k),
            v=bench.put(v),
            table=bench.put(self.table),
            table_stride=self.table.shape[1],
            n_kv_heads=self.heads[1],
            head_dim=self.head_dim,
            format=self.format,
        )

    def put_unturned(self, bench: Bench) -> tuple[tuple[Any, ...], ops.CacheBlocks]:
        """(table, q, k, v) as the projections leave them, and a cache without each sequence's last key."""
        kv_heads, dim = self.heads[1], self.head_dim
        width = kv_heads * dim
        k, v = (np.zeros((len(self.places), kv_heads, dim), np.float32) for _ in range(2))
        q = self.q.reshape(len(self.places), -1, dim).copy()
        for row, (sequence, position) in enumerate(self.places):
            if position != ops.UNUSED_POSITION:
                block, token = self.table[sequence, position // ops.BLOCK_TOKENS], position % ops.BLOCK_TOKENS
                k[row], v[row] = (part[block, :, token].astype(np.float32) for part in (self.k, self.v))
                cos, sin = np.cos(self.angles[[position]]), np.sin(self.angles[[position]])
                q[[row]], k[[row]] = (reference.rope(part[[row]], cos, -sin) for part in (q, k))
        rows = np.concatenate([part.reshape(len(self.places), -1) for part in (k, q, v)], axis=1)
        qkv = bench.put_rows(rows, stride=rows.shape[1] + 7, offset=3)
        table = bench.put(np.stack([np.cos(self.angles), np.sin(self.angles)], axis=-1))
        columns = (qkv.columns(width, q[0].size), qkv.columns(0, width), qkv.columns(width + q[0].size, width))
        cache = self._put_cache(bench, *(self._hide(part, newest=True) for part in (self.k, self.v)))
        return (table, *columns), cache

    def _hide(self, blocks: NDArray[Any], *, newest: bool = False) -> NDArray[Any]:
        """Keys that no query sees become NaN: one that is read all the same shows. So does, if wanted, the newest."""
        hidden = blocks.copy()
        for sequence, own in enumerate(self.table):
            last = max((p for s, p in self.places if s == sequence and p != ops.UNUSED_POSITION), default=-1)
            for number, block in enumerate(own):
                seen = min(max(last + (not newest) - number * ops.BLOCK_TOKENS, 0), ops.BLOCK_TOKENS)
                hidden[block, :, seen:] = np.nan
        return hidden

    def expected(self, window: int | None, *, half_weights: bool = False) -> tuple[Array, Array]:
        """The reference's result, and the tolerance."""
        result, tolerance = np.zeros_like(self.q), np.zeros_like(self.q)
        for row, (sequence, position) in enumerate(self.places):
            if position == ops.UNUSED_POSITION:
                continue
            k, v = (cache_array(part, self.table, sequence, position + 1) for part in (self.k, self.v))
            q = self.q[row].reshape(1, self.heads[0], self.head_dim)
            result[row] = reference.attention(q, k, v, q_start=position, window=window)[0]
            tolerance[row] = self._tolerance(q, k, v, position, window, half_weights=half_weights)
        return result, tolerance

    def _tolerance(
        self, q: Array, k: Array, v: Array, position: int, window: int | None, *, half_weights: bool
    ) -> Array:
        """A score is a sum of head_dim products; its error and exp's (3 + 2 |x| units: Vulkan) scale the weights.

        A weight that is one f16 number, 1 at most, is off by half a unit of 11 bits, or by 2^-25 where it is small.
        """
        group = self.heads[0] // self.heads[1]
        keys = np.repeat(k, group, axis=1)
        scores = np.abs(q[0] * keys).sum(-1).max() * self.head_dim**-0.5
        relative = 2 * UNIT * ((np.sqrt(self.head_dim) + 8) * scores + 8 + 4 * scores + np.sqrt(position + 1))
        mixed = reference.attention(q, k, np.abs(v), q_start=position, window=window)[0]
        rounded = 2.0**-11 * mixed + 2.0**-25 * np.abs(v).sum(0).repeat(group, axis=0).reshape(mixed.shape)
        return np.asarray(2 * relative * mixed + half_weights * rounded, np.float32)


def run(
    bench: Bench, case: Case, *, variant: str | None = None, window: int | None = None, n_splits: int | None = None
) -> Array:
    """The device's result, (T, heads * head_dim)."""
    turns = variant in {turning.id for turning in TURNING}
    inputs, cache = case.put_unturned(bench) if turns else ((), None)
    state, q, whole_cache = case.put(bench)
    cache = cache or whole_cache
    out = bench.out(len(case.places), q.width + 5)
    counted: list[tuple[Output, int]] = []

    def record(on: ops.Recorder) -> None:
        longest = case.table.shape[1] * ops.BLOCK_TOKENS
        plan = ops.plan_attention(
            *(on, cache), n_heads=case.heads[0], n_rows=q.n, max_keys=longest, variant=variant, n_splits=n_splits
        )
        assert plan.turns == turns
        assert n_splits is None or plan.n_splits == min(n_splits, most_splits(plan.variant))
        scratch = None
        if plan.scratch_bytes:
            fill = np.full(plan.scratch_bytes // 4, 0x7FFF_FFFF, np.uint32)
            fill[: plan.counter_bytes // 4] = 0
            scratch = bench.out(fill.size, dtype=np.uint32, fill=fill)
            counted.append((scratch, plan.counter_bytes // 4))
        target = out.rows().columns(5, q.width)
        options: dict[str, Any] = {"window": window, "scratch": scratch and scratch.place, "label": "attn"}
        for again in range(2):  # as a replay does: the first run must have left the counters at 0
            if again:
                on.recording.barrier()
            if turns:
                table, own_q, k, v = inputs
                ops.turn_attention(on, plan, state, table, own_q, k, v, cache, target, **options)
            else:
                ops.attention(on, plan, state, q, cache, target, **options)

    bench.run(record)
    assert all((scratch.read()[:n] == 0).all() for scratch, n in counted)
    if turns:
        check_appended(bench, case, cache)
    found = out.read()
    assert np.isnan(found[:, :5]).all()
    return np.asarray(found[:, 5:])


def check_appended(bench: Bench, case: Case, cache: ops.CacheBlocks) -> None:
    """The cache now holds every key and value that a query sees, and nothing else was written.

    Keys have been turned back, and here forth: each turn rounds three times what may be sqrt(2) as large as the largest
    of a head, and a rounded cos and sin are off by one unit each; 11 units in all.
    """
    for place, blocks, roundings in ((cache.k, case.k, 11), (cache.v, case.v, 0)):
        found = np.frombuffer(bench.device.download(place[: blocks.nbytes]), blocks.dtype).reshape(blocks.shape)
        expected = case._hide(blocks).astype(np.float32)
        unit = UNIT if case.format == "f32" else 2.0**-11  # where it may fall to the neighbouring f16
        finite = np.isfinite(expected)
        size = np.abs(np.where(finite, expected, 0)).max(axis=-1, keepdims=True)
        off = np.abs(np.where(finite, found.astype(np.float32) - np.where(finite, expected, 0), 0))
        assert (off <= roundings * unit * size).all()
        assert np.array_equal(found[~finite], expected[~finite], equal_nan=True)


def check(
    bench: Bench, case: Case, *, variant: str | None = None, window: int | None = None, n_splits: int | None = None
) -> None:
    wanted = case.expected(window, half_weights=variant in HALF_WEIGHTS)
    assert_close(run(bench, case, variant=variant, window=window, n_splits=n_splits), *wanted)


def first_choice(bench: Bench, case: Case) -> str:
    _, q, cache = case.put(bench)
    candidates = attention_candidates(cache, q.n)
    return bench.kernels.first_usable(candidates).id


def most_splits(variant: Variant) -> int:
    """What the last workgroup of attention_tiled has room for, where it puts the splits together."""
    return ATTENTION_TILED_SPLITS_MAX if is_tiled(variant) else ATTENTION_SPLITS_MAX


def takes(variant: Variant, head_dim: int) -> bool:
    """Whether a variant has room for heads so large."""
    return head_dim <= dict(variant.defines).get("DIM_MAX", 256)


@pytest.mark.parametrize(
    ("variant", "head_dim"),
    [(v, dim) for v in VARIANTS for dim in (32, 48, 64, 80, 96, 128) if takes(v, dim)],
    ids=lambda value: value.id if isinstance(value, Variant) else str(value),
)
def test_head_dims(bench: Bench, variant: Variant, head_dim: int) -> None:
    case = Case([(0, 100), (1, 40)], heads=(6, 2), head_dim=head_dim, cache_format=format_of(variant))
    check(bench, case, variant=variant.id)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
def test_lengths(bench: Bench, variant: Variant) -> None:
    """1 to 2,049 keys, around the borders of blocks, tiles and splits; every row its own length."""
    ends = [0, 30, 31, 32, 63, 64, 127, 128, 129, 191, 192, 255, 256, 2048]
    case = Case(
        [(i % 2, end) for i, end in enumerate(ends)], heads=(4, 2), head_dim=32, cache_format=format_of(variant)
    )
    for n_splits in (1, 3, 256):
        check(bench, case, variant=variant.id, n_splits=n_splits)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (14, 2), (9, 1), (40, 2)])
def test_groups_of_heads(bench: Bench, variant: Variant, heads: tuple[int, int]) -> None:
    case = Case([(0, 70)], heads=heads, head_dim=32, cache_format=format_of(variant))
    check(bench, case, variant=variant.id)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
@pytest.mark.parametrize("window", [1, 31, 32, 33, 129, 4096])
def test_windows(bench: Bench, variant: Variant, window: int) -> None:
    ends = [0, 31, 32, 33, 128, 300]
    case = Case([(0, end) for end in ends], heads=(4, 2), head_dim=32, cache_format=format_of(variant))
    for n_splits in (1, 4):
        check(bench, case, variant=variant.id, window=window, n_splits=n_splits)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
def test_large_scores(bench: Bench, variant: Variant) -> None:
    """Scores of hundreds, as Qwen2's key biases make them: exp of a raw score would overflow."""
    case = Case([(0, 200), (1, 3)], heads=(4, 2), head_dim=64, cache_format=format_of(variant), spread=60.0)
    for n_splits in (1, 4):
        check(bench, case, variant=variant.id, n_splits=n_splits)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
def test_padding_rows_are_zero(bench: Bench, variant: Variant) -> None:
    """Whatever stands in them: what was computed of padding before may be anything."""
    places = [(0, 5), (0, ops.UNUSED_POSITION), (1, 6)]
    case = Case(places, heads=(4, 2), head_dim=32, cache_format=format_of(variant))
    case.q[1] = [np.nan, np.inf, -np.inf, 3e38] * (case.q.shape[1] // 4)
    for n_splits in (1, 2):
        check(bench, case, variant=variant.id, n_splits=n_splits)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
@pytest.mark.parametrize(("part", "value"), [("q", np.nan), ("k", np.nan), ("v", np.nan), ("v", np.inf)])
def test_what_is_not_a_number_goes_through(bench: Bench, variant: Variant, part: str, value: float) -> None:
    """The sentinel behind the logits must see it: no max, no guard of an empty sum may swallow it."""
    for n_splits in (1, 3):
        case = Case([(0, 99), (0, 50)], heads=(4, 2), head_dim=32, cache_format=format_of(variant))
        if part == "q":
            case.q[0, 2 * 32] = value  # head 2, of KV head 1
        else:
            blocks = case.k if part == "k" else case.v
            blocks[case.table[0, 2], 1, 7, 0] = value  # key 71, KV head 1: seen by the first row alone
        found = run(bench, case, variant=variant.id, n_splits=n_splits).reshape(2, 4, 32)
        bad = np.asarray(np.logical_not(np.isfinite(found)).any(axis=-1))  # (row, head)
        assert bad[0].tolist() == [False, False, True, part != "q"]
        if variant not in PREFILL:  # whose rows of a tile share the products with V, 0 times NaN among them
            assert not bad[1].any()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
@pytest.mark.parametrize("key", [0, 31, 32, 64, 99])
def test_a_matching_key_gives_its_value_exactly(bench: Bench, variant: Variant, key: int) -> None:
    """Queries that fit one key alone: the result is that key's value, bit for bit, from the right head and block."""
    dim = 64
    case = Case([(0, 99)], heads=(4, 2), head_dim=dim, cache_format=format_of(variant))
    case.k[...] = 0
    case.q[...] = 0
    block, token = case.table[0, key // ops.BLOCK_TOKENS], key % ops.BLOCK_TOKENS
    for kv_head in range(2):
        case.k[block, kv_head, token, kv_head] = 1000
        case.q.reshape(1, 4, dim)[:, 2 * kv_head : 2 * kv_head + 2, kv_head] = 1000
    value = case.v[block, :, token].astype(np.float32)
    assert np.array_equal(run(bench, case, variant=variant.id, n_splits=2)[0].reshape(4, dim), value[[0, 0, 1, 1]])


@pytest.mark.parametrize("cache_format", ["f32", "f16"])
@pytest.mark.parametrize("head_dim", [2, 6, 10, 66])
def test_odd_head_dims_take_the_plain_variant(bench: Bench, cache_format: CacheFormat, head_dim: int) -> None:
    case = Case([(0, 70), (1, 31)], heads=(6, 3), head_dim=head_dim, cache_format=cache_format)
    assert first_choice(bench, case) == f"attention.{cache_format}.plain"
    check(bench, case)


@pytest.mark.parametrize("head_dim", [160, 256])
def test_large_heads(bench: Bench, head_dim: int) -> None:
    for variant in (v for v in VARIANTS if takes(v, head_dim) and bench.kernels.usable(v.id)):
        case = Case([(0, 70)], heads=(2, 1), head_dim=head_dim, cache_format=format_of(variant))
        check(bench, case, variant=variant.id)


@pytest.mark.parametrize("variant", PREFILL, ids=lambda variant: variant.id)
@pytest.mark.parametrize(("n_rows", "start"), [(31, 0), (32, 1), (33, 95), (70, 0)])
@pytest.mark.parametrize("window", [None, 40])
def test_prefill(bench: Bench, variant: Variant, n_rows: int, start: int, window: int | None) -> None:
    """A chunk of one sequence, behind what the cache holds already."""
    places = [(1, start + i) for i in range(n_rows)]
    case = Case(places, heads=(4, 2), head_dim=48, cache_format=format_of(variant))
    for n_splits in (1, 3):
        check(bench, case, variant=variant.id, window=window, n_splits=n_splits)


@pytest.mark.parametrize("variant", PREFILL, ids=lambda variant: variant.id)
def test_prefill_of_two_sequences_in_one_tile(bench: Bench, variant: Variant) -> None:
    places = [(i % 2, 40 + i) if i % 5 else (0, ops.UNUSED_POSITION) for i in range(45)]
    case = Case(places, heads=(2, 1), head_dim=32, cache_format=format_of(variant))
    for n_splits in (1, 2):
        check(bench, case, variant=variant.id, n_splits=n_splits)


@pytest.mark.parametrize("variant", PREFILL, ids=lambda variant: variant.id)
@pytest.mark.parametrize(
    ("n_rows", "head_dim", "window"), [(9, 8, None), (47, 24, 1), (70, 8, 33), (130, 40, 33), (200, 64, 100)]
)
def test_rows_in_no_order(bench: Bench, variant: Variant, n_rows: int, head_dim: int, window: int | None) -> None:
    """Two sequences, padding in between, windows, splits and a tile that is not full, all at once."""
    rng = np.random.default_rng([n_rows, head_dim])
    places = [(int(rng.integers(2)), int(rng.integers(150))) for _ in range(n_rows)]
    for row in rng.integers(0, n_rows, n_rows // 5):
        places[row] = (0, ops.UNUSED_POSITION)
    case = Case(places, heads=(3, 1), head_dim=head_dim, cache_format=format_of(variant))
    case.q[[position == ops.UNUSED_POSITION for _, position in places]] = np.nan
    for n_splits in (1, 3):
        check(bench, case, variant=variant.id, window=window, n_splits=n_splits)


@pytest.mark.parametrize(
    ("head_dim", "expected", "on_matrix_cores"),
    [
        *((64, "prefill64", "coop64.split"), (80, "prefill128", "coop128.split")),
        *((160, "decode", "decode"), (6, "plain", "plain")),
    ],
)
def test_chosen_for_many_rows(bench: Bench, head_dim: int, expected: str, on_matrix_cores: str) -> None:
    case = Case([(0, i) for i in range(20)], heads=(2, 1), head_dim=head_dim, cache_format="f16")
    cores = bench.kernels.usable("attention.f16.coop64.split")
    assert first_choice(bench, case) == f"attention.f16.{on_matrix_cores if cores else expected}"
    check(bench, case)


def test_long_contexts_are_not_split_on_matrix_cores() -> None:
    """Loops of so few iterations come to an end everywhere; splits would have to be put together."""
    for dim in (64, 128):
        trips = attention_trips(f"attention.f16.coop{dim}.half", head_dim=dim, max_keys=131_072, n_splits=1)
        assert trips < MAX_TRIPS
