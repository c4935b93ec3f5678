"""A conversation's prompts: the ids of its answers as they were generated, wherever the text is still the same."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.conftest import CheckpointFactory
from tokenizers import decoders, models, normalizers, pre_tokenizers

from xinfer import LLM, hub
from xinfer.errors import ContextLengthError
from xinfer.tokenizer import MOST_NFC_SHRINKS, Tokenizer
from xinfer.transcript import Turn, encode_after

HOT: dict[str, Any] = {
    "temperature": 1.5,
    "top_k": 0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}  # random weights: hardly ever canonical

LETTERS = re.compile("[a-z]")


@pytest.fixture(scope="module")
def llm(checkpoint: CheckpointFactory) -> Iterator[LLM]:
    with LLM(checkpoint("gqa", seed=11)) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(checkpoint: CheckpointFactory) -> Tokenizer:
    return Tokenizer.from_folder(checkpoint("gqa"))


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` one byte a token, as no tokenizer would cut it."""
    ids = [token for char in text for token in tokenizer.encode(char)]
    assert ids != tokenizer.encode(text)
    return ids


@pytest.mark.parametrize("seed", range(4))
def test_the_kept_prefix_is_the_whole_history(llm: LLM, seed: int) -> None:
    tokenizer = llm.checkpoint.tokenizer
    letters = [i for i in range(tokenizer.size) if LETTERS.fullmatch(tokenizer.token(i) or "")]
    others = dict.fromkeys(set(range(tokenizer.size)) - set(letters), float("-inf"))  # no half characters, no end
    talk = llm.conversation()
    kept = 0
    for text in ("Who goes there?", "And then?", "Why?"):
        stream = talk.send(text, max_tokens=20, logit_bias=others, seed=seed, **HOT)
        answer = "".join(chunk.text for chunk in stream)
        done = stream.completion
        assert done.stats.cached_tokens == kept
        assert list(done.token_ids) != tokenizer.encode(answer)  # or the test shows nothing
        kept = len(done.prompt_token_ids) + len(done.token_ids) - 1  # the last one was drawn and not computed


def test_what_is_kept_says_what_was_asked(llm: LLM) -> None:
    """Whatever ids are used, their text is the rendered conversation."""
    talk = llm.conversation(system="Be brief.")
    for text in ("Who?", "Where?", "When?"):
        stream = talk.send(text, max_tokens=12, seed=5, **HOT)
        messages = [*talk.messages, {"role": "user", "content": text}]
        ids = stream.completion.prompt_token_ids
        prompt = llm.checkpoint.tokenizer.decode(ids, skip_special_tokens=False)
        assert prompt == llm.checkpoint.render_chat(messages)
        for _ in stream:
            pass


