"""Tiny checkpoints with random weights and every structural feature, written as Hugging Face writes them.

They hold a small real tokenizer and a chat template as well, so that every command can be tried on them.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from xinfer.errors import RequestError
from xinfer.model import names
from xinfer.model.config import CONFIG_FILE, GENERATION_CONFIG_FILE, Qwen2Config
from xinfer.model.weights import INDEX_FILE, SINGLE_FILE

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"

MIN_VOCAB: Final = 288  # 256 bytes, the special tokens, a few merges and the padding
_PADDING_ROWS: Final = 8  # at least so many embedding rows past the tokenizer's last id, as real checkpoints have them
MAX_BIAS_SCALE: Final = 1e6  # times 0.3: far above trained biases, and finite in every type but f16
_MAX_MERGED_VOCAB: Final = 700  # what `_TEXT` is long enough to teach

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSpec:
    """The structure of a synthetic checkpoint."""

    hidden_size: int = 64
    intermediate_size: int = 112
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int | None = None  # None leaves the key out: hidden_size / num_attention_heads
    vocab_size: int = 384
    tie_word_embeddings: bool = True
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    shards: int = 1  # more than one writes an index
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    yarn_factor: float | None = None
    yarn_original_positions: int | None = None  # None leaves the key out: max_position_embeddings
    sliding_window: int | None = None  # layers from max_window_layers on see this many tokens
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    k_bias_scale: float = 1.0  # trained checkpoints have key biases far above their activations
    spelling: Literal["transformers4", "transformers5"] = "transformers5"

    def config_json(self) -> dict[str, Any]:
        """The object that config.json holds, in the keys of the chosen transformers version."""
        ids = special_token_ids(self)
        config: dict[str, Any] = {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[TURN_END],
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.max_window_layers if self.sliding_window else self.num_hidden_layers,
            "model_type": "qwen2",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "sliding_window": self.sliding_window,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "use_sliding_window": self.sliding_window is not None,
            "vocab_size": self.vocab_size,
        }
        if self.head_dim is not None:
            config["head_dim"] = self.head_dim
        if self.layer_types is not None:
            config["layer_types"] = list(self.layer_types)
        scaling: dict[str, Any] = {}
        if self.yarn_factor is not None:
            scaling["factor"] = self.yarn_factor
            if self.yarn_original_positions is not None:
                scaling["original_max_position_embeddings"] = self.yarn_original_positions
        kind = "yarn" if scaling else "default"
        if self.spelling == "transformers4":
            config |= {"torch_dtype": self.dtype, "transformers_version": "4.46.1", "rope_theta": self.rope_theta}
            config["rope_scaling"] = {"type": kind, **scaling} if scaling else None
        else:
            config |= {"dtype": self.dtype, "transformers_version": "5.0.0"}
            config["rope_parameters"] = {"rope_type": kind, "rope_theta": self.rope_theta, **scaling}
        return dict(sorted(config.items()))


PRESETS: Final[Mapping[str, SyntheticSpec]] = MappingProxyType(
    {
        "gqa": SyntheticSpec(),
        "mha": SyntheticSpec(num_key_value_heads=4),
        "mqa": SyntheticSpec(num_key_value_heads=1),
        "tied": SyntheticSpec(tie_word_embeddings=True, spelling="transformers4"),
        "untied": SyntheticSpec(tie_word_embeddings=False),
        "one_layer": SyntheticSpec(num_hidden_layers=1),
        "deep": SyntheticSpec(num_hidden_layers=9, hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
        "wide_heads": SyntheticSpec(head_dim=40),
        "narrow_heads": SyntheticSpec(head_dim=6, num_attention_heads=6, num_key_value_heads=2),
        "odd_sizes": SyntheticSpec(
            hidden_size=60, intermediate_size=77, num_attention_heads=5, num_key_value_heads=1, vocab_size=331
        ),
        "sharded": SyntheticSpec(num_hidden_layers=3, shards=3, tie_word_embeddings=False),
        "f16": SyntheticSpec(dtype="float16"),
        "bf16": SyntheticSpec(dtype="bfloat16", tie_word_embeddings=False),
        "bf16_sharded": SyntheticSpec(dtype="bfloat16", shards=4, spelling="transformers4"),
        "yarn": SyntheticSpec(
            yarn_factor=4.0, yarn_original_positions=64, max_position_embeddings=256, spelling="transformers4"
        ),
        "yarn_silent": SyntheticSpec(yarn_factor=2.5, max_position_embeddings=512, rope_theta=10000.0),
        "sliding": SyntheticSpec(num_hidden_layers=4, sliding_window=16, max_window_layers=2, spelling="transformers4"),
        "sliding_all": SyntheticSpec(sliding_window=7, max_window_layers=0),
        "layer_types": SyntheticSpec(
            num_hidden_layers=3,
            sliding_window=12,
            max_window_layers=3,
            layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        ),
        "large_k_bias": SyntheticSpec(k_bias_scale=100.0),
        "low_theta": SyntheticSpec(rope_theta=10000.0, rms_norm_eps=1e-5, spelling="transformers4"),
    }
)


def special_token_ids(spec: SyntheticSpec) -> dict[str, int]:
    """The ids of the three special tokens: the last of the tokenizer, below the padding rows."""
    specials = (END_OF_TEXT, TURN_START, TURN_END)
    first = min(spec.vocab_size - _PADDING_ROWS - len(specials), _MAX_MERGED_VOCAB)
    return {text: first + offset for offset, text in enumerate(specials)}


def write_checkpoint(
    folder: Path, spec: SyntheticSpec, *, seed: int, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write a checkpoint with random weights into `folder`, which is made or is empty; the same seed, the same bytes.

    `progress` is called with tensors that are made, of all; with all of them when they are written.

    Raises:
        RequestError: the folder holds something already or cannot be written, the vocabulary is too small for the
            tokenizer, or there are more shards than tensors.
        ConfigError: the spec is no valid config.
    """
    folder = Path(folder)
    if spec.vocab_size < MIN_VOCAB:
        raise RequestError(f"a vocabulary of {spec.vocab_size}; expected {MIN_VOCAB} or more: every byte is a token")
    config = Qwen2Config.from_json(spec.config_json())
    tensor_count = len(names.expected_shapes(config))
    if not 1 <= spec.shards <= tensor_count:
        raise RequestError(f"{spec.shards} shards; expected 1 to {tensor_count}, the number of tensors")
    if not 0.0 <= spec.k_bias_scale <= MAX_BIAS_SCALE:
        raise RequestError(f"a scale of {spec.k_bias_scale} for the key biases; expected 0 to {MAX_BIAS_SCALE:g}")
    try:
        str(folder).encode()  # a library below takes names as UTF-8 only
        if folder.exists() and any(folder.iterdir()):
            raise RequestError(f"{folder} is not empty; give a new folder, so that nothing is overwritten")
        _write_whole(folder, spec, random_weights(spec, config, seed=seed, progress=progress))
    except (OSError, UnicodeEncodeError, SafetensorError) as problem:
        raise RequestError(f"{folder!s:.200} cannot be written: {problem}") from problem
    if progress is not None:
        progress(tensor_count, tensor_count)
    return folder


