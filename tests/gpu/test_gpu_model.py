"""The model on a device beyond its numbers: loading, memory, queued steps, chunks, bad numbers, giving things back."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load_file, save_file
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer.choice import Choice
from xinfer.errors import ContextLengthError, DeviceError, NumericalError, OutOfMemoryError, RequestError, WeightsError
from xinfer.gpu import _staging as staging
from xinfer.gpu.api import Bindable, Device, DeviceKind, MemoryStatus, Recording, Ticket
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions
from xinfer.gpu_model import ModelOptions, QwenModel, loading, memory
from xinfer.gpu_model import model as model_module
from xinfer.gpu_model.answer import STEPS_AHEAD
from xinfer.gpu_model.layout import WeightsLayout
from xinfer.gpu_model.steps import READ, STEP
from xinfer.model.names import global_tensor_name, layer_tensor_name
from xinfer.model.reference import ReferenceModel, RoundTo
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights
from xinfer.ops import BAD_TOKEN
from xinfer.sampling import Sampler, SamplingParams

Array = NDArray[np.float32]
LIMIT = 1e-4
SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 20,
    "seed": 3,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
}
PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32]


@pytest.fixture(autouse=True)
def _shaders(device: Device) -> Iterator[None]:
    """Compiled, and everything given back to the device."""
    build_shaders.build()
    settle(device)
    before = device.live_objects()
    yield
    settle(device)
    left, until = left_of(device, before), time.monotonic() + 5
    while left and time.monotonic() < until:  # what hangs in cycles goes when Python finds them
        gc.collect()
        left = left_of(device, before)
    assert left == {}


def settle(device: Device) -> None:
    """Let the device end what is under way, and make what its first recording takes and it keeps: its fill kernel."""
    last = device.create_recording("last")
    last.finish()
    device.wait(device.submit(last))
    last.release()
    device.flush_uploads()


def left_of(device: Device, before: dict[str, int]) -> dict[str, int]:
    """Native objects that have come since, by name, but for what the device keeps."""
    device.collect()  # type: ignore[attr-defined]
    after = device.live_objects()
    return {name: n for name, n in after.items() if n > before.get(name, 0) and name not in STAGING}


# What the device makes when first needed and keeps: staging, its command buffers, shared layouts.
STAGING = {
    *("VkBuffer", "VkDeviceMemory", "VkCommandPool", "VkDescriptorSetLayout", "VkPipelineLayout"),
    *("ID3D12Resource", "ID3D12CommandAllocator", "ID3D12GraphicsCommandList", "ID3D12RootSignature"),
}


@contextmanager
def on(device: Device, folder: Path, *, quarantine: Sequence[str] = (), **values: Any) -> Iterator[QwenModel]:
    options = ModelOptions(**{"kv_cache": "f32", "exact": True, **values})
    with (
        ModelWeights.open(folder) as weights,
        QwenModel.load(weights, device, options, quarantine=quarantine) as model,
    ):
        yield model


def expected_logits(folder: Path, ids: ArrayLike, round_to: RoundTo | None = "float16") -> Array:
    oracle = ReferenceModel(ModelWeights.open(folder), keep=True, round_to=round_to)
    try:
        return oracle.forward(ids)
    finally:
        oracle.close()


def error_of(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def continued(model: QwenModel, prompt: Sequence[int], n: int, *, capacity: int = 400) -> list[int]:
    """The greedy continuation, one forward a token: the slow way, whose logits are compared with the reference's."""
    cache = model.make_cache(capacity)
    logits, chosen = model.forward(prompt, cache, last_only=True), []
    for _ in range(n):
        chosen.append(int(logits[0].argmax()))
        logits = model.forward(chosen[-1:], cache, last_only=True)
    return chosen


def greedy(model: QwenModel, prompt: Sequence[int], n: int, *, capacity: int = 400) -> Iterator[int]:
    return sampled(model, prompt, n, Choice(n_valid=model.config.vocab_size), capacity=capacity)


def sampled(model: QwenModel, prompt: Sequence[int], n: int, choice: Choice, *, capacity: int = 400) -> Iterator[int]:
    cache = model.make_cache(capacity)
    if len(prompt) > 1:
        model.extend(prompt[:-1], cache)
    return model.choose(prompt[-1], cache, choice, limit=n)


