"""Mutations of tokenizer.json, and of the older form of vocab.json with merges.txt."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.files import Files, Pairs, Raw, change_bytes, dump_json, load_json, text_of, tree_of, weird
from tests.fuzz.json_files import TOKENIZER, TOKENIZER_CONFIG

# Patterns that backtrack without end on the prompt, that are broken, or that match nothing or everything.
PATTERNS = (
    "(a+)+$", "(a|a)*b", "(a*)*b", "(.*)*x", "(a|aa)+$", "(?:a+)+?!", "((a*)*)*c", "(\\w+\\s?)+$",
    "a*a*a*a*a*a*a*a*b", ".*.*.*=.*",
    "(", "[", "*", "a{2,1}", "a{100000}", "(a{1000}){1000}", "\\p{Nonsense}", "(?<n>a)\\g<n>", "(?<n>a\\g<n>)", "\\1",
    "(?<=a+)b",
    "", "^", "$", "|", ".", "\\s+", "\\X", "(?!)", "(?=)", "(?i:'s|'t)", "[^\\r\\n]", "\\b", "\x00", "🙂+",
    "(?:" * 500 + ")" * 500,
    "(" * 20_000 + ")" * 20_000, "a|" * 20_000, "[a-" + "z" * 20_000, "(?(1)a|b)", "(?>a+)", "a++", "\\x{110000}",
    "\\ud800",
)  # fmt: skip


ATOMS = (
    "a",
    "b",
    "[ab]",
    ".",
    "\\w",
    "\\s",
    "[^b]",
    "\\p{L}",
    "\\p{N}",
    " ",
    "🙂",
    "\\d",
    "!",
    "\\S",
    "[[:alpha:]]",
    "'",
)


def random_pattern(rng: Random, depth: int = 0) -> str:
    """A regular expression of Oniguruma's grammar; most compile, and many take for ever."""
    kind = rng.randrange(9)
    if depth > 4 or kind <= 2:
        return rng.choice(ATOMS)
    inner = random_pattern(rng, depth + 1)
    if kind == 3:
        return f"({rng.choice(('?:', '', '?i:', '?>', '?=', '?!', '?<=', '?<!', '?<n>'))}{inner})"
    if kind == 4:
        return inner + random_pattern(rng, depth + 1)
    if kind == 5:
        return f"(?:{inner}|{random_pattern(rng, depth + 1)})"
    if kind == 6:
        return inner + rng.choice(("$", "\\b", "^", "\\1", "\\z", "|", ""))
    body = inner if inner in ATOMS else f"(?:{inner})"
    return body + rng.choice(("*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "++", "{0,40}", "{,2}", "**"))


def _regex(rng: Random) -> str:
    return rng.choice(PATTERNS) if rng.random() < 0.5 else random_pattern(rng)


def _pattern(rng: Random) -> Any:
    pattern = _regex(rng)
    return rng.choice(
        ({"Regex": pattern}, {"Regex": pattern}, {"Regex": pattern}, {"String": pattern}, pattern, weird(rng))
    )


def _text(rng: Random) -> Any:
    return rng.choice(("", " ", "▁", "Ġ", "a", "aa", "x" * 1000, "\x00", "🙂", "e\u0301", weird(rng)))


def _count(rng: Random) -> Any:
    return rng.choice((0, 1, 2, 3, 100, 2**31, 2**32, 2**63, 2**64, -1, 1.5, weird(rng)))


def _flag(rng: Random) -> Any:
    return rng.choice((True, False, True, False, None, weird(rng)))


def _behavior(rng: Random) -> Any:
    return rng.choice(
        ("Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous", "isolated", weird(rng))
    )


def _charsmap(rng: Random) -> Any:
    """A precompiled table of Unigram normalizers: its length, a double array, strings."""
    units = rng.choice((0, 1, 2, 4, 256, 1024))
    array = rng.randbytes(4 * units) if rng.random() < 0.5 else bytes(4 * units)
    size = rng.choice((len(array), len(array) + 4, 0, 3, 2**31, 2**32 - 1, max(0, len(array) - 4)))
    blob = struct.pack("<I", size) + array + rng.choice((b"", b"\x00", b"a\x00b\x00", b"\xff\xfe"))
    text = base64.b64encode(rng.choice((blob, blob, blob[:3], b""))).decode()
    return rng.choice((text, text, text, text[:-1], "!", weird(rng)))


Maker = Callable[[Random, int], dict[str, Any]]


def _inner(rng: Random, depth: int, makers: dict[str, Maker]) -> Any:
    """The parts of a sequence: a few, none, or very deep."""
    if depth > 2 or rng.random() < 0.1:
        return rng.choice(([], None, weird(rng)))
    return [component(rng, makers, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 40)))]