HEAD, TAIL = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize(
    ("answer", "rendered", "kept"),
    [
        ("the harbour", "the harbour", 11),  # as it was
        ("the harbour STOP", "the harbour", 11),  # cut at a stop string
        ("the harbour  ", "the harbour", 11),  # trimmed by the template
        ("(thinking) the harbour", "the harbour", 0),  # shortened at its beginning
        ("the harbour", "another", 0),  # edited
        ("", "", 0),
    ],
)
def test_ids_are_kept_as_far_as_the_text_agrees(tokenizer: Tokenizer, answer: str, rendered: str, kept: int) -> None:
    prompt_ids = spell(tokenizer, "user") + tokenizer.encode(HEAD)[3:]  # not canonical either
    answer_ids = spell(tokenizer, answer) if answer else []
    ids = encode_after(Turn(HEAD, prompt_ids, answer_ids), HEAD + rendered + TAIL, tokenizer)
    rest = rendered[kept:] + TAIL
    assert ids == [*prompt_ids, *answer_ids[:kept], *tokenizer.encode(rest, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("turn", "prompt"),
    [
        (None, "the sea"),
        (Turn("another", [1], [2]), "the sea"),
        (Turn("the se", [1, 2], []), "the sea"),  # the tokenizer cuts elsewhere: "ea" is a token
    ],
)
def test_without_agreement_the_tokenizer_decides(tokenizer: Tokenizer, turn: Turn | None, prompt: str) -> None:
    assert encode_after(turn, prompt, tokenizer) == tokenizer.encode(prompt)


def test_half_a_character_is_not_kept(tokenizer: Tokenizer) -> None:
    halves = tokenizer.encode("\u4e00")[:1]
    assert tokenizer.decode(halves) == "\ufffd"
    answer = [*spell(tokenizer, "the"), *halves]
    ids = encode_after(Turn(HEAD, tokenizer.encode(HEAD), answer), HEAD + "the" + TAIL, tokenizer)
    assert ids == [*tokenizer.encode(HEAD), *answer[:3], *tokenizer.encode(TAIL)]


def test_reset_begins_afresh(llm: LLM) -> None:
    talk = llm.conversation()
    first = talk.send("Who?", max_tokens=8, seed=1, **HOT)
    list(first)
    talk.reset()
    again = talk.send("Who?", max_tokens=8, seed=1, **HOT)
    list(again)
    assert again.completion.prompt_token_ids == first.completion.prompt_token_ids
    assert again.completion.stats.cached_tokens == 0


def test_text_that_is_held_back_is_not_lost(llm: LLM) -> None:
    """A stream that is left where a stop string may have begun."""
    talk = llm.conversation()
    whole = talk.send("Who?", temperature=0, max_tokens=12, ignore_eos=True)
    text = "".join(chunk.text for chunk in whole)
    talk.reset()
    stop = text[2:] + "never"  # from the third character on, everything may be its beginning
    stream = talk.send("Who?", temperature=0, max_tokens=12, ignore_eos=True, stop=[stop])
    read = "".join(next(stream).text for _ in range(8))
    said = llm.checkpoint.tokenizer.decode(stream.completion.token_ids)
    assert len(read) < len(said.rstrip("\ufffd"))  # or nothing was held back
    assert stream.completion.text == talk.messages[-1]["content"] == said.rstrip("\ufffd")
    rest = "".join(chunk.text for chunk in stream)
    assert read + rest == stream.completion.text == talk.messages[-1]["content"] == text


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, checkpoint: CheckpointFactory
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    text = "the sea " * 200_000
    for ask in (llm.stream, llm.stream_chat, llm.conversation().send):
        with pytest.raises(ContextLengthError, match="at least"):
            ask(text)


@pytest.mark.parametrize(
    "text", ["the sea " * 30_000, " " * 200_000, "é" * 150_000, "e\u0301" * 100_000, "\u1fbe\u0308\u0301" * 50_000]
)
def test_the_bound_is_a_bound(text: str) -> None:
    tokenizer = Tokenizer.from_folder(hub.DEMO_FOLDER)
    fewest = tokenizer.fewest_tokens(text)
    assert 1000 < fewest <= len(tokenizer.encode(text))


def test_the_bound_counts_what_normalization_joins() -> None:
    """Three letters of Hangul become one syllable, and that is the longest token: as tight as it gets."""
    syllable = "\uac01"  # U+1100 U+1161 U+11A8
    cutter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    first, second, third = list(cutter.pre_tokenize_str(syllable)[0][0])
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), first + second, first + second + third]
    vocabulary = {word: token for token, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[(first, second), (first + second, third)]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cutter
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    text = "\u1100\u1161\u11a8" * 1000
    assert len(tokenizer.encode(text)) == 1000
    assert 500 < tokenizer.fewest_tokens(text) <= 1000
    assert tokenizer.fewest_tokens("a" * 3000) == 1000


def test_normalization_shrinks_no_text_more_than_that() -> None:
    """Of each character of NFC, the longest spelling: every part of it in its longest form."""
    chars = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]
    longest: dict[str, int] = defaultdict(int)
    for char in chars:
        parts = unicodedata.normalize("NFD", char)
        if len(parts) == 1:
            longest[parts] = max(longest[parts], len(char.encode()))
    worst = max(
        sum(longest[part] for part in unicodedata.normalize("NFD", char)) / len(char.encode())
        for char in chars
        if unicodedata.is_normalized("NFC", char)
    )
    assert 3 < worst <= MOST_NFC_SHRINKS


def test_nothing_is_said_of_a_tokenizer_that_may_drop_text(own_checkpoint: CheckpointFactory) -> None:
    folder: Path = own_checkpoint("gqa")
    file = folder / "tokenizer.json"
    assert Tokenizer.from_folder(folder).fewest_tokens("x" * 1000) > 0
    text = file.read_text(encoding="utf-8")
    for old, new in (
        ('{"type":"NFC"}', '{"type":"Strip","strip_left":true,"strip_right":true}'),
        ('"behavior": "Isolated"', '"behavior": "Removed"'),
        ('"lstrip": false', '"lstrip": true'),
    ):
        changed = text.replace(old, new)
        if changed == text:
            changed = text.replace(old.replace(":", ": "), new).replace('"type": "NFC"', '"type": "Lowercase"')
        assert changed != text, old
        file.write_text(changed, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
        assert Tokenizer.from_folder(folder).fewest_tokens("x" * 1000) == 0, old
