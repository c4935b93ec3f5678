"""The oracle: a Qwen2 forward pass in NumPy, float32 throughout.

Every operation of the network is a function of its own here, so that any one of them can be run on given inputs;
`ReferenceModel` composes them into layers and the network, with a KV cache. Shapes: T new tokens, S keys (cached and
new), D values a head.

Two things keep it fast without making it less plain. Matrices stay as the checkpoint has them, (out, in) row-major, so
that a decode step is a matrix-vector product over contiguous rows; and the projections that read the same input
(q, k, v; gate, up) lie in one matrix, of which the single ones are row slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from xinfer.errors import ContextLengthError, RequestError, WeightsError
from xinfer.model.config import Qwen2Config
from xinfer.model.memory import available_memory
from xinfer.model.names import LAYER_FIELDS, global_tensor_name, layer_tensor_name
from xinfer.model.tokens import checked_ids
from xinfer.model.weights import ModelWeights

Array = NDArray[np.float32]
Tap = Callable[[str, NDArray[np.float32]], None]
RoundTo = Literal["float16", "bfloat16"]

# Scores of one block of queries, all heads together: small enough to stay in cache through the softmax.
_SCORE_BLOCK_BYTES = 4 * 2**20
# LM head rows converted at a time where float32 weights are not kept.
_HEAD_BLOCK_BYTES = 64 * 2**20
# Rows of a tensor converted at a time: from the page cache into the processor's, and on into place.
_READ_BLOCK_BYTES = 2 * 2**20
_CACHE_STEP = 256  # tokens
# Damaged weights overflow somewhere and end in NaN logits, which the sampler reports with their step; NumPy's warnings
# about every operation on the way would only fill stderr.
_quiet = np.errstate(divide="ignore", over="ignore", invalid="ignore")
_ROUND_TYPES: dict[RoundTo, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


# --- the operations ---------------------------------------------------------------------------------------------------


def embed(tokens: NDArray[np.integer], table: NDArray[Any]) -> Array:
    """Rows of the embedding table: tokens (T,), table (vocab, hidden) of any stored type -> (T, hidden)."""
    return to_float32(table[tokens])


def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis: x (T, hidden), weight (hidden,) -> (T, hidden)."""
    mean_square = np.vecdot(x, x) / np.float32(x.shape[-1])  # (T,)
    scale = np.float32(1) / np.sqrt(mean_square + np.float32(eps))
    return np.asarray((x * scale[..., np.newaxis]) * weight)


def linear(x: Array, w: Array, b: Array | None = None) -> Array:
    """`x @ w.T + b`: x (T, in), w (out, in), b (out,) -> (T, out)."""
    y = x @ w.T
    if b is not None:
        y += b
    return y


def rope_frequencies(config: Qwen2Config) -> tuple[Array, float]:
    """The angle a position adds to each pair, (D / 2,), and the factor on cos and sin (1 without YaRN).

    float32 in the order of transformers' `modeling_rope_utils`: the angle at position p is p times this, so that one
    unit in the last place here is felt at long positions. YaRN is arXiv:2309.00071, section 3.2 and 3.4.
    """
    dim = config.head_dim
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # float64 and one rounding: the power is then the nearest float32
    wavelength = np.power(float(np.float32(config.rope_theta)), exponent.astype(np.float64)).astype(np.float32)
    frequency = np.float32(1) / wavelength
    yarn = config.yarn
    if yarn is None:
        return frequency, 1.0

    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times within the original context."""
        return (
            dim
            * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(config.rope_theta))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    kept = np.float32(1) - ramp  # 1 where a pair turns fast enough to be left as it is
    stretched = np.float32(1) / (np.float32(yarn.factor) * wavelength)
    return stretched * (np.float32(1) - kept) + frequency * kept, yarn.attention_factor


def rope_tables(config: Qwen2Config, positions: ArrayLike) -> tuple[Array, Array]:
    """What `rope` takes: positions (T,) -> cos and sin, (T, D / 2) each, the YaRN attention factor included."""
    return _rope_tables(*rope_frequencies(config), np.asarray(positions))


def _rope_tables(frequency: Array, factor: float, positions: NDArray[Any]) -> tuple[Array, Array]:
    # Angles in float32, as transformers has them; their cosine to the last bit, whatever the platform's float32 one.
    angle = (positions.astype(np.float32)[:, np.newaxis] * frequency).astype(np.float64)  # (T, D / 2)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return (cos, sin) if factor == 1.0 else (cos * np.float32(factor), sin * np.float32(factor))


def rope(x: Array, cos: Array, sin: Array) -> Array:
    """Turn the pair (x[i], x[i + D / 2]) of every head by its angle: x (T, heads, D), cos, sin (T, D / 2)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, np.newaxis], sin[:, np.newaxis]  # (T, 1, D / 2)
    out = np.empty(x.shape, np.float32)
    np.subtract(first * cos, second * sin, out=out[..., :half])
    np.add(second * cos, first * sin, out=out[..., half:])
    return out