def component(rng: Random, makers: dict[str, Maker], depth: int = 0) -> Any:
    """A random part of a tokenizer, its fields sometimes missing or surplus."""
    kind = rng.choice(sorted(makers))
    part = {"type": kind, **makers[kind](rng, depth)}
    if rng.random() < 0.1 and len(part) > 1:
        part.pop(rng.choice(sorted(part)))
    if rng.random() < 0.05:
        part["type"] = rng.choice(("Nonsense", "", None, kind.lower(), weird(rng)))
    if rng.random() < 0.05:
        part[rng.choice(("x", "pattern", "prepend", "trim_offsets"))] = weird(rng)
    return part


NORMALIZERS: dict[str, Maker] = {
    "BertNormalizer": lambda rng, _: {
        "clean_text": _flag(rng), "handle_chinese_chars": _flag(rng), "strip_accents": _flag(rng),
        "lowercase": _flag(rng),
    },
    "ByteLevel": lambda rng, _: {},
    "Lowercase": lambda rng, _: {},
    "NFC": lambda rng, _: {},
    "NFD": lambda rng, _: {},
    "NFKC": lambda rng, _: {},
    "NFKD": lambda rng, _: {},
    "Nmt": lambda rng, _: {},
    "Precompiled": lambda rng, _: {"precompiled_charsmap": _charsmap(rng)},
    "Prepend": lambda rng, _: {"prepend": _text(rng)},
    "Replace": lambda rng, _: {"pattern": _pattern(rng), "content": _text(rng)},
    "Sequence": lambda rng, depth: {"normalizers": _inner(rng, depth, NORMALIZERS)},
    "Strip": lambda rng, _: {"strip_left": _flag(rng), "strip_right": _flag(rng)},
    "StripAccents": lambda rng, _: {},
}  # fmt: skip
PRE_TOKENIZERS: dict[str, Maker] = {
    "BertPreTokenizer": lambda rng, _: {},
    "ByteLevel": lambda rng, _: {
        "add_prefix_space": _flag(rng), "trim_offsets": _flag(rng), "use_regex": _flag(rng),
    },
    "CharDelimiterSplit": lambda rng, _: {"delimiter": rng.choice((" ", "a", "", "ab", "🙂", weird(rng)))},
    "Digits": lambda rng, _: {"individual_digits": _flag(rng)},
    "FixedLength": lambda rng, _: {"length": _count(rng)},
    "Metaspace": lambda rng, _: {
        "replacement": rng.choice(("▁", "", "ab", "🙂", weird(rng))), "split": _flag(rng),
        "prepend_scheme": rng.choice(("always", "never", "first", "x", weird(rng))),
    },
    "Punctuation": lambda rng, _: {"behavior": _behavior(rng)},
    "Sequence": lambda rng, depth: {"pretokenizers": _inner(rng, depth, PRE_TOKENIZERS)},
    "Split": lambda rng, _: {"pattern": _pattern(rng), "behavior": _behavior(rng), "invert": _flag(rng)},
    "UnicodeScripts": lambda rng, _: {},
    "Whitespace": lambda rng, _: {},
    "WhitespaceSplit": lambda rng, _: {},
}  # fmt: skip
DECODERS: dict[str, Maker] = {
    "BPEDecoder": lambda rng, _: {"suffix": _text(rng)},
    "ByteFallback": lambda rng, _: {},
    "ByteLevel": lambda rng, _: {"add_prefix_space": _flag(rng), "trim_offsets": _flag(rng), "use_regex": _flag(rng)},
    "CTC": lambda rng, _: {"pad_token": _text(rng), "word_delimiter_token": _text(rng), "cleanup": _flag(rng)},
    "Fuse": lambda rng, _: {},
    "Metaspace": lambda rng, _: {
        "replacement": rng.choice(("▁", "", "ab")),
        "prepend_scheme": "always",
        "split": _flag(rng),
    },
    "Replace": lambda rng, _: {"pattern": _pattern(rng), "content": _text(rng)},
    "Sequence": lambda rng, depth: {"decoders": _inner(rng, depth, DECODERS)},
    "Strip": lambda rng, _: {
        "content": rng.choice((" ", "a", "", "ab", weird(rng))),
        "start": _count(rng),
        "stop": _count(rng),
    },
    "WordPiece": lambda rng, _: {"prefix": _text(rng), "cleanup": _flag(rng)},
}


