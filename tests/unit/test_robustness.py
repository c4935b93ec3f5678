"""Each fault that the mutated checkpoints of tests/fuzz brought up, in its smallest form."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.conftest import CheckpointFactory
from tests.fuzz.tokenizer_files import random_pattern
from tokenizers import Regex, pre_tokenizers

import xinfer
from xinfer.chat import ChatTemplate
from xinfer.errors import (
    ChatTemplateError,
    ConfigError,
    NumericalError,
    RequestError,
    TokenizerError,
    WeightsError,
    XinferError,
)
from xinfer.inspection import explain_messages
from xinfer.llm import LLM
from xinfer.model.config import Qwen2Config
from xinfer.model.weights import ModelWeights
from xinfer.patterns import PatternError, check_pattern
from xinfer.tokenizer import Tokenizer

# --- patterns ---------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "GPT-2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "DeepSeek V3": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Kimi": (
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    ),
    "BLOOM": " ?[^(\\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
    "digits in threes": r"\d{1,3}(?=(?:\d{3})*\b)",
    "CJK": "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    "runs of spaces": " {2,}",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_are_accepted(name: str) -> None:
    check_pattern(PUBLISHED[name])
    check_pattern(PUBLISHED[name], may_match_nothing=False)
    assert Regex(PUBLISHED[name])


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a|a)*b", "(a*)*b", "(.*)*x", "(a|aa)+$", "((a*)*)*c", r"(\w+\s?)+$", "a*a*a*a*b", "(a|a)*[bc]",
        r"(\w|a)*\?", "(?:a|a|a)+[=]", "^(a|a)+$", "(?=(a+)+$)", r"(a+)+\b\B", r"\p{L}+\p{L}+\?", "a?" * 30 + "a" * 30,
        "(?:a|a)" * 20 + "b", r"(?i:a+|\s$)(?!a*)$", r"(?:(?:.\w)*[^b]){2}", "(?:[ab]){0,40}(?:b(?!a)|[^b]{2,})$",
    ],
)  # fmt: skip
def test_patterns_that_take_too_long_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=r"repeats|takes very many steps"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "leaves a group open"),
        ("a)", "closes a group that it did not open"),
        ("[a", "leaves a class in brackets open"),
        ("*a", "repeats nothing"),
        ("a{2,1}", "counts from 2 to 1"),
        ("a\\", "ends in a backslash"),
        (r"(a)\1", r"unsupported escape \\1"),
        (r"(?<n>a)\g<n>", "group of an unsupported kind"),
        (r"\pL", "without the name of a property"),
        ("(" * 40 + ")" * 40, "more than 30 deep"),
        ("[a-" * 40, "more than 30 deep"),
        ("x" * 10_001, "10,001 characters"),
        ("(?:a{1000}){1000}", "written out"),
        ("a{2}{2}{2}{2}{2}", "several times over"),
    ],
)
def test_patterns_that_cannot_be_read_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        check_pattern(pattern)


@pytest.mark.parametrize("pattern", ["", "|", "a*", "^", "(?=a)", "a?b?", "(?:a|)"])
def test_patterns_that_match_nothing_may_cut_but_not_replace(pattern: str) -> None:
    check_pattern(pattern)
    with pytest.raises(PatternError, match="can match nothing"):
        check_pattern(pattern, may_match_nothing=False)


@pytest.mark.parametrize("pattern", ["a*b*c*", "a*a*(?:b|)", "(?:a+)?", r"\w+\s*", "(?:ab)+c", "(?>a+)b+", "a++b"])
def test_patterns_whose_repetitions_are_never_taken_back_are_accepted(pattern: str) -> None:
    check_pattern(pattern)


def test_no_accepted_pattern_exhausts_the_library() -> None:
    """Oniguruma counts its retries and gives up (panics) at ten million: no accepted pattern gets there."""
    rng = random.Random(5)
    texts = ["a" * 400 + "!", "ab" * 200 + " ", ("a" * 40 + " ") * 10, "a" * 400 + "b!"]
    accepted = refused = 0
    while accepted < 400:
        pattern = random_pattern(rng)
        try:
            check_pattern(pattern)
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
        except Exception:  # the library's own for a pattern that does not compile has no type of its own
            refused += 1
            continue
        accepted += 1
        for text in texts:
            pieces = [piece for piece, _ in split.pre_tokenize_str(text)]
            assert "".join(pieces) == text
    assert refused > 100


def change_json(file: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_a_tokenizer_with_such_a_pattern_is_refused(part: str, own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    pattern = {"Regex": "(a+)+$"}
    parts = {
        "normalizer": {"type": "Replace", "pattern": pattern, "content": "b"},
        "pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": pattern, "content": "b"}]},
    }
    change_json(folder / "tokenizer.json", lambda data: data.update({part: parts[part]}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the pattern '\(a\+\)\+\$' of the " + part):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("pattern", [{"Regex": "$"}, {"Regex": "a*"}, {"String": ""}])
def test_a_normalizer_that_replaces_nothing_is_refused(
    pattern: dict[str, str], own_checkpoint: CheckpointFactory
) -> None:
    """The library writes past its own index there, and panics at the first text."""
    folder = own_checkpoint()
    replace = {"type": "Replace", "pattern": pattern, "content": "b"}
    change_json(folder / "tokenizer.json", lambda data: data.update(normalizer=replace))
    with pytest.raises(TokenizerError, match=r"can match nothing|has an empty pattern"):
        Tokenizer.from_folder(folder)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_tokenizer_with_a_key_twice_is_refused(own_checkpoint: CheckpointFactory) -> None:
    """Python goes by the last, the library here by the last that is not null: the other would not be checked."""
    folder = own_checkpoint()
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8").rstrip()
    assert text.endswith("}")
    precompiled = '"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "normalizer": null'
    file.write_text(text.replace('"normalizer"', '"unused"', 1)[:-1] + f", {precompiled}}}", encoding="utf-8")
    with pytest.raises(TokenizerError, match="the key 'normalizer' twice"):
        Tokenizer.from_folder(folder)


def test_late_tokens_get_the_ids_that_they_say(own_checkpoint: CheckpointFactory) -> None:
    """Thousands at once; one at a time took a time that grew with their square."""
    folder = own_checkpoint()
    late = {str(376 + n): {"content": f"<extra {n}>", "special": n % 2 == 0} for n in range(3000)}
    change_json(folder / "tokenizer_config.json", lambda data: data["added_tokens_decoder"].update(late))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.size == 3376
    assert tokenizer.encode("<extra 0><extra 2999>") == [376, 3375]
    assert [tokenizer.is_special(token) for token in (376, 377, 3374, 3375)] == [True, False, True, False]
    with pytest.raises(TokenizerError, match="2992 tokens past the model's vocabulary"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens_decoder": {"x": {"content": "<new>"}}}, "gives 'x' as the id of an added token"),
        ({"added_tokens_decoder": {"+376": {"content": "<new>"}}}, r"gives '\+376' as the id"),
        ({"added_tokens_decoder": {"1" * 5000: {"content": "<new>"}}}, "as the id of an added token; expected a whole"),
        ({"add_bos_token": 1}, "add_bos_token is 1; expected true or false"),
        ({"add_eos_token": []}, r"add_eos_token is \[\]; expected true or false"),
        ({"extra_special_tokens": 5}, "additional special tokens are 5; expected a list"),
    ],
)
def test_tokenizer_configs_are_refused_in_our_own_words(
    change: dict[str, Any], message: str, own_checkpoint: CheckpointFactory
) -> None:
    folder = own_checkpoint()
    change_json(folder / "tokenizer_config.json", lambda data: data.update(change))
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_folder(folder)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.0, "1", None, True])
def test_ids_of_older_files_are_whole_numbers(token_id: object, own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    change_json(folder / "tokenizer_config.json", lambda data: data.pop("added_tokens_decoder"))
    if token_id != "1":  # as a key it would be right
        (folder / "added_tokens.json").write_text(json.dumps({"<new>": token_id}), encoding="utf-8")
        with pytest.raises(TokenizerError, match=r"added_tokens\.json gives .* as the id|should have id 4294967296"):
            Tokenizer.from_folder(folder)
        (folder / "added_tokens.json").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": token_id}), encoding="utf-8")
    (folder / "merges.txt").write_text("", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"vocab\.json gives 'b' the id .*; expected a whole number"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_integers_of_absurd_length_are_named(name: str, own_checkpoint: CheckpointFactory) -> None:
    """Python's own words advise a call of sys.set_int_max_str_digits()."""
    folder = own_checkpoint()
    (folder / name).write_bytes(b'{"x": ' + b"1" * 5000 + b"}")
    with pytest.raises(XinferError, match=r"holds an integer of (absurd length|thousands of digits)"):
        LLM(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", ConfigError),
        ("generation_config.json", ConfigError),
        ("tokenizer_config.json", TokenizerError),
        ("chat_template.jinja", ChatTemplateError),
        ("tokenizer.json", TokenizerError),
    ],
)
def test_files_of_absurd_size_are_refused_unread(
    name: str, error: type[XinferError], own_checkpoint: CheckpointFactory
) -> None:
    folder = own_checkpoint()
    with (folder / name).open("wb") as file:
        file.truncate(65 << 20)  # a hole, which takes no space
    tracemalloc.start()
    with pytest.raises(error, match=r"larger than|at most"):
        LLM(folder, device="cpu")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_tokenizers_of_absurdly_many_values_are_refused(name: str, own_checkpoint: CheckpointFactory) -> None:
    """Three bytes of `{},` take seventy of memory."""
    folder = own_checkpoint()
    (folder / "tokenizer.json").unlink()
    (folder / "merges.txt").write_text("a b\n", encoding="utf-8")
    (folder / name).write_bytes(b'{"x": [' + b"{}," * 1_500_001 + b"0]}")
    with pytest.raises(TokenizerError, match="more than 3,000,000 values"):
        Tokenizer.from_folder(folder)


