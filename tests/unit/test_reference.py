"""The network of the reference: its parts against each other, its cache, its memory and its errors."""

from __future__ import annotations

import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from xinfer.errors import ContextLengthError, RequestError, WeightsError
from xinfer.model import names, reference
from xinfer.model.reference import ReferenceCache, ReferenceModel
from xinfer.model.synthetic import PRESETS, SyntheticSpec
from xinfer.model.weights import ModelWeights

Array = NDArray[np.float32]


def error(got: Array, expected: Array) -> float:
    """Relative L2 error."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def tokens_for(model: ReferenceModel, count: int) -> NDArray[np.int64]:
    return np.random.default_rng(count).integers(0, model.config.vocab_size, count)


Load = Callable[..., ReferenceModel]
Checkpoint = Callable[..., Path]


@pytest.fixture
def load() -> Iterator[Load]:
    """`load(folder, keep=..., ...)`: the model of a folder, closed after the test."""
    with ExitStack() as stack:

        def make(folder: Path, *, keep: bool | None = True, **kwargs: Any) -> ReferenceModel:
            weights = stack.enter_context(ModelWeights.open(folder))
            return ReferenceModel(weights, keep=keep, **kwargs)

        yield make


@pytest.fixture(params=sorted(PRESETS))
def any_model(request: pytest.FixtureRequest, checkpoint: Checkpoint, load: Load) -> ReferenceModel:
    return load(checkpoint(request.param))


@pytest.fixture
def model(checkpoint: Checkpoint, load: Load) -> ReferenceModel:
    return load(checkpoint("layer_types"))


# --- forward, incremental and by parts


def test_incremental_is_full(any_model: ReferenceModel) -> None:
    tokens = tokens_for(any_model, 45)
    full = any_model.forward(tokens)
    assert full.shape == (45, any_model.config.vocab_size)
    assert full.dtype == np.float32
    cache = any_model.make_cache(45)
    cuts = [0, 1, 2, 9, 25, 26, 27, 40, 45]
    parts = [any_model.forward(tokens[a:b], cache) for a, b in itertools.pairwise(cuts)]
    assert cache.length == 45
    # A K bias of several hundred gives scores in the hundreds, whose last bits softmax makes visible
    assert error(np.concatenate(parts), full) < 1e-5


def test_last_only_is_the_last_row(any_model: ReferenceModel) -> None:
    tokens = tokens_for(any_model, 12)
    last = any_model.forward(tokens, last_only=True)
    assert last.shape == (1, any_model.config.vocab_size)
    assert error(last, any_model.forward(tokens)[-1:]) < 1e-6


def test_later_tokens_change_nothing_before_them(any_model: ReferenceModel) -> None:
    tokens = tokens_for(any_model, 20)
    changed = tokens.copy()
    changed[15:] = (changed[15:] + 1) % any_model.config.vocab_size
    before, after = any_model.forward(tokens), any_model.forward(changed)
    assert (before[:15] == after[:15]).all()
    assert (before[15:] != after[15:]).any()


@pytest.mark.parametrize("preset", ["bf16", "f16", "sharded", "odd_sizes"])
def test_converting_each_time_is_the_same(
    preset: str, checkpoint: Checkpoint, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_HEAD_BLOCK_BYTES", 4 * 64 * 50)  # several blocks of the head, the last one short
    kept, streamed = load(checkpoint(preset)), load(checkpoint(preset), keep=False)
    assert (kept.kept, streamed.kept) == (True, False)
    tokens = np.array([3, 300, 3, 17, 330, 0])
    cache = streamed.make_cache(6)
    parts = [streamed.forward(tokens[:4], cache), streamed.forward(tokens[4:], cache)]
    assert error(np.concatenate(parts), kept.forward(tokens)) < 1e-6


@pytest.mark.parametrize("preset", ["bf16", "f16", "sharded", "odd_sizes"])
def test_weights_read_in_blocks_are_the_same(
    preset: str, checkpoint: Checkpoint, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(checkpoint(preset)).forward([3, 300, 17, 330])
    for rows in (1, 7, 50):
        monkeypatch.setattr(reference, "_READ_BLOCK_BYTES", 4 * 64 * rows)
        assert (load(checkpoint(preset)).forward([3, 300, 17, 330]) == expected).all()


def taps_of(model: ReferenceModel, tokens: NDArray[np.int64], **kwargs: Any) -> dict[str, Array]:
    seen: dict[str, Array] = {}

    def tap(name: str, value: Array) -> None:
        assert name not in seen
        seen[name] = value.copy()

    model.forward(tokens, tap=tap, **kwargs)
    return seen


def test_taps_are_what_the_operations_give(any_model: ReferenceModel) -> None:
    """Every tap is recomputed from the taps before it and the checkpoint's own tensors."""
    config, weights = any_model.config, any_model._weights
    tokens = tokens_for(any_model, 11)
    taps = taps_of(any_model, tokens)
    cos, sin = reference.rope_tables(config, np.arange(11))
    got = iter(taps.items())

    def check(name: str, expected: Array) -> Array:
        actual_name, actual = next(got)
        assert actual_name == name
        assert actual.shape == expected.shape, name
        assert error(actual, expected) < 1e-6, name
        return actual

    x = check("embed", weights.embed.astype(np.float32)[tokens])
    for i in range(config.num_hidden_layers):
        stored = weights.layer(i)
        w = names.LayerWeights(*(getattr(stored, field).astype(np.float32) for field in names.LAYER_FIELDS))
        at = f"layers.{i}"
        h = check(f"{at}.input_ln", reference.rms_norm(x, w.input_ln, eps=config.rms_norm_eps))
        q = check(f"{at}.q", reference.linear(h, w.q_w, w.q_b)).reshape(11, -1, config.head_dim)
        k = check(f"{at}.k", reference.linear(h, w.k_w, w.k_b)).reshape(11, -1, config.head_dim)
        v = check(f"{at}.v", reference.linear(h, w.v_w, w.v_b)).reshape(11, -1, config.head_dim)
        q = check(f"{at}.q_rope", reference.rope(q, cos, sin).reshape(11, -1)).reshape(q.shape)
        k = check(f"{at}.k_rope", reference.rope(k, cos, sin).reshape(11, -1)).reshape(k.shape)
        attn = reference.attention(q, k, v, q_start=0, window=config.layer_windows[i])
        o = check(f"{at}.o", reference.linear(check(f"{at}.attn", attn), w.o_w))
        x = check(f"{at}.attn_residual", x + o)
        h = check(f"{at}.post_ln", reference.rms_norm(x, w.post_ln, eps=config.rms_norm_eps))
        gate = check(f"{at}.gate", reference.linear(h, w.gate_w))
        mixed = reference.swiglu(gate, check(f"{at}.up", reference.linear(h, w.up_w)))
        down = check(f"{at}.down", reference.linear(check(f"{at}.swiglu", mixed), w.down_w))
        x = check(at, x + down)
    x = check("norm", reference.rms_norm(x, weights.norm.astype(np.float32), eps=config.rms_norm_eps))
    check("logits", reference.linear(x, weights.lm_head.astype(np.float32)))
    assert next(got, None) is None