def _write_whole(folder: Path, spec: SyntheticSpec, weights: Mapping[str, NDArray[Any]]) -> None:
    """Write all files or none: into a folder beside it, which then takes its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".xinfer-", ignore_cleanup_errors=True) as made:
        partial = Path(made) / "checkpoint"
        partial.mkdir()
        _write_json(partial / CONFIG_FILE, spec.config_json())
        _write_json(partial / GENERATION_CONFIG_FILE, _generation_config(spec))
        _write_weights(partial, weights, spec.shards)
        _write_tokenizer(partial, spec)
        if folder.exists():
            folder.rmdir()  # it is empty
        partial.rename(folder)


def random_weights(
    spec: SyntheticSpec, config: Qwen2Config, *, seed: int, progress: Callable[[int, int], None] | None = None
) -> dict[str, NDArray[Any]]:
    """Weights under which activations stay near 1 and the logits have a spread of about 2."""
    bits = np.random.PCG64(seed)
    weights: dict[str, NDArray[Any]] = {}
    shapes = names.expected_shapes(config)
    for name, shape in shapes.items():
        if progress is not None:
            progress(len(weights), len(shapes))
        role = names.parse(name)
        assert role is not None
        values = _bell(bits, shape)
        if role.field in ("embed", "lm_head"):
            values *= 2.0 / math.sqrt(config.hidden_size)
        elif role.field.endswith("_w"):
            values /= math.sqrt(shape[1])
        elif role.field.endswith("_b"):
            values *= 0.3 * (spec.k_bias_scale if role.field == "k_b" else 1.0)
        else:
            values = np.float32(1) + np.float32(0.2) * values  # a norm
        weights[name] = values.astype(_DTYPES[spec.dtype])
    return weights


def _bell(bits: np.random.PCG64, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values of mean 0 and spread 1, nearly normal: sums of four 16-bit numbers.

    NumPy keeps the raw stream of a PCG64 stable between versions, but not what its Generator makes of it; and sums of
    small integers are the same on every platform. So a seed gives the same checkpoint everywhere.
    """
    words = bits.random_raw(math.prod(shape)).astype("<u8")
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32)  # 0 to 4 * 65535
    spread = math.sqrt(4 * (2**32 - 1) / 12)
    values: NDArray[np.float32] = (sums - 2 * 65535).astype(np.float32) / np.float32(spread)
    return values.reshape(shape)


