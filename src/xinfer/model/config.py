"""`config.json` and `generation_config.json` as frozen, validated values.

Whatever would change the numbers and is not understood is refused by name; a key that changes nothing passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from xinfer.errors import ConfigError
from xinfer.files import is_folder, is_there, read_json_object, shown

CONFIG_FILE: Final = "config.json"
GENERATION_CONFIG_FILE: Final = "generation_config.json"

# Far above any published Qwen2 (vocabulary 152064, hidden 8192, intermediate 29696, 80 layers, 64 heads, 1M positions),
# and low enough that a broken file cannot ask for an absurd amount of work.
_MAX_VOCAB: Final = 1 << 22
_MAX_HIDDEN: Final = 1 << 17
_MAX_INTERMEDIATE: Final = 1 << 20
_MAX_LAYERS: Final = 1024
_MAX_HEADS: Final = 1024
_MAX_HEAD_DIM: Final = 1024
_MAX_POSITIONS: Final = 1 << 27
_MAX_TOKEN_ID: Final = (1 << 31) - 1
_MAX_STOP_IDS: Final = 1024

# What transformers assumes where a Qwen2 config is silent.
_DEFAULT_MAX_POSITIONS: Final = 32768
_DEFAULT_RMS_NORM_EPS: Final = 1e-6
_DEFAULT_ROPE_THETA: Final = 10000.0
_DEFAULT_SLIDING_WINDOW: Final = 4096
_DEFAULT_MAX_WINDOW_LAYERS: Final = 28

_DTYPES: Final = ("float32", "float16", "bfloat16")
_ARCHITECTURES: Final = ("Qwen2ForCausalLM", "Qwen2Model")
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_QUANTIZATION_KEYS: Final = ("quantization_config", "quantization", "compression_config")
_ROPE_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_YARN_KEYS: Final = _ROPE_KEYS | {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
}

# Keys that would change the network, with the only value that this one computes; null and absent pass.
_ONLY_VALUES: Final[Mapping[str, object]] = {"is_causal": True, "partial_rotary_factor": 1, "use_mrope": False}

# Keys of generation_config.json that would change the text, with the values that leave it alone; null and absent pass.
_NEUTRAL_GENERATION: Final[Mapping[str, tuple[object, ...]]] = {
    "assistant_ensemble_weight": (),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


@dataclass(frozen=True, slots=True)
class _Section:
    """A JSON object whose values are asked for by type and range; null counts as absent."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def refuse(self, key: str, expected: str) -> NoReturn:
        found = f"is {shown(self.values[key])}" if key in self.values else "is missing"
        raise ConfigError(f"{self.where}: {self.prefix}{key} {found}; expected {expected}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, *, low: int, high: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high}")
        return value

    def required_integer(self, key: str, *, low: int = 1, high: int) -> int:
        value = self.integer(key, low=low, high=high)
        if value is None:
            self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float, above: bool = False) -> float | None:
        """A finite number from `low` to `high`; with `above`, `low` itself is excluded."""
        value = self.get(key)
        if value is None:
            return None
        # Comparing before converting: an integer may be too large for a float. NaN fails every comparison.
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
            or (above and value == low)
        ):
            self.refuse(key, f"a number above {low:g}, at most {high:g}" if above else f"a number {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def object(self, key: str) -> Mapping[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as one integer or a list, each once, in the order given.

        An id past the vocabulary is kept: it can never be sampled, so that it changes nothing.
        """
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        if len(ids) > _MAX_STOP_IDS or any(
            not isinstance(i, int) or isinstance(i, bool) or not 0 <= i <= _MAX_TOKEN_ID for i in ids
        ):
            self.refuse(key, "a token id, or a list of them, each 0 or more")
        return tuple(dict.fromkeys(ids))


def _open_section(source: Path | Mapping[str, Any], name: str) -> _Section:
    if isinstance(source, Mapping):
        return _Section(source, name)
    path = Path(source)
    if is_folder(path) and path.name != name:  # a folder in the place of the file is refused as one
        path = path / name
    return _Section(read_json_object(path, error=ConfigError), str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN's change of the rotary frequencies (arXiv:2309.00071), with every default resolved."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config:
    """What `config.json` says of a Qwen2: sizes, positions, windows and ids."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnScaling | None
    layer_windows: tuple[int | None, ...]  # a layer's window in tokens, itself included; None is full attention
    tie_word_embeddings: bool
    dtype: str | None  # what the config says; the tensors' own types are what counts
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        """Outputs of the query projection: heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the key projection, and of the value projection: KV heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def max_context(self) -> int:
        """Positions that the model is good for: YaRN configs often leave max_position_embeddings at the original's."""
        if self.yarn is None:
            return self.max_position_embeddings
        stretched = int(self.yarn.factor * self.yarn.original_max_position_embeddings)
        return min(max(self.max_position_embeddings, stretched), _MAX_POSITIONS)

    def num_parameters(self) -> int:
        """Weights of the network; a tied LM head is counted once."""
        attention = 2 * self.hidden_size * (self.q_size + self.kv_size) + self.q_size + 2 * self.kv_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        layers = self.num_hidden_layers * (attention + mlp + 2 * self.hidden_size)
        tables = 1 if self.tie_word_embeddings else 2
        return layers + tables * self.vocab_size * self.hidden_size + self.hidden_size

    @classmethod
    def from_json(cls, source: Path | Mapping[str, Any]) -> Qwen2Config:
        """Read a config: a folder, its config.json, or the object already parsed.

        Raises:
            ConfigError: the file is broken, a value is out of range, or something is asked for that this network does
                not compute. The message names the key, the value and what was expected.
        """
        section = _open_section(source, CONFIG_FILE)
        _refuse_other_models(section)
        heads = section.required_integer("num_attention_heads", high=_MAX_HEADS)
        kv_heads = section.integer("num_key_value_heads", low=1, high=_MAX_HEADS) or heads
        if heads % kv_heads:
            section.refuse("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
        hidden = section.required_integer("hidden_size", high=_MAX_HIDDEN)
        layers = section.required_integer("num_hidden_layers", high=_MAX_LAYERS)
        positions = section.integer("max_position_embeddings", low=1, high=_MAX_POSITIONS) or _DEFAULT_MAX_POSITIONS
        rope_theta, yarn = _rope(section, positions)
        eps = section.number("rms_norm_eps", low=0, high=0.1, above=True)
        return cls(
            vocab_size=section.required_integer("vocab_size", high=_MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=section.required_integer("intermediate_size", high=_MAX_INTERMEDIATE),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_head_dim(section, hidden, heads),
            max_position_embeddings=positions,
            rms_norm_eps=_DEFAULT_RMS_NORM_EPS if eps is None else eps,
            rope_theta=rope_theta,
            yarn=yarn,
            layer_windows=_layer_windows(section, layers),
            tie_word_embeddings=section.boolean("tie_word_embeddings") or False,
            dtype=_dtype(section),
            bos_token_id=section.integer("bos_token_id", low=0, high=_MAX_TOKEN_ID),
            eos_token_ids=section.token_ids("eos_token_id"),
        )


def _refuse_other_models(section: _Section) -> None:
    """Refuse whatever is not a plain Qwen2 with a silu MLP and unquantized weights."""
    architectures = section.get("architectures")
    if architectures is not None and (
        not isinstance(architectures, list | tuple) or not any(name in _ARCHITECTURES for name in architectures)
    ):
        section.refuse("architectures", "a list with Qwen2ForCausalLM, the only architecture that xinfer runs")
    model_type = section.text("model_type")
    if model_type != "qwen2" and not (model_type is None and architectures is not None):
        section.refuse("model_type", "'qwen2', the only model type that xinfer runs")
    if section.text("hidden_act") not in (None, "silu"):
        section.refuse("hidden_act", "'silu', the only activation of a Qwen2")
    for key in _QUANTIZATION_KEYS:
        value = section.get(key)
        if value is not None:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            named = f" (quant_method {shown(method)})" if method is not None else ""
            raise ConfigError(
                f"{section.where}: {key} is set{named}, so the weights are quantized, which xinfer does not read; "
                "use the float16 or bfloat16 release of this model"
            )
    for key, only in _ONLY_VALUES.items():
        if section.get(key) is not None and section.get(key) != only:
            section.refuse(key, f"{shown(only)}, or no such key: xinfer computes nothing else")
    if section.get("per_layer_config"):
        section.refuse("per_layer_config", "no such key: layers that differ from each other are not supported")


def _head_dim(section: _Section, hidden: int, heads: int) -> int:
    head_dim = section.integer("head_dim", low=2, high=_MAX_HEAD_DIM)
    if head_dim is None:
        if hidden % heads:
            section.refuse("hidden_size", f"a multiple of num_attention_heads, which is {heads}, or a head_dim")
        head_dim = hidden // heads
        if head_dim > _MAX_HEAD_DIM or head_dim % 2:
            section.refuse(
                "hidden_size", f"an even hidden_size / num_attention_heads up to {_MAX_HEAD_DIM}, not {head_dim}"
            )
    elif head_dim % 2:
        section.refuse("head_dim", "an even number: rotary positions turn pairs of dimensions")
    return head_dim


def _dtype(section: _Section) -> str | None:
    """The type under either key: `dtype` (transformers 5), which comes first, or `torch_dtype` (before)."""
    for key in ("dtype", "torch_dtype"):
        text = section.text(key)
        if text is not None:
            name = text.removeprefix("torch.")
            if name not in _DTYPES:
                section.refuse(key, "one of " + ", ".join(_DTYPES))
            return name
    return None


def _layer_windows(section: _Section, layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Without use_sliding_window, sliding_window and max_window_layers mean nothing."""
    window: int | None = None
    first_sliding = layers
    if section.boolean("use_sliding_window"):
        window = section.integer("sliding_window", low=1, high=_MAX_POSITIONS)
        if "sliding_window" not in section.values:
            window = _DEFAULT_SLIDING_WINDOW
        first = section.integer("max_window_layers", low=0, high=_MAX_LAYERS)
        first_sliding = _DEFAULT_MAX_WINDOW_LAYERS if first is None else first
    types = section.get("layer_types")
    if types is None:
        return tuple(window if layer >= first_sliding else None for layer in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers or any(t not in _LAYER_TYPES for t in types):
        section.refuse("layer_types", f"a list of {layers} (num_hidden_layers) of " + " or ".join(_LAYER_TYPES))
    if window is None and "sliding_attention" in types:
        section.refuse(
            "layer_types",
            "only full_attention where use_sliding_window is false or sliding_window null: there is no window to use",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope_section(section: _Section) -> _Section:
    """The rotary parameters under either name: `rope_parameters` (transformers 5) or `rope_scaling` (before)."""
    found = [(key, dict(value)) for key in ("rope_parameters", "rope_scaling") if (value := section.object(key))]
    for key, value in found:
        for nested in _LAYER_TYPES:
            if nested in value:
                raise ConfigError(
                    f"{section.where}: {key} holds {nested!r}, parameters for each layer type; xinfer supports one "
                    "set for all layers: put rope_type and rope_theta directly into it"
                )
        if None not in (value.get("type"), value.get("rope_type")) and value["type"] != value["rope_type"]:
            raise ConfigError(
                f"{section.where}: {key} has type {shown(value['type'])} and rope_type {shown(value['rope_type'])}; "
                "keep one of them"
            )
        value["rope_type"] = value.pop("type", None) if value.get("rope_type") is None else value["rope_type"]
        value.pop("type", None)
    if len(found) == 2 and found[0][1] != found[1][1]:
        raise ConfigError(
            f"{section.where}: rope_parameters and rope_scaling are both given and differ; expected one of them. "
            "Merge them into rope_parameters, with rope_theta and rope_type inside"
        )
    return _Section(found[0][1], section.where, f"{found[0][0]}.") if found else _Section({}, section.where)


def _rope(section: _Section, positions: int) -> tuple[float, YarnScaling | None]:
    """`rope_theta`, wherever it stands, and the YaRN scaling if there is one."""
    rope = _rope_section(section)
    thetas = [t for s in (rope, section) if (t := s.number("rope_theta", low=1, high=1e15)) is not None]
    if len(set(thetas)) > 1:
        rope.refuse("rope_theta", f"the same as the top-level rope_theta, which is {thetas[1]:g}; keep one of them")
    theta = thetas[0] if thetas else _DEFAULT_ROPE_THETA
    kind = rope.text("rope_type") or "default"
    if kind not in ("default", "yarn"):
        raise ConfigError(
            f"{section.where}: {rope.prefix}rope_type is {shown(kind)}, a rotary scaling that xinfer does not compute; "
            "expected 'default' or 'yarn'"
        )
    known = _YARN_KEYS if kind == "yarn" else _ROPE_KEYS
    for key, value in rope.values.items():
        if value is not None and key not in known:
            raise ConfigError(
                f"{section.where}: {rope.prefix}{shown(key)} is {shown(value)}; expected no such key for rope_type "
                f"{kind!r}: remove it, or correct rope_type"
            )
    if rope.number("partial_rotary_factor", low=0, high=1) not in (None, 1.0):
        rope.refuse("partial_rotary_factor", "1, or no such key: xinfer rotates whole heads")
    return theta, _yarn(section, rope, positions, theta) if kind == "yarn" else None


def _yarn(section: _Section, rope: _Section, positions: int, theta: float) -> YarnScaling:
    """YaRN's parameters with the defaults that transformers gives them."""
    if theta == 1:
        raise ConfigError(f"{section.where}: rope_theta is 1; expected more for YaRN, which divides by its logarithm")
    key = "original_max_position_embeddings"
    outer = section.integer(key, low=1, high=_MAX_POSITIONS)
    inner = rope.integer(key, low=1, high=_MAX_POSITIONS)
    original = outer or inner or positions
    factor = rope.number("factor", low=1, high=1 << 20)
    if factor is None:
        if original >= positions:
            rope.refuse("factor", f"a number 1 or more, or an {key} below max_position_embeddings to derive it from")
        factor = positions / original
    beta_fast = rope.number("beta_fast", low=0, high=1e6, above=True) or 32.0
    beta_slow = rope.number("beta_slow", low=0, high=1e6, above=True) or 1.0
    if beta_fast < beta_slow:
        rope.refuse("beta_fast", f"at least beta_slow, which is {beta_slow:g}")
    attention_factor = rope.number("attention_factor", low=0, high=1e3, above=True)
    mscale = rope.number("mscale", low=0, high=1e3)
    mscale_all_dim = rope.number("mscale_all_dim", low=0, high=1e3)
    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    truncate = rope.boolean("truncate")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
        truncate=True if truncate is None else truncate,
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """What `generation_config.json` says of sampling; None where it is silent."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    @classmethod
    def from_json(cls, source: Path | Mapping[str, Any]) -> GenerationConfig:
        """Read the sampling defaults: a folder, its generation_config.json, or the object already parsed.

        Raises:
            ConfigError: the file is broken, a value is out of range, or it asks for something that would change the
                text and is not supported.
        """
        section = _open_section(source, GENERATION_CONFIG_FILE)
        for key, neutral in _NEUTRAL_GENERATION.items():
            value = section.get(key)
            if value is not None and value not in neutral:
                section.refuse(key, "no such key: it would change the text and xinfer does not support it; remove it")
        pad = section.integer("pad_token_id", low=-1, high=_MAX_TOKEN_ID)
        return cls(
            do_sample=section.boolean("do_sample"),
            temperature=section.number("temperature", low=0, high=1e3),
            top_k=section.integer("top_k", low=0, high=_MAX_TOKEN_ID),
            top_p=section.number("top_p", low=0, high=1),
            min_p=section.number("min_p", low=0, high=1),
            repetition_penalty=section.number("repetition_penalty", low=0, high=1e3, above=True),
            max_new_tokens=section.integer("max_new_tokens", low=1, high=_MAX_TOKEN_ID),
            eos_token_ids=section.token_ids("eos_token_id"),
            pad_token_id=None if pad == -1 else pad,  # some published files write -1 for none
            bos_token_id=section.integer("bos_token_id", low=0, high=_MAX_TOKEN_ID),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationConfig | None:
        """The folder's sampling defaults, or None where it has no generation_config.json."""
        path = Path(folder) / GENERATION_CONFIG_FILE
        return cls.from_json(path) if is_there(path) else None