def test_taps_leave_the_result_alone(model: ReferenceModel) -> None:
    tokens = tokens_for(model, 7)
    assert (model.forward(tokens, tap=lambda name, value: None) == model.forward(tokens)).all()


@pytest.mark.parametrize("keep", [True, False])
def test_a_layer_alone_is_the_same_layer(keep: bool, checkpoint: Checkpoint, load: Load) -> None:
    model = load(checkpoint("layer_types"), keep=keep)
    tokens = tokens_for(model, 20)
    taps = taps_of(model, tokens)
    for i in range(3):
        x = taps["embed" if i == 0 else f"layers.{i - 1}"]
        assert error(model.layer(i, x), taps[f"layers.{i}"]) < 1e-6
        cache = model.make_cache(20)
        first = model.layer(i, x[:13], cache=cache)
        cache.advance(13)
        second = model.layer(i, x[13:], cache=cache)
        assert error(np.concatenate([first, second]), taps[f"layers.{i}"]) < 1e-6


def test_a_layer_alone_takes_a_position(model: ReferenceModel) -> None:
    """Rotary positions are relative: a shift leaves the output alone, and moves what is rotated."""
    x = np.random.default_rng(0).standard_normal((6, model.config.hidden_size), dtype=np.float32)
    seen: list[dict[str, Array]] = [{}, {}]
    outputs = [model.layer(0, x, start=start, tap=taps.__setitem__) for start, taps in zip((0, 3), seen, strict=True)]
    assert error(outputs[1], outputs[0]) < 1e-5
    assert error(seen[1]["layers.0.q_rope"], seen[0]["layers.0.q_rope"]) > 0.1


