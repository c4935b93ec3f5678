"""The acceptance test of the GPU forward: its logits against the reference's, on every structure of checkpoint.

    python -m pytest tests/test_forward_parity.py -s

The reference runs on the weights as the GPU holds them (float32 checkpoints rounded to f16). With a float32 cache the
relative L2 error of the logits must be below 1e-4 and every argmax the same. The f16 cache is judged twice: against a
reference whose cache is rounded just so, and against the plain reference, with a limit that follows from the rounding
(`f16_cache_limit`). Where the logits differ, the first op that does is named. Each error is printed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conftest import CheckpointFactory
from tests.gpu.conftest import BACKENDS, VALIDATION, missing, no_messages

import build_shaders
from xinfer import engine, gpu, ops
from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu.api import Device
from xinfer.gpu_model import KVType, ModelOptions, QwenModel, memory, prompt
from xinfer.gpu_model import model as model_module
from xinfer.gpu_model.layout import Split, WeightsLayout
from xinfer.model.reference import ReferenceCache, ReferenceModel, RoundTo
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights
from xinfer.sampling import Sampler, SamplingParams

Array = NDArray[np.float32]

CASES = (
    *("tied", "untied", "gqa", "mha", "mqa", "f16", "bf16", "one_layer", "deep", "sharded", "bf16_sharded", "yarn"),
    *("sliding", "sliding_all", "layer_types", "large_k_bias", "wide_heads", "narrow_heads", "odd_sizes"),
)
HALF_LIMIT = 2e-3  # relative L2 error of the logits where activations are f16
MATRIX_CORES = "coop_matrix.f16.f32.16x16x16"
LIMIT = 1e-4
N_TOKENS = 70  # more than two blocks of the cache, and than a tile of any kernel


@pytest.fixture(scope="module", params=BACKENDS)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    with pytest.MonkeyPatch.context() as patch:
        cache = os.environ.get("XINFER_TEST_CACHE") or str(tmp_path_factory.mktemp("cache"))
        patch.setenv("XDG_CACHE_HOME", cache)
        build_shaders.build()
        try:
            opened = gpu.open_device(request.param, debug=VALIDATION)
        except DeviceError as error:
            missing(str(error))
            raise
        assert opened is not None
        print(f"\non {opened.info.name}, {opened.info.driver} {opened.info.driver_version}")  # noqa: T201
        with opened:
            yield opened
        no_messages(opened)
        assert opened.live_objects() == {}


@pytest.fixture(autouse=True)
def _silent(device: Device) -> Iterator[None]:
    """Nothing that a test does may upset the validation layers."""
    yield
    no_messages(device)


@contextmanager
def both(
    folder: Path, device: Device, *, kv_cache: KVType = "f32", exact: bool = True
) -> Iterator[tuple[QwenModel, ReferenceModel]]:
    """A checkpoint on the GPU, and the reference on weights rounded as the GPU rounds them."""
    with ModelWeights.open(folder) as weights:
        round_to: RoundTo | None = "float16" if "float32" in weights.bytes_by_dtype() else None
        oracle = ReferenceModel(weights, keep=True, round_to=round_to)
        with QwenModel.load(weights, device, ModelOptions(kv_cache=kv_cache, exact=exact)) as model:
            yield model, oracle


def error_of(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def check(what: str, found: Array, expected: Array, limit: float, diagnosis: str = "") -> None:
    """Fail where the logits are too far apart, or choose another token."""
    error = error_of(found, expected)
    print(f"{what:<58} {error:.2e} of {limit:.0e}")  # noqa: T201
    assert error < limit, f"{what}: {error:.3e}, limit {limit:.1e}{diagnosis}"
    best = np.sort(expected, axis=1)
    apart = best[:, -1] - best[:, -2] > 6 * limit * np.sqrt(np.mean(expected**2))  # else rounding decides
    assert len(apart) < 20 or apart.mean() > (0.8 if limit <= LIMIT else 0.2)
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[apart].all(), f"{what}: another token"


def first_difference(model: QwenModel, oracle: ReferenceModel, ids: NDArray[np.int64], limit: float) -> str:
    """Which op is the first to differ, the GPU's inputs to those before it being as right as they are."""
    expected: dict[str, Array] = {}
    oracle.forward(ids, tap=lambda name, values: expected.update({name: values.copy()}))
    found: dict[str, Array] = {}
    model.forward(ids, tap=lambda name, values: found.update({name: values}))
    assert list(found) == list(expected), "the taps are not the reference's"
    for name, values in expected.items():
        error = error_of(found[name], values)
        if not error < limit:
            return f"; the first op to differ is {name}: {error:.3e}"
    return "; run op by op nothing differs: it is a fused op, or the order of ops"


