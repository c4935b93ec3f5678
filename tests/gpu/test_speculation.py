"""Guessed tokens, checked in one pass: the same tokens, keys and values as in steps, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer import ops
from xinfer.choice import Choice
from xinfer.errors import NumericalError, OutOfMemoryError
from xinfer.gpu.api import Device
from xinfer.gpu_model import QwenModel, steps
from xinfer.gpu_model.checks import CheckedRows
from xinfer.gpu_model.layout import Split
from xinfer.gpu_model.options import ModelOptions
from xinfer.gpu_model.speculation import Lookup, agreement
from xinfer.gpu_model.tuning import AttentionChoice, Tuning
from xinfer.kv_cache import KVCache
from xinfer.model.config import Qwen2Config
from xinfer.model.weights import ModelWeights

PROMPT = [5, 17, 3, 99, 42, 5, 17, 3]


@contextmanager
def on(
    device: Device, folder: Path, split: Split | None = None, *, quarantine: Sequence[str] = (), **options: Any
) -> Iterator[QwenModel]:
    build_shaders.build()
    how: dict[str, Any] = {"split": split, "quarantine": quarantine}
    with ModelWeights.open(folder) as weights, QwenModel.load(weights, device, ModelOptions(**options), **how) as model:
        yield model


# --- guesses ----------------------------------------------------------------------------------------------------------


def test_what_followed_last_is_guessed() -> None:
    lookup = Lookup([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 2, 3])
    assert lookup.guess(2) == [5, 9]
    assert lookup.guess(10) == [5, 9, 1, 2, 3]
    lookup.add(4)
    assert lookup.guess(3) == [1, 2, 3]  # behind 2 3 4, which has stood there once


def test_two_tokens_do_where_three_are_new() -> None:
    assert Lookup([7, 1, 2, 8, 3, 1, 2]).guess(2) == [8, 3]


@pytest.mark.parametrize("ids", [[], [1], [1, 1], [1, 2, 3, 4, 5]])
def test_nothing_is_guessed_of_what_is_new(ids: list[int]) -> None:
    assert Lookup(ids).guess(8) == []


def test_a_token_again_and_again() -> None:
    assert Lookup([4, 4, 4, 4]).guess(3) == [4]
    assert Lookup([4, 4, 4]).guess(0) == []


def test_agreement_ends_at_the_first_difference() -> None:
    assert [agreement(guess, [1, 2, 3, 4]) for guess in ([1, 2, 3], [1, 9, 3], [9], [])] == [3, 1, 0, 0]


# --- what comes of them -----------------------------------------------------------------------------------------------


Answered = tuple[list[int], Any, Choice]


def answered(model: QwenModel, prompt: list[int], n: int, speculate: int, *, cache: KVCache | None = None) -> Answered:
    """The tokens, the logits that follow them, and the choice with its tally; the cache has the prompt afterwards."""
    if cache is None:
        cache = filled(model, prompt)
    choice = Choice(n_valid=model.config.vocab_size, speculate=speculate)
    tokens = list(model.choose(prompt[-1], cache, choice, limit=n))
    assert cache.ids == [*prompt, *tokens[:-1]]
    logits = model.forward([7], cache, last_only=True)
    cache.truncate(len(prompt) - 1)
    return tokens, logits, choice


def filled(model: QwenModel, prompt: list[int]) -> KVCache:
    """With all of the prompt but its last token. Another's chunks, and so its sums, may be others."""
    cache = model.make_cache(300)
    model.extend(prompt[:-1], cache)
    return cache


@pytest.mark.parametrize(
    ("name", "options", "guesses"),
    [
        ("gqa", {}, 1),
        ("gqa", {"kv_cache": "f32"}, 7),
        ("bf16", {"split": Split(streamed=(0, 1), n_slots=1)}, 7),
        ("untied", {"split": Split(streamed=(1,), n_slots=1)}, 4),
        ("odd_sizes", {}, 3),
        ("sliding", {}, 7),
        ("gqa", {"quarantine": ["rope_append.f16"]}, 3),  # then no step turns keys within attention either
    ],
)
def test_the_answer_is_that_of_single_steps_to_the_bit(
    device: Device, checkpoint: CheckpointFactory, name: str, options: dict[str, Any], guesses: int
) -> None:
    with on(device, checkpoint(name), **options) as model:
        expected, logits, _ = answered(model, PROMPT, 40, 0)
        prompt = [*PROMPT, *expected[:30], *PROMPT]  # so that what follows has stood there before
        cache = filled(model, prompt)
        expected, logits, _ = answered(model, prompt, 40, 0, cache=cache)
        found, found_logits, choice = answered(model, prompt, 40, guesses, cache=cache)
        assert found == expected
        assert np.array_equal(found_logits, logits), "keys or values differ from those of single steps"
        assert choice.tally.accepted > 0
        assert choice.tally.accepted <= choice.tally.guessed