# --- rounded weights


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("preset", ["gqa", "untied", "f16", "bf16"])
@pytest.mark.parametrize("keep", [True, False])
def test_round_to_is_a_checkpoint_so_rounded(
    kind: Any, preset: str, keep: bool, own_checkpoint: Checkpoint, load: Load
) -> None:
    """Matrices, embedding and head are rounded, biases and norms are not: against a checkpoint stored that way."""
    folder = own_checkpoint(preset)
    tokens = np.array([3, 300, 3, 17, 330, 0])
    original = load(folder, keep=keep).forward(tokens)
    rounded = load(folder, keep=keep, round_to=kind).forward(tokens)
    stored = load_file(folder / "model.safetensors")
    dtype = np.float16 if kind == "float16" else ml_dtypes.bfloat16
    for name, tensor in stored.items():
        wide = tensor.astype(np.float32)
        stored[name] = wide.astype(dtype) if tensor.ndim == 2 else wide
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    expected = load(folder, keep=keep).forward(tokens)
    assert error(rounded, expected) < 1e-6
    loses = (preset, kind) not in {("f16", "float16"), ("bf16", "bfloat16"), ("bf16", "float16")}
    assert (error(rounded, original) > 1e-5) == loses


@pytest.mark.parametrize("field", ["q_w", "down_w", "embed", "lm_head"])
def test_weights_beyond_the_type_are_refused_by_name(field: str, own_checkpoint: Checkpoint, load: Load) -> None:
    folder = own_checkpoint("untied")
    stored = load_file(folder / "model.safetensors")
    name = names.layer_tensor_name(1, field) if field in names.LAYER_FIELDS else names.global_tensor_name(field)
    stored[name][3, 2] = 1e5
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=f"{name} holds 1"):
        load(folder, round_to="float16")
    streamed = load(folder, keep=False, round_to="float16")
    with pytest.raises(WeightsError, match=f"{name} holds 1"):
        streamed.forward([3])


# --- requests that cannot be


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"shape \(0,\).*at least one"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([0.5], "float64"),
        ([True], "bool"),
        ([1, 384], "384 at place 1.*0 to 383"),
        ([-1], "-1 at place 0"),
        ([2**63], "9223372036854775808 at place 0"),
    ],
)
def test_tokens_are_checked(model: ReferenceModel, tokens: Any, message: str) -> None:
    cache = model.make_cache(4)
    with pytest.raises(RequestError, match=message):
        model.forward(tokens, cache)
    assert cache.length == 0


def test_a_full_cache_refuses_and_stays_as_it_was(model: ReferenceModel) -> None:
    tokens = tokens_for(model, 9)
    cache = model.make_cache(8)
    model.forward(tokens[:6], cache)
    with pytest.raises(ContextLengthError, match=r"3 tokens do not fit behind the 6 in the context of 8.* 2 tokens"):
        model.forward(tokens[6:], cache)
    assert cache.length == 6
    assert error(model.forward(tokens[6:8], cache), model.forward(tokens[:8])[6:]) < 1e-6
    with pytest.raises(ContextLengthError):
        model.forward(tokens[8:], cache)


def test_a_failed_forward_leaves_the_cache_usable(model: ReferenceModel) -> None:
    tokens = tokens_for(model, 9)
    cache = model.make_cache(20)
    model.forward(tokens[:6], cache)

    def interrupt(name: str, value: Array) -> None:
        if name == "layers.1":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.forward([5, 5, 5], cache, tap=interrupt)
    assert cache.length == 6
    assert error(model.forward(tokens[6:], cache), model.forward(tokens)[6:]) < 1e-6


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_holds_something(model: ReferenceModel, capacity: int) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        model.make_cache(capacity)


