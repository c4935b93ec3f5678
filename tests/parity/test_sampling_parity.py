"""Our kept tokens and probabilities against transformers' own logits processors, in transformers' own order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer.sampling import Sampler, SamplingParams

pytestmark = pytest.mark.transformers


def transformers_probs(
    logits: NDArray[np.float32], *, ids: list[int], bias: dict[int, float], settings: dict[str, Any], dtype: str
) -> NDArray[np.float64]:
    """(vocab,) what transformers samples from, built by GenerationMixin as `generate` builds it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sequence_bias = {(token,): value for token, value in bias.items()} or None
    config = transformers.GenerationConfig(do_sample=True, sequence_bias=sequence_bias, **settings)

    class Mixin(transformers.GenerationMixin):  # type: ignore[misc,name-defined]
        config = transformers.PretrainedConfig()

    processors = Mixin()._get_logits_processor(config, input_ids_seq_length=len(ids))
    scores = torch.tensor(logits, dtype=getattr(torch, dtype))[None]
    scores = processors(torch.tensor([ids], dtype=torch.long), scores)
    probs: NDArray[np.float64] = torch.softmax(scores, dim=-1)[0].double().numpy()
    return probs


def our_probs(
    logits: NDArray[np.float32], *, ids: list[int], bias: dict[int, float], settings: dict[str, Any]
) -> NDArray[np.float64]:
    params = SamplingParams(logit_bias=bias, seed=0, **settings)
    kept, values = Sampler(params, prompt_ids=ids, vocab_size=logits.size).distribution(logits)
    probs = np.zeros(logits.size)
    probs[kept] = values
    return probs


def random_case(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([5, 40, 700, 3000]))
    logits = rng.standard_normal(vocab) * rng.choice([0.3, 2.0, 8.0])
    if rng.random() < 0.5:
        logits = np.round(logits * 8) / 8  # as coarse as bfloat16: ties everywhere
    settings: dict[str, Any] = {
        "temperature": float(rng.choice([1.0, 0.25, 0.7, 1.3, 5.0])),
        "repetition_penalty": float(rng.choice([1.0, 1.05, 1.3, 0.8])),
        "top_k": int(rng.choice([0, 1, 2, 20, 400, 5000])),
        "top_p": float(rng.choice([1.0, 0.8, 0.5, 0.95, 0.01])),
        "min_p": float(rng.choice([0.0, 0.05, 0.3, 1.0])) if rng.random() < 0.6 else None,
    }
    biased = rng.choice(vocab, size=min(vocab, int(rng.integers(0, 6))), replace=False)
    return {
        "logits": logits.astype(np.float32),
        "ids": rng.integers(0, vocab, rng.integers(1, 30)).tolist(),
        # Eighths, so that transformers' float32 bias tensor holds them exactly.
        "bias": {int(token): float(rng.integers(-40, 40)) / 8 for token in biased},
        "settings": settings,
    }


def assert_same_choice(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], message: str, *, rtol: float, atol: float
) -> None:
    """The same tokens are kept, with the same probabilities.

    Where top-p cuts through tokens of one score, torch's unstable sort decides which of them stay: then as many stay.
    """
    np.testing.assert_allclose(np.sort(ours), np.sort(theirs), rtol=rtol, atol=atol, err_msg=message)
    swapped = (ours > 0) != (theirs > 0)
    in_a_tie = np.maximum(ours, theirs)[swapped]
    assert np.allclose(in_a_tie, in_a_tie[:1], rtol=rtol, atol=atol), message
    np.testing.assert_allclose(ours[~swapped], theirs[~swapped], rtol=rtol, atol=atol, err_msg=message)


@pytest.mark.parametrize("block", range(10))
def test_kept_tokens_and_probabilities_are_transformers(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        case = random_case(seed)
        theirs = transformers_probs(**case, dtype="float64")
        assert_same_choice(our_probs(**case), theirs, f"{seed} {case['settings']}", rtol=1e-9, atol=1e-15)


def test_float32_as_transformers_runs_it_differs_by_rounding_only() -> None:
    """`generate` works in float32: but for tokens whose mass is within rounding of a border, the outcome is ours."""
    same = 0
    for seed in range(1000, 1200):
        case = random_case(seed)
        theirs = transformers_probs(**case, dtype="float32")
        ours = our_probs(**case)
        if np.count_nonzero(ours) == np.count_nonzero(theirs):
            same += 1
            assert_same_choice(ours, theirs, f"{seed} {case['settings']}", rtol=2e-5, atol=1e-7)
    assert same >= 196, same


def test_greedy_takes_what_torch_argmax_takes() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    for _ in range(200):
        logits = (np.round(rng.standard_normal(300) * 4) / 4).astype(np.float32)
        params = SamplingParams(temperature=0)
        token = Sampler(params, prompt_ids=[], vocab_size=300).sample(logits, 0).token
        assert token == int(torch.argmax(torch.tensor(logits)))
