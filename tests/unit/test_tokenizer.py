"""The tokenizer against Qwen's real ids (golden), the library's own whole-text decode, and files that are broken."""

from __future__ import annotations

import itertools
import json
import tracemalloc
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from xinfer import cache_files, patterns, tokenizer_files
from xinfer import tokenizer as module
from xinfer.errors import RequestError, TokenizerError
from xinfer.tokenizer import IncrementalDecoder, StopMatcher, Tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "qwen_golden.json").read_text(encoding="utf-8"))
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

Counted = list[int]


def byte_level(extra: tuple[AddedToken, ...] = ()) -> tokenizers.Tokenizer:
    """256 bytes, a few merges, three special tokens (ids 262 to 264), and what else is asked for."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©")]
    vocab = {token: i for i, token in enumerate([*ALPHABET, *(left + right for left, right in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    backend.add_tokens(list(extra))
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama has it: pieces with "▁" for a space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcé你", "▁a", "▁▁", "ab", "\ufffd"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def pieces_with(decoder: Any, pieces: list[str]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["[CLS]"])
    return backend


PIECES = ["[UNK]", "▁", "▁a", "b", "▁▁", "##c", "##d", "e</w>", "f", ",", ".", "n't", "", " ", "  g", "é"]
BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": byte_level,
    "byte level, odd added tokens": lambda: byte_level((AddedToken("é x"), AddedToken("é"), AddedToken("日本"))),
    "byte fallback": byte_fallback,
    "metaspace": lambda: pieces_with(decoders.Metaspace(), PIECES),
    "word piece": lambda: pieces_with(decoders.WordPiece(cleanup=True), PIECES),
    "bpe suffix": lambda: pieces_with(decoders.BPEDecoder(), PIECES),
    "none": lambda: pieces_with(None, PIECES),
    "strips three spaces": lambda: pieces_with(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]), PIECES
    ),
}


SHARED = Tokenizer(byte_level())


@pytest.fixture(scope="module", params=list(BACKENDS))
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BACKENDS[request.param]())


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The touched part of Qwen2's vocabulary, as vocab.json and merges.txt."""
    folder = tmp_path_factory.mktemp("qwen")
    vocab = GOLDEN["vocab"] | GOLDEN["special"]  # listed here, because added tokens would get the next free ids
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *GOLDEN["merges"]]), encoding="utf-8")
    added = {str(i): {"content": t, "special": True, "normalized": False} for t, i in GOLDEN["special"].items()}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "eos_token": "<|im_end|>"})
    )
    return Tokenizer.from_folder(folder)


def write(folder: Path, backend: tokenizers.Tokenizer | None = None, **config: Any) -> Path:
    backend = backend or byte_level()
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# Ids.


def test_golden_strings_have_qwens_ids(qwen: Tokenizer) -> None:
    assert len(GOLDEN["cases"]) == 240
    for text, ids in GOLDEN["cases"]:
        assert qwen.encode(text) == ids, repr(text)


def test_golden_strings_come_back_one_id_at_a_time(qwen: Tokenizer) -> None:
    for text, ids in GOLDEN["cases"]:
        decoder = IncrementalDecoder(qwen, skip_special_tokens=False)
        shown = "".join(map(decoder.push, ids)) + decoder.finish()
        assert shown == qwen.decode(ids, skip_special_tokens=False)
        if not any(token in text for token in SPECIALS):  # NFC of the pieces between them is another thing
            assert shown == unicodedata.normalize("NFC", text), repr(text)


def test_special_tokens_spelled_out_in_a_prompt_are_recognised() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.encode("<|im_end|>") == [264]
    assert tokenizer.decode([264]) == ""
    assert tokenizer.decode([264], skip_special_tokens=False) == "<|im_end|>"
    assert (tokenizer.special_id("<|im_end|>"), tokenizer.special_id("hello"), tokenizer.special_id("x")) == (
        264,
        None,
        None,
    )


def test_truncation_and_padding_in_the_file_are_not_applied() -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert len(Tokenizer(backend).encode("a b c d e f")) == 11


