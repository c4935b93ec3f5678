"""From logits to the next token id.

The processors run in the order that transformers gives them: logit bias, repetition penalty, presence and frequency
penalty, temperature, top-k, top-p, min-p; what is left is renormalised and one token is drawn. Ties: as in
transformers, top-k keeps every token that equals the k-th, and top-p keeps as many of a tie as it needs; which ones
transformers leaves to an unstable sort, here they are the lower ids.

Randomness is a function of (seed, position) alone: the uniform number comes from Philox4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), keyed with the seed and counting positions. It needs 32-bit integers
only, so that a compute shader can draw the same number.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xinfer.choice import SPECULATE_MOST, Choice
from xinfer.errors import NumericalError, RequestError

MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1

# Beyond these only float64 will do.
WARMEST = 1e6
LARGEST_FLOAT32_SCORE = 1e30

# Larger than any logit can usefully become, and small enough that sums of two stay finite in float64.
_LARGEST_SCORE = 1e300
_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request wants of the sampler. Every value is checked here; `RequestError` says which one is wrong.

    `None` means "what the checkpoint's generation_config.json says, and where it is silent, the neutral value".

    Attributes:
        max_tokens: At most this many new tokens (1 or more).
        temperature: 0 is greedy: the highest score, the lowest id among equals.
        top_k: Keep the k best tokens, and those that equal the k-th. 0 keeps all.
        top_p: Keep the smallest set of best tokens whose probability reaches this, in (0, 1].
        min_p: Drop tokens less probable than this times the most probable one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative scores of every id in the prompt and the answer.
        presence_penalty: Subtracted once from every id in the answer, in [-2, 2].
        frequency_penalty: Subtracted for each time an id is in the answer, in [-2, 2].
        logit_bias: Added to the scores of these ids; `-inf` forbids an id.
        seed: 0 to 2**64 - 1; `None` takes one from the operating system.
        stop: A string or several; the answer ends before the first that appears.
        stop_token_ids: Ids that end the answer, besides the checkpoint's own.
        ignore_eos: Do not end at the checkpoint's own stop ids.
        logprobs: Report the log probability of every token and of this many alternatives (0 to 20).
        speculate: On a GPU, guess up to so many tokens (0 to 15) from what followed the last two or three before, and
            check them in one pass. Greedy answers without penalties only, whose tokens stay the same; it pays where
            text repeats itself, most where layers are streamed.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculate: int = 0

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1, do="leave it out for as many as the context holds")
        _check_float("temperature", self.temperature, low=0.0, do="0 is greedy")
        _check_int("top_k", self.top_k, low=0, do="0 keeps every token")
        _check_float("top_p", self.top_p, low=0.0, high=1.0, above_low=True, do="1 keeps every token")
        _check_float("min_p", self.min_p, low=0.0, high=1.0, do="0 keeps every token")
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0, above_low=True, do="1 is neutral")
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0, do="0 is neutral")
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0, do="0 is neutral")
        _check_int("seed", self.seed, low=0, high=MAX_SEED, do="leave it out for a random one")
        _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, do="leave it out for none")
        _check_int("speculate", self.speculate, low=0, high=SPECULATE_MOST, do="0 guesses nothing")
        if self.speculate is None:
            raise RequestError("speculate must be a number; 0 guesses nothing")
        if self.presence_penalty is None or self.frequency_penalty is None:
            raise RequestError("presence_penalty and frequency_penalty must be numbers; 0 is neutral")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _checked_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))


class _FrozenBias(Mapping[int, float]):
    """A bias that cannot be changed once it was checked. Unlike a MappingProxyType it can be copied and pickled."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[int, float]) -> None:
        self._values = values

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)


