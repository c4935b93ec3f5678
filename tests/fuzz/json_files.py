"""Mutations of config.json, generation_config.json, tokenizer_config.json and whatever else lies in the folder."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.files import (
    Files,
    Raw,
    Special,
    change_bytes,
    content_of,
    dump_json,
    load_json,
    text_of,
    tree_of,
    weird,
)

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

# --- config.json ------------------------------------------------------------------------------------------------------

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "max_window_layers", "sliding_window", "bos_token_id", "eos_token_id",
)  # fmt: skip


def config_size(rng: Random, files: Files) -> str:
    """A size that is off by one, at the edge of what is allowed, or absurd."""
    config = load_json(files, CONFIG)
    key = rng.choice(_SIZES)
    value = config.get(key)
    number = value if isinstance(value, int) else 4
    edges = (
        0, 1, 2, 3, 5, 7, 64, 1024, 1025, 4096, 1 << 17, (1 << 17) + 1, 1 << 22, (1 << 22) + 1, 1 << 27, (1 << 27) + 1,
        (1 << 31) - 1, 1 << 31, 1 << 63, number + 1, number - 1, number * 2, number // 2, -number, 10**400,
    )  # fmt: skip
    config[key] = rng.choice((rng.choice(edges), rng.choice(edges), weird(rng, value)))
    files[CONFIG] = dump_json(config)
    return f"{key} {value!r} becomes {config[key]!r:.60}"


def config_rope(rng: Random, files: Files) -> str:
    """Rotary parameters under all their names, sensible and senseless."""
    config = load_json(files, CONFIG)
    factor = rng.choice((1, 1.0, 4.0, 0.5, 0, -1, 1e6, 1 << 20, 1e300, weird(rng)))
    kinds = ("yarn", "yarn", "yarn", "default", "linear", "dynamic", "llama3", "longrope", "", None, 1, weird(rng))
    scaling: dict[str, Any] = {rng.choice(("type", "rope_type")): rng.choice(kinds), "factor": factor}
    extras: tuple[tuple[str, Any], ...] = (
        ("original_max_position_embeddings", rng.choice((1, 64, 2048, 1 << 27, 0, weird(rng)))),
        ("beta_fast", rng.choice((32, 1, 0, 1e6, 1e-300, weird(rng)))),
        ("beta_slow", rng.choice((1, 32, 0, 1e-300, weird(rng)))),
        ("attention_factor", rng.choice((1.0, 0, 1e3, -1, 1e-300, weird(rng)))),
        ("mscale", rng.choice((1, 0, 1e3, 0.707, weird(rng)))),
        ("mscale_all_dim", rng.choice((1, 0, 1e-300, 0.707, weird(rng)))),
        ("truncate", rng.choice((True, False, 1, weird(rng)))),
        ("rope_theta", rng.choice((1, 1.0, 1e4, 1e15, 1e16, 0, -1, 1.0000001, weird(rng)))),
        ("partial_rotary_factor", rng.choice((1, 0.5, weird(rng)))),
        ("full_attention", {"rope_type": "default"}),
        ("low_freq_factor", 1),
    )
    scaling.update(dict(rng.sample(extras, rng.randrange(len(extras)))))
    for key in rng.choice((("rope_scaling",), ("rope_parameters",), ("rope_scaling", "rope_parameters"))):
        config[key] = scaling
    if rng.random() < 0.3:
        config["rope_theta"] = rng.choice((1, 1e4, 1e6, 1e15, -1, weird(rng)))
    if rng.random() < 0.3:
        config["max_position_embeddings"] = rng.choice((1, 64, 1 << 27, weird(rng)))
    files[CONFIG] = dump_json(config)
    return f"rope {scaling!r:.120}"


def config_windows(rng: Random, files: Files) -> str:
    """Sliding windows and layer types in every combination."""
    config = load_json(files, CONFIG)
    layers = config["num_hidden_layers"]
    kinds = ("full_attention", "sliding_attention", "chunked_attention", None, weird(rng))
    config["use_sliding_window"] = rng.choice((True, True, True, False, None, 1, weird(rng)))
    config["sliding_window"] = rng.choice((1, 2, 7, 4096, 1 << 27, 0, -1, None, weird(rng)))
    config["max_window_layers"] = rng.choice((0, 1, layers, layers + 1, 1 << 20, -1, None, weird(rng)))
    if rng.random() < 0.6:
        length = rng.choice((layers, layers, layers, layers + 1, 0))
        config["layer_types"] = rng.choice(
            ([rng.choice(kinds[:2]) for _ in range(length)], rng.choices(kinds, k=length))
        )
    for key in rng.sample(("sliding_window", "max_window_layers", "use_sliding_window"), rng.randrange(2)):
        del config[key]
    files[CONFIG] = dump_json(config)
    return f"windows {config.get('sliding_window')!r:.40}, types {config.get('layer_types')!r:.60}"


def config_kind(rng: Random, files: Files) -> str:
    """What kind of model, number and precision it claims to be."""
    config = load_json(files, CONFIG)
    value: Any
    key, value = rng.choice(
        (
            ("model_type", rng.choice(("qwen2_moe", "qwen3", "llama", "", "Qwen2", None, weird(rng)))),
            (
                "architectures",
                rng.choice(([], ["Qwen2ForCausalLM"], ["Qwen2Model"], ["X"], "Qwen2ForCausalLM", [[]], [{}])),
            ),
            ("hidden_act", rng.choice(("gelu", "relu", "SiLU", "swish", "", None, weird(rng)))),
            ("quantization_config", rng.choice(({}, {"quant_method": weird(rng)}, [], "awq", False, None))),
            ("compression_config", weird(rng)),
            ("dtype", rng.choice(("float32", "float64", "int8", "torch.bfloat16", "auto", "", None, weird(rng)))),
            ("torch_dtype", rng.choice(("float16", "float8_e4m3fn", weird(rng)))),
            ("rms_norm_eps", rng.choice((0, 1e-6, 1e-12, 1e-300, 5e-324, 0.1, 0.11, -1e-6, 1, 10**400, weird(rng)))),
            ("tie_word_embeddings", rng.choice((True, False, None, 0, "true", weird(rng)))),
            ("is_causal", rng.choice((True, False, 1, weird(rng)))),
            (
                "eos_token_id",
                rng.choice(([], [1, 2], [1, 1], -1, [-1], 1 << 40, [None], list(range(2000)), weird(rng))),
            ),
            ("per_layer_config", weird(rng)),
            ("use_mrope", weird(rng)),
            ("attention_bias", weird(rng)),
            ("transformers_version", weird(rng)),
        )
    )
    config[key] = value
    files[CONFIG] = dump_json(config)
    return f"{key} becomes {value!r:.60}"


def config_gone(rng: Random, files: Files) -> str:
    """Keys missing, one or many."""
    config = load_json(files, CONFIG)
    gone = rng.sample(sorted(config), rng.choice((1, 1, 2, 5, len(config))))
    files[CONFIG] = dump_json({key: value for key, value in config.items() if key not in gone})
    return f"without {', '.join(gone)[:100]}"


CONFIGS = (
    config_size,
    config_size,
    config_rope,
    config_windows,
    config_kind,
    config_gone,
    tree_of(CONFIG),
    tree_of(CONFIG),
    text_of(CONFIG),
)

# --- generation_config.json -------------------------------------------------------------------------------------------

_RANGED: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1e-300, 5e-324, 1e-6, 0.7, 1, 1000, 1001, 1e308, -0.1, -0.0),
    "top_k": (0, 1, 2, 383, 384, 385, 50_000, 2**31 - 1, 2**31, 2**63, -1, 1.0, 20.5),
    "top_p": (0, 0.0, 1e-300, 0.5, 1, 1.0, 1.0001, -0.1, 2),
    "min_p": (0, 1e-300, 0.5, 1, 1.01, -0.1),
    "repetition_penalty": (0, 1e-300, 5e-324, 0.5, 1, 1.05, 1000, 1001, -1, 1e308),
    "max_new_tokens": (0, 1, 2, 2048, 2**31 - 1, 2**31, -1, 1.5),
    "max_length": (0, 1, 20, 2**40, -1),
    "do_sample": (True, False, None, 1, 0, "true"),
    "eos_token_id": ([], 0, -1, 383, 384, 10**9, 2**31, [0] * 2000, [1, "2"], [[1]], list(range(384)), None),
    "pad_token_id": (0, -1, -2, 2**31, [1], None),
    "bos_token_id": (0, -1, 2**31, [1], None),
}
_OTHERS = (
    "num_beams", "no_repeat_ngram_size", "suppress_tokens", "forced_eos_token_id", "bad_words_ids", "typical_p",
    "stop_strings",
    "guidance_scale", "sequence_bias", "watermarking_config", "encoder_repetition_penalty", "penalty_alpha",
    "min_length",
    "cache_implementation", "use_cache", "transformers_version", "renormalize_logits", "max_time",
    "num_return_sequences",
)  # fmt: skip


def generation_values(rng: Random, files: Files) -> str:
    """Values at the edges of their ranges and of floating point, several at once."""
    config = load_json(files, GENERATION)
    keys = rng.sample(sorted(_RANGED), rng.choice((1, 1, 2, 4)))
    for key in keys:
        config[key] = rng.choice((rng.choice(_RANGED[key]), rng.choice(_RANGED[key]), weird(rng, config.get(key))))
    files[GENERATION] = dump_json(config)
    return ", ".join(f"{key} {config[key]!r:.40}" for key in keys)


def generation_edges(rng: Random, files: Files) -> str:
    """Only values that are allowed, at their extremes together: the sampler must cope."""
    config = {
        "do_sample": True,
        "temperature": rng.choice((5e-324, 1e-300, 1e-6, 1, 1000)),
        "top_k": rng.choice((0, 1, 2, 10, 384, 2**31 - 1)),
        "top_p": rng.choice((5e-324, 1e-9, 0.5, 1)),
        "min_p": rng.choice((0, 5e-324, 0.5, 1)),
        "repetition_penalty": rng.choice((5e-324, 1e-300, 0.5, 1, 1000)),
        "max_new_tokens": rng.choice((1, 2, 2**31 - 1)),
        "eos_token_id": rng.choice((list(range(384)), 0, 2**31 - 1, [])),
    }
    files[GENERATION] = dump_json(dict(rng.sample(sorted(config.items(), key=str), rng.randrange(2, len(config) + 1))))
    return f"{config}"[:200]


def generation_others(rng: Random, files: Files) -> str:
    """Keys that would change the text, with values that do and values that do not."""
    config = load_json(files, GENERATION)
    key = rng.choice(_OTHERS)
    config[key] = rng.choice((0, 1, 2, [], {}, [[1]], None, False, True, 1.0, 0.0, "static", weird(rng)))
    files[GENERATION] = dump_json(config)
    return f"{key} {config[key]!r:.60}"


def generation_gone(rng: Random, files: Files) -> str:
    if rng.random() < 0.2:
        del files[GENERATION]
        return "no file"
    config = load_json(files, GENERATION)
    gone = rng.sample(sorted(config), rng.randrange(1, len(config) + 1))
    files[GENERATION] = dump_json({key: value for key, value in config.items() if key not in gone})
    return f"without {', '.join(gone)}"


GENERATIONS = (
    generation_values,
    generation_values,
    generation_edges,
    generation_others,
    generation_gone,
    tree_of(GENERATION),
    text_of(GENERATION),
)

# --- tokenizer_config.json and its companions -------------------------------------------------------------------------


def _token(rng: Random) -> Any:
    """A special token as some file might name it."""
    return rng.choice(
        (
            "<|im_end|>", "<|endoftext|>", "<absent>", "a", "", " ", "\n", "\x00", "🙂", "e", "th", "x" * 10_000, None,
            False, 7,
            {"content": "<|im_end|>"}, {"content": "<new>", "special": True}, {"content": None}, {}, [], ["<|im_end|>"],
            {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": True, "rstrip": True, "single_word": True},
            {"content": "<|im_end|>", "lstrip": weird(rng)}, Raw('"\\ud800"'), weird(rng),
        )
    )  # fmt: skip


def tokenizer_config_tokens(rng: Random, files: Files) -> str:
    """The named special tokens, and whether BOS and EOS are added."""
    config = load_json(files, TOKENIZER_CONFIG)
    keys = rng.sample(
        ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "image_token", "x_token"), rng.randrange(1, 4)
    )
    for key in keys:
        config[key] = _token(rng)
    for key in ("add_bos_token", "add_eos_token"):
        if rng.random() < 0.5:
            config[key] = rng.choice((True, True, False, None, 1, weird(rng)))
    extra = rng.choice(("additional_special_tokens", "extra_special_tokens"))
    if rng.random() < 0.5:
        config[extra] = rng.choice(
            ([_token(rng), _token(rng)], {"image_token": _token(rng)}, {"x": _token(rng)}, weird(rng), None, 5, True)
        )
    if rng.random() < 0.3:
        config["tokenizer_class"] = rng.choice(("Qwen2TokenizerFast", "LlamaTokenizer", None, 3, weird(rng)))
    files[TOKENIZER_CONFIG] = dump_json(config)
    return ", ".join(f"{key} {config[key]!r:.60}" for key in keys)


def tokenizer_config_added(rng: Random, files: Files) -> str:
    """Added tokens: ids out of order, taken, huge, not numbers; contents repeated, empty, enormous."""
    config = load_json(files, TOKENIZER_CONFIG)
    added = config["added_tokens_decoder"]
    last = max(map(int, added))
    ids = (
        last + 1, last + 2, last, 0, -1, 2**32 - 1, 2**32, 2**63, 2**64, "x", "", "1.5", " 7", "+7", "0x10", "007",
        "1" * 5000,
        "١٢", "1_0",
    )  # fmt: skip
    contents = (
        "<new>",
        "<|im_end|>",
        "a",
        "",
        " ",
        "\x00",
        "🙂",
        "n" * 100_000,
        "(a+)+$",
        None,
        3,
        Raw('"\\ud800"'),
        weird(rng),
    )
    for _ in range(rng.choice((1, 1, 2, 3))):
        token = {"content": rng.choice(contents), "special": rng.choice((True, False, None, weird(rng)))}
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            if rng.random() < 0.5:
                token[flag] = rng.choice((True, False, None, weird(rng)))
        added[rng.choice(ids)] = rng.choice((token, token, token, weird(rng)))
    if rng.random() < 0.2:
        added.update({str(last + 1 + n): {"content": f"<extra {n}>"} for n in range(rng.choice((5, 3000)))})
    if rng.random() < 0.2:
        config["added_tokens_decoder"] = rng.choice((list(added.values()), {}, None, weird(rng)))
    files[TOKENIZER_CONFIG] = dump_json(config)
    return f"{len(added)} added tokens"


def tokenizer_config_companions(rng: Random, files: Files) -> str:
    """Files that older tokenizers have beside theirs."""
    config = load_json(files, TOKENIZER_CONFIG)
    if rng.random() < 0.8:
        del config["added_tokens_decoder"]
    files[TOKENIZER_CONFIG] = dump_json(config)
    last = max(token["id"] for token in load_json(files, TOKENIZER)["added_tokens"])
    name, value = rng.choice(
        (
            (
                "added_tokens.json",
                {"<new>": rng.choice((last + 1, last, 0, -1, 2**32, 2**64, "5", None, 1.0, weird(rng)))},
            ),
            ("added_tokens.json", {"<|im_end|>": last, "": 3}),
            ("added_tokens.json", weird(rng)),
            ("special_tokens_map.json", {"eos_token": _token(rng), "additional_special_tokens": _token(rng)}),
            ("special_tokens_map.json", {"additional_special_tokens": [_token(rng), _token(rng)]}),
            ("special_tokens_map.json", weird(rng)),
        )
    )
    files[name] = dump_json(value)
    if rng.random() < 0.2:
        files[name], _ = change_bytes(rng, dump_json(value))
    return f"{name}: {value!r:.100}"


def tokenizer_config_gone(rng: Random, files: Files) -> str:
    if rng.random() < 0.2:
        del files[TOKENIZER_CONFIG]
        return "no file"
    config = load_json(files, TOKENIZER_CONFIG)
    gone = rng.sample(sorted(config), rng.randrange(1, len(config) + 1))
    files[TOKENIZER_CONFIG] = dump_json({key: value for key, value in config.items() if key not in gone})
    return f"without {', '.join(gone)[:100]}"


TOKENIZER_CONFIGS = (
    tokenizer_config_tokens,
    tokenizer_config_tokens,
    tokenizer_config_added,
    tokenizer_config_added,
    tokenizer_config_companions,
    tokenizer_config_gone,
    tree_of(TOKENIZER_CONFIG),
    text_of(TOKENIZER_CONFIG),
)

# --- the folder -------------------------------------------------------------------------------------------------------

_NAMES = (
    CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, "chat_template.jinja", "model.safetensors",
    "model.safetensors.index.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
)  # fmt: skip


def folder_special(rng: Random, files: Files) -> str:
    """Something that is no regular file under a name that is looked for: reading a FIFO would never end."""
    name = rng.choice(_NAMES)
    files[name] = special = rng.choice(
        (
            Special("folder"),
            Special("fifo"),
            Special("link", target="absent"),
            Special("link", target=name),
            Special("link", target="/dev/zero"),
            Special("link", target="/dev/null"),
            Special("link", target="."),
            Special("sparse", size=1 << 33),
            Special("sparse", size=(32 << 20) + 1),
        )
    )
    return f"{name} is {special}"


def folder_gone(rng: Random, files: Files) -> str:
    gone = rng.sample(sorted(files), rng.choice((1, 1, 2, len(files))))
    for name in gone:
        del files[name]
    return f"without {', '.join(gone)[:100]}"


def folder_moved(rng: Random, files: Files) -> str:
    """Two files under each other's name, or one as a link to a blob elsewhere, as in the hub's cache."""
    one, other = rng.sample(sorted(files), 2)
    if rng.random() < 0.5:
        files["../blob"] = content_of(files, one)
        files[one] = Special("link", target="../blob")
        return f"{one} is a link"
    files[one], files[other] = files[other], files[one]
    return f"{one} and {other} swapped"


def folder_bulk(rng: Random, files: Files) -> str:
    """A file as large as a hostile one may be, of what takes the most memory or time a byte."""
    name = rng.choice((*_NAMES[:5], "model.safetensors.index.json", "merges.txt", "chat_template.json"))
    size = rng.choice((500_000, 900_000, 3_500_000, 7_000_000, 31_000_000, 63_000_000))
    element = rng.choice(
        (b"{},", b"[],", b'"ab",', b"0,", b"1.5,", b'{"a":', b"[", b"9", b'"\\u00e9",', b"1e5,", b" ", b"a b\n")
    )
    start, end = rng.choice(
        ((b'{"x":[', b"0]}"), (b'{"weight_map":[', b"0]}"), (b'{"model":{"vocab":[', b"0]}}"), (b"", b""))
    )
    files[name] = start + element * (size // len(element)) + end
    if rng.random() < 0.3:
        files[name] = b"{" + b",".join(b'"%d":%d' % (n, n) for n in range(min(size, 7_000_000) // 14)) + b"}"
    if name == "merges.txt":
        files["vocab.json"] = b"{}"
        files.pop(TOKENIZER, None)
    return f"{name} of {len(content_of(files, name)):,} bytes, {start.decode()}{element.decode()}..."


FOLDERS = (folder_special, folder_special, folder_gone, folder_moved, folder_bulk)
