"""Files that can be made again: whatever stands in their place, reading ends, and only what was written comes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from xinfer import cache_files

MAGIC = b"a test 1\n"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "file"
    assert cache_files.read(file, MAGIC, 10) is None
    cache_files.write(file, MAGIC, b"0123456789")
    assert cache_files.read(file, MAGIC, 10) == b"0123456789"
    assert cache_files.read(file, MAGIC, 9) is None  # longer than anything that would be written
    assert cache_files.read(file, b"another 1", 10) is None
    assert list(tmp_path.rglob("*")) == [file.parent, file]


def test_nowhere_is_fine() -> None:
    cache_files.write(None, MAGIC, b"")
    assert cache_files.read(None, MAGIC, 0) is None


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such files")
@pytest.mark.parametrize("what", ["pipe", "endless", "folder", "circle", "sparse"])
@pytest.mark.timeout(20)
def test_what_is_no_file_of_ours_is_passed_over(tmp_path: Path, what: str) -> None:
    """A pipe that nobody writes to, and a device that never ends: neither is waited for, nor read to its end."""
    file = tmp_path / "file"
    if what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
    elif what == "sparse":
        with file.open("wb") as opened:
            opened.truncate(1 << 40)
    else:
        file.symlink_to("/dev/zero" if what == "endless" else file)
    assert cache_files.read(file, MAGIC, 100) is None


@pytest.mark.skipif(sys.platform == "win32", reason="it names the folder in another variable")
def test_a_home_that_is_none_is_not_made_in_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "relative")
    assert cache_files.cache_folder("tokenizers") is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_files.cache_folder("tokenizers") is not None
