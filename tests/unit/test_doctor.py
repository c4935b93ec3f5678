"""The doctor without a device: how processes end, what goes into quarantine, and what the report does not say."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from xinfer.cli.app import app
from xinfer.doctor import child, clinic, isolated
from xinfer.doctor import report as reporting
from xinfer.doctor.isolated import BROKEN, CRASHED, HUNG, LOST, REFUSED, RIGHT, SKIPPED, WRONG, Ended, run_isolated
from xinfer.errors import DeviceError, DeviceHungError, DeviceLostError, OutOfMemoryError, RequestError
from xinfer.gpu.api import RemovedReason
from xinfer.gpu.null import INFO
from xinfer.quarantine import Quarantine

PREAMBLE = """
import json, os, signal, sys, time
job = json.load(sys.stdin)
def answer(**values):
    with open(job["answer"], "w") as file:
        file.write(json.dumps(values))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Make a module of some code; its name."""

    def make(code: str) -> str:
        (tmp_path / "a_child.py").write_text(PREAMBLE + code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "a_child"

    return make


def test_an_answer_is_passed_on_whatever_is_printed(script: Callable[[str], str]) -> None:
    code = (
        "print('{' * 100_000); print('noise', file=sys.stderr); answer(outcome='wrong', detail='by 3', ratio=job['n'])"
    )
    ended = run_isolated(script(code), {"n": 7}, timeout_s=30)
    assert (ended.outcome, ended.detail) == (WRONG, "by 3")
    assert ended.answer is not None
    assert ended.answer["ratio"] == 7


def test_a_hung_process_is_ended(script: Callable[[str], str], tmp_path: Path) -> None:
    code = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
while True: time.sleep(1)
"""
    started = time.monotonic()
    ended = run_isolated(script(code), {}, timeout_s=3)
    assert (ended.outcome, ended.detail) == (HUNG, "no end after 3 s")
    assert time.monotonic() - started < 8
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_a_signal_is_named(script: Callable[[str], str], name: str) -> None:
    ended = run_isolated(script(f"os.kill(os.getpid(), signal.{name})"), {}, timeout_s=30)
    assert (ended.outcome, ended.detail) == (CRASHED, name)


def test_a_failing_process_says_its_last_line(script: Callable[[str], str]) -> None:
    ended = run_isolated(script("raise RuntimeError('driver said no')"), {}, timeout_s=30)
    assert (ended.outcome, ended.detail) == (CRASHED, "exit code 1: RuntimeError: driver said no")


def test_a_crash_after_the_answer_is_a_crash(script: Callable[[str], str]) -> None:
    ended = run_isolated(script("answer(outcome='right'); os._exit(3)"), {}, timeout_s=30)
    assert (ended.outcome, ended.detail) == (CRASHED, "exit code 3 after the answer 'right'")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3"])
def test_half_an_answer_is_none(script: Callable[[str], str], content: str) -> None:
    ended = run_isolated(script(f"open(job['answer'], 'w').write({content!r})"), {}, timeout_s=30)
    assert ended.outcome == CRASHED


def test_what_windows_calls_a_crash() -> None:
    assert isolated.how_it_died(-1073741819) == "access violation (0xc0000005)"
    assert isolated.how_it_died(0xC0000409) == "stack buffer overrun (0xc0000409)"
    assert isolated.how_it_died(3) == "exit code 3"


class FakeDevice:
    def __init__(self, reason: RemovedReason) -> None:
        self.reason = reason

    def removed_reason(self) -> RemovedReason:
        return self.reason


