"""Each operation of the reference against a formula written another way, in float64 where numbers are compared."""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer.errors import WeightsError
from xinfer.model import reference
from xinfer.model.config import Qwen2Config, YarnScaling
from xinfer.model.synthetic import PRESETS

Array = NDArray[np.float32]
Wide = NDArray[np.float64]
SIZES = (1, 31, 32, 33)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def config_with(**changes: Any) -> Qwen2Config:
    return dataclasses.replace(Qwen2Config.from_json(PRESETS["gqa"].config_json()), **changes)


# --- rms_norm, linear, embed, swiglu


@pytest.mark.parametrize("hidden", [*SIZES, 4097])
def test_rms_norm_is_the_formula(hidden: int) -> None:
    x, weight = normal(3, hidden), normal(hidden, seed=1)
    roots = [math.sqrt(sum(v * v for v in row) / hidden + 1e-5) for row in x.tolist()]
    expected = x.astype(np.float64) / np.array(roots)[:, np.newaxis]
    got = reference.rms_norm(x, weight, eps=1e-5)
    assert got.dtype == np.float32
    assert error(got, expected * weight.astype(np.float64)) < 1e-6


def test_rms_norm_adds_eps_inside_the_root() -> None:
    x = np.full((1, 8), 1e-4, np.float32)  # mean square 1e-8: eps decides
    got = reference.rms_norm(x, np.ones(8, np.float32), eps=1e-6)
    np.testing.assert_allclose(got, 1e-4 / math.sqrt(1e-8 + 1e-6), rtol=1e-6)
    assert (reference.rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), eps=1e-6) == 0).all()


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("columns", SIZES)
def test_linear_is_the_sum_over_inputs(rows: int, columns: int) -> None:
    x, w, b = normal(5, columns), normal(rows, columns, seed=1), normal(rows, seed=2)
    expected = np.einsum("ti,oi->to", x.astype(np.float64), w.astype(np.float64))
    assert error(reference.linear(x, w), expected) < 1e-6
    assert error(reference.linear(x, w, b), expected + b) < 1e-6


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_embed_takes_rows(dtype: Any) -> None:
    table = normal(7, 4).astype(dtype)
    got = reference.embed(np.array([6, 0, 6]), table)
    assert got.dtype == np.float32
    assert got.tolist() == [table[6].tolist(), table[0].tolist(), table[6].tolist()]


def test_swiglu_is_the_formula() -> None:
    gate, up = 8 * normal(9, 33), normal(9, 33, seed=1)
    expected = [[g * u / (1 + math.exp(-g)) for g, u in zip(*rows, strict=True)] for rows in zip(gate, up, strict=True)]
    assert error(reference.swiglu(gate, up), np.array(expected)) < 1e-6


def test_swiglu_at_the_ends_of_the_range() -> None:
    gate = np.array([-1e30, -1e4, -89, 0, 1e4, 1e30], np.float32)
    got = reference.swiglu(gate, np.full(6, 2, np.float32))  # a warning would be an error here
    assert got.tolist()[:2] == [0, 0]
    assert abs(got[2]) < 1e-36
    assert got.tolist()[3:] == [0, 2e4, float(np.float32(2e30))]


# --- rotary positions


@pytest.mark.parametrize("dim", [2, 6, 64, 128])
@pytest.mark.parametrize("heads", [1, 3])
def test_rope_is_multiplication_by_a_unit_complex_number(dim: int, heads: int) -> None:
    positions = np.array([0, 1, 31, 4096])
    config = config_with(head_dim=dim)
    x = normal(len(positions), heads, dim)
    cos, sin = reference.rope_tables(config, positions)
    got = reference.rope(x, cos, sin)
    angle = np.outer(positions, [config.rope_theta ** (-2 * i / dim) for i in range(dim // 2)])
    turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * np.exp(1j * angle)[:, np.newaxis]
    # an angle of 4096 in float32 is off by up to 2.4e-4, by design; the small positions have to be exact
    assert error(got[:3], np.concatenate([turned.real, turned.imag], -1)[:3]) < 3e-6
    assert error(got, np.concatenate([turned.real, turned.imag], -1)) < 5e-4
    assert (got[0] == x[0]).all()


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e7, 500.0])
@pytest.mark.parametrize("dim", [2, 40, 64, 128])
def test_frequencies_are_the_nearest_float32(theta: float, dim: int) -> None:
    got, factor = reference.rope_frequencies(config_with(rope_theta=theta, head_dim=dim))
    exact = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
    assert factor == 1.0
    # the exponent, the power and its reciprocal are each rounded once
    assert np.abs(got / exact - 1).max() < (2 + math.log(theta)) * 2.0**-24
    assert got[0] == 1


def test_angles_are_rounded_to_float32() -> None:
    """As transformers rounds them, and as checkpoints were trained: a thousandth of a radian at position 30,000."""
    config = config_with(head_dim=64)
    frequency, _ = reference.rope_frequencies(config)
    positions = [1, 77, 2049, 30011]
    cos, sin = reference.rope_tables(config, positions)
    exact = [[position * float(f) for f in frequency] for position in positions]
    angles = [[struct.unpack("<f", struct.pack("<f", angle))[0] for angle in row] for row in exact]
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=4e-8)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=4e-8)
    assert np.abs(cos - np.cos(exact)).max() > 2e-4


