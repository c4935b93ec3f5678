"""What any JSON file of a checkpoint may have wrong with it; config.json stands for all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xinfer.errors import ConfigError
from xinfer.model import _json
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
        file.truncate(_json.MAX_JSON_BYTES + 1)  # a hole: it takes no space
    with pytest.raises(ConfigError, match="is larger than 4194304 bytes"):
        Qwen2Config.from_json(path)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(ConfigError, match=r"cannot be opened: .*Permission denied"):
        Qwen2Config.from_json(tmp_path / "config.json")