def _pieces(rng: Random) -> Any:
    """The template of a post-processor."""
    ids = ("<|im_end|>", "<|endoftext|>", "<absent>", "", weird(rng))
    pieces: list[Any] = [
        rng.choice(
            (
                {"Sequence": {"id": rng.choice(("A", "B", "C", weird(rng))), "type_id": _count(rng)}},
                {"SpecialToken": {"id": rng.choice(ids), "type_id": rng.choice((0, 1, 2**32, weird(rng)))}},
            )
        )
        for _ in range(rng.randrange(4))
    ]
    return rng.choice((pieces, pieces, [*pieces, {"Sequence": {"id": "A", "type_id": 0}}], weird(rng)))


def _template_tokens(rng: Random) -> Any:
    tokens = {
        token: {
            "id": rng.choice((token, token, "other", weird(rng))),
            "ids": rng.choice(([0], [], [2**31], [2**32], [-1], [0] * 100_000, weird(rng))),
            "tokens": rng.choice(([token], [], [token, token], weird(rng))),
        }
        for token in rng.sample(("<|im_end|>", "<|endoftext|>", "<absent>", ""), rng.randrange(4))
    }
    return rng.choice((tokens, tokens, tokens, weird(rng)))


def _pair(rng: Random) -> Any:
    return rng.choice((["<|im_end|>", 375], ["<absent>", 2**32 - 1], ["", 0], ["x", -1], [1, "x"], [], weird(rng)))


POST_PROCESSORS: dict[str, Maker] = {
    "BertProcessing": lambda rng, _: {"sep": _pair(rng), "cls": _pair(rng)},
    "ByteLevel": lambda rng, _: {"add_prefix_space": _flag(rng), "trim_offsets": _flag(rng), "use_regex": _flag(rng)},
    "RobertaProcessing": lambda rng, _: {
        "sep": _pair(rng), "cls": _pair(rng), "trim_offsets": _flag(rng), "add_prefix_space": _flag(rng),
    },
    "Sequence": lambda rng, depth: {"processors": _inner(rng, depth, POST_PROCESSORS)},
    "TemplateProcessing": lambda rng, _: {
        "single": _pieces(rng), "pair": _pieces(rng), "special_tokens": _template_tokens(rng),
    },
}  # fmt: skip
PARTS: dict[str, dict[str, Maker]] = {
    "normalizer": NORMALIZERS,
    "pre_tokenizer": PRE_TOKENIZERS,
    "decoder": DECODERS,
    "post_processor": POST_PROCESSORS,
}


def parts(rng: Random, files: Files) -> str:
    """One or more of the four parts become random ones, or go."""
    tokenizer = load_json(files, TOKENIZER)
    chosen = rng.sample(sorted(PARTS), rng.choice((1, 1, 1, 2, 4)))
    for name in chosen:
        tokenizer[name] = None if rng.random() < 0.1 else component(rng, PARTS[name])
    files[TOKENIZER] = dump_json(tokenizer)
    return "; ".join(f"{name} {tokenizer[name]!r:.90}" for name in chosen)


def parts_twice(rng: Random, files: Files) -> str:
    """A part under a key that comes twice: a reader that checks one may be followed by one that uses the other."""
    tokenizer = load_json(files, TOKENIZER)
    name = rng.choice(sorted(PARTS))
    others = [component(rng, PARTS[name]), rng.choice((None, tokenizer[name]))]
    rng.shuffle(others)
    files[TOKENIZER] = dump_json(Pairs((*tokenizer.items(), (name, others[0]), (name, others[1]))))
    return f"{name} {others[0]!r:.90}, {others[1]!r:.90}"


def patterns(rng: Random, files: Files) -> str:
    """A regular expression of somebody else's."""
    tokenizer = load_json(files, TOKENIZER)
    pattern = _regex(rng)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": rng.random() < 0.5}
    replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": rng.choice(("", "a", "aa", "x" * 1000))}
    where = rng.choice(("split", "only split", "normalizer", "decoder"))
    if where == "split":
        tokenizer["pre_tokenizer"]["pretokenizers"][0] = split
    elif where == "only split":
        tokenizer["pre_tokenizer"] = split
    elif where == "normalizer":
        tokenizer["normalizer"] = replace
    else:
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], replace]}
    files[TOKENIZER] = dump_json(tokenizer)
    return f"{where} with {pattern!r:.60}"


