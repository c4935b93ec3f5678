"""Text to token ids and back, by the checkpoint's own tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from xinfer.errors import RequestError, TokenizerError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str] | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._ids = np.array(sorted(set(backend.get_vocab(with_added_tokens=True).values())), dtype=np.int64)
        self.size = int(self._ids[-1]) + 1 if self._ids.size else 0

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json from a checkpoint's folder."""
        folder = Path(path)
        config_file = folder / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise TokenizerError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        special = {}
        for name in SPECIAL_TOKEN_NAMES:
            value = config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                special[name] = value
        return cls(backend, special_tokens=special)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the tokenizer's own end-of-sequence token, if it names one."""
        token = self.special_tokens.get("eos_token")
        token_id = None if token is None else self._backend.token_to_id(token)
        return () if token_id is None else (token_id,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text has a lone surrogate at character {error.start}") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        token: str | None = self._backend.id_to_token(token_id)
        return "" if token is None else token

    def invalid_ids(self, vocab_size: int) -> NDArray[np.bool_]:
        """(vocab_size,) True for ids that no token has."""
        invalid = np.ones(vocab_size, dtype=np.bool_)
        invalid[self._ids[self._ids < vocab_size]] = False
        return invalid


class IncrementalDecoder:
    """Text of a growing list of ids, never half a character (first version: re-decodes)."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        """What the next id adds to the text."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip).rstrip("\ufffd")
        new = text[len(self._shown) :]
        self._shown = text
        return new

    def finish(self) -> str:
        """What is left at the end."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[len(self._shown) :]


class StopMatcher:
    """Finds stop strings in a stream of text, also across the borders of its pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string is complete (then: the text before it)."""
        if not self._stops:
            return text, False
        text, start = self._held + text, len(self._held)
        for index in range(start, len(text)):
            done = self._advance(text[index])
            if done:
                self._held = ""
                return text[: index + 1 - done], True
        keep = len(text) - max(self._matched)
        self._held = text[keep:]
        return text[:keep], False

    def finish(self) -> str:
        """What was held back in case a stop string followed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        done = 0
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = self._fallbacks[i][matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                done = max(done, matched)
            self._matched[i] = matched
        return done


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest proper prefix that ends it (Knuth, Morris, Pratt)."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