def yarn_config(*, factor: float = 4.0, truncate: bool = True, attention_factor: float = 1.25) -> Qwen2Config:
    yarn = YarnScaling(
        factor=factor, original_max_position_embeddings=1024, attention_factor=attention_factor, truncate=truncate
    )
    return config_with(yarn=yarn, head_dim=64, rope_theta=1e4)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("factor", [2.0, 4.0, 40.0])
def test_yarn_stretches_what_turns_slowly(factor: float, truncate: bool) -> None:
    got, attention_factor = reference.rope_frequencies(yarn_config(factor=factor, truncate=truncate))
    plain = [1e4 ** (-2 * i / 64) for i in range(32)]

    def pair(rotations: float) -> float:  # the pair that turns so many times in 1024 positions
        return 32 * math.log(1024 / (2 * math.pi * rotations)) / math.log(1e4)

    low, high = pair(32), pair(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    mix = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(32)]
    expected = [f * (1 - m) + f / factor * m for f, m in zip(plain, mix, strict=True)]
    assert attention_factor == 1.25
    np.testing.assert_allclose(got, expected, rtol=2e-6)
    assert 0 < low < high < 31  # both ends of the ramp are inside, so that all three cases were compared


def test_yarn_attention_factor_scales_both_tables() -> None:
    positions = np.arange(50)
    cos, sin = reference.rope_tables(yarn_config(), positions)
    np.testing.assert_allclose(cos * cos + sin * sin, 1.25**2, rtol=1e-6)


# --- attention


def naive_attention(q: Array, k: Array, v: Array, *, q_start: int, window: int | None) -> Wide:
    """One query, one head, one key at a time, in Python floats."""
    n_tokens, n_heads, dim = q.shape
    out = np.zeros((n_tokens, n_heads, dim))
    for t in range(n_tokens):
        at = q_start + t
        seen = [s for s in range(at + 1) if window is None or s > at - window]
        for h in range(n_heads):
            kv = h * k.shape[1] // n_heads
            scores = [float(np.dot(q[t, h].astype(np.float64), k[s, kv])) / math.sqrt(dim) for s in seen]
            weights = [math.exp(score - max(scores)) for score in scores]
            for s, weight in zip(seen, weights, strict=True):
                out[t, h] += weight / sum(weights) * v[s, kv]
    return out.reshape(n_tokens, n_heads * dim)