def random_ids(oracle: ReferenceModel, n: int, seed: int = 1) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, oracle.config.vocab_size, n)


@pytest.mark.parametrize("case", CASES)
def test_gpu_forward_matches_cpu(device: Device, checkpoint: CheckpointFactory, case: str) -> None:
    with both(checkpoint(case), device) as (model, oracle):
        for n in (N_TOKENS, 1, 5):
            ids = random_ids(oracle, n)
            expected = oracle.forward(ids)
            found = model.forward(ids)
            difference = "" if error_of(found, expected) < LIMIT else first_difference(model, oracle, ids, LIMIT)
            check(f"{case}, {n} tokens, every logit", found, expected, LIMIT, difference)
            check(f"{case}, {n} tokens, the last logits", model.forward(ids, last_only=True), expected[-1:], LIMIT)


@pytest.mark.parametrize("case", CASES)
def test_kv_cache_decode_matches_full(device: Device, checkpoint: CheckpointFactory, case: str) -> None:
    """A prompt in two parts, then token by token: each step's logits are those of the whole sequence at once."""
    with both(checkpoint(case), device) as (model, oracle):
        ids = random_ids(oracle, N_TOKENS, seed=2)
        expected = oracle.forward(ids)
        cache = model.make_cache(N_TOKENS)
        model.extend(ids[:7], cache)
        first = model.forward(ids[7:50], cache)
        steps = [model.forward(ids[i : i + 1], cache, last_only=True) for i in range(50, N_TOKENS)]
        found = np.concatenate([first, *steps])
        check(f"{case}, prefill 7 + 43, decode {N_TOKENS - 50}", found, expected[7:], LIMIT)
        assert cache.length == N_TOKENS

        cache.truncate(30)
        again = model.forward(ids[30:40], cache)
        check(f"{case}, truncated to 30 and on", again, expected[30:40], LIMIT)


@pytest.mark.parametrize("case", ["gqa", "bf16", "sliding", "odd_sizes", "untied"])
def test_greedy_tokens_match_cpu(device: Device, checkpoint: CheckpointFactory, case: str) -> None:
    with both(checkpoint(case), device) as (model, oracle):
        ids = random_ids(oracle, 9, seed=3)
        cpu_cache = oracle.make_cache(100)
        logits, expected = oracle.forward(ids, cpu_cache, last_only=True), []
        for _ in range(60):
            expected.append(int(logits[0].argmax()))
            logits = oracle.forward([expected[-1]], cpu_cache, last_only=True)
        cache = model.make_cache(100)
        model.extend(ids[:-1], cache)
        assert list(model.greedy(int(ids[-1]), cache, limit=60)) == expected


def test_taps_are_the_references(device: Device, checkpoint: CheckpointFactory) -> None:
    expected: dict[str, Array] = {}
    found: dict[str, Array] = {}
    last: dict[str, Array] = {}
    with both(checkpoint("layer_types"), device) as (model, oracle):
        ids = random_ids(oracle, 33)
        oracle.forward(ids, tap=lambda name, values: expected.update({name: values.copy()}))
        cache = model.make_cache(40)
        logits = model.forward(ids, cache, tap=lambda name, values: found.update({name: values}))
        assert cache.length == len(ids)
        model.forward(ids, last_only=True, tap=lambda name, values: last.update({name: values}))
    assert list(found) == list(expected) == list(last)
    for name, values in expected.items():
        assert error_of(found[name], values) < LIMIT, name
    assert np.array_equal(logits, found["logits"])
    assert last["logits"].shape == (1, logits.shape[1])


# --- the f16 cache ----------------------------------------------------------------------------------------------------


