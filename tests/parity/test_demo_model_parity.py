"""The bundled model in transformers' hands: it loads there, and scores on the held-out plays what its README says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from xinfer.chat import ChatTemplate
from xinfer.hub import DEMO_FOLDER
from xinfer.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.transformers

DATA = Path(__file__).parents[1] / "data"


def test_perplexity_is_the_readmes() -> None:
    figures = json.loads((DATA / "heldout.json").read_text(encoding="utf-8"))
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER, model_max_length=10**9)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    tokens = torch.tensor(tokenizer(text).input_ids)
    windows = tokens.split(figures["context"])
    assert len(windows) == len(figures["windows"])
    total = 0.0
    for window, expected in zip(windows, figures["windows"], strict=True):
        with torch.no_grad():  # `loss` is transformers' own, shifted and averaged over the predictions
            loss = model(window[None], labels=window[None]).loss.item()
        assert loss * (len(window) - 1) == pytest.approx(expected["nll_sum"], rel=2e-6)
        total += loss * (len(window) - 1)
    perplexity = float(np.exp(total / (len(tokens) - len(windows))))
    readme = (DEMO_FOLDER / "README.md").read_text(encoding="utf-8")
    row = re.search(r"^\| ([\d.]+) \|", readme, re.MULTILINE)
    assert row is not None
    assert f"{perplexity:.2f}" == row[1]


def test_tokenizer_and_chat_are_the_same_here_and_there() -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    ours = Tokenizer.from_folder(DEMO_FOLDER)
    template = ChatTemplate.from_folder(DEMO_FOLDER, special_tokens=ours.special_tokens)
    assert template is not None
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")[:5000]
    assert ours.encode(text) == theirs(text).input_ids
    messages = [{"role": "system", "content": "You are Hamlet."}, {"role": "user", "content": " What is love?\n"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages, add_generation_prompt=True) == rendered
    assert ours.encode(rendered) == theirs(rendered, add_special_tokens=False).input_ids
