"""What each op should make of its inputs, by the reference, and how far rounding may take a right kernel from it.

Tolerances are computed, not chosen. A float32 sum of n products, in any order, is off by about sqrt(n) roundings of the
size of the sum of the products' magnitudes (Higham, Accuracy and Stability, 4.2), which Cauchy and Schwarz bound by the
lengths of the two vectors; both sides round, so it counts twice, and a few roundings are left for what comes before and
behind. exp is good to 3 + 2 |x| units in Vulkan's precision table, a division to 2.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.model import reference
from xinfer.trials.judge import Array, Expected

UNIT = 2.0**-24  # the largest relative error of one rounding to float32
TINY = 2.0**-126  # below it a device may flush to zero
TURN_UNITS = 4.0  # roundings of rope, by the length of a head
F16_HALF_STEP = 2.0**-11  # the largest relative error of one rounding to f16
F16_LEAST = 2.0**-25  # and the largest error where f16 is subnormal


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix (rows, columns) in float32, with the length of each row.

    Where `rows` is given it has so many: those of `values`, over and over, each of which is multiplied once.
    """

    values: Array
    rows: int | None = None
    lengths: Array = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", np.sqrt(np.einsum("ij,ij->i", self.values, self.values)))

    @property
    def columns(self) -> int:
        """What a product with it sums over."""
        return int(self.values.shape[1])

    def whole(self, product: Array) -> Array:
        """What was computed for each row of `values`, (..., len(values)), for every row: (..., rows)."""
        if self.rows is None or self.rows == len(self.values):
            return product
        return np.take(product, np.arange(self.rows) % len(self.values), axis=-1)


def sum_units(n: int) -> float:
    """The error of a sum of n products, relative to their magnitudes."""
    return 2 * UNIT * (math.sqrt(n) + 8)


def exact(values: NDArray[Any]) -> Expected:
    """Nothing may differ."""
    return Expected(values.astype(np.float32), np.zeros(1, np.float32))


def rms_norm(x: Array, weight: Array, *, eps: float) -> Expected:
    """Normalized rows: x (T, width)."""
    values = reference.rms_norm(x, weight, eps=eps)
    return Expected(values, np.asarray(sum_units(x.shape[1]) * np.abs(values), np.float32))


def linear(x: Array, w: Weights, *, bias: Array | None = None, before: Array | None = None) -> Expected:
    """The product of x (T, columns) -> (T, rows); `before` is what it is added to."""
    values = w.whole(reference.linear(x, w.values))
    magnitude = w.whole(np.multiply.outer(np.linalg.norm(x, axis=1), w.lengths))  # (T, rows)
    if bias is not None:
        values += bias
    for added in (bias, before):
        if added is not None:
            magnitude += np.abs(added)
    if before is not None:
        values += before
    return Expected(values, np.asarray(sum_units(w.columns) * magnitude, np.float32))


def norm_linear(x: Array, norm: Array, w: Weights, *, eps: float, bias: Array | None = None) -> Expected:
    """`linear(rms_norm(x))`; the norm's own sum adds as much again."""
    product = linear(reference.rms_norm(x, norm, eps=eps), w, bias=bias)
    return Expected(product.values, 2 * product.tolerance)


def swiglu(gate: Array, up: Array) -> Expected:
    """silu(gate) * up, element by element."""
    values = reference.swiglu(gate, up)
    with np.errstate(over="ignore"):
        tolerance = 2 * UNIT * (8 + 2 * np.abs(gate)) * np.abs(values) + 8 * TINY * (1 + np.abs(gate)) * (
            1 + np.abs(up)
        )
    return Expected(values, np.asarray(tolerance, np.float32))


def gate_up(x: Array, gate: Weights, up: Weights, *, norm: tuple[Array, float] | None = None) -> Expected:
    """`silu(x @ gate^T) * (x @ up^T)`, x normalized first where `norm` (weight, eps) is given."""
    if norm is None:
        a, b = linear(x, gate), linear(x, up)
    else:
        a, b = (norm_linear(x, norm[0], w, eps=norm[1]) for w in (gate, up))
    own = swiglu(a.values, b.values)
    # silu's slope is at most 1.1.
    tolerance = 1.1 * a.tolerance * np.abs(b.values) + b.tolerance * np.abs(a.values)
    tolerance += own.tolerance + 1.1 * a.tolerance * b.tolerance
    return Expected(own.values, np.asarray(tolerance, np.float32))


