"""The reference against transformers' Qwen2ForCausalLM, float32 on the CPU, on checkpoints that transformers wrote.

Every case is initialised and saved by transformers. Its full forward and its KV cache are compared with ours, the cache
in the same steps on both sides. `pytest -s` shows every error.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer.model import reference
from xinfer.model.reference import ReferenceModel
from xinfer.model.weights import ModelWeights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.transformers

LIMIT = 1e-5  # relative L2 error of the logits
LENGTHS = (1, 2, 37, 600)
# Where the cached run cuts its 600 tokens: single tokens, chunks, and 40 single tokens at the end.
CUTS = (0, 1, 2, 3, 9, 130, 131, 400, *range(560, 601))


@dataclass(frozen=True)
class Case:
    """A checkpoint that transformers is asked to make."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"  # what it is stored as
    shard_size: str = "1GB"
    k_bias: float | None = None  # standard deviation; None as for the other biases
    slow_k_bias: float = (
        0.0  # norm of a head's key bias in the slowest pairs, where trained checkpoints have 600 to 900
    )


def yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, "factor": factor}
    return {"rope_parameters": {**parameters, "original_max_position_embeddings": original, **more}}


def plain(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def sliding(window: int, **more: Any) -> dict[str, Any]:
    return {"use_sliding_window": True, "sliding_window": window, **more}


CASES = [
    Case("gqa"),
    Case("mha", {"num_key_value_heads": 4}),
    Case("mqa", {"num_key_value_heads": 1}),
    Case("gqa_of_7", {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 8}),
    Case("one_head", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    Case("wide_heads", {"head_dim": 64}),
    Case("narrow_heads", {"head_dim": 6}),
    Case("head_dim_128", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    Case("untied", {"tie_word_embeddings": False}),
    Case("one_layer", {"num_hidden_layers": 1}),
    Case("deep", {"num_hidden_layers": 12}),
    Case("odd_sizes", {"hidden_size": 60, "num_attention_heads": 6, "intermediate_size": 77, "vocab_size": 251}),
    Case("sharded", {"num_hidden_layers": 3, "tie_word_embeddings": False}, shard_size="60KB"),
    Case("float16", dtype="float16"),
    Case("bfloat16", dtype="bfloat16"),
    Case("bfloat16_sharded_untied", {"tie_word_embeddings": False}, dtype="bfloat16", shard_size="30KB"),
    Case("theta_1e4", plain(1e4)),
    Case("theta_1e7", plain(1e7)),
    Case("eps_1e-5", {"rms_norm_eps": 1e-5}),
    Case("eps_large", {"rms_norm_eps": 1e-2}),
    Case("k_bias_20", k_bias=20.0),
    # Scores of a hundred or two; of several hundred, float32 itself is off by more: see the test against float64.
    Case("large_k_bias", {"initializer_range": 0.05}, slow_k_bias=900.0),
    Case(
        "large_k_bias_mha_bfloat16",
        {"initializer_range": 0.05, "num_key_value_heads": 4, "head_dim": 64},
        dtype="bfloat16",
        slow_k_bias=900.0,
    ),
    Case("yarn_4", yarn(4.0, 256)),
    Case("yarn_2.5_short_original", yarn(2.5, 64) | {"head_dim": 32}),
    Case("yarn_40", yarn(40.0, 128) | {"head_dim": 64}),
    Case("yarn_attention_factor", yarn(4.0, 256, attention_factor=0.7)),
    Case("yarn_not_truncated", yarn(4.0, 256, truncate=False) | {"head_dim": 32}),
    Case("yarn_betas", yarn(8.0, 256, beta_fast=16.0, beta_slow=2.0) | {"head_dim": 32}),
    Case("yarn_mscale", yarn(8.0, 256, mscale=0.7, mscale_all_dim=1.2)),
    Case("window_all_layers", sliding(16, max_window_layers=0)),
    Case("window_upper_layers", sliding(33, max_window_layers=2, num_hidden_layers=4)),
    Case("window_2", sliding(2, max_window_layers=1)),
    Case(
        "window_layer_types",
        sliding(20, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    Case("window_longer_than_prompt", sliding(1000, max_window_layers=0)),
    Case("window_unused", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}),
    Case(
        "everything",
        {**yarn(4.0, 256), **sliding(50, max_window_layers=1), "head_dim": 24, "rms_norm_eps": 1e-5},
        dtype="bfloat16",
        shard_size="40KB",
        k_bias=10.0,
    ),
]


def write(case: Case, folder: Path) -> None:
    """Transformers' own initialisation, wider than its default so that attention is far from uniform."""
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        **plain(1e6),
        **case.config,
    }
    torch.manual_seed(sum(case.name.encode()))
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # initialised to zero
                std = 2.5 * model.config.initializer_range
                parameter.normal_(std=case.k_bias if case.k_bias and "k_proj" in name else std)
                if case.slow_k_bias and "k_proj" in name:
                    heads = parameter.view(model.config.num_key_value_heads, 2, -1)  # (KV heads, 2, D / 2)
                    slow = heads[:, :, heads.shape[-1] * 5 // 8 :]
                    slow *= case.slow_k_bias / slow.norm(dim=(1, 2), keepdim=True)
            elif "norm" in name:  # initialised to one
                parameter.normal_(mean=1.0, std=0.3)
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shard_size)


def theirs_full(model: Any, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    assert logits.dtype == torch.float32
    return np.asarray(logits.numpy())


def theirs_cached(model: Any, tokens: NDArray[np.int64], cuts: tuple[int, ...]) -> NDArray[np.float32]:
    cache = transformers.DynamicCache(config=model.config)
    known = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in known else "past_key_values"  # its name before transformers 5.20
    parts = []
    with torch.no_grad():
        for a, b in itertools.pairwise(cuts):
            parts.append(model(torch.from_numpy(tokens[a:b])[None], **{keyword: cache}).logits[0].numpy())
    return np.concatenate(parts)


def ours_cached(model: ReferenceModel, tokens: NDArray[np.int64], cuts: tuple[int, ...]) -> NDArray[np.float32]:
    cache = model.make_cache(len(tokens))
    return np.concatenate([model.forward(tokens[a:b], cache) for a, b in itertools.pairwise(cuts)])


def error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path)
    sharded = (tmp_path / "model.safetensors.index.json").exists()
    assert sharded == (case.shard_size != "1GB")
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.default_rng(7).integers(0, theirs.config.vocab_size, max(LENGTHS))
    with ModelWeights.open(tmp_path) as weights:
        assert set(weights.bytes_by_dtype()) == {case.dtype}
        ours = ReferenceModel(weights, keep=True)
        streamed = ReferenceModel(weights, keep=False)
        errors = {f"full {n}": error(ours.forward(tokens[:n]), theirs_full(theirs, tokens[:n])) for n in LENGTHS}
        cached = theirs_cached(theirs, tokens, CUTS)
        errors["cached"] = error(ours_cached(ours, tokens, CUTS), cached)
        errors["not kept"] = error(ours_cached(streamed, tokens[:40], (0, 30, 39, 40)), cached[:40])
    print(f"\n{case.name}: " + ", ".join(f"{name} {value:.1e}" for name, value in errors.items()))  # noqa: T201
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize(
    "case", [case for case in CASES if "yarn" in case.name or "theta" in case.name], ids=lambda c: c.name
)
def test_rotary_tables_equal_transformers(case: Case, tmp_path: Path) -> None:
    write(case, tmp_path)
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).model.rotary_emb
    with ModelWeights.open(tmp_path) as weights:
        config = weights.config
    frequency, factor = reference.rope_frequencies(config)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    np.testing.assert_array_max_ulp(frequency, theirs.inv_freq.numpy(), 1)
    positions = np.arange(0, 32768, 97)
    tables = reference.rope_tables(config, positions)
    expected = theirs(torch.zeros(1), torch.from_numpy(positions)[None])
    same = frequency == theirs.inv_freq.numpy()  # one unit in the last place is thousands of them at these positions
    assert same.mean() > 0.9
    for got, wanted in zip(tables, expected, strict=True):
        half = wanted[0, :, : config.head_dim // 2].numpy()
        np.testing.assert_allclose(got[:, same], half[:, same], rtol=0, atol=3e-7 * factor)


def test_scores_of_900_are_as_close_to_float64_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 cannot give 1e-5, ours has to be off from the exact answer by no more than transformers is."""
    case = Case("wild_k_bias", slow_k_bias=900.0)
    write(case, tmp_path)
    load = partial(transformers.Qwen2ForCausalLM.from_pretrained, tmp_path)
    tokens = np.random.default_rng(7).integers(0, 320, 300)
    single = theirs_full(load(dtype=torch.float32, attn_implementation="eager"), tokens)
    with ModelWeights.open(tmp_path) as weights:
        ours = ReferenceModel(weights).forward(tokens)

    def rms_norm(self: Any, x: Any) -> Any:  # transformers' own goes through float32
        return self.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm, "forward", rms_norm)
    with torch.no_grad():
        double = load(dtype=torch.float64, attn_implementation="sdpa")(torch.from_numpy(tokens)[None], use_cache=False)
    assert double.logits.dtype == torch.float64
    exact = double.logits[0].numpy()
    print(f"\n{case.name}: ours {error(ours, exact):.1e}, transformers {error(single, exact):.1e} from float64")  # noqa: T201
    assert error(ours, exact) < 1.25 * error(single, exact)
    assert error(ours, exact) > LIMIT  # else the case belongs to the others


def test_decoding_token_by_token_from_the_first(tmp_path: Path) -> None:
    write(CASES[0], tmp_path)
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = np.random.default_rng(8).integers(0, 320, 300)
    cuts = tuple(range(301))
    with ModelWeights.open(tmp_path) as weights:
        ours = ours_cached(ReferenceModel(weights), tokens, cuts)
    assert error(ours, theirs_cached(theirs, tokens, cuts)) < LIMIT


def test_window_of_one(tmp_path: Path) -> None:
    """Every token sees itself alone. Full forward only: transformers' cache keeps all keys for this window."""
    write(Case("window_1", sliding(1, max_window_layers=0)), tmp_path)
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens = np.random.default_rng(9).integers(0, 320, 50)
    with ModelWeights.open(tmp_path) as weights:
        ours = ReferenceModel(weights).forward(tokens)
    assert error(ours, theirs_full(theirs, tokens)) < LIMIT


def test_the_cases_cover_600_tokens_and_enough_shapes() -> None:
    assert len(CASES) >= 24
    assert len({case.name for case in CASES}) == len(CASES)
    assert max(LENGTHS) == CUTS[-1] == 600