class RoundedCache(ReferenceCache):
    """The reference's cache, holding what an f16 cache holds."""

    def write(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        return super().write(layer, k.astype(np.float16).astype(np.float32), v.astype(np.float16).astype(np.float32))


def f16_cache_limit(oracle: ReferenceModel, ids: NDArray[np.int64]) -> float:
    """What rounding K and V to f16 may cost, as a relative L2 error of the logits.

    Rounding moves a number by a relative error with a standard deviation of u / sqrt(3), u = 2^-11. A score, scale *
    sum(q * k), then moves by sigma = scale * u / sqrt(3) * sqrt(sum(q^2 * k^2)), and a softmax weight by that much of
    itself; the mix of values moves by no more, beside u for the values' own rounding. Layers' errors are independent:
    their squares add up, sigma being the root mean square over a layer's queries, keys and heads. What a layer's
    attention is to its residual stream is below 1 in most models and about 1 in these; the limit takes it as 1. It
    grows in proportion to the keys: large K biases cost precision.
    """
    taps: dict[str, Array] = {}
    oracle.forward(ids, tap=lambda name, values: taps.update({name: values.copy()}))
    config, u = oracle.config, 2.0**-11
    total = 0.0
    for i in range(config.num_hidden_layers):
        q = taps[f"layers.{i}.q_rope"].reshape(len(ids), config.num_key_value_heads, -1, config.head_dim)
        k = taps[f"layers.{i}.k_rope"].reshape(len(ids), config.num_key_value_heads, config.head_dim)
        squares = np.einsum("tkgd,skd->", q.astype(np.float64) ** 2, k.astype(np.float64) ** 2)
        variance = squares / (len(ids) ** 2 * config.num_attention_heads) / config.head_dim * u**2 / 3
        total += variance + u**2
    return float(np.sqrt(total))


@pytest.mark.parametrize("case", ["gqa", "mha", "bf16", "deep", "yarn", "sliding", "large_k_bias", "wide_heads"])
def test_f16_cache_keeps_its_limit(device: Device, checkpoint: CheckpointFactory, case: str) -> None:
    with both(checkpoint(case), device, kv_cache="f16") as (model, oracle):
        ids = random_ids(oracle, N_TOKENS)
        found, expected = model.forward(ids), oracle.forward(ids)
        limit = f16_cache_limit(oracle, ids)
        check(f"{case}, f16 cache, against float32", found, expected, limit)
        rounded = oracle.forward(ids, RoundedCache(oracle.config, N_TOKENS))
        # Keys and values that lie on the border between two f16 numbers may go either way: one in some thousand does.
        check(f"{case}, f16 cache, against a rounded one", found, rounded, max(LIMIT, limit / 10))


def test_f16_cache_with_biases_as_large_as_trained_ones(device: Device, checkpoint: CheckpointFactory) -> None:
    """K biases with a norm of some 700 a head, which Qwen2.5 reaches."""
    spec = SyntheticSpec(head_dim=64, num_attention_heads=4, num_key_value_heads=2, k_bias_scale=300.0)
    folder = checkpoint(spec)
    with both(folder, device) as (model, oracle):
        ids = random_ids(oracle, N_TOKENS)
        expected, limit = oracle.forward(ids), f16_cache_limit(oracle, ids)
        check("K bias 700, f32 cache", model.forward(ids), expected, LIMIT)
    with both(folder, device, kv_cache="f16") as (model, oracle):
        check("K bias 700, f16 cache", model.forward(ids), expected, limit)


@pytest.mark.parametrize("case", ["gqa", "deep", "wide_heads", "large_k_bias"])
@pytest.mark.usefixtures("one_chunk")
def test_activations_of_11_bits_keep_their_limit(device: Device, checkpoint: CheckpointFactory, case: str) -> None:
    """What prompts are read with on matrix cores unless exactness is asked for; elsewhere nothing changes."""
    with both(checkpoint(case), device, kv_cache="f16", exact=False) as (model, oracle):
        ids = random_ids(oracle, N_TOKENS)
        found, limit = model.forward(ids), f16_cache_limit(oracle, ids)
        check(f"{case}, activations of 11 bits", found, oracle.forward(ids), limit + HALF_LIMIT)
    if MATRIX_CORES not in device.info.features:
        with both(checkpoint(case), device, kv_cache="f16") as (model, _):
            assert np.array_equal(model.forward(ids), found)


# --- layers that do not fit -----------------------------------------------------------------------------------------

PROMPT_TOKENS, ANSWER_TOKENS = 40, 6


def answers(model: QwenModel, ids: NDArray[np.int64]) -> tuple[list[int], Array, Array]:
    """Greedy tokens behind a prompt, all logits, and those of a step behind a cache."""
    cache = model.make_cache(PROMPT_TOKENS + ANSWER_TOKENS)
    model.extend(ids[:-1], cache)
    tokens = list(model.greedy(int(ids[-1]), cache, limit=ANSWER_TOKENS))
    return tokens, model.forward(ids), model.forward(ids, last_only=True)


def splits(n_layers: int) -> Iterator[Split]:
    """Every choice of streamed layers, through 1 to 3 slots; pinned and read again in turn."""
    for n_streamed in range(1, n_layers + 1):
        for streamed in itertools.combinations(range(n_layers), n_streamed):
            for n_slots in range(1, min(3, n_streamed) + 1):
                yield Split(streamed=streamed, n_slots=n_slots, pinned=(sum(streamed) + n_slots) % 2 == 0)


@pytest.fixture
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts go in one piece, however slow the device: chunks of other sizes take other kernels."""
    monkeypatch.setattr(model_module, "FIRST_CHUNK", 64)
    monkeypatch.setattr(model_module, "CHUNK_SECONDS", 1e6)


@pytest.mark.parametrize(("case", "table_on_host"), [("streaming", False), ("streaming_untied", True)])
@pytest.mark.usefixtures("one_chunk")
def test_streaming_matches_resident(
    device: Device, checkpoint: CheckpointFactory, case: str, table_on_host: bool
) -> None:
    """Bit for bit, whatever is streamed: the same kernels run on the same bytes."""
    spec = SyntheticSpec(num_hidden_layers=3, tie_word_embeddings=not table_on_host, dtype="float16")
    with ModelWeights.open(checkpoint(spec)) as weights:
        layout = WeightsLayout(weights)
        ids = np.random.default_rng(3).integers(0, weights.config.vocab_size, PROMPT_TOKENS)
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32")) as resident:
            tokens, every, last = answers(resident, ids)
        for split in splits(weights.config.num_hidden_layers):
            split = replace(split, table_on_host=table_on_host)
            with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=split) as streaming:
                found = answers(streaming, ids)
                sent = streaming.bytes_sent
            assert found[0] == tokens, split
            assert np.array_equal(found[1], every), split
            assert np.array_equal(found[2], last), split
            # A prompt and the steps behind it; all logits at once; a prompt and the step that gives its last ones.
            passes = 1 + ANSWER_TOKENS + 1 + 2
            assert sent == passes * sum(layout.layers[i].size for i in split.streamed), split


@pytest.mark.parametrize(("tail", "rows"), [(1, 1), (3, 4), (6, 8)])
def test_a_prompt_of_several_chunks_sends_each_layer_once(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, tail: int, rows: int
) -> None:
    """Chunks of 8, 8, 8 and few rows; the same numbers as one chunk after the other. Where two can wait, twice."""
    spec = SyntheticSpec(num_hidden_layers=4, dtype="float16")
    monkeypatch.setattr(model_module, "CHUNK_SECONDS", 1e6)
    monkeypatch.setattr(memory, "MOST_ROWS", 8)
    monkeypatch.setattr(memory, "MOST_ROWS_SMALL", 8)
    with ModelWeights.open(checkpoint(spec)) as weights:
        layout = WeightsLayout(weights)
        ids = np.random.default_rng(6).integers(0, weights.config.vocab_size, 33)

        def run(split: Split) -> tuple[Array, list[tuple[int, int]], int]:
            with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=split) as model:
                cache = model.make_cache(40)
                model.extend(ids[: 24 + tail], cache)
                sent = model.bytes_sent
                return model.forward(ids[24 + tail :], cache), cache.passes[:4], sent

        expected, passes, _ = run(Split())
        for split in (Split(streamed=(1, 3), n_slots=2), Split(streamed=(0, 1, 2, 3), n_slots=1)):
            a_pass = sum(layout.layers[i].size for i in split.streamed)
            for held, times in ((prompt.HELD, 1), (2 * 8 * (4 * 64 + ops.STATE_BYTES), 2)):
                monkeypatch.setattr(prompt, "HELD", held)
                found, its_passes, sent = run(split)
                assert np.array_equal(found, expected), split
                assert its_passes == passes == [(8, 8)] * 3 + [(tail, rows)]
                assert sent == times * a_pass
                monkeypatch.setattr(prompt, "HELD", 1 << 28)


def test_a_long_prompt_is_one_piece_where_layers_are_streamed(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would cut it at 12 tokens. It is told of by layer, and Ctrl-C on the way leaves the session usable."""
    monkeypatch.setattr(engine, "QUEUED_CHUNK", 12)
    monkeypatch.setattr(model_module, "CHUNK_SECONDS", 1e6)
    monkeypatch.setattr(memory, "MOST_ROWS_SMALL", 8)
    monkeypatch.setattr(memory, "MOST_ROWS", 8)
    spec, split = SyntheticSpec(num_hidden_layers=6, dtype="float16"), Split(streamed=(0, 1, 3, 4, 5), n_slots=2)
    with ModelWeights.open(checkpoint(spec)) as weights:
        ids = np.random.default_rng(6).integers(0, weights.config.vocab_size, 33).tolist()
        told: list[tuple[int, int]] = []
        pressed = [False]

        def progress(done: int, total: int) -> None:
            if pressed[0]:
                pressed[0] = False
                raise KeyboardInterrupt
            told.append((done, total))

        def answer(model: QwenModel, session: Any) -> tuple[list[int], int]:
            told.clear()
            sent = model.bytes_sent
            sampler = Sampler(SamplingParams(temperature=0), prompt_ids=ids, vocab_size=weights.config.vocab_size)
            steps = session.generate(ids, sampler, max_tokens=1, on_prefill=progress)
            return [step.sampled.token for step in steps], model.bytes_sent - sent

        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32")) as model:
            expected, _ = answer(model, engine.Engine(model, context=60).session())
            assert [done for done, total in told if total == 32][-1] == 32
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=split) as model:
            session = engine.Engine(model, context=60).session()
            pressed[0] = True
            with pytest.raises(KeyboardInterrupt):
                answer(model, session)
            assert session.ids == ()
            found, sent = answer(model, session)
            assert found == expected
            assert sent == 2 * model.plan.a_token  # for the prompt, and for the step behind it
            shares = [done for done, _ in told]
            assert shares == sorted(shares)
            assert len([done for done in shares if done < 32]) >= 3
            assert told[-1] == (32, 32)


