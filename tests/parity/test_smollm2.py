"""A trained model end to end: SmolLM2-135M, rewritten as a Qwen2, against transformers and llama.cpp's tokenizer.

The checkpoint is converted once into the repository's .cache folder. `pytest -s` shows the texts and errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from xinfer import LLM, SamplingParams
from xinfer.errors import DeviceError
from xinfer.model.reference import ReferenceModel
from xinfer.model.weights import ModelWeights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
import smollm2_to_qwen2  # noqa: E402  (needs gguf)

pytestmark = pytest.mark.transformers

N_NEW = 64
PROMPTS = {
    "fact": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea,",
    "list": "The days of the week are Monday, Tuesday,",
    "code": "def fibonacci(n):\n",
    "chat": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "one_token": "The",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_to_qwen2.cached()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[ReferenceModel]:
    with ModelWeights.open(folder) as weights:
        yield ReferenceModel(weights, keep=True)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None  # no stop token, so that all 64 are compared
    return model.eval()


@pytest.fixture(scope="module")
def answers(ours: ReferenceModel, tokenizer: Tokenizer) -> dict[str, tuple[list[int], float]]:
    return {name: our_greedy(ours, tokenizer.encode(prompt).ids) for name, prompt in PROMPTS.items()}


def error(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def our_greedy(model: ReferenceModel, ids: list[int]) -> tuple[list[int], float]:
    """64 tokens, and the smallest distance between the best logit and the next."""
    cache = model.make_cache(len(ids) + N_NEW)
    fresh, margin = list(ids), np.inf
    answer: list[int] = []
    while len(answer) < N_NEW:
        logits = model.forward(fresh, cache, last_only=True)[0]
        second, first = np.partition(logits, -2)[-2:]
        margin = min(margin, float(first - second))
        fresh = [int(logits.argmax())]
        answer += fresh
    return answer, margin


def perplexity(model: ReferenceModel, ids: list[int]) -> float:
    logits = model.forward(ids[:-1]).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_p = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(-1))
    return float(np.exp(-log_p.mean()))


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_text_equals_transformers(
    name: str, answers: dict[str, tuple[list[int], float]], theirs: Any, tokenizer: Tokenizer
) -> None:
    answer, margin = answers[name]
    prompt = torch.tensor([tokenizer.encode(PROMPTS[name]).ids])
    with torch.no_grad():
        out = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=N_NEW, pad_token_id=0
        )
    print(f"\n{name} (closest call {margin:.1e}): {PROMPTS[name]!r} -> {tokenizer.decode(answer)!r}")  # noqa: T201
    assert answer == out[0, prompt.shape[1] :].tolist()
    assert len(answer) == N_NEW


def test_llm_gives_the_same_text(
    folder: Path, answers: dict[str, tuple[list[int], float]], tokenizer: Tokenizer
) -> None:
    """The whole path, text to text, against the argmax of the reference."""
    greedy = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)
    with LLM(folder, device="cpu") as llm:
        completion = llm.generate(PROMPTS["story"], greedy)
    assert list(completion.token_ids) == answers["story"][0]
    assert completion.text == tokenizer.decode(answers["story"][0])


def test_the_gpu_gives_the_same_text() -> None:
    """64 greedy tokens on Vulkan, on a software driver where there is no GPU, of weights in f16 on both sides."""
    greedy = SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True)
    folder = smollm2_to_qwen2.cached(dtype="float16")
    try:
        on_gpu = LLM(folder, device="vulkan", kv_cache="f32", exact=True)
    except DeviceError as error:
        if os.environ.get("XINFER_REQUIRE_GPU") == "1":
            raise
        pytest.skip(str(error))
    with on_gpu, LLM(folder, device="cpu") as on_cpu:
        found, expected = (llm.generate(PROMPTS["story"], greedy) for llm in (on_gpu, on_cpu))
    print(f"\n{on_gpu.device}: {found.text!r}")  # noqa: T201
    assert found.token_ids == expected.token_ids
    assert len(found.token_ids) == N_NEW


def test_the_text_is_english_and_true(
    ours: ReferenceModel, answers: dict[str, tuple[list[int], float]], tokenizer: Tokenizer
) -> None:
    """A wrong conversion may still agree with transformers on the same wrong weights: look at what it says."""
    texts = {name: tokenizer.decode(answer) for name, (answer, _) in answers.items()}
    assert texts["fact"].startswith(" Paris")
    assert texts["list"].startswith(" Wednesday, Thursday, Friday, Saturday, Sunday")
    assert "light" in texts["chat"]
    english = (
        "The sun rises in the east and sets in the west. Water boils at one hundred degrees, and it freezes at zero. "
        "Most people sleep at night and work during the day."
    )
    words = english.split()
    np.random.default_rng(0).shuffle(words)
    in_order, shuffled = (perplexity(ours, tokenizer.encode(text).ids) for text in (english, " ".join(words)))
    print(f"\nperplexity of plain English: {in_order:.1f}, of its words shuffled: {shuffled:.0f}")  # noqa: T201
    assert in_order < 25  # 41 with the rows of q and k left as llama.cpp has them
    assert shuffled > 20 * in_order


def test_conversion_equals_transformers_own_reading_of_the_gguf(
    folder: Path, ours: ReferenceModel, tokenizer: Tokenizer
) -> None:
    """The same GGUF as the Llama that it is, dequantized and unpermuted by transformers."""
    pytest.importorskip("accelerate")  # transformers asks for it to load a GGUF
    gguf = smollm2_to_qwen2.bundled_gguf()
    llama = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    assert type(llama).__name__ == "LlamaForCausalLM"
    ids = tokenizer.encode(PROMPTS["story"] + PROMPTS["chat"] + PROMPTS["code"]).ids
    with torch.no_grad():
        expected = llama(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    off = error(ours.forward(ids), expected)
    print(f"\nagainst LlamaForCausalLM from the GGUF: {off:.1e}")  # noqa: T201
    assert off < 1e-5


def test_logits_equal_transformers(ours: ReferenceModel, theirs: Any) -> None:
    ids = np.random.default_rng(0).integers(0, 49152, 300)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    off = error(ours.forward(ids), expected)
    print(f"\n300 random tokens: {off:.1e}")  # noqa: T201
    assert off < 1e-5


def test_tokenizer_equals_llama_cpp(tokenizer: Tokenizer) -> None:
    """The rebuilt tokenizer.json against llama.cpp reading the GGUF's own vocabulary, merges and pre-tokenizer name."""
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_cpp.Llama(str(smollm2_to_qwen2.bundled_gguf()), vocab_only=True, verbose=False)
    rng = np.random.default_rng(0)
    alphabets = [
        "abcdefghij ABC'stremdvl  ",
        "0123456789 .,x٣٤Ⅷ½²",
        " \n\t\r  ",
        "éüñßøåçλжшאب你好日本한국",
        "🙂🏳️‍🌈👩‍👩‍👧🎉",
        "{}[]()<>=+-*/&|!?;:#@\"'`~^%$\\_",
    ]
    strings = ["It's 2024: 12345 apples,\n\n  café don't", "<|im_start|>user\nhi<|im_end|>\n", "x<|endoftext|>y"]
    for _ in range(300):
        picked = [alphabets[i] for i in rng.choice(len(alphabets), rng.integers(1, 4), replace=False)]
        strings.append("".join(rng.choice(list("".join(picked)), rng.integers(1, 60))))
    for text in strings:
        assert tokenizer.encode(text).ids == llama.tokenize(text.encode(), add_bos=False, special=True), text
    llama.close()


def test_float16_loses_what_the_script_says(ours: ReferenceModel, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS["story"]).ids
    with ModelWeights.open(smollm2_to_qwen2.cached(dtype="float16")) as weights:
        assert set(weights.bytes_by_dtype()) == {"float16"}
        off = error(ReferenceModel(weights).forward(ids), ours.forward(ids))
    print(f"\nfloat16 against float32: {off:.1e}")  # noqa: T201
    assert 1e-5 < off < 5e-3