def test_merges_of_absurdly_many_lines_are_refused(own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}", encoding="utf-8")
    (folder / "merges.txt").write_text("a b\n" * 1_000_001, encoding="utf-8")
    with pytest.raises(TokenizerError, match="more than 1,000,000 lines"):
        Tokenizer.from_folder(folder)


def with_header(folder: Path, change: Callable[[dict[str, Any]], object], *, padding: int = 0) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode() + b" " * padding
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_headers_of_absurd_size_are_refused(own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    with_header(folder, lambda header: None, padding=4 << 20)
    with pytest.raises(WeightsError, match=r"length of its header; expected at most 4194304"):
        ModelWeights.open(folder)


def test_headers_of_absurdly_many_tensors_are_refused(own_checkpoint: CheckpointFactory) -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    folder = own_checkpoint()
    with_header(folder, lambda header: header.update({f"extra.{n}": empty for n in range(1 << 14)}))
    with pytest.raises(WeightsError, match=r"lists 164\d\d tensors; expected at most 16384"):
        ModelWeights.open(folder)


def test_what_the_safetensors_library_quotes_is_cut(own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    with_header(folder, lambda header: header["model.norm.weight"].update(dtype="x" * 100_000))
    with pytest.raises(WeightsError, match="refused by the safetensors library") as caught:
        ModelWeights.open(folder)
    assert len(str(caught.value)) < 1000


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.embed_tokens.weight", np.nan),
        ("model.embed_tokens.weight", np.inf),
        ("model.layers.0.self_attn.k_proj.bias", -np.inf),
        ("model.layers.1.mlp.up_proj.weight", 3e38),
        ("model.norm.weight", 3e38),
    ],
)
def test_damaged_weights_are_one_error_without_warnings(
    name: str, value: float, own_checkpoint: CheckpointFactory
) -> None:
    """NumPy warns at every operation on the way; here warnings are errors."""
    folder = own_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = np.full_like(tensors[name], value)
    save_file(tensors, folder / "model.safetensors")
    with LLM(folder, device="cpu") as llm, pytest.raises(NumericalError, match="the logits for position 2 hold 384 "):
        llm.generate([1, 2], max_tokens=1)


