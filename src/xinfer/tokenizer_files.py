"""A checkpoint's tokenizer files: read, checked, and put together.

They are checked before the `tokenizers` library sees them, because some broken ones make it panic or ask for gigabytes.
That takes as long as the library needs itself, so the cache of files remembers what has been found right.
The files beside tokenizer.json have the meaning that transformers gives them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from xinfer import cache_files, files, patterns
from xinfer.errors import RequestError, TokenizerError
from xinfer.patterns import PatternError, check_pattern

T = TypeVar("T")

RIGHT = b"xinfer tokenizer 1\n"

MAX_FILE_BYTES = 64 * 2**20  # Qwen's largest tokenizer.json is 20 MB
MAX_CONFIG_BYTES = 4 * 2**20  # of the files beside it, which have some thousands
MAX_MERGES = 1_000_000  # lines of merges.txt
MAX_VALUES = 3_000_000  # in a JSON file, about; 150,000 tokens with as many merges are 600,000

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
_FLAGS = ("add_bos_token", "add_eos_token")  # settings, though they are called like tokens
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a folder holds: the library's tokenizer, and its named special tokens."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    without_gaps: bool = False  # whether the ids are known to be all from 0 to the last one


def read_folder(folder: Path) -> TokenizerFiles:
    """What a folder holds.

    From tokenizer.json, or vocab.json with merges.txt (Qwen's first form), and tokenizer_config.json.
    """
    config_file = folder / "tokenizer_config.json"
    config = _optional_json(config_file)
    if files.is_there(folder / "tokenizer.json"):
        file = folder / "tokenizer.json"
        backend, without_gaps = guarded(lambda: _from_json(file), file)
    elif files.is_there(folder / "vocab.json") and files.is_there(folder / "merges.txt"):
        file = folder / "vocab.json"
        backend, without_gaps = guarded(lambda: _from_vocab_and_merges(folder), file), False
    else:
        raise TokenizerError(_missing(folder))
    special_tokens = guarded(lambda: _apply_config(backend, config, folder), config_file)
    last = backend.get_vocab_size(with_added_tokens=True) - 1  # tokens that were added stand behind the others
    return TokenizerFiles(backend, special_tokens, without_gaps and backend.id_to_token(last) is not None)


def is_without_gaps(backend: tokenizers.Tokenizer) -> bool:
    """Whether the ids are all from 0 to the last one."""
    size = backend.get_vocab_size(with_added_tokens=True)
    return all(backend.id_to_token(i) is not None for i in range(size))


def walk(part: Any) -> Iterator[dict[str, Any]]:
    """A tokenizer component and those inside it."""
    if isinstance(part, dict):
        yield part
        for key in _NESTED:
            inner = part.get(key)
            for item in inner if isinstance(inner, list) else ():
                yield from walk(item)


def guarded(call: Callable[[], T], file: Path | None = None) -> T:
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


def _read_json(file: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    return _parsed(files.read_bytes(file, error=TokenizerError, max_bytes=max_bytes), file)


def _optional_json(file: Path) -> dict[str, Any]:
    return _read_json(file) if files.is_there(file) else {}


def _parsed(data: bytes, file: Path) -> dict[str, Any]:
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise TokenizerError(f"{file} has more than {MAX_VALUES:,} values: this is no tokenizer of a known kind")
    # A key that is there twice is refused: the library might go by another one of them than the one checked here.
    return files.parse_json_object(data, where=str(file), error=TokenizerError)


def _missing(folder: Path) -> str:
    if not files.is_folder(folder):
        return f"{folder} is not a folder; expected a checkpoint's folder with a tokenizer.json"
    return (
        f"{folder} has neither tokenizer.json nor vocab.json with merges.txt; take tokenizer.json from the original "
        "checkpoint, or make it with transformers: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
    )


def _from_json(file: Path) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether its ids are known to be without gaps."""
    stored = files.read_bytes(file, error=TokenizerError, max_bytes=MAX_FILE_BYTES)
    record = _record(stored)
    if cache_files.read(record, RIGHT, 0) is not None:
        return tokenizers.Tokenizer.from_buffer(stored), True
    data = _parsed(stored, file)
    _check_parts(data, file)
    _check_model(data.get("model"), file)
    backend = tokenizers.Tokenizer.from_buffer(stored)
    for token in data.get("added_tokens") or ():
        _check_id(backend, token["content"], token["id"], file)
    if without_gaps := is_without_gaps(backend):
        cache_files.write(record, RIGHT, b"")
    return backend, without_gaps


def _record(stored: bytes) -> Path | None:
    """Where it is remembered that a tokenizer.json is right and its ids are without gaps; None where it cannot be.

    It holds for these bytes, these checks and this version of the library.
    """
    folder = cache_files.cache_folder("tokenizers")
    if folder is None:
        return None
    try:
        checks = [Path(file).read_bytes() for file in (__file__, str(patterns.__file__))]
    except OSError:
        return None
    identity = hashlib.sha256()
    for part in (tokenizers.__version__.encode(), *checks, stored):
        identity.update(hashlib.sha256(part).digest())
    return folder / identity.hexdigest()


def _check_parts(data: dict[str, Any], file: Path) -> None:
    for name, known in _PARTS.items():
        whole = data.get(name)
        if whole is not None and not isinstance(whole, dict):
            raise TokenizerError(f"{file}: {name} is {whole!r:.80}; expected an object or null: download it again")
        for part in walk(whole):
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
    vocab = _read_json(folder / "vocab.json", max_bytes=MAX_FILE_BYTES)
    merges_text = files.read_text(folder / "merges.txt", error=TokenizerError, max_bytes=MAX_FILE_BYTES)
    if merges_text.count("\n") > MAX_MERGES:
        raise TokenizerError(f"{folder / 'merges.txt'} has more than {MAX_MERGES:,} lines: take it from the original")
    lines = merges_text.split("\n")
    merges = []
    for line in lines:
        if line.strip() and not line.startswith("#version"):
            left, _, right = line.rstrip("\r").partition(" ")
            merges.append((left, right))
    for token, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise TokenizerError(
                f"{folder / 'vocab.json'} gives {token!r:.80} the id {token_id!r:.80}; expected a whole number"
            )
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


def _apply_config(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> dict[str, str]:
    """Apply what stands beside tokenizer.json: tokens added later, BOS and EOS. Gives the names of special tokens."""
    file = folder / "tokenizer_config.json"
    if "added_tokens_decoder" in config:
        listed = _mapping(config["added_tokens_decoder"], "added_tokens_decoder", file)
        added = {_token_id(i, file): _added_token(token, file) for i, token in listed.items()}
    else:
        config = {**config, **_optional_json(folder / "special_tokens_map.json")}
        extra = folder / "added_tokens.json"
        by_text = _optional_json(extra)
        special = set(_special_tokens(config, file).values()) | set(_additional(config))
        added = {
            _token_id(i, extra): AddedToken(t, special=t in special, normalized=t not in special)
            for t, i in by_text.items()
        }
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
    for name in _FLAGS:
        if not isinstance(config.get(name), bool | None):
            raise TokenizerError(f"{file}: {name} is {config[name]!r:.80}; expected true or false")
    if "add_bos_token" in config or "add_eos_token" in config:
        bos = names.get("bos_token") if config.get("add_bos_token") else None
        eos = names.get("eos_token") if config.get("add_eos_token") else None
        backend.post_processor = _surrounding(backend, bos, eos)
    return names


def _special_tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The named special tokens: every `..._token` that is a string or an added token."""
    qwen2 = str(config.get("tokenizer_class", "")).startswith("Qwen2Tokenizer")
    named = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>") if qwen2 else {}
    named.update({name: value for name, value in config.items() if name.endswith("_token") and name not in _FLAGS})
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
    if not isinstance(listed, list | dict):
        raise TokenizerError(
            f"the tokenizer's additional special tokens are {listed!r:.80}; expected a list of strings"
        )
    found = [token.get("content") if isinstance(token, dict) else token for token in listed]
    return [token for token in found if isinstance(token, str)]


def _mapping(value: Any, name: str, file: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: {name} is {value!r:.80}; expected an object")
    return value


def _token_id(value: Any, file: Path) -> int:
    """An id from a file that has it as a number or as a key."""
    digits = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10):
        raise TokenizerError(f"{file} gives {value!r:.80} as the id of an added token; expected a whole number")
    return int(digits)


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
            raise TokenizerError(
                f"every text should begin or end with {token!r:.80}, which the vocabulary does not have; correct "
                "add_bos_token and add_eos_token in tokenizer_config.json, or the tokens that they add"
            )
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    return processors.TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)]
    )
