"""Tokens drawn on the device: to the bit as the integers say, and as `Sampler` draws but where borders nearly meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.gpu.op_bench import UNIT, Array, Bench

from xinfer import ops
from xinfer.gpu_model.drawing import counts_of, params_of
from xinfer.ops import SampleParams
from xinfer.sampling import Sampler, SamplingParams, uniform
from xinfer.trials import draws

RING = 4
RAW: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}  # what Qwen2.5 asks for, but for the penalty


class Drawn:
    """What the op left: tokens (T,), states, ring and counts, and how many rows the last stage had to draw."""

    def __init__(
        self,
        bench: Bench,
        logits: Array,
        params: list[SampleParams],
        *,
        counts: NDArray[np.uint32] | None = None,
        bias: Array | None = None,
        rows: list[ops.RowState] | None = None,
        variant: str | None = None,
        times: int = 1,
    ) -> None:
        n, vocab = len(params), logits.shape[1]
        assert len(logits) == n
        rows = rows or [ops.RowState(token=7, position=i) for i in range(n)]
        words = np.frombuffer(b"".join(row.pack() for row in rows), np.uint32).reshape(n, -1)
        state, ring = bench.out(*words.shape, dtype=np.uint32, fill=words), bench.out(n, RING, dtype=np.uint32)
        scratch = bench.out(n, ops.sample_scratch_bytes(1, vocab) // 4, dtype=np.uint32)
        packed = bench.put(np.frombuffer(b"".join(row.pack() for row in params), np.uint32))
        empty = np.zeros((n, vocab), np.uint32)
        counted = bench.out(n, vocab, dtype=np.uint32, fill=empty if counts is None else np.tile(counts, (n, 1)))
        added = bench.put(np.zeros((n, vocab), np.float32) if bias is None else np.tile(bias, (n, 1)))
        source = bench.put_rows(logits, stride=vocab + 3, offset=1)

        def record(on: ops.Recorder) -> None:
            for _ in range(times):
                ops.sample(
                    *(on, source, state.place, ring.place),
                    params=packed,
                    counts=counted.place,
                    bias=added,
                    ring_size=RING,
                    advance=True,
                    scratch=scratch.place,
                    variant=variant,
                )
                on.recording.barrier()

        bench.run(record)
        self.states = [ops.RowState.unpack(row.tobytes()) for row in state.read()]
        self.ring, self.counts = ring.read(), counted.read()
        self.n_slow = int((scratch.read()[:, -1] == 0).sum())
        self.tokens = [row.token for row in self.states]
        bench.release()


def requests(n: int, vocab: int, **values: Any) -> list[SampleParams]:
    """The same for n rows, each with a seed of its own."""
    return [SampleParams(n_valid=vocab, seed=(i << 33) + 5, **{"temperature": 1.0, **values}) for i in range(n)]


def flat(rng: np.random.Generator, vocab: int) -> Array:
    return np.float32(0.05) * rng.standard_normal(vocab, np.float32)


def usual(rng: np.random.Generator, vocab: int) -> Array:
    return np.float32(3) * rng.standard_normal(vocab, np.float32) + np.float32(5)


def peaked(rng: np.random.Generator, vocab: int) -> Array:
    logits = usual(rng, vocab) - np.float32(30)
    logits[rng.integers(0, vocab, 3)] = [3.0, 2.5, -1.0]
    return logits


def tied(rng: np.random.Generator, vocab: int) -> Array:
    return np.round(4 * rng.standard_normal(vocab, np.float32)) / np.float32(2)


def in_a_heap(rng: np.random.Generator, vocab: int) -> Array:
    """The best ones side by side, so that few chunks have them all."""
    logits = rng.standard_normal(vocab, np.float32)
    logits[vocab // 2 : vocab // 2 + 90] += np.float32(12)
    return logits


SHAPES = (flat, usual, peaked, tied, in_a_heap)
REQUESTS: tuple[dict[str, Any], ...] = (
    RAW,
    {},
    {"top_p": 0.9},
    {"top_k": 64, "temperature": 1.3},
    {"top_k": 65, "top_p": 0.95, "min_p": 0.01},
    {"min_p": 0.05, "temperature": 1.5},
    {"top_k": 1},
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"top_p": 1e-9},
    {"temperature": 30.0, "top_p": 0.999},
)


@pytest.mark.parametrize("values", REQUESTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_draws_what_the_integers_say_and_what_the_cpu_draws(bench: Bench, shape: Any, values: dict[str, Any]) -> None:
    n, vocab = 40, 509
    rng = np.random.default_rng(7)
    logits = np.stack([shape(rng, vocab) for _ in range(n)])
    params = requests(n, vocab, **values)
    found = Drawn(bench, logits, params)
    none, zero = np.zeros(vocab, np.uint32), np.zeros(vocab, np.float32)
    assert found.tokens == [draws.drawn(logits[i], params[i], none, zero, i + 1) for i in range(n)]
    for i, token in enumerate(found.tokens):
        asked = SamplingParams(seed=params[i].seed, **{"temperature": 1.0, **values})
        sampler = Sampler(asked, prompt_ids=[1], vocab_size=vocab)
        ids, probabilities = sampler.distribution(logits[i])
        if token != sampler.sample(logits[i], i + 1).token:
            assert_near_a_border(ids, probabilities, token, asked, i + 1)


def assert_near_a_border(
    ids: NDArray[np.int64], probabilities: NDArray[np.float64], token: int, asked: SamplingParams, position: int
) -> None:
    """The token's interval must come as near to the uniform number as float32 makes borders uncertain.

    A weight's exponent, x, is a difference and a product with a rounded factor: 3 * UNIT * |x|, and 2^-24 of its
    own unit; the sum of them, and the sum that it is compared with, may be off by so much in the mean.
    """
    assert asked.temperature
    at = int(np.flatnonzero(ids == token)[0])
    exponents = -np.log(probabilities / probabilities[0])
    margin = 2 * float(np.sum(probabilities * (3 * UNIT * exponents + 2 * UNIT)))
    upper = np.cumsum(probabilities)
    u = uniform(asked.seed or 0, position)
    assert upper[at] - probabilities[at] - margin <= u <= upper[at] + margin


def test_the_whole_vocabulary_of_a_real_model(bench: Bench) -> None:
    vocab = 151_936
    logits = np.stack([usual(np.random.default_rng(i), vocab) for i in range(6)])
    kinds: tuple[dict[str, Any], ...] = (
        {**RAW},
        {},
        {"top_p": 0.95},
        {**RAW, "slow": True},
        {"min_p": 0.2},
        {"temperature": 0.0},
    )
    params = [requests(1, vocab - 7, **kind)[0] for kind in kinds]
    found = Drawn(bench, logits, params)
    none, zero = np.zeros(vocab, np.uint32), np.zeros(vocab, np.float32)
    assert found.tokens == [draws.drawn(logits[i], params[i], none, zero, i + 1) for i in range(6)]


def test_frequencies_are_those_of_the_distribution(bench: Bench) -> None:
    """Chi-square over 4,096 draws of one row of logits; the limit is that of 1 in 1,000,000 for 19 degrees."""
    n, vocab, times = 1024, 48, 4
    logits = usual(np.random.default_rng(3), vocab)
    asked: dict[str, Any] = {"temperature": 1.5, "top_k": 20}
    ids, probabilities = Sampler(SamplingParams(**asked), prompt_ids=[1], vocab_size=vocab).distribution(logits)
    counted = np.zeros(vocab)
    for turn in range(times):
        params = [SampleParams(n_valid=vocab, seed=turn * n + i, **asked) for i in range(n)]
        found = Drawn(bench, np.tile(logits, (n, 1)), params)
        counted += np.bincount(found.tokens, minlength=vocab)
    expected = n * times * probabilities
    assert counted.sum() == counted[ids].sum() == n * times
    assert np.sum((counted[ids] - expected) ** 2 / expected) < 66.6


@pytest.mark.parametrize("variant", ["sample.few", "sample.few.wide", "sample.all", "sample.all.wide"])
@pytest.mark.parametrize("vocab", [1, 2, 31, 513, 2049])
def test_every_variant_at_awkward_sizes(bench: Bench, variant: str, vocab: int) -> None:
    if not bench.kernels.usable(variant):
        pytest.skip("the device has no such workgroups")
    n = 9
    logits = np.stack([tied(np.random.default_rng(i), vocab) for i in range(n)])
    params = requests(n, vocab, top_k=min(20, vocab), top_p=0.9, slow="all" in variant)
    found = Drawn(bench, logits, params, variant=variant)
    none, zero = np.zeros(vocab, np.uint32), np.zeros(vocab, np.float32)
    assert found.tokens == [draws.drawn(logits[i], params[i], none, zero, i + 1) for i in range(n)]
    assert found.n_slow == (n if "all" in variant else 0)


@pytest.mark.parametrize("slow", [False, True])
def test_equal_scores_go_by_their_ids(bench: Bench, slow: bool) -> None:
    """All of them are kept by top_k, and top_p takes the lower half: too many candidates, and their ids in order."""
    n, vocab = 32, 4097
    params = requests(n, vocab, top_k=3, top_p=0.5, slow=slow)
    found = Drawn(bench, np.full((n, vocab), -2.5, np.float32), params)
    expected = [int(uniform(row.seed, i + 1) * (vocab // 2 + 1)) for i, row in enumerate(params)]
    assert found.tokens == expected
    assert found.n_slow == n


def test_penalties_and_bias_are_the_cpus(bench: Bench) -> None:
    n, vocab = 40, 509
    rng = np.random.default_rng(11)
    logits = np.stack([usual(rng, vocab) for _ in range(n)])
    best = np.argsort(-logits[0])[:40]
    prompt, answer = best[:10].tolist(), [*best[5:15].tolist(), *best[5:10].tolist()]
    asked: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 30,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.4,
        "logit_bias": {int(best[3]): 4.0, int(best[12]): -np.inf, int(best[30]): 2.5},
    }
    invalid = np.zeros(vocab, np.bool_)
    invalid[[int(best[1]), *range(vocab - 4, vocab)]] = True  # a hole, which the bias has to close
    params, expected, choices = [], [], []
    for i in range(n):
        sampler = Sampler(SamplingParams(seed=i, **asked), prompt_ids=prompt, vocab_size=vocab, invalid_ids=invalid)
        choice = sampler.choice
        assert choice is not None
        choices.append(choice.after(answer))
        for token in answer:
            sampler._seen[token] = True
            sampler._counts[token] += 1
        params.append(params_of(choices[i]))
        expected.append(sampler.sample(logits[i], i + 1).token)
    counts, bias = counts_of(choices[0], vocab), np.zeros(vocab, np.float32)
    for token, value in choices[0].bias.items():
        bias[token] = value
    found = Drawn(bench, logits, params, counts=counts, bias=bias)
    assert found.tokens == expected
    assert found.tokens == [draws.drawn(logits[i], params[i], counts, bias, i + 1) for i in range(n)]
    added = found.counts - counts
    assert [int(row.argmax()) for row in added] == found.tokens
    assert (added.sum(axis=1) == 1).all()


def test_what_is_drawn_is_counted_for_the_next_draw(bench: Bench) -> None:
    """With a presence penalty above every difference, greedy takes the ids one after the other."""
    logits = np.array([[0.4, 1.0, 0.2, 0.8]], np.float32)
    params = [SampleParams(n_valid=4, temperature=0, presence=2.0, penalties=True)]
    found = Drawn(bench, logits, params, times=RING)
    assert found.ring[0].tolist() == [1, 3, 0, 2]
    assert (found.states[0].position, found.states[0].steps) == (RING, RING)
    assert found.counts[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("slow", [False, True])
def test_what_is_not_a_number_is_reported(bench: Bench, value: float, slow: bool) -> None:
    logits = np.stack([usual(np.random.default_rng(1), 4097)] * 2)
    logits[0, 4000] = value
    params = requests(2, 4097, **RAW, slow=slow, penalties=True)
    found = Drawn(bench, logits, params, times=2)
    assert found.ring[0, :2].tolist() == [ops.BAD_TOKEN] * 2
    assert (found.states[0].flags, found.states[0].bad_step, found.states[0].token) == (ops.FLAG_NOT_FINITE, 0, 7)
    assert (found.states[1].flags, found.states[1].steps) == (0, 2)
    assert not found.counts[0].any()


def test_rows_of_padding_stay_as_they_are(bench: Bench) -> None:
    rows = [ops.RowState(token=3, position=ops.UNUSED_POSITION), ops.RowState(token=3, position=5)]
    logits = np.stack([usual(np.random.default_rng(1), 300)] * 2)
    found = Drawn(bench, logits, requests(2, 300, **RAW, penalties=True), rows=rows)
    assert found.states[0] == rows[0]
    assert not found.counts[0].any()
    assert found.states[1].position == 6
    assert found.counts[1].sum() == 1


@pytest.mark.parametrize("position", [0, 1, 77, 2**31])
def test_the_random_number_is_philox(bench: Bench, position: int) -> None:
    """Over equal weights the token is the random number itself."""
    seeds = [0, 1, 2**32, 2**64 - 1, 0x243F_6A88_85A3_08D3]
    rows = [ops.RowState(token=3, position=position) for _ in seeds]
    params = [SampleParams(n_valid=1 << 16, temperature=1, seed=seed) for seed in seeds]
    found = Drawn(bench, np.zeros((len(seeds), 1 << 16), np.float32), params, rows=rows)
    assert found.tokens == [int(uniform(seed, position + 1) * (1 << 16)) for seed in seeds]