def test_an_eps_below_float32_is_no_division_by_zero(own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    change_json(folder / "config.json", lambda data: data.update(rms_norm_eps=1e-300))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = np.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors")
    with LLM(folder, device="cpu") as llm, pytest.raises(NumericalError):
        llm.generate([1, 2], max_tokens=1)


# --- messages and prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("plain: 你好 🙂\n\tand a second line", "plain: 你好 🙂\n\tand a second line"),
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),
        ("half \ud800 a character", "half \\ud800 a character"),
        ("turned \u202e around", "turned \\u202e around"),
        ("\r\x00", "\\r\\x00"),
        ("", ""),
    ],
)
def test_every_message_can_be_printed(message: str, shown: str) -> None:
    for kind in (XinferError, ConfigError, RequestError):
        assert str(kind(message)) == shown
        str(kind(message)).encode("utf-8")


def test_a_template_that_writes_half_a_character_is_refused() -> None:
    for source in ("{{ '\\ud800' }}", "a\ud800b"):
        template = ChatTemplate(source, special_tokens={}, origin="chat_template.jinja")
        with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja writes half a character"):
            template.render([{"role": "user", "content": "x"}])


def test_a_message_with_half_a_character_is_the_callers_fault() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={})
    with pytest.raises(RequestError, match="message 0 has half a character"):
        template.render([{"role": "user", "content": "x\udc00"}])