class Sampled(NamedTuple):
    """One drawn token.

    `logprob` and `top` are log softmax of the raw logits, before bias, penalties and temperature: what the model
    says, not what the sampler made of it. They are `None` and empty unless `logprobs` was asked for.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draws the tokens of one answer; it keeps count of them for the penalties.

    Args:
        params: The request's values; `None` in them is taken as neutral here.
        prompt_ids: The prompt's token ids, which the repetition penalty covers too.
        vocab_size: Length of the logits.
        invalid_ids: (vocab_size,) True for ids that no token has; they are never drawn.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        vocab_size: int,
        invalid_ids: NDArray[np.bool_] | None = None,
    ) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.temperature = 1.0 if params.temperature is None else float(params.temperature)
        self.top_k = params.top_k or 0
        self.top_p = 1.0 if params.top_p is None else float(params.top_p)
        self.min_p = float(params.min_p or 0.0)
        self.repetition_penalty = 1.0 if params.repetition_penalty is None else float(params.repetition_penalty)
        if invalid_ids is not None:
            assert invalid_ids.shape == (vocab_size,), (invalid_ids.shape, vocab_size)
        self._invalid = None if invalid_ids is None or not invalid_ids.any() else np.flatnonzero(invalid_ids)
        bias = params.logit_bias or {}
        self._bias_ids = _ids_within("logit_bias", bias.keys(), vocab_size)
        self._bias = np.array(list(bias.values()), dtype=np.float64)  # (len(bias),)
        self._seen = np.zeros(vocab_size, dtype=np.bool_)  # in the prompt or the answer
        self._seen[_ids_within("the prompt", prompt_ids, vocab_size)] = True
        self._counts = np.zeros(vocab_size, dtype=np.int32)  # in the answer
        # Used again for every token: fresh megabytes cost more in page faults than the arithmetic on them.
        self._all_ids = np.arange(vocab_size)
        self._scores = np.empty(vocab_size)
        self._weights = np.empty(vocab_size)

    @property
    def choice(self) -> Choice | None:
        """What `sample` does, for a device to do it alone; None where it takes more than that, or float64's range.

        Of the same logits it is the same token, but where two borders are as near as float32 is exact.
        """
        if self.params.logprobs is not None or self.temperature > WARMEST or not self._fits_float32():
            return None
        invalid = np.zeros(self.vocab_size, np.bool_)
        invalid[self._invalid if self._invalid is not None else []] = True
        bias = dict(zip(self._bias_ids.tolist(), self._bias.tolist(), strict=True))
        n_valid = self.vocab_size - int(invalid[::-1].argmin()) if not invalid.all() else 0
        bias |= dict.fromkeys(np.flatnonzero(invalid[:n_valid]).tolist(), -math.inf)
        if n_valid == sum(1 for i, value in bias.items() if i < n_valid and value == -math.inf):
            return None  # nothing is allowed: `sample` says so
        return Choice(
            n_valid=n_valid,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.params.presence_penalty,
            frequency_penalty=self.params.frequency_penalty,
            bias=bias,
            prompt_ids=np.flatnonzero(self._seen).tolist(),
            speculate=self.params.speculate,
        )

    def _fits_float32(self) -> bool:
        """Whether bias and penalty stay far from the ends of float32."""
        sizes = np.abs(self._bias[self._bias > -np.inf])
        repetition = max(self.repetition_penalty, 1 / self.repetition_penalty)
        return repetition < LARGEST_FLOAT32_SCORE and bool((sizes < LARGEST_FLOAT32_SCORE).all())

    def sample(self, logits: NDArray[np.float32], position: int) -> Sampled:
        """Draw the token that follows `logits` (vocab_size,) and count it.

        `position` is the new token's place in the sequence; together with the seed it decides the draw.
        """
        scores = self._scored(logits, position)
        if self.temperature == 0.0:
            token = int(scores.argmax())
        else:
            ids, weights = self._kept(scores)
            token = draw(ids, weights, uniform(self.seed, position))
        self._seen[token] = True
        self._counts[token] += 1
        return self._reported(token, logits)

    def scores(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The logits (vocab_size,) after bias and penalties; -inf at invalid ids."""
        return self._scored(logits, 0).copy()

    def _scored(self, logits: NDArray[np.float32], position: int) -> NDArray[np.float64]:
        assert logits.shape == (self.vocab_size,), (logits.shape, self.vocab_size)
        _check_finite(logits, position)
        scores = self._scores
        scores[:] = logits
        if self._bias.size:
            scores[self._bias_ids] += self._bias
        if self.repetition_penalty != 1.0:
            ids = np.flatnonzero(self._seen)
            scores[ids] = _repeated(scores[ids], self.repetition_penalty)
        if self.params.presence_penalty or self.params.frequency_penalty:
            ids = np.flatnonzero(self._counts)
            scores[ids] -= self.params.presence_penalty + self.params.frequency_penalty * self._counts[ids]
        if self._invalid is not None:
            scores[self._invalid] = -np.inf
        if scores.max() == -np.inf:
            raise RequestError(f"logit_bias forbids every token at position {position}; leave at least one allowed")
        return scores

    def distribution(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The kept ids, most probable first, and their probabilities, which sum to 1: what `sample` draws from."""
        scores = self._scored(logits, 0)
        if self.temperature == 0.0:
            return np.array([scores.argmax()]), np.ones(1)
        ids, weights = self._kept(scores)
        order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
        return ids[order], weights[order] / weights.sum()

    def _kept(self, scores: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Ids that survive, ascending, and their weights (probabilities up to a common factor)."""
        highest = scores.max()
        if self.top_k:
            ids = best(scores, self.top_k)
        elif self.min_p > 0.0 and self.top_p == 1.0:
            # Far fewer exponentials; the margin leaves the borderline to the exact comparison below.
            ids = np.flatnonzero(scores >= highest + self.temperature * (math.log(self.min_p) - 1e-6))
        else:
            ids = self._all_ids
        weights = self._weights[: ids.size]
        # The highest score is subtracted first so that a tiny temperature cannot overflow.
        np.subtract(scores if ids is self._all_ids else scores[ids], highest, out=weights)
        with np.errstate(over="ignore"):
            weights /= self.temperature
        np.exp(weights, out=weights)
        if self.top_p < 1.0:
            weights /= weights.sum()
            ids, weights = nucleus(ids, weights, self.top_p)
        if self.min_p > 0.0:
            keep = weights >= self.min_p * weights.max()
            ids, weights = ids[keep], weights[keep]
        return ids, weights

    def _reported(self, token: int, logits: NDArray[np.float32]) -> Sampled:
        wanted = self.params.logprobs
        if wanted is None:
            return Sampled(token, None, ())
        logprobs, work = self._scores, self._weights
        logprobs[:] = logits
        logprobs -= logprobs.max()
        logprobs -= np.log(np.exp(logprobs, out=work).sum())
        chosen = float(logprobs[token])
        if self._invalid is not None:
            logprobs[self._invalid] = -np.inf
        ids = largest(logprobs, wanted)
        return Sampled(token, chosen, tuple((int(i), float(logprobs[i])) for i in ids if logprobs[i] > -np.inf))


def _repeated(scores: NDArray[np.float64], penalty: float) -> NDArray[np.float64]:
    """Scores of ids that are there already; forbidden ones stay so, and the others stay finite."""
    with np.errstate(over="ignore"):
        penalised = np.where(scores < 0, scores * penalty, scores / penalty)
    return np.where(np.isneginf(scores), scores, np.clip(penalised, -_LARGEST_SCORE, _LARGEST_SCORE))


def best(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the `count` largest values and of all that equal the last of them."""
    if count >= values.size:
        return np.arange(values.size)
    # The maxima of blocks give a floor below which nothing can be among the largest: partitioning all values of a
    # large vocabulary takes several times as long.
    blocks = values[: values.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK)  # (values.size // _BLOCK, _BLOCK)
    if blocks.shape[0] > 2 * count:
        picked = np.flatnonzero(values >= np.partition(blocks.max(axis=1), -count)[-count])
    else:
        picked = np.arange(values.size)
    among = values[picked]
    kept: NDArray[np.int64] = picked[among >= np.partition(among, -count)[-count]]
    return kept


def nucleus(
    ids: NDArray[np.int64], probs: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The smallest set of best tokens whose probability exceeds `top_p`, ids ascending; at least one.

    As in transformers, a token goes when the mass of it and of everything behind it is at most 1 - top_p. Lower ids
    come first among equals. Only as many of the best are sorted as are needed.
    """
    for size in (1024, 16384, probs.size):
        picked = best(probs, size)
        tail = 0.0 if picked.size == probs.size else 1.0 - float(probs[picked].sum())
        if tail <= 1.0 - top_p or picked.size == probs.size:
            break
    order = picked[np.argsort(-probs[picked], kind="stable")]
    mass_from_here = tail + np.cumsum(probs[order][::-1])[::-1]
    keep = mass_from_here > 1.0 - top_p
    keep[0] = True
    kept = np.sort(order[keep])
    return ids[kept], probs[kept]


def draw(ids: NDArray[np.int64], weights: NDArray[np.float64], u: float) -> int:
    """The id at `u` in [0, 1) of the cumulative weights, most probable first, lower ids first among equals.

    Only as many of the best are sorted as the draw reaches.
    """
    target = u * weights.sum()
    for size in (256, 8192, weights.size):
        picked = best(weights, size)
        order = picked[np.argsort(-weights[picked], kind="stable")]
        reached = np.cumsum(weights[order])
        if target < reached[-1]:
            return int(ids[order[np.searchsorted(reached, target, side="right")]])
    return int(ids[order[np.count_nonzero(weights) - 1]])  # rounding: u was almost 1


def largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest values, largest first, lower indices first among equals."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    picked = best(values, count)
    order: NDArray[np.int64] = picked[np.argsort(-values[picked], kind="stable")]
    return order[:count]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, decided by seed and position.

    Its bits are the upper ones of Philox4x32-10's first word, with the seed's words (low, high) as the key and
    (position, 0, 0, 0) as the counter.
    """
    assert 0 <= seed <= MAX_SEED, seed
    assert 0 <= position < 2**32, position
    word = philox4x32((position, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))[0]
    return (word >> 8) * 2.0**-24


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds: four random 32-bit words for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0 = 0xD2511F53 * c0
        product1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _check_finite(logits: NDArray[np.float32], position: int) -> None:
    finite = np.isfinite(logits)
    if finite.all():
        return
    bad = np.flatnonzero(~finite)
    raise NumericalError(
        f"the logits for position {position} hold {bad.size} NaN or infinite values, the first at id {bad[0]}; "
        "expected finite numbers: the weights may be damaged, or the device computed wrongly: try device='cpu'"
    )


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _check_int(name: str, value: Any, *, low: int, high: int | None = None, do: str) -> None:
    if value is None:
        return
    if not _is_int(value) or value < low or (high is not None and value > high):
        bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {bounds}, not {_shown(value)}; {do}")


def _check_float(
    name: str, value: Any, *, low: float, high: float = math.inf, above_low: bool = False, do: str
) -> None:
    if value is None:
        return
    if not _is_float(value) or not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
        bounds = f"above {low:g}" if above_low else f"of {low:g} or more"
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be a finite number {bounds}{limit}, not {_shown(value)}; {do}")


def _is_float(value: object) -> bool:
    """Whether a value is a number that float64 can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _shown(value: object) -> str:
    """A value for a message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _checked_stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (tuple, list)) or not all(isinstance(s, str) for s in stops):
        raise RequestError(f"stop must be a string or a list of strings, not {stop!r}")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for string in stops:
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise RequestError(f"a stop string has {len(string)} characters; 1 to {MAX_STOP_LENGTH} are allowed")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise RequestError(f"the stop string {string!a} has half characters (lone surrogates); expected text")
    return tuple(dict.fromkeys(stops))


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not isinstance(ids, (tuple, list)) or not all(_is_int(i) and i >= 0 for i in ids):
        raise RequestError(f"{name} must be a list of token ids (whole numbers of 0 or more), not {ids!r}")
    return tuple(int(i) for i in ids)


def _checked_bias(bias: object) -> Mapping[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {bias!r}")
    for token, value in bias.items():
        if not _is_int(token) or not 0 <= token < 2**31:
            raise RequestError(f"logit_bias has the key {_shown(token)}; keys are token ids, 0 to 2**31 - 1")
        if not _is_float(value) or not value < math.inf:
            raise RequestError(f"logit_bias for id {token} must be a number below infinity, not {_shown(value)}")
    return _FrozenBias({int(token): float(value) for token, value in bias.items()})


def _ids_within(what: str, ids: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    array = np.array(list(ids), dtype=np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise RequestError(
            f"{what} has the token id {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}; "
            "use ids of this checkpoint's own tokenizer"
        )
    return array