def vocabulary(rng: Random, files: Files) -> str:
    """Ids repeated, missing, negative, huge or no ids; tokens that are odd or gone."""
    tokenizer = load_json(files, TOKENIZER)
    vocab = tokenizer["model"]["vocab"]
    token = rng.choice(sorted(vocab))
    kind = rng.choice(("id", "id", "id", "gone", "many gone", "odd token", "empty", "list", "shuffled", "more", "none"))
    if kind == "id":
        ids = (
            -1,
            0,
            1,
            10**6,
            2**31,
            2**32 - 1,
            2**32,
            2**63,
            2**64,
            1.5,
            1.0,
            "1",
            None,
            True,
            [1],
            Raw("1" * 5000),
            weird(rng),
        )
        vocab[token] = rng.choice(ids)
    elif kind == "gone":
        del vocab[token]
    elif kind == "many gone":
        for gone in rng.sample(sorted(vocab), len(vocab) // 2):
            del vocab[gone]
    elif kind == "odd token":
        odd = ("", " ", "\x00", "🙂", "x" * 100_000, Raw('"\\ud800"'), "<0x41>", "<|im_end|>", "\U0010ffff")
        vocab[rng.choice(odd)] = vocab.pop(token)
    elif kind == "empty":
        vocab.clear()
    elif kind == "list":
        tokenizer["model"]["vocab"] = rng.choice((list(vocab), [[t, -1.0] for t in vocab], weird(rng)))
    elif kind == "shuffled":
        shuffled = list(vocab.values())
        rng.shuffle(shuffled)
        tokenizer["model"]["vocab"] = dict(zip(vocab, shuffled, strict=True))
    elif kind == "more":
        vocab.update({f"extra {n}": len(vocab) + n for n in range(rng.choice((1, 8, 9, 20_000)))})
    else:
        del tokenizer["model"]["vocab"]
    files[TOKENIZER] = dump_json(tokenizer)
    return f"vocabulary: {kind}, {token!r:.40}"


def merges(rng: Random, files: Files) -> str:
    """Merges of tokens that are not there, of the wrong form, repeated, in another order."""
    tokenizer = load_json(files, TOKENIZER)
    listed = tokenizer["model"]["merges"]
    at = rng.randrange(len(listed))
    odd: tuple[Any, ...] = (
        ["absent", "also absent"], ["a", "absent"], ["a"], [], ["a", "b", "c"], "a b", "a", "", " ", "a b c",
        ["", ""], ["a", ""],
        [1, 2], None, {"a": "b"}, ["🙂", "\x00"], listed[0], listed[-1], [listed[at][1], listed[at][0]],
        Raw('["\\ud800", "a"]'),
        weird(rng, listed[at]),
    )  # fmt: skip
    kind = rng.choice(("one", "one", "one", "insert", "gone", "strings", "reversed", "empty", "none", "other"))
    if kind == "one":
        listed[at] = rng.choice(odd)
    elif kind == "insert":
        listed.insert(at, rng.choice(odd))
    elif kind == "gone":
        del listed[at]
    elif kind == "strings":
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in listed]
    elif kind == "reversed":
        listed.reverse()
    elif kind == "empty":
        listed.clear()
    elif kind == "none":
        del tokenizer["model"]["merges"]
    else:
        tokenizer["model"]["merges"] = weird(rng, listed)
    files[TOKENIZER] = dump_json(tokenizer)
    return f"merges: {kind} at {at}"


