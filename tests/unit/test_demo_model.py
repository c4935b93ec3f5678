"""The bundled model by our own forward: it scores on held-out plays what its README says; its files fit together."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer.chat import ChatTemplate
from xinfer.hub import DEMO_FOLDER
from xinfer.llm import LLM
from xinfer.model.config import GenerationConfig, Qwen2Config
from xinfer.model.reference import ReferenceModel
from xinfer.model.weights import ModelWeights
from xinfer.sampling import SamplingParams
from xinfer.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
WINDOWS = 2  # of the held-out text, 4,096 tokens; the marked test in tests/parity takes all of them


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """What the training script measured with transformers on the held-out plays."""
    facts: dict[str, Any] = json.loads((DATA / "heldout.json").read_text(encoding="utf-8"))
    return facts


@pytest.fixture(scope="module")
def held_out(tokenizer: Tokenizer) -> NDArray[np.int64]:
    return np.array(tokenizer.encode((DATA / "heldout.txt").read_text(encoding="utf-8")), dtype=np.int64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO_FOLDER)


def nll(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    """Summed negative log likelihood of targets (T,) under logits (T, vocab)."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return float((np.log(np.exp(x).sum(axis=-1)) - x[np.arange(len(targets)), targets]).sum())


def test_scores_what_was_measured_on_held_out_plays(figures: dict[str, Any], held_out: NDArray[np.int64]) -> None:
    context = figures["context"]
    with ModelWeights.open(DEMO_FOLDER) as weights:
        model = ReferenceModel(weights)
        for i, window in enumerate(figures["windows"][:WINDOWS]):
            tokens = held_out[i * context : (i + 1) * context]
            logits = model.forward(tokens)[:-1]
            assert len(logits) == window["predictions"]
            # float32 on both sides: sums of two thousand losses differ in the seventh digit
            assert nll(logits, tokens[1:]) == pytest.approx(window["nll_sum"], rel=2e-6)
        model.close()


def test_readme_states_the_measured_figures(figures: dict[str, Any], held_out: NDArray[np.int64]) -> None:
    readme = (DEMO_FOLDER / "README.md").read_text(encoding="utf-8")
    row = re.search(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert row is not None
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    losses = sum(window["nll_sum"] for window in figures["windows"])
    mean = losses / sum(window["predictions"] for window in figures["windows"])
    assert mean == pytest.approx(figures["mean_nll"], rel=1e-9)
    total = mean * len(held_out)
    expected = (
        f"{math.exp(mean):.2f}",
        f"{mean:.4f}",
        f"{total / math.log(2) / len(text.encode()):.3f}",
        f"{math.exp(total / len(text.split())):.1f}",
    )
    assert row.groups() == expected
    assert len(held_out) == figures["tokens"]
    assert re.sub(r"\s+", " ", readme).count(f"({len(held_out)} tokens") == 1


def test_is_small_and_shaped_as_promised() -> None:
    files = [path for path in DEMO_FOLDER.iterdir() if path.is_file()]
    assert {path.name for path in files} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in files) <= 12_000_000
    config = Qwen2Config.from_json(DEMO_FOLDER)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (256, 6, 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert 5_000_000 < config.num_parameters() < 6_000_000
    with ModelWeights.open(DEMO_FOLDER) as weights:
        assert set(weights.bytes_by_dtype()) == {"bfloat16"}


def test_tokenizer_fills_the_vocabulary_and_gives_every_text_back(tokenizer: Tokenizer) -> None:
    config = Qwen2Config.from_json(DEMO_FOLDER)
    assert tokenizer.size == config.vocab_size
    assert not tokenizer.invalid_ids(config.vocab_size).any()
    text = "ROMEO:\nWherefore art thou 東京 🎭 naïve\t42?\r\n\n  O!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_stops_at_the_end_of_a_turn_and_of_a_text(tokenizer: Tokenizer) -> None:
    defaults = GenerationConfig.from_folder(DEMO_FOLDER)
    assert defaults is not None
    assert [tokenizer.token(i) for i in defaults.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert defaults.do_sample


def test_chat_template_writes_chatml(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_folder(DEMO_FOLDER, special_tokens=tokenizer.special_tokens)
    assert template is not None
    messages = [
        {"role": "system", "content": "You are Hamlet."},
        {"role": "user", "content": "How now, my lord? "},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "Indeed?"},
    ]
    assert template.render(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are Hamlet.<|im_end|>\n"
        "<|im_start|>user\nHow now, my lord?<|im_end|>\n"
        "<|im_start|>assistant\nWell.<|im_end|>\n"
        "<|im_start|>user\nIndeed?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_answers_a_chat_and_stops_by_itself() -> None:
    with LLM(DEMO_FOLDER, device="cpu") as llm:
        ends = [
            llm.chat(
                [{"role": "user", "content": "What news from the king?"}], SamplingParams(max_tokens=400, seed=seed)
            )
            for seed in range(5)
        ]
    assert [end.finish_reason for end in ends].count("stop") >= 4
    assert len({end.text for end in ends}) == 5
    for end in ends:
        assert len(end.text.split()) >= 2
        assert "<|" not in end.text
