"""`xinfer devices`, and which adapter `--device` takes: on adapters that are made up, and on none at all."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xinfer import gpu, inspection
from xinfer.cli.loading import warn_of_device
from xinfer.errors import DeviceError
from xinfer.gpu.api import DeviceInfo, DeviceKind
from xinfer.gpu.null import INFO


def adapter(index: int, name: str, kind: DeviceKind) -> DeviceInfo:
    return dataclasses.replace(
        INFO,
        api="vulkan",
        index=index,
        name=name,
        kind=kind,
        driver="driver",
        driver_version="1.2.3",
        api_version="1.3",
        heap_bytes=8_000_000_000,
        features=frozenset({"storage16", "timeline"}),
    )


SOFTWARE = adapter(0, "llvmpipe", "cpu")
INTEGRATED = adapter(1, "Iris Xe", "integrated")
DISCRETE = adapter(2, "Radeon RX", "discrete")


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> list[DeviceInfo]:
    """What Vulkan shows; tests fill it."""
    found: list[DeviceInfo] = []
    monkeypatch.setattr("xinfer.gpu.vulkan.list_devices", lambda: list(found))
    monkeypatch.setattr("xinfer.gpu.vulkan.diagnose", lambda: [] if len(found) > 1 else ["only a software driver"])
    return found


@pytest.mark.parametrize(
    ("there", "auto"),
    [
        ([SOFTWARE, INTEGRATED, DISCRETE], "vulkan:2"),
        ([SOFTWARE, INTEGRATED], "vulkan:1"),
        ([SOFTWARE], "cpu"),
        ([], "cpu"),
    ],
)
def test_the_report_says_what_auto_takes(adapters: list[DeviceInfo], there: list[DeviceInfo], auto: str) -> None:
    adapters += there
    report = inspection.list_adapters()
    assert report["auto"] == auto
    assert {device["selector"] for device in report["devices"]} == {f"vulkan:{info.index}" for info in there}
    assert f"--device auto takes {auto}" in inspection.render_adapters(report)
    chosen = gpu.choose_device("auto")
    assert ("cpu" if chosen is None else f"vulkan:{chosen.index}") == auto


def test_software_drivers_come_last_and_say_that_they_are_not_chosen(adapters: list[DeviceInfo]) -> None:
    adapters += [SOFTWARE, DISCRETE]
    report = inspection.list_adapters()
    assert [device["name"] for device in report["devices"]] == ["Radeon RX", "llvmpipe"]
    text = inspection.render_adapters(report)
    assert "Radeon RX (discrete)" in text
    assert "llvmpipe (software, used only when asked for)" in text
    assert "8.0 GB" in text
    assert "storage16, timeline" in text


def test_what_is_missing_is_said(adapters: list[DeviceInfo]) -> None:
    adapters.append(SOFTWARE)
    assert "no GPU through vulkan:\n  only a software driver" in inspection.render_adapters(inspection.list_adapters())


def test_a_broken_driver_is_told_beside_a_gpu_and_once_where_there_is_none(
    adapters: list[DeviceInfo], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"ICD": {')
    monkeypatch.setenv("VK_DRIVER_FILES", str(broken))
    adapters += [SOFTWARE, DISCRETE]
    (note,) = inspection.list_adapters()["notes"]
    assert note.startswith(f"VK_DRIVER_FILES={broken}: {broken} is not the JSON of a driver")
    assert f"note: {note}" in inspection.render_adapters(inspection.list_adapters())
    monkeypatch.setattr("xinfer.gpu.vulkan.diagnose", lambda: ["only software", note])
    assert inspection.list_adapters()["notes"] == []


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("vulkan", "Radeon RX"),
        ("vulkan:1", "Iris Xe"),
        ("VULKAN:0", "llvmpipe"),
        ("radeon", "Radeon RX"),
        ("llvm", "llvmpipe"),
    ],
)
def test_a_selector_names_one_adapter(adapters: list[DeviceInfo], selector: str, name: str) -> None:
    adapters += [SOFTWARE, INTEGRATED, DISCRETE]
    chosen = gpu.choose_device(selector)
    assert chosen is not None
    assert chosen.name == name


@pytest.mark.parametrize("selector", ["vulkan:7", "vulkan:x", "geforce", "vulkan:"])
def test_a_selector_that_fits_nothing_lists_what_there_is(adapters: list[DeviceInfo], selector: str) -> None:
    adapters += [SOFTWARE, DISCRETE]
    with pytest.raises(DeviceError, match=r"Radeon RX|no index"):
        gpu.choose_device(selector)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xinfer", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def test_devices_prints_json_on_any_machine() -> None:
    done = run("devices", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"auto", "devices", "missing", "notes"}
    for device in report["devices"]:
        assert {"selector", "name", "kind", "driver", "api_version", "heap_bytes", "features"} <= set(device)
        assert device["features"] == sorted(device["features"])


def test_devices_says_why_there_is_none(tmp_path: Path) -> None:
    """A driver file that is not there, as after a broken installation."""
    missing = str(tmp_path / "gone.json")
    hidden = {"VK_DRIVER_FILES": missing, "VK_ICD_FILENAMES": missing}
    done = run("devices", **hidden)
    assert done.returncode == 0, done.stderr
    assert "no GPU through vulkan" in done.stdout
    assert "auto takes cpu" in done.stdout
    done = run("generate", "--device", "vulkan", "x", **hidden)
    assert done.returncode == 1
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("selector", "is_software", "warned"),
    [
        ("vulkan", True, True),
        (" Vulkan ", True, True),
        ("vulkan:0", True, False),  # asked for by its number or name
        ("llvmpipe", True, False),
        ("vulkan", False, False),
        ("auto", False, False),
    ],
)
def test_a_software_driver_that_was_not_asked_for_is_said(
    selector: str, is_software: bool, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_device(selector, "vulkan:0 llvmpipe (software)", is_software=is_software, fallback=None)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("warning: vulkan:0 llvmpipe (software) is not a GPU" in shown.err) == warned
    assert bool(shown.err) == warned


@pytest.mark.parametrize(
    ("there", "why"),
    [([], "there is only a software driver"), ([SOFTWARE, DISCRETE], None)],
)
def test_why_there_is_no_gpu_is_the_first_reason_of_each_api(
    adapters: list[DeviceInfo], monkeypatch: pytest.MonkeyPatch, there: list[DeviceInfo], why: str | None
) -> None:
    adapters += there
    reasons = [] if there else ["there is only a software driver", "and a hint"]
    monkeypatch.setattr("xinfer.gpu.vulkan.diagnose", lambda: reasons)
    monkeypatch.setattr("xinfer.gpu.d3d12.diagnose", list)
    assert gpu.why_no_gpu() == (why or "none of the adapters is a GPU of its own")


def test_what_auto_falls_back_to_is_said_in_one_line(tmp_path: Path) -> None:
    """No driver at all, whatever this machine has: text says it once, JSON in a field, and --quiet not at all."""
    missing = str(tmp_path / "gone.json")
    hidden = {"VK_DRIVER_FILES": missing, "VK_ICD_FILENAMES": missing}
    command = ("generate", "--max-tokens", "2", "x")
    said = [line for line in run(*command, **hidden).stderr.splitlines() if "no GPU" in line]
    assert len(said) == 1
    assert said[0].startswith("the CPU is used, for --device auto found no GPU: ")
    assert missing in said[0]
    assert run(*command, "--quiet", **hidden).stderr == ""
    assert "no GPU" not in run(*command, "--device", "cpu", **hidden).stderr
    stats = json.loads(run(*command, "--json", **hidden).stdout)["stats"]
    assert stats["device"] == "cpu"
    assert missing in stats["fallback"]
    assert json.loads(run(*command, "--json", "--device", "cpu", **hidden).stdout)["stats"]["fallback"] is None
    logits = run("logits", "--tokens", "1", "--out", str(tmp_path / "l.npy"), **hidden)
    assert said[0] in logits.stderr.splitlines()


@pytest.mark.parametrize(
    "command", [("generate", "--max-tokens", "2", "x"), ("logits", "--tokens", "1", "--out", "l.npy")]
)
def test_commands_warn_of_a_software_driver(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = json.loads(run("devices", "--json").stdout)
    if report["auto"] != "cpu" or not report["devices"]:
        pytest.skip("needs a machine whose only adapter is a software driver")
    assert "warning: " in run(*command, "--device", "vulkan").stderr
    assert "warning" not in run(*command, "--device", "cpu").stderr