def test_without_rope_append_no_tuning_makes_a_step_turn_its_keys(
    device: Device, checkpoint: CheckpointFactory
) -> None:
    """Guessed rows could not be what such a step is."""
    with on(device, checkpoint("gqa"), quarantine=["rope_append.f16"]) as model:
        sites = model.steps.sites()
        assert not any("turn" in name for name in sites.attention())
        chosen = AttentionChoice(variant="attention.f16.tiled64_turn", n_splits=1)
        assert not sites.accepted(Tuning(attention={512: chosen})).attention
    with on(device, checkpoint("gqa")) as model:
        assert model.steps.sites().accepted(Tuning(attention={512: chosen})).attention == {512: chosen}


def test_keys_are_in_the_cache_before_other_rows_look_back(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where workgroups run in the order of rows nobody would notice: so it is what is recorded that is looked at."""
    recorded: list[str] = []
    for name in ("rope_append", "turn_attention"):
        op = getattr(ops, name)

        def noting(*given: Any, op: Any = op, **options: Any) -> None:
            recorded.append(options["label"])
            op(*given, **options)

        monkeypatch.setattr(ops, name, noting)
    with on(device, checkpoint("untied")) as model:
        assert model.steps.sites().attention()[0].endswith(("turn", "turn2"))
        model.steps.check(3, model.config.vocab_size)
    layers = [f"layers.{i}.{op}" for i in range(2) for op in ("append", "attn")]
    assert recorded == 2 * layers  # to learn which kernels are wanted, and then for good


@pytest.mark.parametrize("most_rows", [4, 1, 0])
def test_where_memory_is_short_fewer_are_guessed(
    device: Device,
    checkpoint: CheckpointFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    most_rows: int,
) -> None:
    """Down to none, which is told once: the answer stays, and nothing is held by what could not be made."""

    class Checked(CheckedRows):
        def __init__(self, device: Device, config: Qwen2Config, n_rows: int) -> None:
            if n_rows > most_rows:
                raise OutOfMemoryError("too little", needed=2, free=1)
            super().__init__(device, config, n_rows)

    with on(device, checkpoint("gqa")) as model:
        expected, _, _ = answered(model, PROMPT, 40, 0)
        prompt = [*PROMPT, *expected[:30], *PROMPT]
        cache = filled(model, prompt)
        expected, logits, _ = answered(model, prompt, 40, 0, cache=cache)
        before = device.memory().ours
        monkeypatch.setattr(steps, "CheckedRows", Checked)
        for _ in range(2):
            found, found_logits, choice = answered(model, prompt, 40, 7, cache=cache)
            assert found == expected
            assert np.array_equal(found_logits, logits)
            assert (choice.tally.accepted > 0) == (most_rows > 1)
        model.steps.forget_checks()
        assert device.memory().ours == before
    said = [record.getMessage() for record in caplog.records if "no room to check guesses" in record.getMessage()]
    assert len(said) == (most_rows < 2)


def test_wrong_guesses_are_forgotten(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on(device, checkpoint("gqa")) as model:
        cache = filled(model, PROMPT)
        expected, logits, _ = answered(model, PROMPT, 30, 0, cache=cache)
        monkeypatch.setattr(Lookup, "guess", lambda _, most: [11, 12, 13][:most])
        found, found_logits, choice = answered(model, PROMPT, 30, 3, cache=cache)
        assert found == expected
        assert np.array_equal(found_logits, logits)
        assert choice.tally.guessed > choice.tally.accepted


def test_an_answer_may_be_dropped_within_a_pass(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("gqa")) as model:
        expected, _, _ = answered(model, PROMPT, 30, 0)
        prompt = [*PROMPT, *expected, *PROMPT]
        expected, _, _ = answered(model, prompt, 30, 0)
        choice = Choice(n_valid=model.config.vocab_size, speculate=6)
        for n in range(1, 12):
            cache = model.make_cache(300)
            model.extend(prompt[:-1], cache)
            answer = model.choose(prompt[-1], cache, choice, limit=30)
            taken = [next(answer) for _ in range(n)]
            answer.close()
            assert cache.ids == [*prompt, *taken[:-1]]
            model.forward([1, 2, 3], last_only=True)  # whoever else comes in between
            assert taken + list(model.choose(taken[-1], cache, choice, limit=30 - n)) == expected


def test_guesses_end_with_the_context(device: Device, checkpoint: CheckpointFactory) -> None:
    with on(device, checkpoint("gqa")) as model:
        cache = model.make_cache(20)
        model.extend(PROMPT[:-1], cache)
        choice = Choice(n_valid=model.config.vocab_size, speculate=15)
        assert len(list(model.choose(PROMPT[-1], cache, choice, limit=50))) == 20 - len(PROMPT) + 1


def test_a_bad_number_is_named(device: Device, own_checkpoint: CheckpointFactory) -> None:
    from safetensors.numpy import load_file, save_file

    folder = own_checkpoint("f16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = np.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with on(device, folder) as model, pytest.raises(NumericalError, match="op down of layer 1"):
        answered(model, PROMPT, 5, 4)
