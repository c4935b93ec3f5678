from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from xinfer.errors import ConfigError
from xinfer.model.config import GenerationConfig, Qwen2Config
from xinfer.model.synthetic import PRESETS

# What the published files say, as far as it matters.
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_7B = QWEN25_05B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(**changes: Any) -> Qwen2Config:
    """The 0.5B's config with changes; a value of `...` takes the key out."""
    values = {key: value for key, value in {**QWEN25_05B, **changes}.items() if value is not ...}
    return Qwen2Config.from_json(values)


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    return str(caught.value)


def test_published_config() -> None:
    config = read()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (151936, 896, 4864)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (24, 14, 2)
    assert (config.head_dim, config.q_size, config.kv_size, config.group_size) == (64, 896, 128, 7)
    assert (config.rms_norm_eps, config.rope_theta, config.yarn) == (1e-6, 1e6, None)
    assert config.max_position_embeddings == config.max_context == 32768
    assert config.layer_windows == (None,) * 24
    assert (config.tie_word_embeddings, config.dtype) == (True, "bfloat16")
    assert (config.bos_token_id, config.eos_token_ids) == (151643, (151645,))


@pytest.mark.parametrize(("values", "count"), [(QWEN25_05B, 494_032_768), (QWEN25_7B, 7_615_616_512)])
def test_num_parameters_is_what_the_model_cards_say(values: dict[str, Any], count: int) -> None:
    assert Qwen2Config.from_json(values).num_parameters() == count


def test_what_transformers_assumes_where_the_config_is_silent() -> None:
    silent = dict.fromkeys(
        [
            "bos_token_id",
            "eos_token_id",
            "hidden_act",
            "max_position_embeddings",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_theta",
            "tie_word_embeddings",
            "torch_dtype",
            "use_sliding_window",
        ],
        ...,
    )
    for config in (read(**silent), read(**dict.fromkeys(silent))):  # absent, then null
        assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), None)
        assert (config.max_position_embeddings, config.num_key_value_heads) == (32768, 14)
        assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-6, 10000.0, False)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": ..., "dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32", "dtype": "float16"}, "float16"),
    ],
)
def test_dtype_under_either_key(changes: dict[str, Any], dtype: str) -> None:
    assert read(**changes).dtype == dtype


def test_any_even_head_dim() -> None:
    assert read(head_dim=None).head_dim == 64
    assert read(head_dim=80).q_size == 1120
    assert read(hidden_size=900, head_dim=2).kv_size == 4
    assert "head_dim is 63; expected an even number" in refused(head_dim=63)
    assert "hidden_size is 900; expected a multiple of num_attention_heads, which is 14" in refused(hidden_size=900)
    assert "hidden_size is 126; expected an even hidden_size / num_attention_heads" in refused(hidden_size=126)


