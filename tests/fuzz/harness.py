"""Watches a worker run cases, from a process that no case can hurt."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fuzz.mutate import stage_of
from tests.fuzz.worker import Outcome

ROOT = Path(__file__).parents[2]

CPU_SECONDS = 2.0  # what one call may take; processor time, so that a busy machine changes nothing
WALL_SECONDS = 60.0  # and what it may wait: far above any case, on a busy machine too
MEGABYTE = 1 << 20
PEAK_BYTES = 256 * MEGABYTE  # and what it may take while it runs
WARM_UP = 200  # cases until the worker has imported and cached what it will


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that ended otherwise than in a result or an `XinferError` in time."""

    number: int
    kind: str  # "traceback", "message", "output", "slow", "hang", "died", "peak"
    detail: str
    how: str = ""

    def __str__(self) -> str:
        return (
            f"case {self.number} ({stage_of(self.number)}), {self.kind}: {self.how}\n{self.detail}\n"
            f"    run it alone: python -m tests.fuzz.worker {self.number}   (with --keep DIR to see its files)"
        )


@dataclass(slots=True)
class Report:
    """How the cases of a run ended."""

    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    growth: list[tuple[int, int]] = field(default_factory=list)  # of each worker after its warm-up: bytes, open files

    def of_stage(self, stage: str) -> list[Outcome]:
        """The outcomes of one stage."""
        return [outcome for outcome in self.outcomes if outcome["stage"] == stage]

    def messages(self, stage: str) -> Counter[str]:
        """The distinct error messages of a stage, with what differs from case to case taken out."""
        return Counter(normalised(o["message"]) for o in self.of_stage(stage) if o["kind"] == "refused")

    def successes(self, stage: str) -> int:
        """How many cases of a stage gave a result."""
        return sum(outcome["kind"] == "ok" for outcome in self.of_stage(stage))

    def table(self) -> str:
        """A line for each stage: cases, results, refusals, distinct messages."""
        rows = [
            f"{'stage':<18}{'cases':>7}{'results':>9}{'refused':>9}{'messages':>10}{'slowest (s)':>13}{'peak (MB)':>11}"
        ]
        for stage in dict.fromkeys(outcome["stage"] for outcome in self.outcomes):
            outcomes, messages = self.of_stage(stage), self.messages(stage)
            slowest = max(outcome["cpu"] for outcome in outcomes)
            rows.append(
                f"{stage:<18}{len(outcomes):>7}{self.successes(stage):>9}{messages.total():>9}{len(messages):>10}"
                f"{slowest:>13.2f}{max(outcome['peak'] for outcome in outcomes) / MEGABYTE:>11.0f}"
            )
        rows += [f"memory grew by {grown / MEGABYTE:.1f} MB, open files by {files}" for grown, files in self.growth]
        whole = sum(outcome["whole"] for outcome in self.outcomes)
        return "\n".join([*rows, f"{whole:.0f} s of processor time in all"])


def normalised(message: str) -> str:
    """An error message without names, numbers and quotations."""
    message = message.split("\n")[0]
    message = re.sub(r"'.*?'|\".*?\"|`.*?`|\(.*?\)|\[.*?\]|\{.*?\}", "_", message)
    message = re.sub(r"/\S+", "PATH", message)
    message = re.sub(r"[a-z_]*\.layers\.[\w.]+|[\w-]*\.(json|safetensors|jinja|txt|weight|bias)", "NAME", message)
    return re.sub(r"-?\d[\d.,e+-]*", "N", message)[:160]


class Worker:
    """One worker process: numbers go in, outcomes come out, and a watchdog ends it when it is silent."""

    def __init__(self, folder: Path, *, use: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-W", "always", "-m", "tests.fuzz.worker", "--serve", str(folder)]
        if use is not None:
            command += ["--use", use]
        paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "OPENBLAS_NUM_THREADS": "1",  # tiny matrices, and processor time that is the case's own
            # One arena: malloc_trim gives nothing back from the top of a thread's own, up to 64 MB of what was freed.
            "MALLOC_ARENA_MAX": "1",
            "RAYON_NUM_THREADS": "1",
            "RUST_BACKTRACE": "0",  # a panic's first lines say enough
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, command: object) -> None:
        """Give the worker something to do; that it is dead already shows when it is asked for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()

    def receive(self, *, timeout: float) -> dict[str, Any] | None:
        """The next line, or None where the worker is dead; `queue.Empty` where it says nothing in time."""
        line = self._lines.get(timeout=timeout)
        return json.loads(line) if line else None

    def returncode(self) -> int:
        """How the dead worker ended: the negative number of a signal, or an exit status."""
        return self._process.wait(timeout=WALL_SECONDS)

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_cases(
    numbers: Iterable[int],
    folder: Path,
    *,
    use: str | None = None,
    wall_seconds: float = WALL_SECONDS,
    warm_up: int = WARM_UP,
    most_failures: int = 20,
) -> Report:
    """Run the cases in a worker, and in a new one after each that was lost; stops when `most_failures` have failed."""
    report = Report()
    left = list(numbers)
    while left and len(report.failures) < most_failures:
        with Worker(folder, use=use) as worker:
            left = _run_until_lost(worker, left, report, wall_seconds, warm_up, most_failures)
    return report


def _run_until_lost(
    worker: Worker, numbers: Sequence[int], report: Report, wall_seconds: float, warm_up: int, most_failures: int
) -> list[int]:
    """Run cases until the worker is lost, and return those that are left."""
    first = _usage(worker)
    for n, number in enumerate(numbers):
        if n == warm_up:
            first = _usage(worker)
        failed = len(report.failures)
        outcome = _run_one(worker, number, report, wall_seconds)
        if outcome is None:
            return list(numbers[n + 1 :])
        if len(report.failures) > failed and len(report.failures) >= most_failures:
            break
    last = _usage(worker)
    report.growth.append((last["resident"] - first["resident"], last["files"] - first["files"]))
    return []


def _usage(worker: Worker) -> dict[str, int]:
    worker.send("usage")
    usage = worker.receive(timeout=120)  # the first answer comes when the sound checkpoints are written
    assert usage is not None, f"the worker ended by itself with status {worker.returncode()}"
    return usage


def _run_one(worker: Worker, number: int, report: Report, wall_seconds: float) -> Outcome | None:
    """Run one case and judge it; None where the worker was lost with it."""
    worker.send(number)
    try:
        begun = worker.receive(timeout=wall_seconds)
        outcome = worker.receive(timeout=wall_seconds) if begun is not None else None
    except queue.Empty:
        report.failures.append(Failure(number, "hang", f"no end after {wall_seconds:.0f} seconds"))
        return None
    if outcome is None:
        report.failures.append(Failure(number, "died", f"the process ended with status {worker.returncode()}"))
        return None
    report.outcomes.append(outcome)
    if outcome["kind"] not in ("ok", "refused"):
        report.failures.append(Failure(number, outcome["kind"], outcome["message"], outcome["how"]))
    elif outcome["peak"] > PEAK_BYTES:
        detail = f"it took {outcome['peak'] / MEGABYTE:.0f} MB while it ran"
        report.failures.append(Failure(number, "peak", detail, outcome["how"]))
    elif outcome["cpu"] > CPU_SECONDS:
        detail = (
            f"{outcome['call']} took {outcome['cpu']:.2f} s of processor time; in all {outcome['wall']:.2f} s passed"
        )
        report.failures.append(Failure(number, "slow", detail, outcome["how"]))
    return outcome
