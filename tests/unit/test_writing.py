"""Files that commands write: whole or not at all, and what is no plain file stays what it is."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from xinfer.cli.writing import replacing, write_file
from xinfer.errors import RequestError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("before")
    with replacing(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_text("before")

    def write_some() -> None:
        with replacing(path) as file:
            file.write(b"aft")
            raise OSError("no more")

    with pytest.raises(RequestError, match="cannot be written: no more"):
        write_some()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", list[str]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    write_file(path, "the report")
    reader.join(10)
    assert read == ["the report"]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    path.symlink_to(target)
    write_file(path, "after")
    assert path.is_symlink()
    assert target.read_text() == "after"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="Linux has it")
def test_a_device_that_is_full(tmp_path: Path) -> None:
    """By a link, so that a fault here costs the machine nothing."""
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    with pytest.raises(RequestError, match="cannot be written: No space left on device"):
        write_file(path, "the report")
    assert path.is_symlink()
