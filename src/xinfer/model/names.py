"""Tensor names of a Qwen2 checkpoint and the fields they become: both ways, and nowhere else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from xinfer.model.config import Qwen2Config

T = TypeVar("T")

LAYER_FIELDS: Final = (
    "input_ln",
    "q_w",
    "q_b",
    "k_w",
    "k_b",
    "v_w",
    "v_b",
    "o_w",
    "post_ln",
    "gate_w",
    "up_w",
    "down_w",
)
GLOBAL_FIELDS: Final = ("embed", "norm", "lm_head")

_LAYER_SUFFIXES: Final = dict(
    zip(
        LAYER_FIELDS,
        (
            "input_layernorm.weight",
            "self_attn.q_proj.weight",
            "self_attn.q_proj.bias",
            "self_attn.k_proj.weight",
            "self_attn.k_proj.bias",
            "self_attn.v_proj.weight",
            "self_attn.v_proj.bias",
            "self_attn.o_proj.weight",
            "post_attention_layernorm.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
        ),
        strict=True,
    )
)
_GLOBAL_NAMES: Final = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_FIELD_OF: Final = {suffix: field for field, suffix in _LAYER_SUFFIXES.items()}
_GLOBAL_FIELD_OF: Final = {name: field for field, name in _GLOBAL_NAMES.items()}

# Leading zeros are refused, so that no two names mean the same tensor.
_LAYER_NAME: Final = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)", re.ASCII)
# Early checkpoints stored the rotary frequencies, which are computed from the config.
_INV_FREQ: Final = re.compile(r"(.+\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[T]):
    """One of something for each tensor of a layer: an array here, a slice of a GPU buffer elsewhere.

    Shapes, with q_size = heads * head_dim and kv_size = KV heads * head_dim; weights are (outputs, inputs).
    """

    input_ln: T  # (hidden,)
    q_w: T  # (q_size, hidden)
    q_b: T  # (q_size,)
    k_w: T  # (kv_size, hidden)
    k_b: T  # (kv_size,)
    v_w: T  # (kv_size, hidden)
    v_b: T  # (kv_size,)
    o_w: T  # (hidden, q_size)
    post_ln: T  # (hidden,)
    gate_w: T  # (intermediate, hidden)
    up_w: T  # (intermediate, hidden)
    down_w: T  # (hidden, intermediate)


@dataclass(frozen=True, slots=True)
class TensorRole:
    """What a tensor is: one of `LAYER_FIELDS` and its layer, or one of `GLOBAL_FIELDS` and None."""

    field: str
    layer: int | None


def layer_tensor_name(layer: int, field: str) -> str:
    """The checkpoint's name of a field of `LAYER_FIELDS` in layer `layer`."""
    return f"model.layers.{layer}.{_LAYER_SUFFIXES[field]}"


def global_tensor_name(field: str) -> str:
    """The checkpoint's name of a field of `GLOBAL_FIELDS`."""
    return _GLOBAL_NAMES[field]


def parse(name: str) -> TensorRole | None:
    """The role of the tensor called `name`, or None where a Qwen2 has no such tensor."""
    if name in _GLOBAL_FIELD_OF:
        return TensorRole(_GLOBAL_FIELD_OF[name], None)
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_FIELD_OF:
        return None
    return TensorRole(_LAYER_FIELD_OF[match[2]], int(match[1]))


def canonical(name: str) -> str:
    """`name` with the prefix `model.` where a base model was saved without it (`layers.0...`, `norm.weight`)."""
    prefixed = f"model.{name}"
    return prefixed if parse(prefixed) is not None else name


def layer_shapes(config: Qwen2Config) -> LayerWeights[tuple[int, ...]]:
    """The shape of each tensor of a layer; all layers are alike."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.q_size, config.kv_size
    return LayerWeights(
        input_ln=(hidden,),
        q_w=(q, hidden),
        q_b=(q,),
        k_w=(kv, hidden),
        k_b=(kv,),
        v_w=(kv, hidden),
        v_b=(kv,),
        o_w=(hidden, q),
        post_ln=(hidden,),
        gate_w=(inner, hidden),
        up_w=(inner, hidden),
        down_w=(hidden, inner),
    )


def expected_shapes(config: Qwen2Config) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint with this config has, by name, in the order of the network."""
    one_layer = layer_shapes(config)
    vocab_by_hidden = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {global_tensor_name("embed"): vocab_by_hidden}
    for layer in range(config.num_hidden_layers):
        for field in LAYER_FIELDS:
            shapes[layer_tensor_name(layer, field)] = getattr(one_layer, field)
    shapes[global_tensor_name("norm")] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[global_tensor_name("lm_head")] = vocab_by_hidden
    return shapes


def may_be_absent(name: str) -> bool:
    """Whether a checkpoint without this expected tensor can be used: the LM head falls back to the embedding."""
    return name == global_tensor_name("lm_head")


def is_harmless_extra(name: str, config: Qwen2Config) -> bool:
    """Whether a surplus tensor may be skipped: a tied checkpoint's LM head, or stored rotary frequencies."""
    if config.tie_word_embeddings and name == global_tensor_name("lm_head"):
        return True
    return _INV_FREQ.fullmatch(name) is not None
