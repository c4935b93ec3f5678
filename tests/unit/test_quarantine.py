"""The quarantine file: who reads it back, what survives damage, and that loading a model honours it."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli_run import run

from xinfer import cache_files, quarantine, state_files
from xinfer.errors import DeviceError, RequestError
from xinfer.gpu.null import INFO
from xinfer.quarantine import Driver, Quarantine, as_text, describe

NEWER = dataclasses.replace(INFO, driver_version="1")
OTHER = dataclasses.replace(INFO, device_id=INFO.device_id + 1)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def kept(tmp_path: Path, said: list[str]) -> Quarantine:
    return Quarantine(tmp_path / "deep" / "quarantine.json", warn=said.append)


def test_an_entry_holds_for_its_adapter_driver_and_version(kept: Quarantine) -> None:
    assert kept.variants_for(INFO) == frozenset()
    kept.add(INFO, "rope.plain", "wrong", "off by 3")
    kept.add(NEWER, "add.plain", "hung")
    assert kept.variants_for(INFO) == {"rope.plain"}
    assert kept.variants_for(NEWER) == {"add.plain"}
    assert kept.variants_for(OTHER) == frozenset()
    for changed in (
        dataclasses.replace(INFO, api="x"),
        dataclasses.replace(INFO, driver="x"),
        dataclasses.replace(INFO, vendor_id=99),
    ):
        assert kept.variants_for(changed) == frozenset()
    (entry,) = kept.entries_for(INFO)
    assert (entry.outcome, entry.detail) == ("wrong", "off by 3")


def test_update_replaces_lifts_and_leaves_others_alone(kept: Quarantine) -> None:
    kept.update(INFO, failed={"a": ("wrong", "1"), "b": ("lost", "2")})
    kept.add(NEWER, "a", "wrong")
    kept.update(INFO, failed={"a": ("hung", "3")}, passed=["b"])
    assert [(entry.variant, entry.outcome) for entry in kept.entries_for(INFO)] == [("a", "hung")]
    kept.lift(INFO, ["a", "unknown"])
    assert kept.variants_for(INFO) == frozenset()
    assert kept.variants_for(NEWER) == {"a"}


def test_an_entry_says_whose_it_is_and_since_when(kept: Quarantine) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    kept.add(INFO, "a", "wrong", "off by 3")
    (entry,) = kept.entries()
    assert entry.adapter == INFO.name
    assert before <= datetime.fromisoformat(entry.since) <= datetime.now(UTC)
    assert entry.flat() == {
        **{name: getattr(INFO, name) for name in ("api", "vendor_id", "device_id", "driver", "driver_version")},
        "variant": "a",
        "outcome": "wrong",
        "detail": "off by 3",
        "adapter": INFO.name,
        "since": entry.since,
    }


def test_a_file_without_names_and_dates_is_read(kept: Quarantine, said: list[str]) -> None:
    kept.add(INFO, "a", "wrong", "off by 3")
    content = json.loads(kept.path.read_text())
    for name in ("adapter", "since"):
        del content["entries"][0][name]
    kept.path.write_text(json.dumps(content))
    assert kept.variants_for(INFO) == {"a"}
    assert said == []
    assert as_text(kept.entries()).endswith("  a  wrong: off by 3")


def test_patterns_lift_on_every_adapter(kept: Quarantine) -> None:
    kept.update(INFO, failed=dict.fromkeys(("rope.plain", "rope.wave", "add.plain"), ("wrong", "")))
    kept.add(NEWER, "rope.plain", "hung")
    lifted = kept.lift_matching(["rope.p*"])
    assert [(entry.driver.driver_version, entry.variant) for entry in lifted] == [
        (INFO.driver_version, "rope.plain"),
        (NEWER.driver_version, "rope.plain"),
    ]
    assert kept.variants_for(INFO) == {"rope.wave", "add.plain"}
    with pytest.raises(RequestError, match=r"fits 'rope\.p\*'; there are: add\.plain, rope\.wave"):
        kept.lift_matching(["add.plain", "rope.p*"])
    assert len(kept.lift_matching(["*"])) == 2
    assert kept.lift_matching(["*"]) == []


def test_the_command_lists_lifts_and_clears(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.json"
    environment = {quarantine.PATH_VARIABLE: str(path)}

    def listed(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return run("quarantine", *arguments, environment=environment, status=status)

    assert listed().stdout == "no kernel is in quarantine\n"
    assert json.loads(listed("--json").stdout) == {"file": str(path), "entries": [], "lifted": []}
    kept = Quarantine(path)
    kept.add(INFO, "rope.plain", "wrong", "off by 3")
    kept.add(INFO, "add.plain", "hung")
    text = listed()
    assert text.stdout.splitlines() == [
        f"{INFO.name}, {INFO.api}, {INFO.driver} {INFO.driver_version}",
        f"  rope.plain  wrong: off by 3, since {kept.entries()[0].since[:10]}",
        f"  add.plain   hung, since {kept.entries()[0].since[:10]}",
    ]
    assert str(path) in text.stderr
    value = json.loads(listed("--json", "--lift", "rope.plain").stdout)
    assert [entry["variant"] for entry in value["lifted"]] == ["rope.plain"]
    assert value["entries"] == [kept.entries()[0].flat()]
    assert "there are: add.plain" in listed("--lift", "rope.plain", status=1).stderr
    assert "give one of the two" in listed("--lift", "x", "--clear", status=2).stderr
    cleared = listed("--clear")
    assert "add.plain is used again" in cleared.stderr
    assert cleared.stdout == "no kernel is in quarantine\n"
    assert kept.entries() == []


def test_nothing_is_written_where_nothing_changes(kept: Quarantine) -> None:
    kept.lift(INFO, ["a"])
    assert not kept.path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"version": 2, "entries": []}',
    ],
)
def test_a_damaged_file_is_set_aside_and_said(kept: Quarantine, said: list[str], content: bytes) -> None:
    kept.path.parent.mkdir()
    kept.path.write_bytes(content)
    assert kept.entries() == []
    assert len(said) == 1
    assert "damaged" in said[0]
    assert kept.path.with_name("quarantine.json.damaged").read_bytes() == content
    kept.path.write_bytes(b"{again")
    assert kept.entries() == []
    assert kept.path.with_name("quarantine.json.damaged").read_bytes() == content  # no copy is lost to the next
    assert kept.path.with_name("quarantine.json.damaged-1").read_bytes() == b"{again"
    del said[1:]
    kept.add(INFO, "a", "wrong")
    assert kept.variants_for(INFO) == {"a"}
    assert len(said) == 1


@pytest.mark.parametrize(
    "strange",
    [
        3,
        None,
        {"variant": "a"},
        {"driver": {"api": "a"}, "variant": "a", "outcome": "wrong"},
        {"driver": dataclasses.asdict(Driver.of(INFO)), "variant": ["a"], "outcome": "wrong"},
        {"driver": dataclasses.asdict(Driver.of(INFO)), "variant": "a", "outcome": "wrong", "newer": 1},
    ],
)
def test_an_entry_that_is_not_understood_takes_no_other_with_it(
    kept: Quarantine, said: list[str], strange: Any
) -> None:
    """A kernel that is known to be wrong stays out of use; what another version wrote stays in the file."""
    kept.add(INFO, "b", "wrong")
    content = json.loads(kept.path.read_text())
    kept.path.write_text(json.dumps({**content, "entries": [strange, *content["entries"]]}))
    assert kept.variants_for(INFO) == {"b"}
    assert kept.variants_for(INFO) == {"b"}
    assert len(said) == 1
    assert "1 of the entries" in said[0]
    kept.add(INFO, "c", "hung")
    kept.lift(INFO, ["b"])
    assert kept.variants_for(INFO) == {"c"}
    assert strange in json.loads(kept.path.read_text())["entries"]
    kept.lift_matching(["*"])
    assert json.loads(kept.path.read_text())["entries"] == []
    kept.lift_matching(["*"])
    assert len(said) == 1


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() == 0, reason="needs a folder that may not be written")
def test_a_folder_that_cannot_be_written_is_an_error(kept: Quarantine) -> None:
    kept.path.parent.mkdir()
    kept.path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(DeviceError, match="cannot be written"):
        kept.add(INFO, "a", "wrong")


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="XINFER_QUARANTINE"):
        Quarantine(tmp_path / "file" / "quarantine.json").add(INFO, "a", "wrong")


def test_an_interrupted_writing_leaves_the_old_file(kept: Quarantine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.add(INFO, "a", "wrong")
    before = kept.path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DeviceError, match="No space left"):
        kept.add(INFO, "b", "wrong")
    monkeypatch.undo()
    assert kept.path.read_bytes() == before
    assert {path.name for path in kept.path.parent.iterdir()} == {"quarantine.json", "quarantine.json.lock"}


def test_what_is_wrong_with_the_file_is_said_once(tmp_path: Path, said: list[str]) -> None:
    kept = Quarantine(tmp_path, warn=said.append)  # a folder
    for _ in range(3):
        assert kept.entries() == []
    assert len(said) == 1


WRITER = """
import sys
from pathlib import Path
from typing import Any
from xinfer.gpu.null import INFO
from xinfer.quarantine import Quarantine
kept = Quarantine(Path(sys.argv[1]))
for n in range(30):
    kept.add(INFO, f"{sys.argv[2]}{n}", "wrong")
