"""Text to token ids and back, by the checkpoint's own tokenizer.

The work is done by the `tokenizers` library. What is added here: every failure is a `TokenizerError` or `RequestError`,
ids become text one at a time, and stop strings are found in it.

Special tokens that are spelled out in a prompt are recognised, as transformers does: the text "<|im_end|>" is one id.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from xinfer.errors import RequestError, TokenizerError
from xinfer.tokenizer_files import guarded, is_without_gaps, read_folder, walk

MOST_NFC_SHRINKS = 4  # bytes of UTF-8 that NFC makes one of, at most: 7 to 2 in U+1FBE U+0308 U+0301


def _ids_of(backend: tokenizers.Tokenizer, *, without_gaps: bool) -> NDArray[np.int64]:
    """Every id, in order. A vocabulary without gaps, as nearly all are, is not copied for that."""
    if without_gaps or is_without_gaps(backend):
        return np.arange(backend.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    return np.array(sorted(set(backend.get_vocab(with_added_tokens=True).values())), dtype=np.int64)


class Tokenizer:
    """A checkpoint's tokenizer. Safe to share between threads.

    Attributes:
        size: The highest id + 1.
        special_tokens: What templates see: `bos_token`, `eos_token`, `pad_token` and so on, each a string.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        without_gaps: bool = False,
    ) -> None:
        # transformers cuts and pads only when asked to, whatever the file says.
        backend.no_truncation()
        backend.no_padding()
        # The library keeps its cache of words for as long as the thread lives, long after the tokenizer is gone.
        if hasattr(backend.model, "_resize_cache"):
            backend.model._resize_cache(0)
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._ids = _ids_of(backend, without_gaps=without_gaps)
        if not self._ids.size:
            raise TokenizerError("the tokenizer has no tokens; expected a vocabulary: take the file from the original")
        self.size = int(self._ids[-1]) + 1
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._decoder_types = frozenset(part["type"] for part in _parts(backend.decoder))

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Read the tokenizer in a checkpoint's folder.

        That is tokenizer.json, or vocab.json with merges.txt (Qwen's first form), and tokenizer_config.json.
        """
        found = read_folder(Path(path))
        return cls(found.backend, special_tokens=found.special_tokens, without_gaps=found.without_gaps)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the tokenizer's own end-of-sequence token, if it names one that it has."""
        token = self.special_tokens.get("eos_token")
        token_id = None if token is None else self._backend.token_to_id(token)
        return () if token_id is None else (token_id,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`: what `tokenizer(text).input_ids` is in transformers.

        `add_special_tokens` adds what the checkpoint puts around every text (Qwen2: nothing). Special tokens that the
        text spells out are recognised either way.
        """
        if not isinstance(text, str):
            raise RequestError(
                f"a prompt must be a string, not {type(text).__name__}; to give ids, pass a list of them"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds half a character (the lone surrogate {text[error.start]!r} at character "
                f"{error.start}), which has no UTF-8 form; read its source as UTF-8, or with errors='replace'"
            ) from None
        ids: list[int] = guarded(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """What `encode` gives at least, told from the text's length alone; 0 where nothing can be told.

        No token of a byte-level BPE without gaps stands for more bytes than the longest one has. Normalization to NFC
        may shorten text that is not ASCII before that.
        """
        if self._longest_token is None:
            return 0
        shrinks = 1 if text.isascii() else MOST_NFC_SHRINKS
        size = len(text.encode("utf-8", "surrogatepass"))
        return -(-size // (shrinks * self._longest_token))

    @cached_property
    def _longest_token(self) -> int | None:
        """Bytes of the longest token; None where a token may stand for more than it spells."""
        backend = self._backend
        steps = [_parts(backend.normalizer), _parts(backend.pre_tokenizer)]
        normalizers, cutters = ({part["type"] for part in parts} for parts in steps)
        removing = any(str(part.get("behavior", "")).lower() == "removed" for part in steps[1])
        vocabulary = backend.get_vocab(with_added_tokens=True)
        stripping = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        if (
            not isinstance(backend.model, tokenizers.models.BPE)
            or not normalizers <= {"NFC"}
            or not {"ByteLevel"} <= cutters <= {"ByteLevel", "Split", "Digits"}
            or removing
            or stripping
            or not vocabulary.keys() >= _BYTES.keys()
        ):
            return None
        return max(len(_bytes_of(token)) for token in vocabulary)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that no token has give nothing, bytes that are not UTF-8 give U+FFFD."""
        checked = [int(i) for i in ids]
        bad = next((i for i in checked if not 0 <= i < 2**32), None)
        if bad is not None:
            raise RequestError(f"{bad} is not a token id; expected 0 to {self.size - 1}")
        return str(guarded(lambda: self._backend.decode(checked, skip_special_tokens=skip_special_tokens)))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (byte-level: "Ġthe"), or None for an id that no token has."""
        if not 0 <= token_id < self.size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled exactly so, if there is one."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self._special_ids else None

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves this id out when it skips special tokens."""
        return token_id in self._special_ids

    def invalid_ids(self, vocab_size: int) -> NDArray[np.bool_]:
        """(vocab_size,) True for ids that no token has: rows past the tokenizer, and holes in it."""
        invalid = np.ones(vocab_size, dtype=np.bool_)
        invalid[self._ids[self._ids < vocab_size]] = False
        return invalid

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raise `TokenizerError` where the tokenizer has ids for which the model has no embedding."""
        beyond = self._ids[self._ids >= vocab_size]
        if beyond.size:
            first = int(beyond[0])
            raise TokenizerError(
                f"the tokenizer has {beyond.size} tokens past the model's vocabulary, the first of them "
                f"{self.token(first)!r:.80} with id {first}, and config.json says vocab_size {vocab_size}; "
                "take both files from the same checkpoint"
            )

    @property
    def decoder_types(self) -> frozenset[str]:
        """Names of the steps that turn tokens into text, as in tokenizer.json."""
        return self._decoder_types

    @cached_property
    def letter_ids(self) -> tuple[int, ...]:
        """One id that is a plain Latin letter or word, where there is one: something for later ids to follow."""
        for token_id in map(int, self._ids):
            token = self.token(token_id)
            if token and token.isascii() and token.isalpha() and not self.is_special(token_id):
                return (token_id,)
        return ()


class IncrementalDecoder:
    """The text of a growing list of ids, a piece at a time and never half a character.

    The pieces put together are what `Tokenizer.decode` makes of all ids. Bytes that may still become a character are
    held back; bytes that cannot are given at once, as U+FFFD. The cost of an id does not depend on those before it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_level = tokenizer.decoder_types == {"ByteLevel"}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # What an id becomes may depend on those before it: the last that became text, and before them a letter, so that
        # they do not count as the text's beginning, where decoders strip spaces.
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """What this id adds to the text; empty where a character is not complete yet."""
        token = self._tokenizer.token(token_id)
        if token is None or (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            return ""
        if self._byte_level:
            return self._utf8.decode(_bytes_of(token))
        self._pending.append(token_id)
        if "ByteFallback" in self._tokenizer.decoder_types and _is_byte_token(token):
            return ""  # a run of bytes is decoded as a whole, and wholly as U+FFFD where any of it is wrong
        return self._flush()

    @property
    def pending(self) -> bool:
        """Whether something is held back."""
        return bool(self._pending or self._utf8.getstate()[0])

    def finish(self) -> str:
        """What was held back, with U+FFFD for an incomplete character."""
        if self._byte_level:
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return text
        return self._flush(final=True)

    def _flush(self, *, final: bool = False) -> str:
        before = self._decode(self._before)
        after = self._decode(self._before + self._pending)
        if not after.startswith(before):
            before = before[: _common_prefix(before, after)]
        new = after[len(before) :]
        # Nothing yet may become something with the next id; a limit keeps this from growing without end.
        if not final and len(self._pending) < 16 and (not new or new.endswith("\ufffd")):
            return ""
        if new:
            self._before = [*self._tokenizer.letter_ids, *self._pending]
        self._pending = []
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


class StopMatcher:
    """Finds stop strings in a stream of text, across the borders of its pieces.

    The stop string that is complete first wins, and of those complete at the same character the longest; so the
    outcome does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "empty stop strings are refused by SamplingParams"
        self._stops = tuple(stops)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how much of each stop string the text so far ends with
        self._held = ""

    @property
    def held(self) -> str:
        """What is held back, since it may become a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string is complete (then: the text before it)."""
        if not self._stops:
            return text, False
        text, start = self._held + text, len(self._held)
        for index in range(start, len(text)):
            complete = self._advance(text[index])
            if complete:
                self._held = ""
                self._matched = [0] * len(self._stops)
                return text[: index + 1 - complete], True
        safe = len(text) - max(self._matched)
        self._held = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """What was held back in case it became a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> int:
        """Take one more character; the length of the longest stop string that it completes, or 0."""
        complete = 0
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = self._fallbacks[i][matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                complete = max(complete, matched)
            self._matched[i] = matched
        return complete


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of the longest shorter prefix that also ends it (Knuth-Morris-Pratt)."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as characters: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTES = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token; an added token that is not spelled in bytes is its own UTF-8."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


def _is_byte_token(token: str) -> bool:
    """Whether this is SentencePiece's "<0x0A>"."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _common_prefix(a: str, b: str) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _parts(component: Any) -> list[dict[str, Any]]:
    """The settings of a tokenizer's component, those of a sequence one by one."""
    if component is None:
        return []
    return [part for part in walk(json.loads(component.__getstate__())) if part.get("type") != "Sequence"]
