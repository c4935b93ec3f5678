"""What any file of a checkpoint may have wrong with it. For JSON, config.json stands for all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CheckpointFactory

from xinfer import LLM, files
from xinfer.checkpoint import Checkpoint
from xinfer.errors import ChatTemplateError, CheckpointError, ConfigError
from xinfer.model.config import Qwen2Config


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b'{"a": 1,}', "is not valid JSON"),
        (b"[1, 2]", "holds [1, 2] at the top; expected a JSON object"),
        (b"null", "holds None at the top"),
        (b'"text"', "holds 'text' at the top"),
        (b'{"a": NaN}', "holds the literal NaN"),
        (b'{"a": [-Infinity]}', "holds the literal -Infinity"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "has the key 'c' twice"),
        (b"\xef\xbb\xbf{}", "starts with a byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (b'{"a": "\xff"}', "is not UTF-8 text: byte 7"),
        (b'{"a": 1}\x00', "is not valid JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "holds an integer of thousands of digits"),
        (b'{"vocab_size": ' + b"9" * 4000 + b"}", "model_type is missing"),
    ],
)
def test_broken(tmp_path: Path, content: bytes, fact: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Qwen2Config.from_json(path)
    assert str(path) in str(caught.value)
    assert fact in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 500


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Qwen2Config.from_json(tmp_path / "config.json")


def test_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../blobs/0123")
    with pytest.raises(ConfigError, match=r"is a link to \.\./blobs/0123, which does not exist.*fetch the model"):
        Qwen2Config.from_json(tmp_path)


def test_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError):
        Qwen2Config.from_json(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no FIFOs")
def test_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        Qwen2Config.from_json(tmp_path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this platform has no /dev/zero")
def test_endless_device(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="not a regular file"):
        Qwen2Config.from_json(tmp_path)


def test_name_that_no_file_can_have() -> None:
    for path in (Path("a\0b"), Path("x" * 5000)):
        with pytest.raises(ConfigError, match="cannot be opened"):
            Qwen2Config.from_json(path)


def test_too_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(files.MAX_JSON_BYTES + 1)  # a hole: it takes no space
    with pytest.raises(ConfigError, match="expected at most 4,194,304"):
        Qwen2Config.from_json(path)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ConfigError, match=r"cannot be opened: .*Permission denied"):
        Qwen2Config.from_json(tmp_path / "config.json")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to("../blobs/0123")


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "folder": (make_folder, "is a folder"),
    "FIFO": (os.mkfifo, "not a regular file"),
    "device": (make_endless, "not a regular file"),
    "link": (make_link_to_nothing, "does not exist"),
}
# Each file that is read from a model's folder, and those that must be out of the way for it to be looked at.
READ = {
    "config.json": (),
    "generation_config.json": (),
    "tokenizer.json": (),
    "tokenizer_config.json": (),
    "special_tokens_map.json": ("tokenizer_config.json",),
    "added_tokens.json": ("tokenizer_config.json",),
    "vocab.json": ("tokenizer.json",),
    "merges.txt": ("tokenizer.json",),
    "chat_template.jinja": (),
    "additional_chat_templates/tool_use.jinja": (),
    "chat_template.json": ("tokenizer_config.json",),
    "model.safetensors": (),
    "model.safetensors.index.json": ("model.safetensors",),
}


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("name", READ)
@pytest.mark.timeout(60)
def test_what_is_no_file_is_refused_by_name(name: str, spoiled: str, own_checkpoint: CheckpointFactory) -> None:
    """In the place of any file that a model's folder may have: neither passed over nor waited for."""
    folder = own_checkpoint("gqa")
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(whole["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) if isinstance(pair, list) else pair for pair in whole["merges"])
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    for other in (name, *READ[name]):
        (folder / other).unlink(missing_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    make, says = SPOILED[spoiled]
    make(folder / name)
    with pytest.raises(CheckpointError) as caught:
        LLM(folder, device="cpu").close()
    assert says in str(caught.value)
    assert name in str(caught.value)


def test_additional_templates_are_in_a_folder(own_checkpoint: CheckpointFactory) -> None:
    folder = own_checkpoint("gqa")
    (folder / "additional_chat_templates").write_text("x")
    with pytest.raises(ChatTemplateError, match="expected a folder of templates"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_file_that_may_not_be_read_is_said(
    name: str, own_checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_checkpoint("gqa")
    (folder / name).touch()
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **keywords: Any) -> Any:  # root may read everything
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be opened: .*Permission denied"):
        Checkpoint(folder)


@pytest.mark.parametrize("text", ["", " \n\n"])
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_an_empty_template_is_refused_where_it_is_used(
    text: str, place: str, own_checkpoint: CheckpointFactory
) -> None:
    """transformers renders it, and the model never sees the messages."""
    folder = own_checkpoint("gqa")
    if place == "chat_template.jinja":
        (folder / place).write_text(text)
    else:
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**config, "chat_template": text}))
    checkpoint = Checkpoint(folder)
    assert checkpoint.encode("hi")
    with pytest.raises(ChatTemplateError, match=f"{place} is empty"):
        checkpoint.encode_chat("hi")