def _write_weights(folder: Path, weights: Mapping[str, NDArray[Any]], shards: int) -> None:
    if shards == 1:
        _save(dict(weights), folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for shard, part in enumerate(np.array_split(np.array(list(weights)), shards), start=1):
        file = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        _save({str(name): weights[name] for name in part}, folder / file)
        weight_map |= {str(name): file for name in part}
    total = sum(array.nbytes for array in weights.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _save(tensors: dict[str, NDArray[Any]], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})  # transformers refuses a file without the format
    shutil.copymode(path.parent / CONFIG_FILE, path)  # the library lets nobody else read it, whatever the umask


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _generation_config(spec: SyntheticSpec) -> dict[str, Any]:
    ids = special_token_ids(spec)
    return {
        "bos_token_id": ids[END_OF_TEXT],
        "do_sample": True,
        "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    }


# How Qwen2 cuts text before the merges: contractions, words, single digits, punctuation, line ends, spaces.
_WORD_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE: Final = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a tiny model with random weights. Say anything.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# What the tokenizer learns its merges from.
_TEXT: Final = """\
The harbour lay quiet in the early light, and the boats that had gone out in the night were coming home one after
another. On the wall an old man counted them, as he had done every morning for thirty years: eleven, twelve, thirteen.
"There should be fourteen," he said, and his granddaughter, who was eight and knew every sail, answered that the
fourteenth was the blue one, which always stopped at the island to take on water. They waited. The wind turned to the
south; the gulls that had followed the fleet settled on the roofs of the market hall; somebody lit a stove, and there
was the smell of bread and of tar. When the blue boat rounded the point at last, nobody cheered, because nobody but the
two of them had been worried. "Fourteen," said the old man, and he wrote the number into his book beside the date.

def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("a rectangle has no negative side")
    return width * height

for number in range(10):
    print(number, area(number, number + 1))

Numbers: 0 1 2 3 4 5 6 7 8 9 10 16 32 64 100 128 256 512 1000 1024 2048 4096. Ça va bien, où es-tu? Größe, Straße,
äußern; mañana, señor; český, žluťoučký; Ελληνικά και ελληνικά; привет, как дела; 你好世界 こんにちは世界 שלום עולם.
"""


def _write_tokenizer(folder: Path, spec: SyntheticSpec) -> None:
    """A byte-level BPE cut as Qwen2's is, with the three special tokens behind its merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    ids = special_token_ids(spec)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=ids[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ids])
    assert all(tokenizer.token_to_id(text) == token for text, token in ids.items()), "the text taught too few merges"
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(spec))


def _tokenizer_config(spec: SyntheticSpec) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    ids = special_token_ids(spec)
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(token): {"content": text, **flags} for text, token in ids.items()},
        "additional_special_tokens": [TURN_START, TURN_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "errors": "replace",
        "model_max_length": spec.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