@pytest.mark.parametrize(
    ("error", "outcome", "detail"),
    [
        (DeviceLostError("gone"), LOST, "DXGI_ERROR_DEVICE_HUNG"),
        (DeviceError("'trial' has not ended after 48.0 s"), HUNG, "has not ended"),
        (DeviceHungError("'trial' has not ended after 48.0 s"), HUNG, "has not ended"),
        (DeviceError("vkCreateComputePipelines: VK_ERROR_UNKNOWN"), REFUSED, "VK_ERROR_UNKNOWN"),
        (OutOfMemoryError("too little memory"), SKIPPED, "too little"),
        (ValueError("shapes"), BROKEN, "ValueError: shapes"),
    ],
)
def test_what_becomes_of_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, outcome: str, detail: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(child, "try_variant", fail)
    device: Any = FakeDevice(RemovedReason("DXGI_ERROR_DEVICE_HUNG", 0x887A0006))
    answer = child._examine(device, {"variant": "add.plain", "scale": "scaled down", "timeout_s": 1})
    assert answer["outcome"] == outcome
    assert detail in answer["detail"]


# --- the whole examination, its processes made up -------------------------------------------------------------------

GPU = dataclasses.replace(INFO, api="vulkan", index=0, name="Radeon RX", kind="discrete", driver="amd")
SOFTWARE = dataclasses.replace(INFO, api="vulkan", index=1, name="llvmpipe", kind="cpu", driver="mesa")


class Machine:
    """Adapters, and how the process of each variant ends."""

    def __init__(self, tmp_path: Path) -> None:
        self.adapters = [GPU, SOFTWARE]
        self.ends: dict[str, Ended] = {}
        self.opens = Ended(outcome=RIGHT, answer={"outcome": RIGHT, "memory": {"budget": 8, "used": 1, "ours": 0}})
        self.jobs: list[dict[str, Any]] = []
        self.quarantine = Quarantine(tmp_path / "quarantine.json")

    def run(self, _module: str, job: dict[str, Any], *, timeout_s: float) -> Ended:
        assert timeout_s > 0
        self.jobs.append(job)
        if job["kind"] == "survey":
            devices = json.loads(
                json.dumps([{**dataclasses.asdict(i), "features": sorted(i.features)} for i in self.adapters])
            )
            return Ended(outcome=RIGHT, answer={"outcome": RIGHT, "devices": devices, "missing": {"d3d12": ["no"]}})
        if job["kind"] == "open":
            return self.opens
        if job["kind"] == "directml":
            return Ended(outcome=SKIPPED, detail="not installed", answer={"outcome": SKIPPED})
        return self.ends.get(job["variant"], Ended(outcome=RIGHT, answer={"outcome": RIGHT, "ratio": 0.1, "trials": 3}))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(clinic, "run_isolated", made.run)
    return made


def test_failures_go_into_quarantine_and_come_out_again(machine: Machine) -> None:
    machine.ends = {
        "rms_norm.wave": Ended(outcome=WRONG, detail="off by 3"),
        "rms_norm.plain": Ended(outcome=SKIPPED, detail="lacks"),
    }
    machine.quarantine.add(GPU, "rms_norm.plain", "hung")
    report = clinic.examine(only="rms_norm.*", quarantine=machine.quarantine)
    assert not report["right"]
    (adapter,) = report["adapters"]
    assert adapter["quarantined"] == ["rms_norm.plain", "rms_norm.wave"]  # what was skipped has not been acquitted
    assert machine.quarantine.variants_for(SOFTWARE) == frozenset()
    text = reporting.as_text(report)
    assert "WRONG      rms_norm.wave: off by 3" in text
    assert "vulkan:1 llvmpipe: not examined" in text

    machine.ends = {}
    report = clinic.examine(only="rms_norm.*", quarantine=machine.quarantine)
    assert report["right"]
    assert report["adapters"][0]["lifted"] == ["rms_norm.plain", "rms_norm.wave"]
    assert "right again" in reporting.as_text(report)


def test_every_failure_is_written_at_once(machine: Machine) -> None:
    """The machine may not survive the next kernel."""
    machine.ends = {"rms_norm.plain": Ended(outcome=LOST, detail="gone")}
    run = machine.run

    def watching(module: str, job: dict[str, Any], *, timeout_s: float) -> Ended:
        if job.get("variant") == "rms_norm.wave":
            assert machine.quarantine.variants_for(GPU) == {"rms_norm.plain"}
        return run(module, job, timeout_s=timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clinic, "run_isolated", watching)
        clinic.examine(only="rms_norm.*", quarantine=machine.quarantine)