def added_tokens(rng: Random, files: Files) -> str:
    """Added tokens: contents that match everywhere or nowhere, ids that lie, flags of other types."""
    tokenizer = load_json(files, TOKENIZER)
    added = tokenizer["added_tokens"]
    contents = (
        "", " ", "a", "aa", "\n", "\x00", "🙂", "e\u0301", "n" * 100_000, "(a+)+", ".*", "<|im_end|>", "▁", "Ġ", None,
        7, Raw('"\\ud800"'), weird(rng),
    )  # fmt: skip
    for _ in range(rng.choice((1, 1, 2, 5))):
        token = {
            "id": rng.choice((376, 376, 377, 0, 375, -1, 2**32 - 1, 2**32, 2**64, None, "376", 376.0, weird(rng))),
            "content": rng.choice(contents),
            **{flag: rng.random() < 0.5 for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")},
        }
        if rng.random() < 0.2:
            token[rng.choice(sorted(token))] = weird(rng)
        if rng.random() < 0.1:
            del token[rng.choice(sorted(token))]
        where = rng.choice(("append", "append", "replace", "first"))
        if where == "replace":
            added[rng.randrange(len(added))] = token
        else:
            added.insert(0 if where == "first" else len(added), token)
    if rng.random() < 0.1:
        tokenizer["added_tokens"] = rng.choice((None, {}, [], added * 2, added[::-1], weird(rng)))
    files[TOKENIZER] = dump_json(tokenizer)
    return f"added tokens {added[-1]!r:.120}"


def model(rng: Random, files: Files) -> str:
    """Another kind of model, or another option of this one."""
    tokenizer = load_json(files, TOKENIZER)
    bpe = tokenizer["model"]
    vocab = bpe["vocab"]
    unk = rng.choice(("a", "<absent>", "", None, weird(rng)))
    models: tuple[dict[str, Any], ...] = (
        {"type": "Unigram", "unk_id": rng.choice((0, 5, 10**9, -1, None, weird(rng))),
        "vocab": [[t, -float(i)] for t, i in vocab.items()],
         "byte_fallback": _flag(rng)},
        {"type": "Unigram", "unk_id": 0, "vocab": rng.choice(([], [["a", 0]], [["a"]],
        [["", -1.0], ["a", Raw("NaN")]], weird(rng)))},
        {"type": "WordLevel", "vocab": vocab, "unk_token": unk},
        {"type": "WordPiece", "vocab": vocab, "unk_token": unk, "continuing_subword_prefix": _text(rng),
         "max_input_chars_per_word": _count(rng)},
        {"type": rng.choice(("Nonsense", None, "bpe", weird(rng))), "vocab": vocab, "merges": bpe["merges"]},
        {"vocab": vocab, "merges": bpe["merges"]},
        {},
    )  # fmt: skip
    if rng.random() < 0.5:
        tokenizer["model"] = rng.choice(models)
        how = f"model {tokenizer['model'].get('type')!r:.40}"
    else:
        key = rng.choice(
            (
                "dropout",
                "unk_token",
                "continuing_subword_prefix",
                "end_of_word_suffix",
                "fuse_unk",
                "byte_fallback",
                "ignore_merges",
            )
        )
        bpe[key] = rng.choice((0, 0.0, 0.5, 1.0, 2.0, True, False, None, "a", "", "##", "</w>", "<absent>", weird(rng)))
        how = f"{key} {bpe[key]!r:.60}"
    files[TOKENIZER] = dump_json(tokenizer)
    return how


def settings(rng: Random, files: Files) -> str:
    """What the file says of cutting and padding, and of its version."""
    tokenizer = load_json(files, TOKENIZER)
    key, value = rng.choice(
        (
            ("truncation", {"direction": "Right", "max_length": _count(rng), "strategy": "LongestFirst",
            "stride": _count(rng)}),
            ("truncation", weird(rng)),
            ("padding", {
                "strategy": rng.choice(("BatchLongest", {"Fixed": _count(rng)})),
                "direction": rng.choice(("Left", "Right", "Up")),
                "pad_to_multiple_of": _count(rng), "pad_id": _count(rng), "pad_type_id": 0, "pad_token": _text(rng),
            }),
            ("padding", weird(rng)),
            ("version", rng.choice(("1.0", "2.0", "", None, 1, weird(rng)))),
        )
    )  # fmt: skip
    tokenizer[key] = value
    files[TOKENIZER] = dump_json(tokenizer)
    return f"{key} {value!r:.100}"


def old_form(rng: Random, files: Files) -> str:
    """vocab.json and merges.txt instead, in order or damaged."""
    tokenizer = load_json(files, TOKENIZER)
    vocab, listed = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    del files[TOKENIZER]
    files["vocab.json"] = dump_json(vocab)
    lines = ["#version: 0.2", *(" ".join(pair) for pair in listed), ""]
    files["merges.txt"] = "\n".join(lines).encode()
    kind = rng.choice(("whole", "vocab text", "merges text", "vocab value", "merges line", "no merges", "no config"))
    if kind == "vocab text":
        files["vocab.json"], _ = change_bytes(rng, dump_json(vocab))
    elif kind == "merges text":
        files["merges.txt"], _ = change_bytes(rng, "\n".join(lines).encode())
    elif kind == "vocab value":
        token = rng.choice(sorted(vocab))
        vocab[token] = rng.choice((-1, 2**32, 2**64, 10**6, "1", None, 1.5, weird(rng)))
        files["vocab.json"] = dump_json(vocab)
    elif kind == "merges line":
        line = rng.choice(
            ("a", "a b c", " ", "absent absent", "\x00 \x00", "a b\r", "#version", " a", "a ", "\u2028 a")
        )
        lines.insert(rng.randrange(1, len(lines)), line)
        files["merges.txt"] = "\n".join(lines).encode()
    elif kind == "no merges":
        del files["merges.txt"]
    elif kind == "no config":
        files.pop(TOKENIZER_CONFIG, None)
    return kind


TOKENIZERS = (
    parts,
    parts,
    parts,
    parts_twice,
    patterns,
    vocabulary,
    merges,
    added_tokens,
    model,
    settings,
    old_form,
    tree_of(TOKENIZER),
    text_of(TOKENIZER),
)