@pytest.mark.usefixtures("one_chunk")
def test_a_budget_is_kept(device: Device, checkpoint: CheckpointFactory) -> None:
    """As many layers stay as fit; never does more memory than allowed hold anything; too small a budget is refused."""
    spec = SyntheticSpec(num_hidden_layers=6, hidden_size=256, intermediate_size=1024, dtype="float16")
    with ModelWeights.open(checkpoint(spec)) as weights:
        ids = np.random.default_rng(4).integers(0, weights.config.vocab_size, PROMPT_TOKENS)
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32")) as resident:
            expected = answers(resident, ids)
            whole = resident.plan
        least = replace(whole, split=Split(streamed=tuple(range(6)), n_slots=2)).needed(None)
        kept = []
        for budget in range(whole.needed(None), least - 1, -whole.layout.slot_bytes):
            with QwenModel.load(weights, device, ModelOptions(kv_cache="f32", vram_budget=budget)) as model:
                assert device.memory().budget - device.memory().used <= budget
                found = answers(model, ids)
                assert device.memory().peak <= budget
                kept.append(6 - len(model.plan.split.streamed))
                assert model.plan.needed(None) <= budget
            assert found[0] == expected[0]
            assert np.array_equal(found[1], expected[1])
        assert kept[0] == 6
        assert kept[-1] == 0
        assert kept == sorted(kept, reverse=True)
        with pytest.raises(OutOfMemoryError, match="are missing"):
            QwenModel.load(weights, device, ModelOptions(kv_cache="f32", vram_budget=least // 2))
        device.limit_memory(None)