def test_a_fault_of_the_trial_is_told_and_blames_no_kernel(machine: Machine) -> None:
    machine.ends = {"add.plain": Ended(outcome=BROKEN, detail="TypeError")}
    report = clinic.examine(only="add.*", quarantine=machine.quarantine)
    assert not report["right"]
    assert machine.quarantine.variants_for(GPU) == frozenset()


def test_no_kernel_is_blamed_for_a_device_that_does_not_open(machine: Machine) -> None:
    machine.opens = Ended(outcome=CRASHED, detail="SIGSEGV")
    report = clinic.examine(quarantine=machine.quarantine)
    assert not report["right"]
    assert report["adapters"][0]["variants"] == []
    assert "cannot be opened: crashed SIGSEGV" in reporting.as_text(report)
    assert machine.quarantine.entries() == []


def test_software_drivers_are_scaled_down_and_the_report_says_so(machine: Machine) -> None:
    scales = {}
    for device, deep in (("vulkan:0", False), ("vulkan:0", True), ("llvmpipe", False), ("llvmpipe", True)):
        report = clinic.examine(device=device, deep=deep, only="add.*", quarantine=machine.quarantine)
        scales[device, deep] = report["adapters"][0]["scale"]
    assert scales == {
        ("vulkan:0", False): "real shapes",
        ("vulkan:0", True): "real shapes, long contexts",
        ("llvmpipe", False): "scaled down",
        ("llvmpipe", True): "real shapes",
    }


def test_a_software_driver_is_examined_where_there_is_no_gpu(machine: Machine) -> None:
    machine.adapters = [SOFTWARE]
    report = clinic.examine(only="add.*", quarantine=machine.quarantine)
    assert [adapter["name"] for adapter in report["adapters"]] == ["llvmpipe"]


def test_what_fits_nothing_is_refused(machine: Machine) -> None:
    with pytest.raises(DeviceError, match="Radeon RX"):
        clinic.examine(device="geforce", quarantine=machine.quarantine)
    with pytest.raises(RequestError, match="fits no kernel"):
        clinic.examine(only="nothing.*", quarantine=machine.quarantine)


def test_the_report_says_nothing_of_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/erika")
    monkeypatch.setattr(getpass, "getuser", lambda: "erika")
    monkeypatch.setattr(socket, "gethostname", lambda: "Bluebird")
    report = {
        "a": ["/srv/people/erika/.config/x", "host bluebird: erika's", r"C:\Users\Max Muster\AppData", "/home/max/y"],
        "/home/max/z": ("erikaX stays", 3, None, True),
    }
    assert reporting.anonymous(report) == {
        "a": ["~/.config/x", "host <host>: <user>'s", r"~\AppData", "~/y"],
        "~/z": ["erikaX stays", 3, None, True],
    }


def test_common_names_are_left_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert reporting.anonymous("root signature on localhost") == "root signature on localhost"


def test_the_command_writes_one_file_and_ends_with_1(machine: Machine, tmp_path: Path) -> None:
    machine.ends = {"add.plain": Ended(outcome=HUNG, detail=f"in {Path.home()}/x")}
    target = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["doctor", "--only", "add.*", "--output", str(target)])
    assert done.exit_code == 1, done.output
    assert "HUNG       add.plain: in ~/x" in done.stdout
    report = json.loads(target.read_text())
    assert report["adapters"][0]["variants"][0]["outcome"] == HUNG
    assert str(Path.home()) not in target.read_text()
    done = CliRunner().invoke(app, ["doctor", "--output", str(tmp_path / "no" / "report.json")])
    assert done.exit_code == 1
    assert "lies in none" in done.output