@pytest.mark.parametrize(("n_heads", "n_kv"), [(4, 4), (4, 2), (6, 2), (5, 1), (1, 1)])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 100])
@pytest.mark.parametrize(("n_tokens", "before"), [(1, 0), (1, 12), (9, 0), (5, 6)])
@pytest.mark.parametrize("block", [1, 2, 4, 5])
def test_attention_is_the_naive_loop(
    n_heads: int, n_kv: int, window: int | None, n_tokens: int, before: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_keys = before + n_tokens
    monkeypatch.setattr(reference, "_SCORE_BLOCK_BYTES", 4 * n_heads * n_keys * block)
    q, k, v = normal(n_tokens, n_heads, 6), normal(n_keys, n_kv, 6, seed=1), normal(n_keys, n_kv, 6, seed=2)
    got = reference.attention(q, k, v, q_start=before, window=window)
    assert error(got, naive_attention(q, k, v, q_start=before, window=window)) < 1e-6


def test_attention_with_one_hot_queries_copies_the_value_row() -> None:
    """The key that a query points at scores 200 above all others, so that the answer is exact."""
    n_tokens, n_heads, n_kv, dim = 8, 6, 2, 16
    v = normal(n_tokens, n_kv, dim)
    k = np.zeros((n_tokens, n_kv, dim), np.float32)
    q = np.zeros((n_tokens, n_heads, dim), np.float32)
    expected = np.empty((n_tokens, n_heads, dim), np.float32)
    for s in range(n_tokens):
        for kv in range(n_kv):
            k[s, kv, (3 * s + 5 * kv) % dim] = 1  # another place for each key and each KV head
    for t in range(n_tokens):
        for h in range(n_heads):
            target, kv = (5 * h) % (t + 1), h // 3
            q[t, h, (3 * target + 5 * kv) % dim] = 200 * math.sqrt(dim)
            expected[t, h] = v[target, kv]
    got = reference.attention(q, k, v, q_start=0)
    assert (got == expected.reshape(n_tokens, -1)).all()


@pytest.mark.parametrize("window", [1, 2, 3, 16])
def test_window_counts_the_query_itself(window: int) -> None:
    """Queries of zero weigh all the keys they see alike: the answer is the mean of the last `window` values."""
    v = np.arange(40, dtype=np.float32).reshape(40, 1, 1) ** 2 * np.ones((1, 1, 4), np.float32)
    got = reference.attention(np.zeros((40, 2, 4), np.float32), normal(40, 1, 4), v, q_start=0, window=window)
    for t in range(40):
        seen = range(max(0, t - window + 1), t + 1)
        np.testing.assert_allclose(got[t], sum(s * s for s in seen) / len(seen), rtol=1e-6)


def test_attention_takes_any_strides_of_k_and_v() -> None:
    q, k, v = normal(4, 6, 8), normal(9, 3, 8, seed=1), normal(9, 3, 8, seed=2)
    by_head = [np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2) for a in (k, v)]
    assert by_head[0].strides != k.strides
    expected = reference.attention(q, k, v, q_start=5)
    np.testing.assert_allclose(reference.attention(q, *by_head, q_start=5), expected, rtol=1e-6, atol=1e-7)


def test_attention_with_scores_in_the_thousands() -> None:
    q, k, v = 300 * normal(5, 4, 8), 300 * normal(5, 2, 8, seed=1), normal(5, 2, 8, seed=2)
    got = reference.attention(q, k, v, q_start=0)
    assert error(got, naive_attention(q, k, v, q_start=0, window=None)) < 1e-4


# --- numbers as stored


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_value_widens_exactly(dtype: Any) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    got = reference.to_float32(bits.view(dtype))
    if dtype is np.float16:
        expected = np.array([struct.unpack("<e", struct.pack("<H", b))[0] for b in bits], np.float32)
    else:
        expected = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, expected)  # NaN equals NaN here


def test_float16_rounds_to_nearest_even() -> None:
    x = np.concatenate([normal(3000) * 10.0**e for e in (-8, -5, -1, 3)]).astype(np.float32)
    ties = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 3 * 2.0**-25, 65519], np.float32)
    x = np.concatenate([x, ties])
    rounded = reference.round_weights(x, "w", "float16")
    assert rounded.dtype == np.float16
    assert rounded.tolist() == [struct.unpack("<e", struct.pack("<e", v))[0] for v in x.tolist()]
    assert rounded[-5:].tolist() == [1, 1 + 2.0**-9, 0, 2.0**-23, 65504]


def test_bfloat16_rounds_to_nearest_even() -> None:
    x = np.concatenate([normal(3000), np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8], np.float32)])
    bits = x.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert (reference.round_weights(x, "w", "bfloat16").view(np.uint16) == expected).all()


def test_what_has_the_type_already_is_not_touched() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = normal(4).astype(dtype)
        assert reference.round_weights(x, "w", "float16" if dtype is np.float16 else "bfloat16") is x
    y = normal(4)
    assert reference.round_weights(y, "w", None) is y
    assert reference.to_float32(y) is y


@pytest.mark.parametrize(("value", "kind"), [(65520.0, "float16"), (-1e30, "float16"), (3.4e38, "bfloat16")])
def test_overflow_names_the_tensor(value: float, kind: Any) -> None:
    said = re.escape(f"model.norm.weight holds {value:g}, but {kind} reaches only") + ".*--device cpu"
    with pytest.raises(WeightsError, match=said):
        reference.round_weights(np.array([1, value], np.float32), "model.norm.weight", kind)
