"""Text to token ids and back, by the checkpoint's own tokenizer.

The work is done by the `tokenizers` library. What is added here: files are checked before that library sees them (some
broken ones make it panic or ask for gigabytes), every failure is a `TokenizerError` or `RequestError`, the files beside
tokenizer.json have the meaning that transformers gives them, and ids become text one at a time.

Special tokens that are spelled out in a prompt are recognised, as transformers does: the text "<|im_end|>" is one id.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from xinfer.errors import RequestError, TokenizerError
from xinfer.patterns import PatternError, check_pattern

T = TypeVar("T")

MAX_FILE_BYTES = 64 * 2**20  # Qwen's largest tokenizer.json is 20 MB

# How Qwen2 cuts text into words before BPE; its first checkpoints have vocab.json and merges.txt only, so that this
# stands in no file of theirs.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_MODELS = {"BPE", "Unigram", "WordLevel", "WordPiece"}
# Not here on purpose: `Precompiled` normalizers, whose tables the library trusts (a wrong size ends the process).
_PARTS = {
    "normalizer": {
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend", "Replace",
        "Sequence", "Strip", "StripAccents",
    },
    "pre_tokenizer": {
        "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation",
        "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
    },
    "post_processor": {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"},
    "decoder": {
        "BPEDecoder", "ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip", "WordPiece",
    },
}  # fmt: skip
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")


class Tokenizer:
    """A checkpoint's tokenizer. Safe to share between threads.

    Attributes:
        size: The highest id + 1.
        special_tokens: What templates see: `bos_token`, `eos_token`, `pad_token` and so on, each a string.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, special_tokens: Mapping[str, str] | None = None) -> None:
        # transformers cuts and pads only when asked to, whatever the file says.
        backend.no_truncation()
        backend.no_padding()
        # The library keeps its cache of words for as long as the thread lives, long after the tokenizer is gone.
        if hasattr(backend.model, "_resize_cache"):
            backend.model._resize_cache(0)
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._ids = np.unique(np.fromiter(backend.get_vocab(with_added_tokens=True).values(), dtype=np.int64))
        if not self._ids.size:
            raise TokenizerError("the tokenizer has no tokens; expected a vocabulary: take the file from the original")
        self.size = int(self._ids[-1]) + 1
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._decoder_types = _decoder_types(backend)

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        """Read the tokenizer in a checkpoint's folder.

        That is tokenizer.json, or vocab.json with merges.txt (Qwen's first form), and tokenizer_config.json.
        """
        folder = Path(path)
        config_file = folder / "tokenizer_config.json"
        config = _read_json(config_file) if config_file.is_file() else {}
        if (folder / "tokenizer.json").is_file():
            file = folder / "tokenizer.json"
            backend = _guarded(lambda: _from_json(file), file)
        elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            file = folder / "vocab.json"
            backend = _guarded(lambda: _from_vocab_and_merges(folder), file)
        else:
            raise TokenizerError(_missing(folder))
        return _guarded(lambda: _with_config(cls, backend, config, folder), config_file)

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
        ids: list[int] = _guarded(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids that no token has give nothing, bytes that are not UTF-8 give U+FFFD."""
        checked = [int(i) for i in ids]
        bad = next((i for i in checked if not 0 <= i < 2**32), None)
        if bad is not None:
            raise RequestError(f"{bad} is not a token id; expected 0 to {self.size - 1}")
        return str(_guarded(lambda: self._backend.decode(checked, skip_special_tokens=skip_special_tokens)))

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


def _decoder_types(backend: tokenizers.Tokenizer) -> frozenset[str]:
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in _walk(state) if part.get("type") != "Sequence")


def _walk(part: Any) -> Iterator[dict[str, Any]]:
    """A tokenizer component and those inside it."""
    if isinstance(part, dict):
        yield part
        for key in _NESTED:
            inner = part.get(key)
            for item in inner if isinstance(inner, list) else ():
                yield from _walk(item)


def _guarded(call: Callable[[], T], file: Path | None = None) -> T:
    """Run what may fail inside the library; a Rust panic arrives as a BaseException of pyo3's own type."""
    try:
        return call()
    except (TokenizerError, RequestError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        where = "the tokenizer" if file is None else str(file)
        found = " ".join(str(error).split())[:300] or type(error).__name__
        raise TokenizerError(
            f"{where} cannot be used: {found}; expected the files as the checkpoint's author published them: "
            "download them again"
        ) from error


def _read_text(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TokenizerError(
                f"{file} has {size:,} bytes; expected at most {MAX_FILE_BYTES:,}: this is no tokenizer of a known kind"
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}; download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    return _parsed(_read_text(file), file)


def _parsed(text: str, file: Path) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}; download it again") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{file} holds a {type(data).__name__}; expected a JSON object: download it again")
    return data


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder; expected a checkpoint's folder with a tokenizer.json"
    return (
        f"{folder} has neither tokenizer.json nor vocab.json with merges.txt; take tokenizer.json from the original "
        "checkpoint, or make it with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
    )


def _from_json(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file)
    data = _parsed(text, file)
    _check_parts(data, file)
    _check_model(data.get("model"), file)
    backend = tokenizers.Tokenizer.from_str(text)
    for token in data.get("added_tokens") or ():
        _check_id(backend, token["content"], token["id"], file)
    return backend


def _check_parts(data: dict[str, Any], file: Path) -> None:
    for name, known in _PARTS.items():
        whole = data.get(name)
        if whole is not None and not isinstance(whole, dict):
            raise TokenizerError(f"{file}: {name} is {whole!r:.80}; expected an object or null: download it again")
        for part in _walk(whole):
            kind = part.get("type")
            if not isinstance(kind, str) or kind not in known:
                raise TokenizerError(
                    f"{file}: unsupported {name} {kind!r:.80}; expected one of {', '.join(sorted(known))}"
                )
            if kind == "TemplateProcessing":
                _check_template(part, file)
            if "pattern" in part:
                _check_pattern(part["pattern"], file, name)


def _check_pattern(pattern: Any, file: Path, name: str) -> None:
    """The library panics where matching takes too long, and where what a normalizer replaces is empty."""
    if not isinstance(pattern, dict):
        return
    expression = pattern.get("Regex")
    if isinstance(expression, str):
        try:
            check_pattern(expression, may_match_nothing=name == "pre_tokenizer")
        except PatternError as error:
            raise TokenizerError(
                f"{file}: the pattern {expression!r:.80} of the {name} {error}; take the file from the original "
                "checkpoint"
            ) from error
    if pattern.get("String") == "":
        raise TokenizerError(f"{file}: the {name} has an empty pattern; take the file from the original checkpoint")


def _check_template(part: dict[str, Any], file: Path) -> None:
    """The library panics at the first text where a template has a token that its own table lacks."""
    table = part.get("special_tokens")
    for form in ("single", "pair"):
        pieces = part.get(form)
        for piece in pieces if isinstance(pieces, list) else ():
            special = piece.get("SpecialToken") if isinstance(piece, dict) else None
            if isinstance(special, dict) and special.get("id") not in (table if isinstance(table, dict) else ()):
                raise TokenizerError(
                    f"{file}: the post_processor puts {special.get('id')!r:.80} around texts, but its special_tokens "
                    "do not list it; take the file from the original checkpoint"
                )


def _check_model(model: Any, file: Path) -> None:
    if not isinstance(model, dict):
        raise TokenizerError(f"{file}: the model is {model!r:.80}; expected an object with a vocabulary")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if not isinstance(kind, str) or kind not in _MODELS:
        raise TokenizerError(f"{file}: unsupported model {kind!r:.80}; expected one of {', '.join(sorted(_MODELS))}")
    if kind == "BPE" and model.get("continuing_subword_prefix"):
        # The library panics where a merge is shorter than this prefix.
        raise TokenizerError(f"{file}: unsupported continuing_subword_prefix in a BPE model; expected none")
    if kind == "BPE":
        _check_merges(model.get("vocab"), model.get("merges"), file)
    vocab, unknown = model.get("vocab"), model.get("unk_id")
    if kind == "Unigram" and isinstance(unknown, int) and isinstance(vocab, list) and not unknown < len(vocab):
        raise TokenizerError(f"{file}: unk_id is {unknown}; expected an index into the {len(vocab)} tokens")
    if model.get("dropout"):
        raise TokenizerError(f"{file}: dropout {model['dropout']!r:.20} makes token ids random; set it to null")


def _check_merges(vocab: Any, merges: Any, file: Path) -> None:
    """The library panics where a merge makes something longer than every token."""
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        raise TokenizerError(f"{file}: the model lacks vocab or merges; expected a table and a list: download it again")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        try:
            left, right = pair
            known = left in vocab and right in vocab and left + right in vocab
        except (TypeError, ValueError):
            raise TokenizerError(f"{file} has the merge {merge!r:.80}; expected two tokens") from None
        if not known:
            raise TokenizerError(
                f"{file} has the merge {merge!r:.80}, but one of the two, or both together, are no token of the "
                "vocabulary; take the tokenizer's files from the same checkpoint"
            )


def _check_id(backend: tokenizers.Tokenizer, content: str, expected: int, file: Path) -> None:
    """Added tokens get ids in order of arrival; where the file says another id, the model was trained for that one."""
    found = backend.token_to_id(content)
    if found != expected:
        raise TokenizerError(
            f"{file}: the added token {content!r:.80} should have id {expected}, but in order it gets {found}; "
            "a token before it is missing or listed twice: take the file from the original checkpoint"
        )


def _from_vocab_and_merges(folder: Path) -> tokenizers.Tokenizer:
    vocab = _read_json(folder / "vocab.json")
    lines = _read_text(folder / "merges.txt").split("\n")
    merges = []
    for line in lines:
        if line.strip() and not line.startswith("#version"):
            left, _, right = line.rstrip("\r").partition(" ")
            merges.append((left, right))
    _check_merges(vocab, merges, folder / "merges.txt")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _with_config(
    cls: type[Tokenizer], backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path
) -> Tokenizer:
    """Apply what stands beside tokenizer.json: tokens added later, the names of special ones, BOS and EOS."""
    file = folder / "tokenizer_config.json"
    if "added_tokens_decoder" in config:
        listed = _mapping(config["added_tokens_decoder"], "added_tokens_decoder", file)
        added = {int(i): _added_token(token, file) for i, token in listed.items()}
    else:
        legacy = folder / "special_tokens_map.json"
        config = {**config, **(_read_json(legacy) if legacy.is_file() else {})}
        extra = folder / "added_tokens.json"
        by_text = _read_json(extra) if extra.is_file() else {}
        special = set(_special_tokens(config, file).values()) | set(_additional(config))
        added = {i: AddedToken(t, special=t in special, normalized=t not in special) for t, i in by_text.items()}
    known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    new = {}
    for token_id, token in sorted(added.items(), key=lambda item: item[0]):
        if known.get(token.content) != repr(token):  # or with other flags than in tokenizer.json
            new[token_id] = token
            known[token.content] = repr(token)
    backend.add_tokens(list(new.values()))  # at once: every call goes through all tokens there are
    for token_id, token in new.items():
        _check_id(backend, token.content, token_id, file)
    names = _special_tokens(config, file)
    # A named token that the vocabulary has only as an ordinary one is cut out of the text from now on. One that it
    # does not have at all is not added: the model has no row for it.
    named = dict.fromkeys([*names.values(), *_additional(config)])
    backend.add_tokens(
        [AddedToken(t, special=True) for t in named if t not in known and backend.token_to_id(t) is not None]
    )
    if "add_bos_token" in config or "add_eos_token" in config:
        bos = names.get("bos_token") if config.get("add_bos_token") else None
        eos = names.get("eos_token") if config.get("add_eos_token") else None
        backend.post_processor = _surrounding(backend, bos, eos)
    return cls(backend, special_tokens=names)


def _special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The named special tokens: every `..._token` that is a string or an added token."""
    qwen2 = str(config.get("tokenizer_class", "")).startswith("Qwen2Tokenizer")
    named = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>") if qwen2 else {}
    named.update({name: value for name, value in config.items() if name.endswith("_token")})
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update(extra)
    tokens = {}
    for name, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
        elif value is not None and not isinstance(value, bool):
            raise TokenizerError(f"{file}: {name} is {value!r:.80}; expected a string, an added token or null")
    return tokens


def _additional(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    found = [token.get("content") if isinstance(token, dict) else token for token in listed]
    return [token for token in found if isinstance(token, str)]


def _mapping(value: Any, name: str, file: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: {name} is {value!r:.80}; expected an object")
    return value


def _added_token(token: Any, file: Path) -> AddedToken:
    fields = _mapping(token, "an added token", file)
    if not isinstance(fields.get("content"), str):
        raise TokenizerError(f"{file}: the added token {token!r:.80} has no content; expected a string")
    flags = {name: bool(fields[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in fields}
    return AddedToken(fields["content"], special=bool(fields.get("special")), **flags)


def _surrounding(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    tokens = [token for token in (bos, eos) if token is not None]
    for token in tokens:
        if backend.token_to_id(token) is None:
            raise TokenizerError(f"every text should begin or end with {token!r}, which the vocabulary does not have")
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
    )