def change(folder: Path, edit: Callable[[dict[str, NDArray[Any]]], None]) -> None:
    """Edit the tensors of a checkpoint of one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["f16", "bf16", "odd_sizes", "sharded"])
def test_every_weight_lies_where_the_layout_says(
    device: Device, checkpoint: CheckpointFactory, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; rows are padded with zeros. Small pieces, so that tensors are read in parts."""
    for name, size in (("SMALLEST", loading.PAGE), ("CONVERTED", 1000), ("GAP", 300)):
        monkeypatch.setattr(loading, name, size)
    with ModelWeights.open(checkpoint(case)) as weights:
        layout = WeightsLayout(weights)
        with QwenModel.load(weights, device) as model:
            allocations = [layout.table, *([layout.head] if layout.head else []), *layout.layers]
            parts = model._weights
            buffers = [parts._table, *([parts._head] if parts._head else []), *parts.buffers]
            for allocation, buffer in zip(allocations, buffers, strict=True):
                assert buffer.size == allocation.size
                for place in allocation.places:
                    stored = weights.read(place.name)
                    dtype: Any = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[place.format]
                    found = np.frombuffer(device.download(buffer[place.offset : place.end]), dtype)
                    rows = found.reshape(place.rows, place.stride // np.dtype(dtype).itemsize)
                    expected = stored.reshape(place.rows, place.columns).astype(dtype)
                    assert np.array_equal(rows[:, : place.columns], expected), place.name
                    assert not rows[:, place.columns :].any(), place.name
    names = {place.name for allocation in allocations for place in allocation.places}
    assert names == set(weights.tensors)


def test_a_tied_checkpoint_has_one_copy_of_its_embedding(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("tied")) as model:
        assert model._weights.head is model._weights.embed
    with on(device, checkpoint("untied")) as model:
        assert model._weights.head is not model._weights.embed


def test_layers_are_one_allocation_with_slices_at_aligned_places(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("odd_sizes")) as model:
        for layer in model._weights.layers:
            matrices = [part.place for m in (layer.qkv, layer.o, layer.gate, layer.up, layer.down) for part in m.slices]
            places = [*matrices, layer.input_ln, layer.qkv_b, layer.post_ln]
            assert len({place.buffer for place in places if not isinstance(place, str)}) == 1  # type: ignore[union-attr]
            assert all(place.offset % 256 == 0 for place in places)  # type: ignore[union-attr]


def test_matrices_larger_than_a_binding_are_sliced(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(SyntheticSpec(vocab_size=711, intermediate_size=500, hidden_size=64))
    monkeypatch.setattr(device, "info", dataclasses.replace(device.info, max_storage_range=33_000))
    with on(device, folder, context=128) as model:
        weights = model._weights
        assert len(weights.head.slices) == 3
        assert len(weights.layers[0].gate.slices) == len(weights.layers[0].up.slices) == 2
        for part in (*weights.head.slices, *weights.layers[0].gate.slices):
            assert part.place.size <= 33_000
            assert part.place.offset % 256 == 0  # type: ignore[union-attr]
        ids = np.random.default_rng(0).integers(0, 711, 40)  # tokens from every slice
        assert error_of(model.forward(ids), expected_logits(folder, ids)) < LIMIT
        assert list(greedy(model, PROMPT, 20, capacity=100)) == continued(model, PROMPT, 20, capacity=100)


def test_types_that_differ_within_a_product_are_kept_exact(device: Device, own_checkpoint: CheckpointFactory) -> None:
    """q in bf16, k in f16, v in f32 and so on: the product is made from float32."""
    folder = own_checkpoint("untied")

    def edit(tensors: dict[str, NDArray[Any]]) -> None:
        kinds = {"q_w": ml_dtypes.bfloat16, "k_w": np.float16, "gate_w": np.float16, "down_w": ml_dtypes.bfloat16}
        for field, dtype in kinds.items():
            name = layer_tensor_name(1, field)
            tensors[name] = tensors[name].astype(dtype)
        for field in ("embed", "lm_head"):
            tensors[global_tensor_name(field)] = tensors[global_tensor_name(field)].astype(ml_dtypes.bfloat16)
        for name, value in tensors.items():  # what is float32 still is made exact in f16
            if value.dtype == np.float32 and value.ndim == 2:
                tensors[name] = value.astype(np.float16).astype(np.float32)

    change(folder, edit)
    with on(device, folder) as model:
        assert model._weights.layers[1].qkv.format == model._weights.layers[1].gate.format == "f32"
        assert model._weights.layers[0].qkv.format == "f16"
        assert model._weights.layers[1].down.format == model._weights.head.format == "bf16"
        ids = np.random.default_rng(0).integers(0, 384, 40)
        assert error_of(model.forward(ids), expected_logits(folder, ids, round_to=None)) < LIMIT
        assert list(greedy(model, PROMPT, 20)) == continued(model, PROMPT, 20)


def test_a_weight_beyond_f16_is_refused_by_name(device: Device, own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint("gqa")
    name = layer_tensor_name(1, "down_w")
    change(folder, lambda tensors: tensors[name].__setitem__((3, 4), 70000.0))
    with pytest.raises(WeightsError, match=f"{name} holds 70000"), on(device, folder):
        pass


def test_progress_is_in_bytes_and_reaches_the_end(device: Device, checkpoint: CheckpointFactory) -> None:
    seen: list[tuple[int, int]] = []
    with ModelWeights.open(checkpoint("bf16")) as weights:
        QwenModel.load(weights, device, progress=lambda done, total: seen.append((done, total))).close()
        assert seen[-1] == (weights.nbytes, weights.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_load_that_is_broken_off_gives_everything_back(
    device: Device, checkpoint: CheckpointFactory, error: type[BaseException]
) -> None:
    def stop(done: int, total: int) -> None:
        raise error

    before = device.memory().ours
    for _ in range(3):
        with ModelWeights.open(checkpoint("sharded")) as weights, pytest.raises(error):
            QwenModel.load(weights, device, progress=stop)
    device.flush_uploads()
    device.collect()  # type: ignore[attr-defined]
    assert device.memory().ours <= before + (96 << 20)  # staging, which stays


@pytest.fixture
def staged_device(device: Device, open_vulkan: Callable[..., VulkanDevice]) -> Device:
    """One whose memory the host does not write in place."""
    return open_vulkan(VulkanOptions(direct=False)) if device.info.api == "vulkan" else device


def many_threads(monkeypatch: pytest.MonkeyPatch, device: Device, stages: int) -> None:
    """Much to do for more threads than there are stages; none may wait for another for long."""
    monkeypatch.setattr(loading, "n_readers", lambda: 12)
    monkeypatch.setattr(loading, "SMALLEST", loading.PAGE)
    monkeypatch.setattr(staging, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(device._transfers, "most", stages)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stages", [4, 16])
def test_threads_that_convert_do_not_hold_up_an_error(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, staged_device: Device, stages: int
) -> None:
    """They wait for stages that the load has: it gives them back before it waits for threads."""
    many_threads(monkeypatch, staged_device, stages)
    read = ModelWeights.read

    def slow(self: ModelWeights, name: str) -> Any:
        time.sleep(0.05)
        return read(self, name)

    def bad(*_: Any) -> None:
        time.sleep(0.2)
        raise WeightsError("the disk is gone")

    monkeypatch.setattr(ModelWeights, "read", slow)
    monkeypatch.setattr(ModelWeights, "read_span", bad)
    with ModelWeights.open(checkpoint("f16")) as weights:
        began = time.monotonic()
        with pytest.raises(WeightsError, match="the disk is gone"):
            QwenModel.load(weights, staged_device)
        assert time.monotonic() - began < 4


@pytest.mark.parametrize("stages", [4, 16])
def test_two_loads_at_once(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, staged_device: Device, stages: int
) -> None:
    """Neither waits for stages of the other while it has some itself; all bytes arrive, converted ones too."""
    many_threads(monkeypatch, staged_device, stages)
    folder = checkpoint(SyntheticSpec(num_hidden_layers=6, hidden_size=128, dtype="float32"))
    ids = np.arange(9)
    expected = expected_logits(folder, ids)

    def load_and_run() -> float:
        with on(staged_device, folder) as model:
            return error_of(model.forward(ids, model.make_cache(64)), expected)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            for found in [threads.submit(load_and_run) for _ in range(2)]:
                assert found.result(timeout=60) < LIMIT


# --- memory -----------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_said_before_anything_is_read(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = device.memory
    spec = SyntheticSpec(max_position_embeddings=100_000)
    with ModelWeights.open(checkpoint(spec)) as weights:
        plan = memory.MemoryPlan(
            config=weights.config,
            layout=WeightsLayout(weights),
            shape=memory.cache_shape(weights.config, "f16"),
            rows=memory.max_rows(device.info, weights.config, 100_000),
        )
        free = plan.weights + plan.workspace + plan.cache(20_000)
        monkeypatch.setattr(device, "memory", lambda: MemoryStatus(budget=2 * free, used=free, ours=0))
        monkeypatch.setattr(ModelWeights, "read_span", lambda *_: pytest.fail("read before asking for memory"))
        with pytest.raises(OutOfMemoryError, match="a shorter context, of which 20,000 tokens would fit") as caught:
            QwenModel.load(weights, device, ModelOptions(context=90_000, mode="resident"))
        assert caught.value.missing == plan.cache(90_000) - plan.cache(20_000)
        assert "weights" in str(caught.value)
        monkeypatch.setattr(device, "memory", lambda: MemoryStatus(budget=2 * free, used=2 * free - 1000, ours=0))
        assert "let layers be streamed (mode 'auto'), or take a shorter context, of which 20,000" in str(caught.value)
        with pytest.raises(OutOfMemoryError, match="no context would fit") as caught:
            QwenModel.load(weights, device)
        assert "let layers be streamed" not in str(caught.value), "they were, and that was not enough"
    monkeypatch.undo()
    assert device.memory == real


def test_memory_of_host_and_device_in_one_is_not_given_twice(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that do not fit there are not kept there for the device either: they are read again, and are the same."""
    spec = SyntheticSpec(num_hidden_layers=9, hidden_size=128, vocab_size=3000, tie_word_embeddings=False)
    options = ModelOptions(context=64)
    with ModelWeights.open(checkpoint(spec)) as weights:
        with QwenModel.load(weights, device, options) as model:
            resident, plan = list(model.greedy(3, model.make_cache(64), limit=20)), model.plan
        free = plan.needed(64) - 3 * plan.layout.slot_bytes

        def left(shared: int | None) -> None:
            monkeypatch.setattr(device, "memory", lambda: MemoryStatus(budget=free, used=0, ours=0, shared=shared))

        for shared, pinned in ((None, True), (2 * free, True), (free, False), (free - plan.layout.slot_bytes, False)):
            left(shared)
            chosen = memory.choose_plan(plan, device, options)
            assert chosen.split.streamed
            assert chosen.split.pinned is pinned
            assert chosen.needed(64) <= free
            assert shared is None or chosen.needed(64) + chosen.on_host <= shared
        with QwenModel.load(weights, device, options) as model:
            assert model.plan.split == chosen.split
            assert list(model.greedy(3, model.make_cache(64), limit=20)) == resident


def test_heads_too_large_for_the_kernels_are_refused_before_anything_is_read(
    device: Device, checkpoint: CheckpointFactory
) -> None:
    with ModelWeights.open(checkpoint(SyntheticSpec(head_dim=320))) as weights:
        before = device.memory().ours
        with pytest.raises(DeviceError, match="heads of 320 dimensions; kernels take 256 at most"):
            QwenModel.load(weights, device)
        assert device.memory().ours == before


def test_what_is_asked_for_covers_what_is_taken(device: Device, checkpoint: CheckpointFactory) -> None:
    with ModelWeights.open(checkpoint("untied")) as weights:
        plan = memory.MemoryPlan(
            config=weights.config,
            layout=WeightsLayout(weights),
            shape=memory.cache_shape(weights.config, "f32"),
            rows=memory.max_rows(device.info, weights.config, 2048),
        )
        before = device.memory().ours
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32", context=2048)) as model:
            cache = model.make_cache(2048)
            model.extend(np.zeros(1500, np.int64), cache)
            taken = device.memory().ours - before
    assert plan.weights < taken < plan.needed(2048)


def test_the_cache_grows_with_the_sequence(device: Device, checkpoint: CheckpointFactory) -> None:
    """Past 512 tokens the pool moves in the middle of an answer: recordings, tables and keys go with it."""
    folder = checkpoint("gqa")
    ids = np.random.default_rng(0).integers(0, 384, 505)
    with on(device, folder) as model:
        cache = model.make_cache(700)
        model.extend(ids[:-1], cache)
        assert model.pool.n_tokens == 512
        chosen = list(model.greedy(int(ids[-1]), cache, limit=20))
        assert model.pool.n_tokens == 2048
        full = expected_logits(folder, [*ids, *chosen])
        assert chosen == [int(row.argmax()) for row in full[504:-1]]


# --- queued greedy steps ----------------------------------------------------------------------------------------------


def test_greedy_gives_what_single_steps_give(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("bf16")) as model:
        for prompt in (PROMPT, [7], list(range(100))):
            assert list(greedy(model, prompt, 40)) == continued(model, prompt, 40)


@pytest.mark.parametrize("kind", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_steps_are_queued_before_the_first_token_is_read_and_no_logits_are(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    events: list[str] = []
    with on(device, checkpoint("gqa")) as model:
        submit, wait, download = device.submit, device.wait, device.download
        choice = Choice(n_valid=model.config.vocab_size, **kind)
        list(sampled(model, PROMPT, 3, choice))  # recordings are made

        def noted_submit(recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
            events.append("step" if segments and STEP in segments else "other")
            assert not segments or READ not in segments, "steps read their logits back"
            return submit(recording, segments)

        def noted_wait(ticket: Ticket, timeout_s: float = 60.0, *, spin_s: float = 0.0) -> None:
            events.append("wait")
            wait(ticket, timeout_s, spin_s=spin_s)

        def noted_download(source: Bindable, timeout_s: float = 60.0) -> bytes:
            events.append("download")
            return download(source, timeout_s)

        cache = model.make_cache(50)
        model.extend(PROMPT[:-1], cache)
        monkeypatch.setattr(device, "submit", noted_submit)
        monkeypatch.setattr(device, "wait", noted_wait)
        monkeypatch.setattr(device, "download", noted_download)
        assert len(list(model.choose(PROMPT[-1], cache, choice, limit=10))) == 10
        monkeypatch.undo()
    first_wait = events.index("wait", events.index("step"))
    assert events[:first_wait].count("step") == STEPS_AHEAD >= 2
    assert events.count("step") == 10  # never more than were asked for
    assert "download" not in events


@pytest.mark.parametrize(("kind", "patience"), [("discrete", 60.0), ("cpu", 600.0)])
def test_a_software_device_may_be_slow(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, patience: float
) -> None:
    """It computes on a CPU that others use, too: what takes a minute there does not hang."""
    waits: list[float] = []
    wait = device.wait

    def watched(ticket: Ticket, timeout_s: float = 0.0, **options: Any) -> None:
        waits.append(timeout_s)
        wait(ticket, timeout_s, **options)

    with on(device, checkpoint(SyntheticSpec())) as model:
        monkeypatch.setattr(device, "info", dataclasses.replace(device.info, kind=kind))
        monkeypatch.setattr(device, "wait", watched)
        continued(model, [1, 2, 3], 2)
        monkeypatch.undo()
    assert set(waits) == {patience}


def test_sampled_steps_give_what_the_sampler_makes_of_their_logits(
    device: Device, checkpoint: CheckpointFactory
) -> None:
    """Counts grow on the device as they do in the sampler, and an answer that is cut goes on from them."""
    asked = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5, seed=2)
    with on(device, checkpoint("gqa")) as model:
        sampler = Sampler(asked, prompt_ids=PROMPT, vocab_size=model.config.vocab_size)
        choice = sampler.choice
        assert choice is not None
        cache = model.make_cache(100)
        logits, expected = model.forward(PROMPT, cache, last_only=True)[0], []
        for n in range(30):
            expected.append(sampler.sample(logits, len(PROMPT) + n).token)
            logits = model.forward(expected[-1:], cache, last_only=True)[0]
        assert list(sampled(model, PROMPT, 30, choice)) == expected
        cache.truncate(len(PROMPT) + 9)
        rest = model.choose(expected[9], cache, choice.after(expected[:10]), limit=20)
        assert list(rest) == expected[10:]


def test_answers_take_turns_on_one_model(device: Device, checkpoint: CheckpointFactory) -> None:
    prompts = [PROMPT, [7], [1, 2, 3], list(range(50, 90))]
    with on(device, checkpoint("untied")) as model:
        vocab = model.config.vocab_size
        choices = [
            Choice(n_valid=vocab),
            Choice(n_valid=vocab, prompt_ids=prompts[1], **SAMPLED),
            Choice(n_valid=vocab, prompt_ids=prompts[2], **SAMPLED, bias={8: 3.0, 9: -np.inf}),
            Choice(n_valid=vocab, temperature=2.0, seed=4),
        ]
        asked = list(zip(prompts, choices, strict=True))
        alone = [list(sampled(model, prompt, 25, choice)) for prompt, choice in asked]
        answers = [sampled(model, prompt, 25, choice) for prompt, choice in asked]
        together: list[list[int]] = [[] for _ in prompts]
        for n, i in itertools.product(range(25), range(len(prompts))):
            together[i].append(next(answers[i]))
            if n % 7 == i:  # and whoever wants logits comes in between
                model.forward([5, 6, 7], last_only=True)
        assert together == alone


def test_an_answer_may_be_dropped_and_the_cache_used_on(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("gqa")) as model:
        expected = list(greedy(model, PROMPT, 30))
        cache = model.make_cache(100)
        model.extend(PROMPT[:-1], cache)
        answer = model.greedy(PROMPT[-1], cache, limit=30)
        taken = [next(answer) for _ in range(5)]
        answer.close()
        assert taken == expected[:5]
        assert cache.ids == [*PROMPT, *expected[:4]]
        assert list(model.greedy(taken[-1], cache, limit=25)) == expected[5:]
        cache.truncate(len(PROMPT) - 1)
        assert list(model.greedy(PROMPT[-1], cache, limit=30)) == expected


def test_ids_past_the_limit_are_never_chosen(device: Device, own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint("untied")
    head = global_tensor_name("lm_head")
    change(folder, lambda tensors: tensors[head].__setitem__(slice(300, 384), 50 * tensors[head][300:384]))
    with on(device, folder) as model:
        assert max(greedy(model, PROMPT, 20)) >= 300
        cache = model.make_cache(100)
        model.extend(PROMPT[:-1], cache)
        chosen = list(model.greedy(PROMPT[-1], cache, limit=20, n_valid=300))
        logits = model.forward([*PROMPT, *chosen])
        assert chosen == [int(row[:300].argmax()) for row in logits[len(PROMPT) - 1 : -1]]


def test_an_answer_ends_where_the_cache_does(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("gqa")) as model:
        assert len(list(greedy(model, PROMPT, 50, capacity=20))) == 20 - len(PROMPT) + 1


# --- prompts in chunks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 7, 16, 40])
def test_long_prompts_in_chunks(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(memory, "MOST_ROWS", most)
    monkeypatch.setattr(memory, "MOST_ROWS_SMALL", most)
    folder = checkpoint("sliding")
    ids = np.random.default_rng(0).integers(0, 384, 100 if most > 1 else 40)  # chunks of one token take long
    with on(device, folder) as model:
        expected = expected_logits(folder, ids)
        assert error_of(model.forward(ids), expected) < LIMIT
        assert error_of(model.forward(ids, last_only=True), expected[-1:]) < LIMIT
        names: list[str] = []
        assert error_of(model.forward(ids, tap=lambda name, _: names.append(name)), expected) < LIMIT


def test_chunks_grow_while_they_are_fast_and_shrink_when_they_are_slow(
    device: Device, checkpoint: CheckpointFactory
) -> None:
    with on(device, checkpoint("gqa")) as model:

        def sizes(seconds_of: Callable[[int], float], count: int = 8) -> list[int]:
            model._chunk, model._chunk_limit, seen = model_module.FIRST_CHUNK, 1024, []
            for _ in range(count):
                seen.append(model._chunk)
                model._adapt(model._chunk, seconds_of(model._chunk))
            return seen

        budget = model_module.CHUNK_SECONDS
        assert sizes(lambda rows: 0.002)[:3] == [8, 1024, 1024]  # fast: straight to the largest
        slow = sizes(lambda rows: 0.01 * rows)  # 100 rows a second
        assert all(0.01 * rows <= 2 * budget for rows in slow)
        assert 0.01 * slow[-1] <= budget
        assert slow[-1] == slow[-2]  # settled
        assert set(sizes(lambda rows: 10.0)[3:]) == {1}
        model._chunk = 512
        model._adapt(8, 0.3)  # the rest of a prompt says nothing about whole chunks
        assert model._chunk == 512


# --- what is refused --------------------------------------------------------------------------------------------------


def test_requests_that_cannot_be_met_change_nothing(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("gqa")) as model:
        cache = model.make_cache(20)
        model.extend(PROMPT, cache)
        calls: tuple[Callable[[Any], Any], ...] = (
            lambda ids: model.forward(ids, cache),
            lambda ids: model.forward(ids, cache, last_only=True),
            lambda ids: model.extend(ids, cache),
        )
        for call in calls:
            with pytest.raises(ContextLengthError, match="12 tokens do not fit behind the 9"):
                call(list(range(12)))
            with pytest.raises(RequestError, match="token 384 at place 1"):
                call([0, 384])
            with pytest.raises(RequestError, match="at least one"):
                call([])
            with pytest.raises(RequestError, match="expected integers"):
                call([0.5])
            assert cache.ids == PROMPT
        found = model.forward([1, 2], cache)
        assert error_of(found, model.forward([*PROMPT, 1, 2])[-2:]) < LIMIT


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_an_interrupt_leaves_cache_and_model_usable(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(memory, "MOST_ROWS_SMALL", 4)
    monkeypatch.setattr(memory, "MOST_ROWS", 4)
    with on(device, checkpoint("gqa")) as model:
        expected = model.forward([*PROMPT, 1, 2], last_only=True)
        answer = list(greedy(model, PROMPT, 20))
        cache = model.make_cache(100)
        model.extend(PROMPT[:2], cache)
        wait, count = device.wait, itertools.count()

        def interrupted(ticket: Ticket, timeout_s: float = 60.0, *, spin_s: float = 0.0) -> None:
            if next(count) == at:
                raise KeyboardInterrupt
            wait(ticket, timeout_s, spin_s=spin_s)

        for run in (
            lambda: model.extend(PROMPT[2:], cache),
            lambda: model.forward([*PROMPT[2:], 1, 2], cache, last_only=True),
            lambda: model.forward(PROMPT[2:], cache),
        ):
            count = itertools.count()
            with monkeypatch.context() as patch:
                patch.setattr(device, "wait", interrupted)
                try:
                    run()
                except KeyboardInterrupt:
                    assert cache.length == 2
            cache.truncate(2)  # those that have fewer waits than `at`
        assert error_of(model.forward([*PROMPT[2:], 1, 2], cache, last_only=True), expected) < LIMIT
        cache.truncate(len(PROMPT) - 1)
        count = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(device, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(model.greedy(PROMPT[-1], cache, limit=20))
        cache.truncate(len(PROMPT) - 1)
        assert list(model.greedy(PROMPT[-1], cache, limit=20)) == answer


# --- NaN and infinity -------------------------------------------------------------------------------------------------


FAULTS = (
    *(("input_ln", "input_ln"), ("q_w", "q"), ("k_w", "k"), ("v_w", "v"), ("k_b", "k"), ("o_w", "o")),
    *(("post_ln", "post_ln"), ("gate_w", "gate"), ("up_w", "up"), ("down_w", "down")),
)


@pytest.mark.parametrize(("field", "op"), FAULTS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_number_is_traced_to_layer_and_op(
    device: Device, own_checkpoint: CheckpointFactory, field: str, op: str, value: float
) -> None:
    folder = own_checkpoint(SyntheticSpec(num_hidden_layers=3))
    name = layer_tensor_name(1, field)
    change(folder, lambda tensors: tensors[name].reshape(-1).__setitem__(5, value))
    with on(device, folder) as model:
        ways: tuple[Callable[[], Any], ...] = (
            lambda: list(greedy(model, PROMPT, 5)),
            lambda: model.forward(PROMPT, last_only=True),
            lambda: model.forward(PROMPT),
        )
        for way in ways:
            with pytest.raises(
                NumericalError, match=rf"op {op} of layer 1 \(layers\.1\.{op}\) made the first NaN.*--device cpu"
            ):
                way()


@pytest.mark.parametrize(("field", "op"), [("norm", "norm"), ("lm_head", "logits"), ("embed", "embed")])
def test_a_bad_number_outside_the_layers(
    device: Device, own_checkpoint: CheckpointFactory, field: str, op: str
) -> None:
    folder = own_checkpoint("untied")
    change(folder, lambda tensors: tensors[global_tensor_name(field)].__setitem__(..., np.nan))
    with on(device, folder) as model, pytest.raises(NumericalError, match=rf"op {op} \({op}\)"):
        list(greedy(model, PROMPT, 5))


def test_a_bad_number_that_came_with_an_earlier_token(device: Device, own_checkpoint: CheckpointFactory) -> None:
    """The step's own op that goes wrong is attention, over what an earlier token has left in the cache."""
    folder = own_checkpoint("untied")
    change(folder, lambda tensors: tensors[global_tensor_name("embed")].__setitem__(7, np.inf))
    with on(device, folder) as model:
        cache = model.make_cache(100)
        model.extend([1, 7, 2, 3, 4, 5], cache)
        with pytest.raises(NumericalError, match=r"op embed \(embed\) made the first NaN"):
            model.forward([6], cache, last_only=True)


@pytest.mark.parametrize("part", ["k", "v"])
def test_keys_and_values_beyond_f16_ask_for_another_cache(
    device: Device, own_checkpoint: CheckpointFactory, part: str
) -> None:
    """Which the error names only where it is the cache that they do not fit into: f32 holds them."""
    folder = own_checkpoint("untied")
    change(folder, lambda tensors: tensors[layer_tensor_name(1, f"{part}_b")].__setitem__(..., 1e5))
    with on(device, folder, kv_cache="f32") as model:
        assert np.isfinite(model.forward(PROMPT)).all()
    beyond = r"layer 1 \(layers\.1\.attn\) made the first NaN.*keys or values reach 1\d\d,\d\d\d, .* --kv-cache f32 "
    with on(device, folder, kv_cache="f16") as model:
        for way in (lambda: list(greedy(model, PROMPT, 5)), lambda: model.forward(PROMPT)):
            with pytest.raises(NumericalError, match=beyond):
                way()
        cache = model.make_cache(100)
        model.extend(PROMPT[:-1], cache)
        with pytest.raises(NumericalError, match=beyond):
            model.forward(PROMPT[-1:], cache, last_only=True)


def test_a_bad_number_that_does_not_come_again(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(device, checkpoint("gqa")) as model:
        expected = list(greedy(model, PROMPT, 9))
        with monkeypatch.context() as patch:
            patch.setattr(model._steps, "chosen", lambda n: BAD_TOKEN if n == 3 else expected[n])
            answer = greedy(model, PROMPT, 9)
            assert [next(answer) for _ in range(3)] == expected[:3]
            with pytest.raises(NumericalError, match="not when the step was run again"):
                next(answer)
        assert list(greedy(model, PROMPT, 9)) == expected


def test_taps_look_at_bad_numbers_without_an_error(device: Device, own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint("gqa")
    change(folder, lambda tensors: tensors[layer_tensor_name(1, "up_w")].__setitem__((0, 0), np.nan))
    bad: list[str] = []
    with on(device, folder) as model:
        model.forward(PROMPT, tap=lambda name, values: None if np.isfinite(values).all() else bad.append(name))
    assert bad[0] == "layers.1.up"


# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_step_is_timed_op_by_op(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("gqa")) as model:
        cache = model.make_cache(50)
        model.extend(PROMPT, cache)
        times, again = model.step_times(cache, 5, repeats=2)
        assert [name for name, _ in again] == [name for name, _ in times]
        assert [[name for name, _ in run] for run in model.step_times(cache, 5, each_op=False)] == [["step"]]
        assert cache.ids == PROMPT
        names = [name for name, _ in times]
        assert names[0] == "embed"
        assert names[-1] == "argmax"
        assert {name.rpartition(".")[0] for name in names[1:-2]} <= {"layers.0", "layers.1", ""}
        assert all(seconds >= 0 for _, seconds in times)
        assert error_of(model.forward([1], cache, last_only=True), model.forward([*PROMPT, 1], last_only=True)) < LIMIT


def test_closing_twice_is_closing_once(device: Device, checkpoint: CheckpointFactory) -> None:
    with ModelWeights.open(checkpoint("gqa")) as weights:
        model = QwenModel.load(weights, device)
    answer = greedy(model, PROMPT, 20)
    next(answer)  # steps are in flight
    model.close()
    model.close()
    device.flush_uploads()
    last = device.create_buffer(16)
    device.download(last[:])  # what was in flight has ended
    last.release()