def test_size_holes_and_rows_past_the_tokenizer(qwen: Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.size == 265
    assert np.flatnonzero(tokenizer.invalid_ids(270)).tolist() == [265, 266, 267, 268, 269]
    assert not tokenizer.invalid_ids(200).any()
    assert qwen.size == 151646
    valid = np.flatnonzero(~qwen.invalid_ids(151936)).tolist()
    assert valid == sorted([*GOLDEN["vocab"].values(), *GOLDEN["special"].values()])
    hole = int(np.flatnonzero(qwen.invalid_ids(151646))[0])
    assert (qwen.token(hole), qwen.token(10**6), qwen.token(-1)) == (None, None, None)


def test_ids_without_an_embedding_are_refused() -> None:
    tokenizer = Tokenizer(byte_level())
    tokenizer.check_vocab_size(265)
    with pytest.raises(TokenizerError, match=r"1 tokens past .* '<\|im_end\|>' with id 264, .* vocab_size 264"):
        tokenizer.check_vocab_size(264)


def test_text_that_has_no_utf8_form_is_refused() -> None:
    with pytest.raises(RequestError, match=r"lone surrogate '\\ud83d' at character 2"):
        Tokenizer(byte_level()).encode("ab\ud83d")
    with pytest.raises(RequestError, match="not bytes"):
        Tokenizer(byte_level()).encode(b"ab")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70])
def test_numbers_that_cannot_be_ids_are_refused(bad: int) -> None:
    with pytest.raises(RequestError, match="not a token id"):
        Tokenizer(byte_level()).decode([1, bad])


def test_ids_that_no_token_has_decode_to_nothing() -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode([tokenizer.encode("a")[0], 9999]) == "a"
    assert IncrementalDecoder(tokenizer).push(9999) == ""


# One id at a time.


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data(), skip=st.booleans())
def test_pieces_put_together_are_the_whole(any_tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.size + 2), max_size=40))
    decoder = IncrementalDecoder(any_tokenizer, skip_special_tokens=skip)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == any_tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoder.finish() == ""


def waiting(raw: bytes) -> int:
    """How many bytes at the end are the beginning of a character, by Python's own decoder."""
    for count in (3, 2, 1):
        tail = raw[-count:]
        try:
            tail.decode()
        except UnicodeDecodeError as error:
            if (error.reason, error.start, error.end) == ("unexpected end of data", 0, count):
                return count
        # Python holds the first two bytes of a surrogate until the third, though UTF-8 has no such character.
        if count == len(tail) == 2 and tail[0] == 0xED and 0xA0 <= tail[1] <= 0xBF:
            return count
    return 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=20), cut=st.integers(0, 80), noise=st.binary(max_size=6))
def test_bytes_wait_for_their_character_and_no_longer(text: str, cut: int, noise: bytes) -> None:
    raw = text.encode()
    raw = raw[:cut] + noise + raw[cut:]
    ids = {byte: ALPHABET.index(char) for char, byte in module._BYTES.items()}
    decoder = IncrementalDecoder(SHARED)
    shown = ""
    for end, byte in enumerate(raw, start=1):
        shown += decoder.push(ids[byte])
        assert shown == raw[: end - waiting(raw[:end])].decode(errors="replace")
    assert shown + decoder.finish() == raw.decode(errors="replace")


def test_half_a_character_waits() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("a👍!")
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in ids] == ["a", "", "", "", "👍", "!"]
    assert [decoder.push(i) for i in ids[:3]] == ["a", "", ""]
    assert (decoder.finish(), decoder.finish()) == ("\ufffd", "")


def test_a_run_of_bytes_waits_for_its_end() -> None:
    tokenizer = Tokenizer(byte_fallback())
    vocab = byte_fallback().get_vocab()
    ids = [vocab[t] for t in ("▁a", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "b")]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(i) for i in ids] == ["a", "", "", "", "", "👍b"]


