"""What `sample` makes of its inputs, to the bit: the same integers, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from xinfer.ops import SEEN_IN_PROMPT, SampleParams
from xinfer.ops._sample import WEIGHT_BITS
from xinfer.sampling import uniform
from xinfer.trials.judge import Array

NOT_FINITE_KEY = 0xFFFF_FFFF
LARGEST = np.finfo(np.float32).max
EXPONENT_END = 46 * 2**24
# (1 - 2^-t) / t in powers of t, alternating in sign, in units of 2^-32: sample.hlsli has the same.
COEFFICIENTS = (0xB17217F7, 0x3D7F7BCC, 0x0E35812F, 0x027641CC, 0x005728F4, 0x0009C23C, 0x0000BDBA)

Words = NDArray[np.uint32]
Weights = NDArray[np.uint64]


def scored(logits: Array, params: SampleParams, counts: Words, bias: Array) -> Array:
    """(vocab,): logits with bias and penalties, minus infinity where an id is forbidden."""
    scores = logits.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        if params.bias:
            scores = np.where(np.isneginf(bias), -np.inf, _clamped(scores + bias))
        if params.penalties:
            repetition, presence, frequency = (
                np.float32(value) for value in (params.repetition, params.presence, params.frequency)
            )
            repeated = _clamped(np.where(scores < 0, scores * repetition, scores * np.float32(1 / params.repetition)))
            scores = np.where((counts != 0) & (scores > -np.inf), repeated, scores)
            times = counts & np.uint32(SEEN_IN_PROMPT - 1)
            taken = frequency * times.astype(np.float32) + presence
            scores = np.where((times != 0) & (scores > -np.inf), _clamped(scores - taken), scores)
    scores[params.n_valid :] = -np.inf
    return scores.astype(np.float32)


def keys_of(scores: Array) -> Words:
    """(vocab,): integers of the scores' order; 0 where an id is forbidden."""
    bits = (scores + np.float32(0)).view(np.uint32)  # -0 becomes 0
    keys = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))
    return np.where(np.isneginf(scores), np.uint32(0), keys).astype(np.uint32)


def weights_of(scores: Array, params: SampleParams) -> Weights:
    """(vocab,): exp((score - highest) / temperature) in units of 2^-WEIGHT_BITS."""
    with np.errstate(over="ignore", invalid="ignore"):
        exponent = (scores.max() - scores) * np.float32(params.scale)
    inside = exponent < EXPONENT_END
    bits = np.where(inside, exponent, 0).astype(np.uint64)
    t = (bits & np.uint64(0xFFFFFF)) << np.uint64(8)
    total = np.full_like(t, COEFFICIENTS[-1])
    for coefficient in COEFFICIENTS[-2::-1]:
        total = np.uint64(coefficient) - (t * total >> np.uint64(32))
    total = t * total >> np.uint64(32)
    weights = (np.uint64(1 << WEIGHT_BITS) - (total << np.uint64(13))) >> (bits >> np.uint64(24))
    return np.where(inside, weights, np.uint64(0))


def drawn(logits: Array, params: SampleParams, counts: Words, bias: Array, position: int) -> int:
    """The token at `position` behind finite logits (vocab,)."""
    scores = scored(logits, params, counts, bias)
    keys, weights = keys_of(scores), weights_of(scores, params)
    order = np.argsort(~keys, kind="stable")
    order = order[keys[order] > 0]
    if params.temperature == 0:
        return int(order[0])
    if params.top_k:
        order = order[keys[order] >= keys[order[min(params.top_k, len(order)) - 1]]]
    own = weights[order]
    before = np.cumsum(own) - own
    kept = own >= params.min_weight
    if params.top_p_fraction:
        most = int(own.sum()) * params.top_p_fraction >> 32
        kept &= (before < np.uint64(most)) | (before == 0)
    order, own = order[kept], own[kept]
    target = int(own.sum()) * _random(params.seed, position) >> 32
    return int(order[np.searchsorted(np.cumsum(own), np.uint64(target), side="right")])


def _random(seed: int, position: int) -> int:
    """The uniform number in units of 2^-32."""
    return int(uniform(seed, position) * 2**32)


def _clamped(scores: Array) -> Array:
    return np.clip(scores, -LARGEST, LARGEST)