"""


def test_two_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two doctors, or a doctor and a model that has lost its device."""
    path = tmp_path / "quarantine.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert Quarantine(path).variants_for(INFO) == {f"{name}{n}" for name in "ab" for n in range(30)}


def test_a_lock_that_nobody_gives_back_is_waited_for_no_longer_than_it_takes(
    kept: Quarantine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "LOCK_S", 0.05)
    monkeypatch.setattr(state_files, "_lock", lambda _: False)
    kept.add(INFO, "a", "wrong")
    assert kept.variants_for(INFO) == {"a"}


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XINFER_QUARANTINE", str(tmp_path / "named"))
    assert quarantine.quarantine_path() == tmp_path / "named"
    monkeypatch.delenv("XINFER_QUARANTINE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert quarantine.quarantine_path() == tmp_path / "xinfer" / "quarantine.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "state", "./state", "~/state"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert quarantine.quarantine_path() == tmp_path / ".local" / "state" / "xinfer" / "quarantine.json"


def test_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative folder would be another one in each place that the command is run from."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "cache", "./cache", "~/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert cache_files.cache_folder("pipelines") == tmp_path / ".cache" / "xinfer" / "pipelines"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_files.cache_folder("pipelines") == tmp_path / "xinfer" / "pipelines"


def test_the_line_for_people_names_the_variants(kept: Quarantine) -> None:
    kept.update(INFO, failed=dict.fromkeys("abcdef", ("wrong", "")))
    line = describe(INFO, kept.entries_for(INFO))
    assert line.startswith("6 kernels are in quarantine with none 0")
    assert "a (wrong), b (wrong), c (wrong), d (wrong) and 2 more" in line
    assert "xinfer doctor" in line


def test_the_line_reaches_stderr_by_itself() -> None:
    """`llm` says it through logging, which prints warnings where nobody has set it up."""
    code = "import xinfer.llm; xinfer.llm._log.warning('said')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "said\n")


@pytest.mark.parametrize("content", [b"my notes\n", b"", b"[1, 2]", b'{"a": 1}'])
def test_a_file_that_never_was_a_quarantine_is_left_as_it_is(
    tmp_path: Path, content: bytes, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """XINFER_QUARANTINE may name anything."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    monkeypatch.setenv("XINFER_QUARANTINE", str(path))
    named = Quarantine(warn=said.append)
    assert named.entries() == []
    assert "left as it is" in said[0]
    with pytest.raises(DeviceError, match="holds no quarantine"):
        named.add(INFO, "add.plain", "wrong")
    assert path.read_bytes() == content
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_file_is_not_read(tmp_path: Path, said: list[str]) -> None:
    """Reading a pipe would wait for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert Quarantine(path, warn=said.append).entries() == []
    assert "is no file" in said[0]