def test_a_space_between_words_is_not_taken_for_the_texts_first() -> None:
    tokenizer = Tokenizer(BACKENDS["strips three spaces"]())
    ids = [PIECES.index(p) for p in ("▁", "▁a", "▁", "▁", "▁a", "▁▁", "b")]
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.finish() == "a   a  b" == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "metaspace", "none"])
def test_the_last_of_many_ids_costs_no_more_than_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(BACKENDS[name]())
    decoded = 0
    whole = Tokenizer.decode

    def counted(self: Tokenizer, ids: Any, **kwargs: Any) -> str:
        nonlocal decoded
        decoded += len(ids)
        return whole(self, ids, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    ids = np.random.default_rng(0).integers(0, tokenizer.size, 100_000 if name == "byte level" else 5_000)
    decoder = IncrementalDecoder(tokenizer)
    tracemalloc.start()
    for i in ids:
        decoder.push(int(i))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert decoded == 0 if name == "byte level" else decoded < 40 * len(ids)
    assert held < 100_000


def test_ids_that_decode_to_nothing_are_not_collected() -> None:
    tokenizer = Tokenizer(BACKENDS["metaspace"]())
    decoder = IncrementalDecoder(tokenizer)
    assert {decoder.push(PIECES.index("")) for _ in range(1000)} == {""}
    assert len(decoder._pending) < 20


# Stop strings.


def first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """By trying every end: the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)], True
    return text, False


def matched(pieces: list[str], stops: list[str]) -> Iterator[str | bool]:
    matcher = StopMatcher(stops)
    for piece in pieces:
        text, stopped = matcher.push(piece)
        yield text
        if stopped:
            yield True
            return
    yield matcher.finish()
    yield False


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    *shown, stopped = matched(pieces, stops)
    assert ("".join(map(str, shown)), stopped) == first_stop("".join(pieces), stops)


def test_every_short_stop_string_is_found_in_every_short_text() -> None:
    """All of them over two letters: a stop string that begins again within itself is where matching goes wrong."""
    texts = ["".join(letters) for letters in itertools.product("ab", repeat=9)]
    for stop in ("".join(letters) for size in range(1, 6) for letters in itertools.product("ab", repeat=size)):
        for text in texts:
            *shown, stopped = matched([text[:4], text[4:]], [stop])
            assert ("".join(map(str, shown)), stopped) == first_stop(text, [stop]), (stop, text)


def test_text_that_may_become_a_stop_string_waits() -> None:
    matcher = StopMatcher(["\nUser:", "###"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("Us") == ("", False)
    assert matcher.push("ing #") == ("\nUsing ", False)
    assert matcher.push("#x\nUser") == ("##x", False)
    assert matcher.push(": me") == ("", True)


def test_what_waited_is_given_at_the_end() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("no STO") == ("no ", False)
    assert (matcher.finish(), matcher.finish()) == ("STO", "")


def test_without_stop_strings_nothing_waits() -> None:
    assert StopMatcher([]).push("abc") == ("abc", False)


# Folders.


def test_names_of_special_tokens(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "bos_token": None,
        "pad_token": "<|endoftext|>",
        "image_token": "<|image|>",
        "add_bos_token": False,
        "extra_special_tokens": ["hello"],
    }
    tokenizer = Tokenizer.from_folder(write(tmp_path, **config))
    expected = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "image_token": "<|image|>"}
    assert tokenizer.special_tokens == expected
    assert tokenizer.eos_token_ids == (264,)
    # an ordinary token that is named special is one from now on
    assert tokenizer.special_id("hello") == tokenizer.encode("xhello")[1]


def test_tokens_that_the_model_has_no_row_for_are_not_made_up(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, eos_token="<eos>"))
    assert (tokenizer.size, tokenizer.eos_token_ids) == (265, ())


def test_bos_and_eos_around_every_text(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "add_bos_token": True,
        "bos_token": "<|im_start|>",
        "add_eos_token": True,
        "eos_token": "<|im_end|>",
    }
    tokenizer = Tokenizer.from_folder(write(tmp_path, **config))
    assert tokenizer.encode("hello") == [263, 259, 264]
    assert tokenizer.encode("hello", add_special_tokens=False) == [259]


def test_tokens_added_beside_tokenizer_json(tmp_path: Path) -> None:
    added = {"265": {"content": "<tool>", "special": False}, "264": {"content": "<|im_end|>", "special": True}}
    tokenizer = Tokenizer.from_folder(write(tmp_path, added_tokens_decoder=added))
    assert tokenizer.encode("<tool>") == [265]
    assert tokenizer.decode([265]) == "<tool>"
    added["270"] = {"content": "<late>", "special": False}
    with pytest.raises(TokenizerError, match=r"'<late>' should have id 270, but in order it gets 266"):
        Tokenizer.from_folder(write(tmp_path, added_tokens_decoder=added))


def test_legacy_added_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 265, "<end>": 266}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (266,)
    assert (tokenizer.is_special(265), tokenizer.is_special(266)) == (False, True)


def test_a_folder_without_a_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"neither tokenizer.json nor vocab.json .*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "absent")


# Broken files.


def changed(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to

    return change


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
UNIGRAM = {"type": "Unigram", "unk_id": 2, "vocab": [["a", -1.0], ["b", -2.0]]}
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "model gone": (lambda d: d.pop("model"), "the model is None"),
    "model of another type": (changed("model", to=5), "the model is 5"),
    "model unknown": (changed("model", "type", to="Quantum"), "unsupported model 'Quantum'"),
    "model type no string": (changed("model", "type", to={}), "unsupported model {}"),
    "vocab a list": (changed("model", "vocab", to=[]), "lacks vocab or merges"),
    "vocab id negative": (changed("model", "vocab", "h", to=-1), "cannot be used"),
    "vocab id fraction": (changed("model", "vocab", "h", to=1.5), "cannot be used"),
    "vocab id huge": (changed("model", "vocab", "h", to=2**40), "cannot be used"),
    "merge of three": (changed("model", "merges", 0, to=["a", "b", "c"]), "expected two tokens"),
    "merge of numbers": (changed("model", "merges", 0, to=[1, 2]), "are no token"),
    "merge into nothing": (changed("model", "merges", 0, to=["h", "hello"]), "are no token of the vocabulary"),
    "merge of nothing": (changed("model", "merges", 0, to=["", "h"]), "are no token of the vocabulary"),
    "prefix": (changed("model", "continuing_subword_prefix", to="##"), "continuing_subword_prefix"),
    "dropout": (changed("model", "dropout", to=0.1), "dropout"),
    "unigram out of range": (changed("model", to=UNIGRAM), "unk_id is 2"),
    "normalizer unknown": (changed("normalizer", to={"type": "Magic"}), "unsupported normalizer 'Magic'"),
    "normalizer a string": (changed("normalizer", to="NFC"), "expected an object or null"),
    "table of another program": (
        changed("normalizer", to={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        "unsupported normalizer 'Precompiled'",
    ),
    "inner part unknown": (
        changed("pre_tokenizer", to={"type": "Sequence", "pretokenizers": [{"type": "Magic"}]}),
        "unsupported pre_tokenizer 'Magic'",
    ),
    "pattern broken": (
        changed(
            "pre_tokenizer",
            to={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        ),
        "cannot be used|pattern",
    ),
    "decoder unknown": (changed("decoder", to={"type": "CTC"}), "unsupported decoder 'CTC'"),
    "template without its token": (changed("post_processor", to=TEMPLATE), "'<s>' around texts"),
    "added token id": (changed("added_tokens", 0, "id", to=900), r"'<\|endoftext\|>' should have id 900"),
    "added token without text": (lambda d: d["added_tokens"][0].pop("content"), "cannot be used"),
    "added tokens a number": (changed("added_tokens", to=3), "cannot be used"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_tokenizer_json_is_an_error(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change, message = BROKEN[name]
    write(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    change(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_folder(tmp_path).encode("hello, <|im_end|> world")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"model":' * 5000, b'{"a":"\\ud800"}', b"\x00" * 100],
    ids=range(9),
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_no_json_object_are_errors(raw: bytes, name: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(raw)
    if (name, raw) == ("tokenizer_config.json", b'{"a":"\\ud800"}'):
        Tokenizer.from_folder(tmp_path)
        return
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"1": 5}},
        {"added_tokens_decoder": {"1": {}}},
        {"eos_token": 5},
        {"eos_token": ["a"]},
        {"add_bos_token": True, "bos_token": "<absent>"},
        {"extra_special_tokens": 5},
    ],
    ids=str,
)
def test_a_broken_tokenizer_config_is_an_error(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer.from_folder(write(tmp_path, **config))


def test_merges_that_do_not_fit_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    for merges in ("a b c", "a", "a  b", "b a"):
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        with pytest.raises(TokenizerError, match=r"merges\.txt"):
            Tokenizer.from_folder(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\r\na b\r\n")
    assert Tokenizer.from_folder(tmp_path).encode("ab") == [2]


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    write(tmp_path)
    with (tmp_path / "tokenizer.json").open("r+b") as file:
        file.truncate(tokenizer_files.MAX_FILE_BYTES + 1)  # sparse: takes no room
    with pytest.raises(TokenizerError, match=r"has 67,108,865 bytes; expected at most 67,108,864"):
        Tokenizer.from_folder(tmp_path)


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """How often a tokenizer.json was taken apart to be checked, with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: Counted = []
    check = tokenizer_files._check_model

    def counting(model: Any, file: Path) -> None:
        calls.append(1)
        check(model, file)

    monkeypatch.setattr(tokenizer_files, "_check_model", counting)
    return calls


def remembered(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/xinfer/tokenizers").glob("*"))


def test_a_file_that_was_right_is_not_checked_again(tmp_path: Path, counted: Counted) -> None:
    folder = write(tmp_path / "model", added_tokens_decoder={"265": {"content": "<more>", "special": True}})
    tokenizers_read = [Tokenizer.from_folder(folder) for _ in range(3)]
    assert len(counted) == 1
    first, *others = tokenizers_read
    for other in others:
        assert other.size == first.size == 266
        assert other.encode("a<more>b") == first.encode("a<more>b")
        assert not other.invalid_ids(266).any()
        assert other.invalid_ids(267).sum() == 1


def test_another_file_another_library_and_other_checks_are_not_known(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "model") / "tokenizer.json"
    Tokenizer.from_folder(file.parent)
    file.write_bytes(file.read_bytes() + b" ")
    Tokenizer.from_folder(file.parent)
    monkeypatch.setattr(tokenizers, "__version__", "another")
    Tokenizer.from_folder(file.parent)
    monkeypatch.setattr(patterns, "__file__", str(tmp_path / "patterns.py"))
    (tmp_path / "patterns.py").write_bytes(b"stricter")
    Tokenizer.from_folder(file.parent)
    assert len(counted) == len(remembered(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["empty", "cut", "no folder", "no sources"])
def test_what_is_remembered_may_be_damaged_or_not_be_there(
    tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = write(tmp_path / "model")
    Tokenizer.from_folder(folder)
    (file,) = remembered(tmp_path)
    if damage == "no folder":
        monkeypatch.setattr(cache_files, "cache_folder", lambda _name: None)
    elif damage == "no sources":
        monkeypatch.setattr(patterns, "__file__", str(tmp_path / "gone.py"))
    else:
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1])
    assert Tokenizer.from_folder(folder).size == 265
    assert len(counted) == 2


def test_a_broken_or_patchy_file_is_never_remembered(tmp_path: Path, counted: Counted) -> None:
    broken = write(tmp_path / "broken") / "tokenizer.json"
    data = json.loads(broken.read_bytes())
    data["decoder"] = {"type": "Unknown"}
    broken.write_text(json.dumps(data), encoding="utf-8")
    for _ in range(2):
        with pytest.raises(TokenizerError, match="unsupported decoder"):
            Tokenizer.from_folder(broken.parent)
    patchy = write(tmp_path / "patchy") / "tokenizer.json"
    data = json.loads(patchy.read_bytes())
    data["model"]["vocab"][next(iter(data["model"]["vocab"]))] = 1000
    patchy.write_text(json.dumps(data), encoding="utf-8")
    for _ in range(2):
        assert Tokenizer.from_folder(patchy.parent).size == 1001
    assert len(counted) == 2
    assert remembered(tmp_path) == []


def test_an_empty_vocabulary_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="no tokens"):
        Tokenizer(tokenizers.Tokenizer(models.BPE()))


def test_a_panic_is_an_error_and_an_interrupt_stays_one() -> None:
    def panics() -> None:
        raise type("PanicException", (BaseException,), {})("slice index\nstarts at 3")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(TokenizerError, match="slice index starts at 3"):
        tokenizer_files.guarded(panics)
    with pytest.raises(KeyboardInterrupt):
        tokenizer_files.guarded(interrupted)


def test_a_real_panic_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    """A pattern that gives up on a text makes the library panic while it encodes."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), behavior="isolated")
    with pytest.raises(TokenizerError, match="retry-limit-in-match"):
        Tokenizer(backend).encode("x" * 2000)
    capfd.readouterr()
