"""The doctor without a device: how processes end, what goes into quarantine, and what the report does not say."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from xinfer.cli import writing
from xinfer.cli.app import app
from xinfer.doctor import child, clinic, isolated
from xinfer.doctor import report as reporting
from xinfer.doctor.clinic import verdict
from xinfer.doctor.isolated import BROKEN, CRASHED, HUNG, LOST, REFUSED, RIGHT, SKIPPED, WRONG, Ended, run_isolated
from xinfer.errors import DeviceError, DeviceHungError, DeviceLostError, OutOfMemoryError, RequestError
from xinfer.gpu.api import RemovedReason
from xinfer.gpu.null import INFO
from xinfer.quarantine import Quarantine
from xinfer.shaders.catalog import variants

PREAMBLE = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
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


@pytest.mark.parametrize("begins", [True, False])
def test_a_process_that_is_slow_to_start_is_not_hung(script: Callable[[str], str], begins: bool) -> None:
    begin = "from xinfer.doctor import isolated\nisolated.begin(job)\n" if begins else ""
    ended = run_isolated(script(f"{begin}while True: time.sleep(1)"), {"announced": True}, timeout_s=2)
    assert ended.outcome == (HUNG if begins else BROKEN)
    assert ("--time-limit" in ended.detail) == (not begins)


def test_a_short_time_limit_calls_no_kernel_hung() -> None:
    """Else `--time-limit 1` would put half of the kernels into quarantine, and no model would run."""
    slow = Ended(outcome=HUNG, detail="no end after 1 s")
    outcome, detail = verdict(slow, limit_s=1, usual_s=60)
    assert outcome == BROKEN
    assert "after 60 s" in detail
    assert verdict(slow, limit_s=60, usual_s=60) == (HUNG, "no end after 1 s")
    assert verdict(Ended(outcome=CRASHED, detail="SIGSEGV"), limit_s=1, usual_s=60) == (CRASHED, "SIGSEGV")


@pytest.mark.parametrize("begins", [True, False])
def test_who_fails_before_the_work_blames_no_kernel(script: Callable[[str], str], begins: bool) -> None:
    """A device that an earlier kernel took down, and that does not come back, cannot be opened again."""
    begin = "from xinfer.doctor import isolated\nisolated.begin(job)\n" if begins else ""
    ended = run_isolated(script(f"{begin}raise RuntimeError('no such device')"), {"announced": True}, timeout_s=30)
    assert ended.outcome == (CRASHED if begins else BROKEN)
    assert "RuntimeError: no such device" in ended.detail


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_child_ends_when_its_parent_is_killed(script: Callable[[str], str], tmp_path: Path) -> None:
    """However: by SIGKILL, too, which leaves a parent no time to end it."""
    child = script(
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "from xinfer.doctor import isolated\n"
        "isolated._end_with_parent(isolated.Path(job['answer']).parent)\n"
    )
    code = f"from xinfer.doctor import isolated\nisolated.run_isolated({child!r}, {{}}, timeout_s=60)\n"
    source = str(Path(isolated.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(tmp_path)]), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    number = tmp_path / "pid"
    until(lambda: number.exists() and number.read_text() != "")
    os.kill(int(number.read_text()), 0)
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{number.read_text()}").exists())
    assert not list(tmp_path.glob("xinfer-doctor-*"))


def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_who_is_killed_from_outside_has_not_crashed(script: Callable[[str], str], name: str) -> None:
    """By a machine that is short of memory, say: no kernel is to blame."""
    ended = run_isolated(script(f"os.kill(os.getpid(), signal.{name})"), {}, timeout_s=30)
    assert (ended.outcome, ended.detail.split()[0]) == (BROKEN, name)


def test_an_answer_that_cannot_be_written_is_no_crash(script: Callable[[str], str]) -> None:
    code = (
        "from pathlib import Path\nfrom xinfer.doctor import child\n"
        "child.write_answer(Path('/dev/full/answer.json'), {'outcome': 'right'})"
    )
    ended = run_isolated(script(code), {}, timeout_s=30)
    assert ended.outcome == BROKEN
    assert "Not a directory" in ended.detail


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
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
        (MemoryError(), SKIPPED, "too little"),
        (ValueError("shapes"), BROKEN, "ValueError: shapes"),
        (OverflowError("infinity"), BROKEN, "OverflowError: infinity"),
        (AttributeError("no such name"), BROKEN, "AttributeError: no such name"),
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


class FakeChild:
    """A process that has ended when it is first asked."""

    seconds = 1.5

    def __init__(self, end: Callable[[], Ended]) -> None:
        self._end = end

    def ended(self) -> Ended:
        return self._end()

    def kill(self) -> None:
        raise AssertionError("it had ended")


class Machine:
    """Adapters, and how the process of each variant ends."""

    def __init__(self, tmp_path: Path) -> None:
        self.adapters = [GPU, SOFTWARE]
        self.ends: dict[str, Ended] = {}
        self.opens = Ended(outcome=RIGHT, answer={"outcome": RIGHT, "memory": {"budget": 8, "used": 1, "ours": 0}})
        self.jobs: list[dict[str, Any]] = []
        self.quarantine = Quarantine(tmp_path / "quarantine.json")
        self.at_a_time = 3

    def start(self, module: str, job: dict[str, Any], *, timeout_s: float, threads: int) -> FakeChild:
        assert threads > 0
        return FakeChild(lambda: self.run(module, job, timeout_s=timeout_s))

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
    monkeypatch.setattr(clinic, "Isolated", made.start)
    monkeypatch.setattr(clinic, "width", lambda *_: made.at_a_time)
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
    machine.at_a_time = 1
    run = machine.run
    seen = []

    def watching(module: str, job: dict[str, Any], *, timeout_s: float) -> Ended:
        if job.get("variant") == "rms_norm.wave":
            seen.append(machine.quarantine.variants_for(GPU))
        return run(module, job, timeout_s=timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "run", watching)
        clinic.examine(only="rms_norm.*", quarantine=machine.quarantine)
    assert seen == [{"rms_norm.plain"}]


def test_the_report_says_how_long_and_keeps_the_order(machine: Machine) -> None:
    machine.at_a_time = 1  # of several, the one that began first is named
    names = []
    report = clinic.examine(
        quarantine=machine.quarantine, progress=lambda stage, done, total, current: names.append(current)
    )
    entries = report["adapters"][0]["variants"]
    assert [entry["variant"] for entry in entries] == list(variants())
    assert {entry["seconds"] for entry in entries} == {1.5}
    assert report["seconds"] >= report["adapters"][0]["seconds"] >= 0
    assert set(variants()) < set(names)
    assert "it took" in reporting.as_text(report)


def test_who_fails_beside_others_is_tried_alone_and_only_then_blamed(machine: Machine) -> None:
    """rope.plain hangs the GPU; what runs beside it is lost with it, and right by itself."""
    runs: list[str] = []
    alone = {"rope.plain": Ended(outcome=HUNG, detail="no end after 60 s")}
    beside = {name: Ended(outcome=LOST, detail="gone") for name in ("rms_norm.wave", "rope.plain", "swiglu.plain")}

    def run(module: str, job: dict[str, Any], *, timeout_s: float) -> Ended:
        name = job.get("variant")
        if name is None:
            return Machine.run(machine, module, job, timeout_s=timeout_s)
        runs.append(name)
        assert machine.quarantine.variants_for(GPU) <= {"rope.plain"}
        again = runs.count(name) > 1
        good = Ended(outcome=RIGHT, answer={"outcome": RIGHT, "ratio": 0.1, "trials": 3})
        return (alone if again else beside).get(name, good)

    machine.at_a_time = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "run", run)
        report = clinic.examine(only="*", quarantine=machine.quarantine)
    (adapter,) = report["adapters"]
    found = {entry["variant"]: entry for entry in adapter["variants"]}
    assert found["rope.plain"]["outcome"] == HUNG
    assert found["rms_norm.wave"]["outcome"] == found["swiglu.plain"]["outcome"] == RIGHT
    assert found["swiglu.plain"]["beside_others"] == "lost gone"
    assert adapter["quarantined"] == ["rope.plain"]
    assert "ALONE      swiglu.plain: right; beside others: lost gone" in reporting.as_text(report)
    assert sorted(name for name in set(runs) if runs.count(name) == 2) == sorted(beside)


def test_what_cannot_be_kept_is_reported_all_the_same(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine.ends = {"add.plain": Ended(outcome=WRONG, detail="off by 3")}
    report = clinic.examine(only="*plain", quarantine=Quarantine(tmp_path / "file" / "quarantine.json"))
    (adapter,) = report["adapters"]
    assert len(adapter["variants"]) > 5
    assert not report["right"]
    text = reporting.as_text(report)
    assert "WRONG      add.plain: off by 3" in text
    assert "NOT KEPT   the quarantine file" in text


def test_a_machine_without_any_adapter_is_not_right(machine: Machine) -> None:
    machine.adapters = []
    report = clinic.examine(quarantine=machine.quarantine)
    assert not report["right"]
    assert "there is no adapter to examine" in reporting.as_text(report)


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
    with pytest.raises(DeviceError, match=r"Radeon RX.*d3d12: no"):
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


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_report_that_cannot_be_written_is_printed_all_the_same(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: tuple[str, ...]
) -> None:
    def fail(*_: Any) -> None:
        raise RequestError("the disk is full")

    monkeypatch.setattr(writing, "write_file", fail)
    command = ["doctor", "--only", "add.*", "--output", str(tmp_path / "report.json"), *as_json]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "error: the disk is full" in done.stderr
    if as_json:
        assert json.loads(done.stdout)["right"]
    else:
        assert "1 right" in done.stdout


def test_a_file_that_may_not_be_written_is_refused_before_the_work(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    done = CliRunner().invoke(app, ["doctor", "--output", str(tmp_path / "report.json")])
    assert done.exit_code == 1
    assert "may not be written by this user" in done.stderr
    assert machine.jobs == []