def attention(q: Array, k: Array, v: Array, *, q_start: int, window: int | None = None) -> Array:
    """Causal softmax attention, query head h reading KV head h // (heads / KV heads).

    Args:
        q: (T, heads, D), rotated; row t stands at position q_start + t.
        k: (S, KV heads, D), rotated; row s stands at position s. Any strides with contiguous D.
        v: (S, KV heads, D).
        q_start: position of the first query; q_start + T <= S.
        window: a query sees this many keys, itself included (transformers' sliding_window); None for all before it.

    Returns:
        (T, heads * D).
    """
    n_tokens, n_heads, dim = q.shape
    n_keys, n_kv, _ = k.shape
    group = n_heads // n_kv
    assert n_heads % n_kv == 0
    assert 0 <= q_start <= n_keys - n_tokens
    scale = np.float32(dim**-0.5)
    keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)  # views: (KV heads, D, S), (KV heads, S, D)
    out = np.empty((n_tokens, n_kv, group, dim), np.float32)
    block = max(1, _SCORE_BLOCK_BYTES // (4 * n_heads * n_keys))
    for t0 in range(0, n_tokens, block):
        t1 = min(t0 + block, n_tokens)
        stop = q_start + t1  # keys past the block's last query are seen by none of it
        start = 0 if window is None else max(0, q_start + t0 - window + 1)
        # The queries of one KV head side by side, so that K and V are read once and never repeated.
        rows = q[t0:t1].reshape(t1 - t0, n_kv, group, dim).transpose(1, 2, 0, 3).reshape(n_kv, -1, dim)
        scores = rows @ keys[:, :, start:stop]  # (KV heads, group * block, keys)
        scores *= scale
        if t1 - t0 > 1:
            hidden = _hidden_keys(np.arange(q_start + t0, stop), np.arange(start, stop), window)
            np.copyto(scores.reshape(n_kv, group, t1 - t0, stop - start), -np.inf, where=hidden)
        mixed = _softmax_times(scores, values[:, start:stop])  # (KV heads, group * block, D)
        out[t0:t1] = mixed.reshape(n_kv, group, t1 - t0, dim).transpose(2, 0, 1, 3)
    return out.reshape(n_tokens, n_heads * dim)


def _hidden_keys(queries: NDArray[np.intp], keys: NDArray[np.intp], window: int | None) -> NDArray[np.bool_]:
    """(queries, keys): true where the key comes after the query, or before its window."""
    age = queries[:, np.newaxis] - keys
    return age < 0 if window is None else (age < 0) | (age >= window)


def _softmax_times(scores: Array, values: Array) -> Array:
    """`softmax(scores) @ values`, scores overwritten; divided afterwards, which is fewer numbers to divide."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    mixed = scores @ values
    mixed /= total
    return mixed


def swiglu(gate: Array, up: Array) -> Array:
    """`gate * sigmoid(gate) * up`, elementwise."""
    with np.errstate(over="ignore"):  # exp(-gate) may be inf: gate / inf is the right 0
        y = np.exp(-gate)
    y += np.float32(1)
    np.divide(gate, y, out=y)
    y *= up
    return y


# --- numbers as stored ------------------------------------------------------------------------------------------------


def to_float32(stored: NDArray[Any]) -> Array:
    """float32, float16 or bfloat16 values as float32, which is exact; float32 itself is not copied."""
    return stored.astype(np.float32, copy=False)


def round_weights(stored: NDArray[Any], name: str, round_to: RoundTo | None) -> NDArray[Any]:
    """The tensor `name` in the 16-bit type, round to nearest even; as it is where round_to is None.

    Raises:
        WeightsError: a finite value lies beyond the type's range.
    """
    if round_to is None or stored.dtype == _ROUND_TYPES[round_to]:
        return stored
    wide = to_float32(stored)
    with np.errstate(over="ignore"):
        rounded = wide.astype(_ROUND_TYPES[round_to])
    overflow = np.isinf(to_float32(rounded)) & np.isfinite(wide)
    if overflow.any():
        limit = {"float16": 65504.0, "bfloat16": 3.3895e38}[round_to]
        raise WeightsError(
            f"{name} holds {float(wide[overflow][0]):g}, but {round_to} reaches only {limit:g}: "
            f"store this checkpoint in {'bfloat16' if round_to == 'float16' else 'float32'}, or run it as it is with "
            "--device cpu (device='cpu')"
        )
    return rounded


# --- the network ------------------------------------------------------------------------------------------------------


class ReferenceCache:
    """K and V of the tokens seen so far, float32; `capacity` is a limit, memory grows with the tokens."""

    def __init__(self, config: Qwen2Config, capacity: int) -> None:
        if capacity < 1:
            raise RequestError(f"a cache for {capacity} tokens was asked for: it must hold at least 1")
        self.capacity = capacity
        self.length = 0
        self._allocated = 0
        empty = np.empty((config.num_key_value_heads, 0, config.head_dim), np.float32)
        # A layer's K: (KV heads, allocated, D), so that a head's keys are one contiguous matrix.
        self._keys = [empty] * config.num_hidden_layers
        self._values = [empty] * config.num_hidden_layers

    def reserve(self, n_tokens: int) -> None:
        """Make room for n_tokens more, or raise ContextLengthError and change nothing."""
        needed = self.length + n_tokens
        if needed > self.capacity:
            raise ContextLengthError(
                f"{n_tokens} tokens do not fit behind the {self.length} in the context of {self.capacity}: "
                f"shorten the prompt to {self.capacity - self.length} tokens or use a longer context"
            )
        if needed <= self._allocated:
            return
        steps = -(-max(needed, self._allocated * 3 // 2) // _CACHE_STEP)
        size = min(self.capacity, steps * _CACHE_STEP)
        for i in range(len(self._keys)):
            self._keys[i] = self._grown(self._keys[i], size)
            self._values[i] = self._grown(self._values[i], size)
        self._allocated = size

    def _grown(self, old: Array, size: int) -> Array:
        new = np.empty((old.shape[0], size, old.shape[2]), np.float32)
        new[:, : self.length] = old[:, : self.length]
        return new

    def write(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Put k, v (T, KV heads, D) behind `length`; returns views of everything up to there, (S, KV heads, D)."""
        stop = self.length + len(k)
        assert stop <= self._allocated
        keys, values = self._keys[layer].transpose(1, 0, 2), self._values[layer].transpose(1, 0, 2)
        keys[self.length : stop] = k
        values[self.length : stop] = v
        return keys[:stop], values[:stop]

    def advance(self, n_tokens: int) -> None:
        """Count n_tokens as seen, once every layer has written them."""
        assert self.length + n_tokens <= self._allocated
        self.length += n_tokens

    def truncate(self, n_tokens: int) -> None:
        """Forget everything behind the first n_tokens."""
        if not 0 <= n_tokens <= self.length:
            raise RequestError(f"cannot cut a cache of {self.length} tokens to {n_tokens}")
        self.length = n_tokens


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer in float32, projections of one input stacked by rows."""

    input_ln: Array  # (hidden,)
    qkv_w: Array  # (q_size + 2 * kv_size, hidden)
    qkv_b: Array  # (q_size + 2 * kv_size,)
    o_w: Array  # (hidden, q_size)
    post_ln: Array  # (hidden,)
    gate_up_w: Array  # (2 * intermediate, hidden)
    down_w: Array  # (hidden, intermediate)


@dataclass(frozen=True, slots=True)
class _Positions:
    """Where the tokens of a forward stand."""

    start: int  # of the first one
    cos: Array  # (T, D / 2)
    sin: Array  # (T, D / 2)


class ReferenceModel:
    """The network on the CPU. Stateless apart from caches: threads may call `forward` at once, each with its cache.

    Args:
        weights: an open checkpoint, which `close` closes.
        keep: hold float32 weights in memory (fast); False converts each layer again in every forward and needs one
            layer's memory; None keeps them where they fit into the RAM that is free.
        round_to: round matrices, embedding and head to this 16-bit type first, as a GPU holds them. Biases and norms
            stay float32.
        on_load: called with stored bytes loaded and bytes in all, while kept weights are read.

    Raises:
        WeightsError: the checkpoint cannot be read, or has values beyond the range of `round_to`.
    """

    def __init__(
        self,
        weights: ModelWeights,
        *,
        keep: bool | None = None,
        round_to: RoundTo | None = None,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = weights.config
        self._weights = weights
        self._round_to = round_to
        self._frequency, self._rope_factor = rope_frequencies(self.config)
        self._norm = self._read(global_tensor_name("norm"))
        if keep is None:
            keep = 4 * self.config.num_parameters() < 0.8 * available_memory()
        self._layers: list[_Layer] | None = None
        self._head: Array | None = None
        self._table: NDArray[Any] | None = None
        if keep:
            self._load(on_load)

    def _load(self, on_load: Callable[[int, int], None] | None) -> None:
        weights, total = self._weights, self._weights.nbytes
        self._head = self._table = self._read(self._head_name)
        if not weights.lm_head_is_embed:  # only rows of it are ever used: it need not be widened
            name = global_tensor_name("embed")
            self._table = self._read(name, dtype=self._read_rows(name, 0, 1).dtype)
        layers: list[_Layer] = []
        layer_bytes = sum(weights.tensors[layer_tensor_name(0, field)].nbytes for field in LAYER_FIELDS)
        for left in reversed(range(self.config.num_hidden_layers)):
            layers.append(self._read_layer(len(layers)))
            if on_load is not None:
                on_load(total - left * layer_bytes, total)
        self._layers = layers

    @property
    def kept(self) -> bool:
        """Whether float32 weights are held in memory."""
        return self._layers is not None

    def make_cache(self, capacity: int) -> ReferenceCache:
        """An empty cache for at most `capacity` tokens."""
        return ReferenceCache(self.config, capacity)

    def close(self) -> None:
        """Close the checkpoint and let go of the weights held in memory."""
        self._layers = self._head = self._table = None
        self._weights.close()

    @_quiet
    def forward(
        self,
        tokens: ArrayLike,
        cache: ReferenceCache | None = None,
        *,
        last_only: bool = False,
        tap: Tap | None = None,
    ) -> Array:
        """Logits after each token, (T, vocab), or after the last one, (1, vocab).

        Args:
            tokens: (T,) ids, at least one; they stand behind those in the cache, and are added to it.
            cache: what came before; None starts at position 0 and keeps nothing.
            last_only: compute the head for the last token only.
            tap: called with a name and a (T, width) array after every operation, in the order of the network:
                `embed`; for layer 0 `layers.0.` + `input_ln q k v q_rope k_rope attn o attn_residual post_ln gate up
                swiglu down`, and its output as `layers.0`; then `norm` and `logits`. The arrays must not be changed.

        Raises:
            RequestError: no tokens, or one outside the vocabulary. The cache is as before.
            ContextLengthError: the cache has no room for them. It is as before.
        """
        ids = checked_ids(tokens, self.config.vocab_size)
        start = 0
        if cache is not None:
            cache.reserve(len(ids))
            start = cache.length
        x = self._embedded(ids)  # (T, hidden)
        if tap is not None:
            tap("embed", x)
        positions = self._positions(start, len(ids))
        for i, weights in enumerate(self._each_layer()):
            x = self._run_layer(i, weights, x, positions, cache, tap)
        if last_only:
            x = x[-1:]
        x = rms_norm(x, self._norm, eps=self.config.rms_norm_eps)
        if tap is not None:
            tap("norm", x)
        logits = self._logits(x)
        if tap is not None:
            tap("logits", logits)
        if cache is not None:
            cache.advance(len(ids))
        return logits

    @_quiet
    def layer(
        self, i: int, x: Array, *, start: int = 0, cache: ReferenceCache | None = None, tap: Tap | None = None
    ) -> Array:
        """Run layer i alone on x, (T, hidden), at positions start, start + 1, ... -> (T, hidden).

        With a cache, x stands at `cache.length` (and `start` is not used): what the layer wrote there before is
        attended to, and its K and V are written behind it; `cache.advance` is left to the caller.
        """
        if cache is not None:
            cache.reserve(len(x))
            start = cache.length
        weights = self._read_layer(i) if self._layers is None else self._layers[i]
        return self._run_layer(i, weights, x, self._positions(start, len(x)), cache, tap)

    def _positions(self, start: int, count: int) -> _Positions:
        return _Positions(start, *_rope_tables(self._frequency, self._rope_factor, np.arange(start, start + count)))

    def _run_layer(
        self, i: int, w: _Layer, x: Array, at: _Positions, cache: ReferenceCache | None, tap: Tap | None
    ) -> Array:
        config = self.config
        q_size, qk_size = config.q_size, config.q_size + config.kv_size
        n_heads, n_kv, inner = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
        n_tokens = len(x)

        h = rms_norm(x, w.input_ln, eps=config.rms_norm_eps)  # (T, hidden)
        qkv = linear(h, w.qkv_w, w.qkv_b)  # (T, q_size + 2 * kv_size)
        qk = qkv[:, :qk_size].reshape(n_tokens, n_heads + n_kv, config.head_dim)
        qk_rope = rope(qk, at.cos, at.sin)  # queries and keys turn alike
        q, k = qk_rope[:, :n_heads], qk_rope[:, n_heads:]  # (T, heads, D), (T, KV heads, D)
        v = qkv[:, qk_size:].reshape(n_tokens, n_kv, config.head_dim)
        q_start = 0 if cache is None else at.start
        keys, values = (k, v) if cache is None else cache.write(i, k, v)  # (S, KV heads, D)
        attn = attention(q, keys, values, q_start=q_start, window=config.layer_windows[i])  # (T, q_size)
        o = linear(attn, w.o_w)  # (T, hidden)
        attn_residual = x + o
        post_ln = rms_norm(attn_residual, w.post_ln, eps=config.rms_norm_eps)
        gate_up = linear(post_ln, w.gate_up_w)  # (T, 2 * intermediate)
        mixed = swiglu(gate_up[:, :inner], gate_up[:, inner:])  # (T, intermediate)
        down = linear(mixed, w.down_w)  # (T, hidden)
        y = attn_residual + down
        if tap is not None:
            flat = qk_rope.reshape(n_tokens, qk_size)
            emitted = {
                "input_ln": h,
                "q": qkv[:, :q_size],
                "k": qkv[:, q_size:qk_size],
                "v": qkv[:, qk_size:],
                "q_rope": flat[:, :q_size],
                "k_rope": flat[:, q_size:],
                "attn": attn,
                "o": o,
                "attn_residual": attn_residual,
                "post_ln": post_ln,
                "gate": gate_up[:, :inner],
                "up": gate_up[:, inner:],
                "swiglu": mixed,
                "down": down,
            }
            for name, value in emitted.items():
                tap(f"layers.{i}.{name}", value)
            tap(f"layers.{i}", y)
        return y

    @property
    def _head_name(self) -> str:
        return global_tensor_name("embed" if self._weights.lm_head_is_embed else "lm_head")

    def _each_layer(self) -> Iterator[_Layer]:
        if self._layers is not None:
            yield from self._layers
        else:
            for i in range(self.config.num_hidden_layers):
                yield self._read_layer(i)

    def _read_layer(self, i: int) -> _Layer:
        def read(*fields: str) -> Array:
            return self._read(*(layer_tensor_name(i, field) for field in fields))

        return _Layer(
            input_ln=read("input_ln"),
            qkv_w=read("q_w", "k_w", "v_w"),
            qkv_b=read("q_b", "k_b", "v_b"),
            o_w=read("o_w"),
            post_ln=read("post_ln"),
            gate_up_w=read("gate_w", "up_w"),
            down_w=read("down_w"),
        )

    def _read(self, *tensor_names: str, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """The tensors one under the other in one new array, converted a block of rows at a time."""
        shapes = [self._weights.tensors[name].shape for name in tensor_names]
        out = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
        row = 0
        for name, shape in zip(tensor_names, shapes, strict=True):
            step = max(1, _READ_BLOCK_BYTES // (4 * math.prod(shape[1:])))
            for start in range(0, shape[0], step):
                stop = min(start + step, shape[0])
                out[row + start : row + stop] = self._read_rows(name, start, stop)
            row += shape[0]
        return out

    def _read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows as stored, or rounded where they are a matrix's; biases and norms never are."""
        stored = self._weights.read_rows(name, start, stop)
        return round_weights(stored, name, self._round_to if stored.ndim == 2 else None)

    def _embedded(self, ids: NDArray[np.int64]) -> Array:
        if self._table is not None:
            return embed(ids, self._table)
        name = global_tensor_name("embed")
        distinct, places = np.unique(ids, return_inverse=True)
        rows = np.concatenate([self._read_rows(name, int(t), int(t) + 1) for t in distinct])
        return embed(places, rows)

    def _logits(self, x: Array) -> Array:
        if self._head is not None:
            return linear(x, self._head)
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        step = max(1, _HEAD_BLOCK_BYTES // (4 * hidden))
        logits = np.empty((len(x), vocab), np.float32)
        for row in range(0, vocab, step):
            rows = self._read_rows(self._head_name, row, min(row + step, vocab))
            logits[:, row : row + step] = linear(x, to_float32(rows))
        return logits