class TestRope:
    def test_theta_in_either_place(self) -> None:
        assert read(rope_theta=10000).rope_theta == 10000.0
        assert read(rope_theta=..., rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope_theta == 5e5
        assert read(rope_theta=2e5, rope_parameters={"rope_type": "default"}).rope_theta == 2e5
        assert read(rope_theta=2e5, rope_parameters={"rope_theta": 2e5}).rope_theta == 2e5

    def test_thetas_that_differ_are_refused(self) -> None:
        message = refused(rope_theta=2e5, rope_parameters={"rope_theta": 1e6})
        assert "rope_parameters.rope_theta is 1000000.0; expected the same" in message
        assert "200000" in message

    @pytest.mark.parametrize(
        "scaling", [None, {}, {"type": "default"}, {"rope_type": "default"}, {"rope_type": None, "factor": None}]
    )
    def test_no_scaling(self, scaling: Any) -> None:
        assert read(rope_scaling=scaling).yarn is None

    @pytest.mark.parametrize(
        "changes",
        [
            {"rope_scaling": YARN},
            {"rope_scaling": {**YARN, "rope_type": "yarn"}},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}},
            {"rope_theta": ..., "rope_parameters": {**YARN, "rope_theta": 1e6}},
            {"rope_scaling": YARN, "rope_parameters": YARN},
        ],
    )
    def test_yarn_in_every_spelling(self, changes: dict[str, Any]) -> None:
        config = read(**changes)
        assert config.yarn is not None
        assert (config.yarn.factor, config.yarn.original_max_position_embeddings) == (4.0, 32768)
        assert (config.yarn.beta_fast, config.yarn.beta_slow, config.yarn.truncate) == (32.0, 1.0, True)
        assert config.yarn.attention_factor == 0.1 * math.log(4.0) + 1.0
        assert config.rope_theta == 1e6
        assert config.max_context == 131072

    def test_max_context_is_not_below_max_position_embeddings(self) -> None:
        assert read(rope_scaling=YARN, max_position_embeddings=200000).max_context == 200000

    def test_yarn_options(self) -> None:
        options = {"beta_fast": 24, "beta_slow": 2.5, "attention_factor": 1.5, "truncate": False}
        yarn = read(rope_scaling=YARN | options).yarn
        assert yarn is not None
        assert (yarn.beta_fast, yarn.beta_slow, yarn.attention_factor, yarn.truncate) == (24.0, 2.5, 1.5, False)

    def test_mscale_counts_where_both_are_given(self) -> None:
        for options, expected in [
            ({"mscale": 0.707, "mscale_all_dim": 1.0}, 0.96432691),  # (0.1 * 0.707 ln 4 + 1) / (0.1 ln 4 + 1)
            ({"mscale": 0.707}, 1.13862944),
            ({"mscale": 0.707, "mscale_all_dim": 0}, 1.13862944),
            ({"mscale": 0.707, "mscale_all_dim": 1.0, "attention_factor": 2}, 2.0),
        ]:
            yarn = read(rope_scaling=YARN | options).yarn
            assert yarn is not None
            assert yarn.attention_factor == pytest.approx(expected, rel=1e-7)

    def test_original_positions_at_the_top_come_first(self) -> None:
        yarn = read(rope_scaling=YARN, original_max_position_embeddings=1024).yarn
        assert yarn is not None
        assert yarn.original_max_position_embeddings == 1024

    def test_factor_from_the_positions_where_it_is_null(self) -> None:
        yarn = read(rope_scaling=YARN | {"factor": None, "original_max_position_embeddings": 8192}).yarn
        assert yarn is not None
        assert yarn.factor == 4.0

    def test_two_scalings_that_differ_are_refused(self) -> None:
        message = refused(rope_scaling=YARN, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
        assert "rope_parameters and rope_scaling are both given and differ" in message
        assert "type 'yarn' and rope_type 'default'" in refused(rope_scaling=YARN | {"rope_type": "default"})

    @pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope", "mrope", "su", "proportional"])
    def test_other_scalings_are_refused_by_name(self, kind: str) -> None:
        message = refused(rope_scaling={"type": kind, "factor": 2.0})
        assert f"rope_scaling.rope_type is '{kind}'" in message
        assert "expected 'default' or 'yarn'" in message

    @pytest.mark.parametrize(
        ("scaling", "fact"),
        [
            (YARN | {"factor": 0.5}, "rope_scaling.factor is 0.5; expected a number 1 to"),
            (YARN | {"factor": True}, "rope_scaling.factor is True"),
            (YARN | {"factor": "4"}, "rope_scaling.factor is '4'"),
            ({"type": "yarn"}, "rope_scaling.factor is missing"),
            (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
            (YARN | {"beta_fast": 0}, "rope_scaling.beta_fast is 0; expected a number above 0"),
            (YARN | {"beta_fast": 0.5}, "rope_scaling.beta_fast is 0.5; expected at least beta_slow, which is 1"),
            (YARN | {"attention_factor": 0}, "rope_scaling.attention_factor is 0"),
            (YARN | {"attention_factor": -1.0}, "rope_scaling.attention_factor is -1.0"),
            (YARN | {"truncate": 1}, "rope_scaling.truncate is 1; expected true or false"),
            (YARN | {"short_factor": [1.0]}, "rope_scaling.'short_factor' is [1.0]; expected no such key"),
            ({"type": "default", "factor": 4.0}, "rope_scaling.'factor' is 4.0; expected no such key"),
            ({"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor is 0.5; expected 1"),
            ({"rope_type": ["yarn"]}, "rope_scaling.rope_type is ['yarn']; expected a string"),
            ({"full_attention": {"rope_type": "default"}}, "rope_scaling holds 'full_attention'"),
            ([], "rope_scaling is []; expected an object"),
            ("yarn", "rope_scaling is 'yarn'; expected an object"),
        ],
    )
    def test_broken_scaling(self, scaling: Any, fact: str) -> None:
        assert fact in refused(rope_scaling=scaling)

    def test_yarn_needs_a_theta_with_a_logarithm(self) -> None:
        assert read(rope_theta=1).rope_theta == 1.0
        assert "rope_theta is 1; expected more for YaRN" in refused(rope_theta=1, rope_scaling=YARN)


# Keys that change YaRN, in the combinations in which transformers reads them.
YARN_VARIANTS: list[dict[str, Any]] = [
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "yarn", "factor": 1.0}},
    {"rope_scaling": {"type": "yarn", "factor": 8.0}},
    {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
    {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 8192}},
    {"rope_scaling": YARN | {"attention_factor": 1.25}},
    {"rope_scaling": YARN | {"attention_factor": None, "mscale": 0.707, "mscale_all_dim": 1.0}},
    {"rope_scaling": YARN | {"mscale": 0.707}},
    {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0}},
    {"rope_scaling": YARN | {"beta_fast": None, "beta_slow": None, "truncate": False}},
    {"rope_scaling": YARN | {"beta_fast": 16, "beta_slow": 2}},
    {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 10000.0}},
]


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", YARN_VARIANTS)
def test_yarn_is_resolved_as_transformers_resolves_it(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {key: value for key, value in copy.deepcopy({**QWEN25_05B, **changes}).items() if value is not None}
    theirs = transformers.Qwen2Config(**values)
    ours = read(**changes)
    assert ours.yarn is not None
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert ours.yarn.attention_factor == attention_factor
    assert ours.yarn.original_max_position_embeddings == theirs.rope_parameters["original_max_position_embeddings"]
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]

    # The frequencies from our values alone, in float64 by the formula of the paper's section 3.2 (NTK-by-parts).
    dim, yarn = ours.head_dim, ours.yarn
    original = yarn.original_max_position_embeddings

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(ours.rope_theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    for pair, frequency in enumerate(frequencies.tolist()):
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        plain = ours.rope_theta ** (-2 * pair / dim)
        assert frequency == pytest.approx(plain * kept + plain / yarn.factor * (1 - kept), rel=1e-5)


class TestWindows:
    def test_ignored_without_use_sliding_window(self) -> None:
        windows = read(sliding_window="nonsense", max_window_layers=-3).layer_windows
        assert windows == (None,) * 24

    def test_layers_from_max_window_layers_on_slide(self) -> None:
        windows = read(use_sliding_window=True, sliding_window=512, max_window_layers=21).layer_windows
        assert windows == (None,) * 21 + (512,) * 3
        assert read(use_sliding_window=True, sliding_window=1, max_window_layers=0).layer_windows == (1,) * 24
        assert read(use_sliding_window=True, max_window_layers=24).layer_windows == (None,) * 24
        assert read(use_sliding_window=True, sliding_window=None).layer_windows == (None,) * 24

    def test_transformers_defaults(self) -> None:
        values = {"use_sliding_window": True, "sliding_window": ..., "num_hidden_layers": 30, "max_window_layers": ...}
        assert read(**values).layer_windows == (None,) * 28 + (4096,) * 2

    def test_explicit_layer_types_win(self) -> None:
        types = ["sliding_attention", "full_attention"] * 12
        windows = read(use_sliding_window=True, sliding_window=9, max_window_layers=24, layer_types=types).layer_windows
        assert windows == (9, None) * 12
        full = read(use_sliding_window=True, sliding_window=9, max_window_layers=0, layer_types=["full_attention"] * 24)
        assert full.layer_windows == (None,) * 24

    def test_sliding_layers_without_a_window_are_refused(self) -> None:
        types = ["sliding_attention"] * 24
        assert "there is no window to use" in refused(layer_types=types)  # transformers fails in its mask here
        assert "there is no window to use" in refused(use_sliding_window=True, sliding_window=None, layer_types=types)

    @pytest.mark.parametrize(
        "types", [["full_attention"] * 23, ["chunked_attention"] * 24, "full_attention", [None] * 24, {}, []]
    )
    def test_broken_layer_types(self, types: Any) -> None:
        message = refused(layer_types=types)
        assert "layer_types is " in message
        assert "expected a list of 24 (num_hidden_layers) of full_attention or sliding_attention" in message

    @pytest.mark.parametrize("window", [0, -1, 1.5, "8", True, 1 << 60])
    def test_broken_window(self, window: Any) -> None:
        assert "sliding_window is" in refused(use_sliding_window=True, sliding_window=window)

    @pytest.mark.transformers
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("preset", PRESETS)
    def test_windows_are_those_of_transformers(self, preset: str) -> None:
        transformers = pytest.importorskip("transformers")
        theirs = transformers.Qwen2Config(**PRESETS[preset].config_json())
        windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
        assert Qwen2Config.from_json(PRESETS[preset].config_json()).layer_windows == windows


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"model_type": "llama"}, ["model_type is 'llama'", "'qwen2'"]),
        ({"model_type": "qwen2_moe"}, ["model_type is 'qwen2_moe'"]),
        ({"model_type": 2}, ["model_type is 2; expected a string"]),
        ({"model_type": None, "architectures": None}, ["model_type is None"]),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, ["architectures", "Qwen2ForSequenceClassification"]),
        ({"architectures": "Qwen2ForCausalLM"}, ["architectures is 'Qwen2ForCausalLM'; expected a list"]),
        ({"architectures": []}, ["architectures is []"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
        ({"hidden_act": ["silu"]}, ["hidden_act is ['silu']; expected a string"]),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ["quantization_config is set (quant_method 'gptq')", "use the float16 or bfloat16 release"],
        ),
        ({"quantization": {"bits": 4}}, ["quantization is set"]),
        ({"quantization_config": []}, ["quantization_config is set"]),
        ({"torch_dtype": "float64"}, ["torch_dtype is 'float64'", "float32, float16, bfloat16"]),
        ({"dtype": 16}, ["dtype is 16; expected a string"]),
        ({"is_causal": False}, ["is_causal is False"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5"]),
        ({"use_mrope": True}, ["use_mrope is True"]),
        ({"per_layer_config": {"0": {}}}, ["per_layer_config is"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3; expected a divisor of num_attention_heads", "14"]),
        ({"num_key_value_heads": 28}, ["num_key_value_heads is 28; expected a divisor"]),
        ({"tie_word_embeddings": "true"}, ["tie_word_embeddings is 'true'; expected true or false"]),
        ({"use_sliding_window": 1}, ["use_sliding_window is 1; expected true or false"]),
        ({"eos_token_id": "151645"}, ["eos_token_id is '151645'"]),
        ({"eos_token_id": [151645, -1]}, ["eos_token_id is [151645, -1]"]),
        ({"eos_token_id": [True]}, ["eos_token_id is [True]"]),
        ({"eos_token_id": {"a": 1}}, ["eos_token_id is {'a': 1}"]),
        ({"eos_token_id": list(range(5000))}, ["eos_token_id is [0, 1,"]),
        ({"bos_token_id": 1.0}, ["bos_token_id is 1.0"]),
        ({"rope_theta": 0}, ["rope_theta is 0; expected a number 1 to"]),
        ({"rope_theta": math.nan}, ["rope_theta is nan"]),
        ({"rope_theta": math.inf}, ["rope_theta is inf"]),
        ({"rope_theta": 10**400}, ["rope_theta is 1000"]),
        ({"rope_theta": {"__float__": "Infinity"}}, ["rope_theta is {'__float__': 'Infinity'}"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps is 0; expected a number above 0, at most 0.1"]),
        ({"rms_norm_eps": -1e-6}, ["rms_norm_eps is -1e-06"]),
        ({"rms_norm_eps": False}, ["rms_norm_eps is False"]),
        ({"rms_norm_eps": "1e-6"}, ["rms_norm_eps is '1e-6'"]),
    ],
)
def test_refusals_name_key_value_and_expectation(changes: dict[str, Any], facts: list[str]) -> None:
    message = refused(**changes)
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_sizes_are_required_positive_bounded_integers(key: str) -> None:
    assert f"config.json: {key} is missing; expected an integer from 1 to " in refused(**{key: ...})
    junk: list[Any] = [None, 0, -1, True, 1.0, "64", [64], {}, math.nan, 10**18, 10**5000]
    for value in junk:
        assert f"config.json: {key} is " in refused(**{key: value})


def test_no_valid_config_asks_for_an_absurd_size() -> None:
    most = read(
        vocab_size=1 << 22,
        hidden_size=1 << 17,
        intermediate_size=1 << 20,
        num_hidden_layers=1024,
        num_attention_heads=1024,
        num_key_value_heads=1024,
        head_dim=1024,
    )
    assert most.num_parameters() < 2**50


def test_architecture_alone_or_model_type_alone_is_enough() -> None:
    assert read(model_type=...).hidden_size == 896
    assert read(architectures=...).hidden_size == 896
    assert read(architectures=["Qwen2Model"]).hidden_size == 896


def test_eos_ids() -> None:
    assert read(eos_token_id=[7, 5, 7]).eos_token_ids == (7, 5)
    assert read(eos_token_id=[]).eos_token_ids == ()
    assert read(eos_token_id=0).eos_token_ids == (0,)


def test_source_may_be_the_file_its_folder_or_the_object(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN25_05B), encoding="utf-8")
    assert Qwen2Config.from_json(path) == Qwen2Config.from_json(tmp_path) == read()


def test_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        read().hidden_size = 5  # type: ignore[misc]


class TestGeneration:
    def test_published_file(self) -> None:
        config = GenerationConfig.from_json(
            {
                "bos_token_id": 151643,
                "pad_token_id": 151643,
                "do_sample": True,
                "eos_token_id": [151645, 151643],
                "repetition_penalty": 1.1,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "transformers_version": "4.37.0",
            }
        )
        assert config == GenerationConfig(
            do_sample=True,
            temperature=0.7,
            top_k=20,
            top_p=0.8,
            repetition_penalty=1.1,
            eos_token_ids=(151645, 151643),
            pad_token_id=151643,
            bos_token_id=151643,
        )
        assert (config.min_p, config.max_new_tokens) == (None, None)

    def test_base_models_file(self) -> None:
        values = {"bos_token_id": 151643, "do_sample": False, "eos_token_id": 151643, "max_new_tokens": 2048}
        config = GenerationConfig.from_json(values)
        assert (config.do_sample, config.eos_token_ids, config.max_new_tokens) == (False, (151643,), 2048)

    def test_null_and_empty_are_silent(self) -> None:
        silent = GenerationConfig()
        assert GenerationConfig.from_json({}) == silent
        everything = ["do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"]
        everything += ["eos_token_id", "pad_token_id", "bos_token_id", "num_beams", "suppress_tokens", "typical_p"]
        assert GenerationConfig.from_json(dict.fromkeys(everything)) == silent

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("temperature", 0),
            ("temperature", 2.5),
            ("top_k", 0),
            ("top_p", 0.0),
            ("top_p", 1),
            ("min_p", 0),
            ("min_p", 1.0),
            ("repetition_penalty", 0.01),
            ("max_new_tokens", 1),
            ("bos_token_id", 0),
        ],
    )
    def test_limits_are_inside(self, key: str, value: float) -> None:
        assert getattr(GenerationConfig.from_json({key: value}), key) == value

    @pytest.mark.parametrize(
        ("key", "values"),
        [
            ("do_sample", [0, 1, "true", []]),
            ("temperature", [-0.1, math.nan, math.inf, "1", True, 10**400, [], {}]),
            ("top_k", [-1, 1.5, "20", True, 1 << 40]),
            ("top_p", [-0.1, 1.1, math.nan, "0.8", False]),
            ("min_p", [-0.1, 1.1, math.nan, "0.1"]),
            ("repetition_penalty", [0, -1, math.nan, "1.1", 1e9]),
            ("max_new_tokens", [0, -1, 2.0, "10", True]),
            ("eos_token_id", [-1, "1", 1.5, [[1]], [None], {}, True]),
            ("pad_token_id", [-2, "0", 0.0]),
            ("bos_token_id", [-1, "0", [1]]),
        ],
    )
    def test_values_out_of_range(self, key: str, values: list[Any]) -> None:
        for value in values:
            with pytest.raises(ConfigError, match=rf"^generation_config.json: {key} is .*; expected "):
                GenerationConfig.from_json({key: value})

    def test_minus_one_is_no_padding(self) -> None:
        assert GenerationConfig.from_json({"pad_token_id": -1}).pad_token_id is None

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("no_repeat_ngram_size", 3),
            ("num_beams", 4),
            ("typical_p", 0.9),
            ("suppress_tokens", [1]),
            ("begin_suppress_tokens", [1]),
            ("forced_bos_token_id", 0),
            ("forced_eos_token_id", 2),
            ("bad_words_ids", [[1]]),
            ("sequence_bias", {"1": 2}),
            ("min_new_tokens", 1),
            ("min_length", 5),
            ("guidance_scale", 1.5),
            ("penalty_alpha", 0.6),
            ("epsilon_cutoff", 3e-4),
            ("watermarking_config", {}),
            ("stop_strings", ["x"]),
            ("stop_strings", "x"),
            ("max_time", 1.0),
            ("encoder_repetition_penalty", 1.2),
            ("top_h", 0.4),
            ("num_beams", "1"),
        ],
    )
    def test_what_would_change_the_text_is_refused_by_name(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=rf"{key} is .* would change the text .* remove it"):
            GenerationConfig.from_json({key: value})

    def test_neutral_values_and_harmless_keys_pass(self) -> None:
        neutral = {
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "typical_p": 1.0,
            "suppress_tokens": [],
            "sequence_bias": {},
            "min_length": 0,
            "guidance_scale": 1,
            "renormalize_logits": True,
            "use_cache": True,
            "length_penalty": 2.0,
            "max_length": 32768,
            "cache_implementation": "static",
            "chat_format": "chatml",
            "_from_model_config": True,
        }
        assert GenerationConfig.from_json(neutral) == GenerationConfig()

    def test_from_folder(self, tmp_path: Path) -> None:
        assert GenerationConfig.from_folder(tmp_path) is None
        path = tmp_path / "generation_config.json"
        path.symlink_to("gone")
        with pytest.raises(ConfigError, match="is a link to gone"):
            GenerationConfig.from_folder(tmp_path)
        path.unlink()
        path.write_text('{"top_k": 5}', encoding="utf-8")
        assert GenerationConfig.from_folder(tmp_path) == GenerationConfig(top_k=5)
        path.write_text('{"top_k": "5"}', encoding="utf-8")
        with pytest.raises(ConfigError, match=r"generation_config.json: top_k is '5'; expected an integer from 0 to"):
            GenerationConfig.from_folder(tmp_path)


