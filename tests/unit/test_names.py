from __future__ import annotations

import dataclasses

import pytest

from xinfer.model import names
from xinfer.model.config import Qwen2Config
from xinfer.model.names import GLOBAL_FIELDS, LAYER_FIELDS, LayerWeights, TensorRole
from xinfer.model.synthetic import PRESETS, SyntheticSpec

# Written out from the checkpoint's side, so that a slip in the table of names shows.
LAYER_7 = {
    "input_ln": "model.layers.7.input_layernorm.weight",
    "q_w": "model.layers.7.self_attn.q_proj.weight",
    "q_b": "model.layers.7.self_attn.q_proj.bias",
    "k_w": "model.layers.7.self_attn.k_proj.weight",
    "k_b": "model.layers.7.self_attn.k_proj.bias",
    "v_w": "model.layers.7.self_attn.v_proj.weight",
    "v_b": "model.layers.7.self_attn.v_proj.bias",
    "o_w": "model.layers.7.self_attn.o_proj.weight",
    "post_ln": "model.layers.7.post_attention_layernorm.weight",
    "gate_w": "model.layers.7.mlp.gate_proj.weight",
    "up_w": "model.layers.7.mlp.up_proj.weight",
    "down_w": "model.layers.7.mlp.down_proj.weight",
}
GLOBAL = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def config(spec: SyntheticSpec) -> Qwen2Config:
    return Qwen2Config.from_json(spec.config_json())


def test_fields_are_the_twelve_and_the_three_in_order() -> None:
    assert tuple(LAYER_7) == LAYER_FIELDS
    assert tuple(field.name for field in dataclasses.fields(LayerWeights)) == LAYER_FIELDS
    assert tuple(GLOBAL) == GLOBAL_FIELDS


@pytest.mark.parametrize(("field", "name"), LAYER_7.items())
def test_layer_names_both_ways(field: str, name: str) -> None:
    assert names.layer_tensor_name(7, field) == name
    assert names.parse(name) == TensorRole(field, 7)
    assert names.parse(name.replace(".7.", ".163.")) == TensorRole(field, 163)


@pytest.mark.parametrize(("field", "name"), GLOBAL.items())
def test_global_names_both_ways(field: str, name: str) -> None:
    assert names.global_tensor_name(field) == name
    assert names.parse(name) == TensorRole(field, None)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",
        "model.layers.0",
        "model.layers.-1.mlp.up_proj.weight",
        "model.layers.07.mlp.up_proj.weight",
        "model.layers.٣.mlp.up_proj.weight",
        "model.layers.9999999999.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight\n",
        "model.layers.0.mlp.up_proj.bias",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "layers.0.mlp.up_proj.weight",
        "model.lm_head.weight",
        "xmodel.norm.weight",
    ],
)
def test_other_names_have_no_role(name: str) -> None:
    assert names.parse(name) is None


def test_canonical_adds_the_prefix_only_where_it_makes_a_known_name() -> None:
    assert names.canonical("layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert names.canonical("embed_tokens.weight") == "model.embed_tokens.weight"
    for name in ("model.norm.weight", "lm_head.weight", "layers.3.mlp.up_proj.bias"):
        assert names.canonical(name) == name


def test_expected_shapes_of_a_hand_worked_config() -> None:
    shapes = names.expected_shapes(
        config(
            SyntheticSpec(
                hidden_size=10,
                intermediate_size=7,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=4,
                vocab_size=300,
                tie_word_embeddings=False,
            )
        )
    )
    assert len(shapes) == 2 * 12 + 3
    assert [shapes[names.layer_tensor_name(1, field)] for field in LAYER_FIELDS] == [
        (10,),
        (24, 10),
        (24,),
        (8, 10),
        (8,),
        (8, 10),
        (8,),
        (10, 24),
        (10,),
        (7, 10),
        (7, 10),
        (10, 7),
    ]
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (300, 10)
    assert shapes["model.norm.weight"] == (10,)


def test_a_tied_config_expects_no_head_and_skips_one() -> None:
    tied, untied = config(PRESETS["tied"]), config(PRESETS["untied"])
    assert "lm_head.weight" not in names.expected_shapes(tied)
    assert names.is_harmless_extra("lm_head.weight", tied)
    assert not names.is_harmless_extra("lm_head.weight", untied)
    assert names.may_be_absent("lm_head.weight")
    assert not names.may_be_absent("model.norm.weight")


def test_stored_rotary_frequencies_are_harmless() -> None:
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "rotary_emb.inv_freq"):
        assert names.is_harmless_extra(name, config(PRESETS["untied"]))
    assert not names.is_harmless_extra("model.layers.0.self_attn.rotary_emb.inv_freq.x", config(PRESETS["untied"]))
    assert not names.is_harmless_extra("model.layers.0.self_attn.xrotary_emb.inv_freq", config(PRESETS["untied"]))


@pytest.mark.parametrize("preset", PRESETS)
def test_num_parameters_is_the_sum_of_the_shapes(preset: str) -> None:
    shapes = names.expected_shapes(config(PRESETS[preset]))
    total = 0
    for shape in shapes.values():
        size = 1
        for length in shape:
            size *= length
        total += size
    assert config(PRESETS[preset]).num_parameters() == total


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", PRESETS)
def test_names_and_shapes_are_those_of_transformers(preset: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    theirs = transformers.Qwen2Config(**PRESETS[preset].config_json())
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(theirs)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if PRESETS[preset].tie_word_embeddings:
        del state["lm_head.weight"]
    assert names.expected_shapes(config(PRESETS[preset])) == state