def test_a_template_refuses_in_few_words() -> None:
    template = ChatTemplate("{{ raise_exception('\\x1b[31m' ~ 'no ' * 20000) }}", special_tokens={})
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: \\x1b\[31mno no") as caught:
        template.render([{"role": "user", "content": "x"}])
    assert len(str(caught.value)) < 1200


def test_broken_templates_are_quoted_in_few_words() -> None:
    user = [{"role": "user", "content": "x"}]
    with pytest.raises(ChatTemplateError, match="line 1: ") as caught:
        ChatTemplate("{% " + "x" * 50_000 + " %}", special_tokens={}).render(user)
    assert len(str(caught.value)) < 1000
    with pytest.raises(ChatTemplateError, match="has no template named 'default', only a") as caught:
        ChatTemplate({f"a{n}": "" for n in range(10_000)}, special_tokens={}).render(user)
    assert len(str(caught.value)) < 1000


def test_a_token_around_every_text_is_quoted_in_few_words(own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint()
    added = {"add_bos_token": True, "bos_token": "x" * 10_000}
    change_json(folder / "tokenizer_config.json", lambda data: data.update(added))
    with pytest.raises(TokenizerError, match=r"begin or end with 'xxx.*correct add_bos_token") as caught:
        Tokenizer.from_folder(folder)
    assert len(str(caught.value)) < 400


def test_explain_names_where_the_template_was_found(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint()
    assert explain_messages(folder, "hello")["chat_template"] == str(folder / "tokenizer_config.json")


# --- memory -----------------------------------------------------------------------------------------------------------


LEFT_BEHIND = """
import ctypes, gc, sys
from pathlib import Path
from xinfer.tokenizer import Tokenizer

folder, text = Path(sys.argv[1]), "Fourteen boats, the blue one last: " + " ".join(map(str, range(200)))

def use(times):
    for _ in range(times):
        Tokenizer.from_folder(folder).encode(text)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = use(20)
print(use(400) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tokenizer_leaves_nothing_behind(checkpoint: CheckpointFactory) -> None:
    """The library's cache of words outlives the tokenizer, until its thread ends."""
    command = [sys.executable, "-c", LEFT_BEHIND, str(checkpoint())]
    environment = os.environ | {"PYTHONPATH": str(Path(xinfer.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1 << 19, "2 MB with the cache"


def test_a_config_read_as_text_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"x": [' + b"{}," * (4 << 20) + b"0]}")
    with pytest.raises(ConfigError, match="expected at most 4,194,304"):
        Qwen2Config.from_json(file)