JUNK: list[Any] = [None, True, False, 0, -1, 1, 2, 7, 63, 1 << 31, 10**18, -0.5, 0.5, 1e308, "", "yarn", [], [1], {}]
JUNK += [{"rope_type": "yarn"}, ["full_attention"] * 24, [[]], {"a": {"b": []}}, "\ud800", "x" * 1000]


@pytest.mark.parametrize("seed", range(20))
def test_mutated_values_give_a_config_or_a_config_error(seed: int) -> None:
    """Junk in one to three places of a config: a valid result or a ConfigError, nothing else, and a short message."""
    chance = random.Random(seed)
    for _ in range(100):
        source = chance.choice([QWEN25_05B | {"rope_scaling": YARN}, PRESETS["layer_types"].config_json()])
        values: dict[str, Any] = copy.deepcopy(dict(source))
        for _ in range(chance.randint(1, 3)):
            target: Any = values
            key = chance.choice(list(values))
            if isinstance(values[key], Mapping) and values[key] and chance.random() < 0.7:
                target, key = values[key], chance.choice(list(values[key]))
            target[key] = chance.choice(JUNK)
        for reader in (Qwen2Config, GenerationConfig):
            message = ""
            try:
                reader.from_json(values)
            except ConfigError as problem:
                message = str(problem)
            assert len(message) < 500