def rope(x: Array, cos: Array, sin: Array) -> Expected:
    """Turned pairs: x (T, heads * D), cos and sin (T, D / 2)."""
    heads = x.reshape(len(x), -1, 2 * cos.shape[1])
    values = reference.rope(heads, cos, sin).reshape(x.shape)
    largest = max(1.0, float(np.max(np.hypot(cos, sin), initial=0)))  # YaRN's factor
    other = np.roll(np.abs(heads), cos.shape[1], axis=-1).reshape(x.shape)
    return Expected(values, np.asarray(4 * UNIT * largest * (np.abs(x) + other), np.float32))


def cached(turned: Expected, cache_format: str) -> Expected:
    """Numbers as the cache holds them: float32, or rounded to the nearest f16."""
    if cache_format == "f32":
        return turned
    if not turned.tolerance.any():  # nothing was computed before: the rounding is exactly known
        return Expected(turned.values.astype(np.float16).astype(np.float32), turned.tolerance)
    step = F16_HALF_STEP * np.abs(turned.values) + F16_LEAST
    return Expected(turned.values, np.asarray(turned.tolerance + 1.001 * step, np.float32))


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    start: int,
    window: int | None = None,
    turn_units: float = 0.0,
    half_weights: bool = False,
) -> Expected:
    """Attention of q (T, heads, D), from position `start` on, to k and v (S, KV heads, D) -> (T, heads * D).

    k and v are what the cache holds. A score is a sum of D products; its error and exp's scale the weights of the
    values. `turn_units` are roundings that q has had before. With `half_weights` each weight is one f16 number, 1 at
    most: off by half a unit of 11 bits, or by 2^-25 where it is small.
    """
    n_tokens, n_heads, dim = q.shape
    values = reference.attention(q, k, v, q_start=start, window=window)
    mixed = reference.attention(q, k, np.abs(v), q_start=start, window=window)
    longest_key = np.linalg.norm(k, axis=-1).max(axis=0)  # (KV heads,)
    per_head = np.repeat(longest_key, n_heads // k.shape[1])
    score = np.linalg.norm(q, axis=-1) * per_head * dim**-0.5  # (T, heads): at most
    n_keys = np.arange(start + 1, start + n_tokens + 1)[:, np.newaxis]
    relative = 2 * UNIT * ((math.sqrt(dim) + 8 + turn_units) * score + 8 + 4 * score + np.sqrt(n_keys))
    tolerance = 2 * np.repeat(relative, dim, axis=1) * mixed
    if half_weights:
        total = np.repeat(np.abs(v).sum(axis=0), n_heads // k.shape[1], axis=0).reshape(1, -1)
        tolerance = np.asarray(tolerance + 2.0**-11 * mixed + 2.0**-25 * total, np.float32)
    return Expected(values, np.asarray(tolerance, np.float32))


def turned_attention(
    q: Array, cos: Array, sin: Array, k: Array, v: Array, *, start: int, window: int | None = None
) -> Expected:
    """Attention of q (T, heads, D) that is turned first, cos and sin (T, D / 2)."""
    turned = reference.rope(q, cos, sin)
    return attention(turned, k, v, start=start, window=window, turn_units=TURN_UNITS)


def packed(given: Expected, scales: Array, *, exact: bool) -> Expected:
    """What f16 halves stand for, scale (T,) times their sum: 22 bits of its largest value, or 11 of one half."""
    step = (2.0**-11 if exact else 1.0) * scales[:, np.newaxis]
    return Expected(given.values, np.asarray(given.tolerance + step + TINY, np.float32))


def argmax(logits: Array, n_valid: int, bad: int) -> NDArray[np.int64]:
    """The id of each row's largest logit below n_valid, the lowest on ties; `bad` where one is not finite."""
    valid = logits[:, :n_valid]
    chosen = np.argmax(valid, axis=1)
    return np.where(np.isfinite(valid).all(axis=1), chosen, bad)