# --- the cache


def test_truncated_tokens_are_forgotten(model: ReferenceModel) -> None:
    tokens, other = tokens_for(model, 30), tokens_for(model, 10)
    cache = model.make_cache(40)
    model.forward(tokens, cache)
    cache.truncate(20)
    assert cache.length == 20
    expected = model.forward(np.concatenate([tokens[:20], other]))[20:]
    assert error(model.forward(other, cache), expected) < 1e-6
    cache.truncate(0)
    assert error(model.forward(tokens, cache), model.forward(tokens)) < 1e-6
    for wrong in (-1, 31):
        with pytest.raises(RequestError, match=f"30 tokens to {wrong}"):
            cache.truncate(wrong)


def cache_bytes(cache: ReferenceCache) -> int:
    return sum(array.nbytes for array in [*cache._keys, *cache._values])


def test_a_cache_grows_with_its_tokens(model: ReferenceModel) -> None:
    tokens = tokens_for(model, 600)
    cache = model.make_cache(10**9)
    full = model.forward(tokens)
    per_token = 4 * 2 * model.config.kv_size * model.config.num_hidden_layers
    rows = []
    for a, b in [(0, 1), (1, 255), (255, 256), (256, 257), (257, 600)]:
        assert error(model.forward(tokens[a:b], cache), full[a:b]) < 1e-6
        assert cache_bytes(cache) % per_token == 0
        rows.append(cache_bytes(cache) // per_token)
    assert rows == [256, 256, 256, 512, 768]
    limited = model.make_cache(300)
    model.forward(tokens[:257], limited)
    assert cache_bytes(limited) // per_token == 300


def test_threads_with_a_cache_each(model: ReferenceModel) -> None:
    prompts = [tokens_for(model, n) for n in (5, 40, 17, 33)]
    expected = [model.forward(prompt)[-1] for prompt in prompts]
    results: list[Array | None] = [None] * len(prompts)

    def run(i: int) -> None:
        cache = model.make_cache(64)
        for token in prompts[i]:
            results[i] = model.forward([token], cache)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(results, expected, strict=True):
        assert got is not None
        assert error(got, wanted) < 1e-6


# --- memory


def peak_of(action: Any) -> int:
    """The most memory in use at a time while `action` runs, above what was in use before; NumPy's arrays count."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_streaming_holds_one_layer_at_a_time(checkpoint: Checkpoint, load: Load) -> None:
    spec = SyntheticSpec(num_hidden_layers=12, hidden_size=128, intermediate_size=512, dtype="bfloat16")
    model = load(checkpoint(spec), keep=False)
    layer_bytes = 4 * (model.config.num_parameters() - spec.vocab_size * 128) // 12
    model.forward([1])
    peak = peak_of(lambda: model.forward(np.arange(4), last_only=True))
    # one layer in float32 and as stored, while the one before is being let go
    assert layer_bytes < peak < 3.2 * layer_bytes
    kept = peak_of(lambda: load(checkpoint(spec)))
    assert kept > 12 * layer_bytes


def test_attention_needs_no_full_score_matrix() -> None:
    n, rng = 8192, np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, heads, 4), dtype=np.float32) for heads in (2, 1, 1))
    assert peak_of(lambda: reference.attention(q, k, v, q_start=0)) < 24 * 2**20  # scores whole: 512 MiB


def test_kept_where_they_fit(checkpoint: Checkpoint, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    need = 4 * load(checkpoint("gqa")).config.num_parameters()
    for free, kept in [(need, False), (2 * need, True), (0, False)]:
        monkeypatch.setattr(reference, "available_memory", lambda free=free: free)
        assert load(checkpoint("gqa"), keep=None).kept is kept


def test_loading_is_reported(checkpoint: Checkpoint, load: Load) -> None:
    seen: list[tuple[int, int]] = []
    load(checkpoint("sharded"), on_load=lambda done, total: seen.append((done, total)))
    total = 4 * load(checkpoint("sharded"), keep=False).config.num_parameters()
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) == 3
    assert seen[-1] == (total, total)
    assert {of for _, of in seen} == {total}
