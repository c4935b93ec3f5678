"""Sampling against probabilities worked by hand, published random vectors, and the distribution it should draw from."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer.errors import NumericalError, RequestError
from xinfer.sampling import Sampler, SamplingParams, best, draw, largest, nucleus, philox4x32, uniform


def logits_of(*probs: float) -> NDArray[np.float32]:
    return np.log(np.array(probs, dtype=np.float32), dtype=np.float32)


def sampler(vocab_size: int, *, prompt_ids: tuple[int, ...] = (), invalid: Any = None, **params: Any) -> Sampler:
    params = {"seed": 1, "temperature": 1.0} | params
    return Sampler(SamplingParams(**params), prompt_ids=prompt_ids, vocab_size=vocab_size, invalid_ids=invalid)


def kept(logits: NDArray[np.float32], **params: Any) -> dict[int, float]:
    ids, probs = sampler(logits.size, **params).distribution(logits)
    return dict(zip(ids.tolist(), probs.tolist(), strict=True))


# Hand-worked probabilities.


def test_temperature_two_takes_square_roots() -> None:
    # sqrt(0.64, 0.32, 0.04) = (0.8, 0.566, 0.2), which sum to 1.566
    found = kept(logits_of(0.64, 0.32, 0.04), temperature=2.0)
    total = 0.8 + math.sqrt(0.32) + 0.2
    assert found == pytest.approx({0: 0.8 / total, 1: math.sqrt(0.32) / total, 2: 0.2 / total}, abs=1e-7)


def test_top_k_keeps_the_best_and_renormalises() -> None:
    assert kept(logits_of(0.1, 0.4, 0.2, 0.3), top_k=2) == pytest.approx({1: 4 / 7, 3: 3 / 7}, abs=1e-7)


def test_top_k_keeps_all_that_equal_the_kth() -> None:
    assert set(kept(np.array([1, 3, 2, 2, 2, 0], np.float32), top_k=2)) == {1, 2, 3, 4}


def test_top_k_larger_than_the_vocabulary_keeps_everything() -> None:
    assert len(kept(logits_of(0.5, 0.5), top_k=10)) == 2


def test_top_p_keeps_the_smallest_set_that_exceeds_it() -> None:
    assert kept(logits_of(0.1, 0.5, 0.15, 0.25), top_p=0.7) == pytest.approx({1: 2 / 3, 3: 1 / 3}, abs=1e-7)


def test_top_p_of_nearly_nothing_keeps_one() -> None:
    assert kept(logits_of(0.2, 0.2, 0.6), top_p=1e-9) == {2: 1.0}


def test_top_p_keeps_the_lower_ids_of_a_tie() -> None:
    # Each has 1/4. Masses from the last up: 1/4, 1/2, 3/4, 1; the first two are at most 1 - 0.5.
    assert set(kept(np.zeros(4, np.float32), top_p=0.5)) == {0, 1}


def test_top_p_counts_what_top_k_left() -> None:
    # top_k leaves (0.4, 0.3, 0.2) / 0.9; then 4/9 alone is not above 0.5, 7/9 is
    assert kept(logits_of(0.4, 0.3, 0.2, 0.1), top_k=3, top_p=0.5) == pytest.approx({0: 4 / 7, 1: 3 / 7}, abs=1e-7)


def test_min_p_is_relative_to_the_best() -> None:
    assert kept(logits_of(0.6, 0.25, 0.1, 0.05), min_p=0.3) == pytest.approx({0: 0.6 / 0.85, 1: 0.25 / 0.85}, abs=1e-7)


def test_min_p_comes_after_temperature() -> None:
    # The square roots are 0.775 and 0.224: a ratio of 0.289 where it was 0.083.
    assert set(kept(logits_of(0.6, 0.05, 0.35), min_p=0.2, temperature=2.0)) == {0, 1, 2}
    assert set(kept(logits_of(0.6, 0.05, 0.35), min_p=0.2)) == {0, 2}


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores_of_prompt_and_answer() -> None:
    s = sampler(4, prompt_ids=(0, 1, 1), repetition_penalty=2.0, temperature=0.0)
    logits = np.array([3.0, -1.0, 2.0, 0.5], np.float32)
    assert s.scores(logits).tolist() == [1.5, -2.0, 2.0, 0.5]
    assert s.sample(logits, 3).token == 2
    assert s.scores(logits).tolist() == [1.5, -2.0, 1.0, 0.5]
    assert s.sample(logits, 4).token == 0


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    s = sampler(3, prompt_ids=(0, 1, 2), presence_penalty=0.5, frequency_penalty=0.25, temperature=0.0)
    logits = np.array([2.0, 1.0, 0.0], np.float32)
    assert s.scores(logits).tolist() == [2.0, 1.0, 0.0]
    assert [s.sample(logits, i).token for i in range(3)] == [0, 0, 0]  # 2, 1.25, 1: the tie goes to the lower id
    assert s.scores(logits).tolist() == [2.0 - 0.5 - 0.75, 1.0, 0.0]


def test_logit_bias_is_added_before_the_penalty() -> None:
    s = sampler(2, prompt_ids=(0,), repetition_penalty=2.0, logit_bias={0: 3.0})
    assert s.scores(np.array([1.0, 0.0], np.float32)).tolist() == [2.0, 0.0]


def test_logit_bias_of_minus_infinity_forbids() -> None:
    assert set(kept(np.zeros(3, np.float32), logit_bias={1: -math.inf})) == {0, 2}
    with pytest.raises(RequestError, match="forbids every token"):
        kept(np.zeros(2, np.float32), logit_bias={0: -math.inf, 1: -math.inf})


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert sampler(5, temperature=0.0).sample(np.array([1, 7, 7, 0, 7], np.float32), 0).token == 1


def test_logprobs_are_of_the_raw_logits() -> None:
    s = sampler(4, temperature=0.0, logprobs=2, logit_bias={2: 9.0}, invalid=np.array([False, True, False, False]))
    token, logprob, top = s.sample(logits_of(0.5, 0.3, 0.15, 0.05), 0)
    assert token == 2
    assert logprob == pytest.approx(math.log(0.15), abs=1e-6)
    # id 1 has no token: it is counted in the sum, as the model counts it, and not listed
    assert [i for i, _ in top] == [0, 2]
    assert [math.exp(p) for _, p in top] == pytest.approx([0.5, 0.15], abs=1e-6)
    assert sampler(2).sample(np.zeros(2, np.float32), 0)[1:] == (None, ())


# Ids without a token, and logits that are no numbers.


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {}])
def test_invalid_ids_are_never_drawn(params: dict[str, Any]) -> None:
    invalid = np.zeros(50, dtype=np.bool_)
    invalid[[3, 7, 40, 49]] = True
    logits = np.zeros(50, np.float32)
    logits[invalid] = 30.0
    s = sampler(50, invalid=invalid, **params)
    assert not any(invalid[s.sample(logits, i).token] for i in range(200))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_name_the_position(bad: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[4] = bad
    with pytest.raises(NumericalError, match=r"position 17 hold 1 NaN or infinite values, the first at id 4"):
        sampler(10, temperature=0.0).sample(logits, 17)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3, 1e30, 1.7e308])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([3e38, -3e38, 2.9e38, 0], np.float32)
    found = kept(logits, temperature=temperature)
    assert all(math.isfinite(p) for p in found.values())
    if temperature < 1:
        assert found[0] == 1.0


def test_an_extreme_repetition_penalty_stays_finite() -> None:
    s = sampler(2, prompt_ids=(0, 1), repetition_penalty=1e-300)
    assert s.sample(np.array([3e38, 1.0], np.float32), 0).token == 0
    s = sampler(2, prompt_ids=(0, 1), repetition_penalty=1e300)
    assert s.sample(np.array([-3e38, 1.0], np.float32), 0).token == 1


# Randomness.

VECTORS = [  # kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, output: str) -> None:
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    assert philox4x32((c0, c1, c2, c3), (k0, k1)) == tuple(int(word, 16) for word in output.split())


def test_uniform_is_the_top_24_bits_of_the_first_word() -> None:
    assert uniform(0, 0) == 0x6627E8 / 2**24
    words = philox4x32((5, 0, 0, 0), (0x89ABCDEF, 0x01234567))
    assert uniform(0x0123456789ABCDEF, 5) == (words[0] >> 8) / 2**24


def test_a_draw_is_a_function_of_seed_and_position_alone() -> None:
    logits = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)
    forward = sampler(300, seed=123)
    tokens = {i: forward.sample(logits[i], i).token for i in range(40)}
    backward = sampler(300, seed=123)
    assert {i: backward.sample(logits[i], i).token for i in reversed(range(40))} == tokens
    assert [sampler(300, seed=123).sample(logits[9], 9).token for _ in range(3)] == [tokens[9]] * 3
    others = [sampler(300, seed=s).sample(logits[i], i).token for s, i in itertools.product((0, 124), range(40))]
    assert others != [tokens[i] for i in range(40)] * 2


def chi_square(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


PROBS = np.array([0.3, 0.22, 0.18, 0.12, 0.08, 0.05, 0.03, 0.02])
# 7 degrees of freedom: a fair sampler exceeds this once in 100,000 times, and the seeds below are fixed.
LIMIT = 35.3


@pytest.mark.parametrize("over", ["positions", "low word of the seed", "high word of the seed"])
def test_draws_follow_the_distribution(over: str) -> None:
    logits = logits_of(*PROBS)
    counts = np.zeros(8, dtype=np.int64)
    s = sampler(8, seed=7)
    for i in range(6_000):
        if over != "positions":
            s.seed = i if over.startswith("low") else i << 32
        counts[s.sample(logits, i if over == "positions" else 11).token] += 1
    assert chi_square(counts, PROBS) < LIMIT
    assert counts.sum() == 6_000


def test_neighbouring_positions_are_independent() -> None:
    pairs = np.zeros((4, 4), dtype=np.int64)
    tokens = [int(uniform(99, i) * 4) for i in range(16_001)]
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    assert chi_square(pairs.ravel(), np.full(16, 1 / 16)) < 52.0  # 15 degrees of freedom, once in 100,000


# The shortcuts: sorting only as much as is needed gives what sorting everything gives.


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4097, 40_000])
@pytest.mark.parametrize("levels", [3, 500, None])
def test_best_and_largest_equal_a_full_sort(size: int, levels: int | None) -> None:
    rng = np.random.default_rng(size)
    values = rng.standard_normal(size) if levels is None else rng.integers(0, levels, size).astype(np.float64)
    for count in (1, 2, 20, 500, size):
        order = np.lexsort((np.arange(size), -values))
        threshold = values[order[min(count, size) - 1]]
        assert best(values, count).tolist() == np.flatnonzero(values >= threshold).tolist()
        assert largest(values, count).tolist() == order[:count].tolist()


@pytest.mark.parametrize("size", [1, 5, 1023, 1025, 30_000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
def test_nucleus_equals_a_full_sort(size: int, spread: float) -> None:
    rng = np.random.default_rng(size)
    # Rounded logits have many ties, as bfloat16 ones do.
    weights = np.exp(np.round(rng.standard_normal(size) * spread * 8) / 8)
    probs = weights / weights.sum()
    ids = np.arange(size) * 2
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999999):
        order = np.lexsort((-ids, probs))  # the last to be kept first
        masses = np.cumsum(probs[order])
        gone = masses <= 1 - top_p
        gone[-1] = False
        expected = np.sort(order[~gone])
        found, found_probs = nucleus(ids, probs, top_p)
        # The mass of a long tail is summed in another order: one token at the border may differ where it lies within
        # rounding of it.
        difference = set(found.tolist()) ^ set((expected * 2).tolist())
        border = {int(ids[i]) for i in order[np.abs(masses - (1 - top_p)) < 1e-12]}
        assert difference <= border
        assert found_probs.tolist() == probs[found // 2].tolist()


@pytest.mark.parametrize("size", [1, 300, 9000, 20_000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_draw_equals_a_full_sort(size: int, spread: float) -> None:
    rng = np.random.default_rng(size)
    weights = np.exp(np.round(rng.standard_normal(size) * spread * 4) / 4)
    ids = np.arange(size) + 3
    order = np.lexsort((ids, -weights))
    reached = np.cumsum(weights[order])
    for u in [0.0, 1 - 2**-24, *rng.random(50)]:
        rank = min(int(np.searchsorted(reached, u * weights.sum(), side="right")), size - 1)
        assert draw(ids, weights, u) == ids[order[rank]]


def test_draw_never_takes_a_weight_of_zero() -> None:
    weights = np.array([0.0, 1.0, 0.0, 0.1, 0.0])
    assert {draw(np.arange(5), weights, u) for u in (0.0, 0.5, 1 - 2**-24, 1.0)} == {1, 3}


# Checked values.

BAD: list[tuple[str, Any]] = [
    *itertools.product(["temperature"], [-0.1, math.nan, math.inf, "1", True, [1.0]]),
    *itertools.product(["top_p"], [0, 0.0, -0.5, 1.5, math.nan, "0.9", False]),
    *itertools.product(["top_k"], [-1, 1.5, True, "20", math.nan]),
    *itertools.product(["min_p"], [-0.1, 1.1, math.nan, "0"]),
    *itertools.product(["repetition_penalty"], [0, 0.0, -1.0, math.nan, math.inf, "1"]),
    *itertools.product(["presence_penalty", "frequency_penalty"], [-2.1, 2.1, math.nan, "0", None, True]),
    *itertools.product(["max_tokens"], [0, -1, 1.0, True, "5"]),
    *itertools.product(["seed"], [-1, 2**64, 1.5, True, "1"]),
    *itertools.product(["logprobs"], [-1, 21, True, 1.0]),
    *itertools.product(["stop"], ["", ["a", ""], [1], 5, {"a"}, ["a"] * 65, ["a" * 4097], [b"a"], None]),
    *itertools.product(["stop_token_ids"], [5, [-1], [1.0], [True], "1", None]),
    *itertools.product(["ignore_eos"], [1, None, "no"]),
    *itertools.product(["logit_bias"], [{"1": 1.0}, {-1: 1.0}, {1: math.nan}, {1: math.inf}, {1: "x"}, {1.0: 1}, [1]]),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: True}),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name.split("_token")[0].split("ping")[0]):
        SamplingParams(**{name: value})


def test_right_values_are_taken_as_they_are() -> None:
    values: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3), "logit_bias": {np.int64(3): 1}}
    params = SamplingParams(stop="x", stop_token_ids=[5, 6], seed=0, **values)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (5, 6), {3: 1.0})
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert SamplingParams(seed=2**64 - 1, temperature=0, top_p=1, top_k=0, min_p=1, logprobs=20).top_p == 1


@pytest.mark.parametrize(
    ("params", "prompt_ids", "named"),
    [({"logit_bias": {10: 1.0}}, (), "logit_bias"), ({}, (3, 10), "prompt"), ({}, (-1,), "prompt")],
)
def test_ids_outside_the_vocabulary_are_refused(params: Any, prompt_ids: tuple[int, ...], named: str) -> None:
    with pytest.raises(RequestError, match=rf"{named}.*ends at 9"):
        sampler(10, prompt_ids=prompt_ids, **params)


def test_without_a_seed_two_samplers_differ() -> None:
    assert sampler(2, seed=None).seed != sampler(2, seed=None).seed


def test_a_bias_cannot_be_changed_once_it_was_checked() -> None:
    given = {3: 1.0}
    params = SamplingParams(logit_bias=given)
    given[3] = math.nan
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[3] = math.nan  # type: ignore[index]
    for copied in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), dataclasses.replace(params)):
        assert copied == params
    assert dataclasses.asdict(params)["logit_bias"] == {3: 1.0}
