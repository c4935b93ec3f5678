"""A process of its own for what may hang, lose the device or crash, and what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RIGHT, WRONG, HUNG, LOST, CRASHED, REFUSED, SKIPPED, BROKEN = (
    *("right", "wrong", "hung", "lost"),
    *("crashed", "refused", "skipped", "broken"),
)
FAILURES = (WRONG, HUNG, LOST, CRASHED, REFUSED)  # a kernel's; "broken" is a fault of the trial itself
KILL_WAIT_S = 5.0  # for a killed process to go; one that sits in its driver may never
WINDOWS_CODES = {
    0xC0000005: "access violation",
    0xC000001D: "illegal instruction",
    0xC0000094: "division by zero",
    0xC00000FD: "stack overflow",
    0xC0000374: "heap corruption",
    0xC0000409: "stack buffer overrun",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended: one of the outcomes above, and details."""

    outcome: str
    detail: str = ""
    answer: dict[str, Any] | None = None  # what it printed


def run_isolated(module: str, job: dict[str, Any], *, timeout_s: float) -> Ended:
    """Run `python -m module` with a job on stdin; it answers with one JSON object in a file.

    Drivers print what they like to stdout and stderr: neither is listened to, but for the last line of stderr.
    """
    with tempfile.TemporaryDirectory(prefix="xinfer-doctor-", ignore_cleanup_errors=True) as folder:
        target = Path(folder) / "answer.json"
        with (Path(folder) / "stderr").open("w+b") as errors:
            process = subprocess.Popen(  # noqa: S603  # our own module, by our own interpreter
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=_environment(),
            )
            try:
                process.communicate(json.dumps({**job, "answer": str(target)}).encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                _kill(process)
                return Ended(outcome=HUNG, detail=f"no end after {timeout_s:.0f} s")
            except BaseException:  # Ctrl-C: leave nothing behind
                _kill(process)
                raise
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
        return _ended(process.returncode, target, said[-1] if said else "")


def _ended(code: int, target: Path, said: str) -> Ended:
    answer = _read(target)
    if answer is not None and code == 0:
        return Ended(outcome=str(answer["outcome"]), detail=str(answer.get("detail", "")), answer=answer)
    if answer is not None:  # it had its result and then fell over: while closing the device, say
        detail = f"{how_it_died(code)} after the answer {answer['outcome']!r}"
        return Ended(outcome=CRASHED, detail=detail, answer=answer)
    return Ended(outcome=CRASHED, detail=f"{how_it_died(code)}{': ' + said if said else ''}")


def how_it_died(code: int) -> str:
    """A return code in words: a signal's name, or what Windows calls it."""
    unsigned = code & 0xFFFF_FFFF
    if unsigned in WINDOWS_CODES:
        return f"{WINDOWS_CODES[unsigned]} ({unsigned:#010x})"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _read(target: Path) -> dict[str, Any] | None:
    try:
        answer = json.loads(target.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and "outcome" in answer else None


def _environment() -> dict[str, str]:
    """Ours, with this very package first: a child must not find another xinfer, nor print a crash report of its own."""
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": ""}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    try:
        process.wait(KILL_WAIT_S)
    except subprocess.TimeoutExpired:
        return  # it goes when its driver lets it
