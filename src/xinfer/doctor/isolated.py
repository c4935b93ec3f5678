"""A process of its own for what may hang, lose the device or crash, and what became of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

RIGHT, WRONG, HUNG, LOST, CRASHED, REFUSED, SKIPPED, BROKEN = (
    *("right", "wrong", "hung", "lost"),
    *("crashed", "refused", "skipped", "broken"),
)
FAILURES = (WRONG, HUNG, LOST, CRASHED, REFUSED)  # a kernel's; "broken" is a fault of the trial itself
POLL_S = 0.01
BEGUN = ".begun"
FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")  # no fault of a kernel's comes to these
NO_ANSWER = 73  # a child's exit status when it cannot write
ORPHANED = 75  # a child's exit status when its parent has gone
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
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


class Isolated:
    """`python -m module` at a job, which it reads from stdin; it answers with one JSON object in a file.

    Drivers print what they like to stdout and stderr: neither is listened to, but for the last line of stderr. Stdin
    stays open for as long as we live: a child whose parent was killed reads its end (`read_job`). One whose job is
    "announced" says when it begins with what may hang (`begin`): what goes wrong before, as on a machine that is too
    busy or with a device that an earlier kernel has taken down for good, is no kernel's fault.
    """

    def __init__(self, module: str, job: dict[str, Any], *, timeout_s: float, threads: int | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="xinfer-doctor-", ignore_cleanup_errors=True)
        self._target = Path(self._folder.name) / "answer.json"
        self._errors = Path(self._folder.name) / "stderr"
        self._begun = self._target.with_suffix(BEGUN)
        self._announced = bool(job.get("announced"))
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        try:
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(  # noqa: S603  # our own module, by our own interpreter
                    [sys.executable, "-m", module],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=_environment(threads),
                    start_new_session=True,  # Ctrl-C is for us: a child that it ended would look as if it had crashed
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                )
        except BaseException:
            self._folder.cleanup()
            raise
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone already: how it ended says more
            self._process.stdin.write(json.dumps({**job, "answer": str(self._target)}).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def ended(self) -> Ended | None:
        """How it ended, once; None while it runs and has time left. One whose time is over is killed."""
        code = self._process.poll()
        if code is None:
            if self.seconds < self._timeout_s:
                return None
            began = self._began
            self.kill()
            if began:
                return Ended(outcome=HUNG, detail=f"no end after {self._timeout_s:.0f} s")
            detail = f"it did not get as far as its work in {self._timeout_s:.0f} s; give it more time (--time-limit)"
            return Ended(outcome=BROKEN, detail=detail)
        said = self._errors.read_bytes().decode(errors="replace").strip().splitlines()
        ended, began = _ended(code, self._target, said[-1] if said else ""), self._began
        self._clean()
        if ended.outcome == CRASHED and not began:
            return Ended(outcome=BROKEN, detail=f"{ended.detail}, before it came to its work")
        return ended

    @property
    def _began(self) -> bool:
        return self._begun.exists() or not self._announced

    def kill(self) -> None:
        """End it, whatever it does, and leave nothing of it behind."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # else it goes when its driver lets it
            self._process.wait(KILL_WAIT_S)
        self._clean()

    def _clean(self) -> None:
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._folder.cleanup()


def run_isolated(module: str, job: dict[str, Any], *, timeout_s: float) -> Ended:
    """Run one `Isolated` to its end."""
    child = Isolated(module, job, timeout_s=timeout_s)
    try:
        while (ended := child.ended()) is None:
            time.sleep(POLL_S)
    except BaseException:  # Ctrl-C: leave nothing behind
        child.kill()
        raise
    return ended


def read_job() -> dict[str, Any]:
    """In the child: the job. From then on it ends when its parent does, however that was ended."""
    job: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    Thread(target=_end_with_parent, args=(Path(job["answer"]).parent,), daemon=True).start()
    return job


def begin(job: dict[str, Any]) -> None:
    """In the child: from now on, what takes too long is the work."""
    Path(job["answer"]).with_suffix(BEGUN).touch()


def _end_with_parent(folder: Path) -> None:
    # Nothing more comes: it ends when nobody holds the other end any more. Not through sys.stdin, whose lock an exiting
    # interpreter wants.
    with suppress(OSError):
        os.read(0, 1)
    shutil.rmtree(folder, ignore_errors=True)  # which the parent has made for us, and cannot remove any more
    os._exit(ORPHANED)


def _ended(code: int, target: Path, said: str) -> Ended:
    answer = _read(target)
    if answer is not None and code == 0:
        return Ended(outcome=str(answer["outcome"]), detail=str(answer.get("detail", "")), answer=answer)
    if answer is not None:  # it had its result and then fell over: while closing the device, say
        detail = f"{how_it_died(code)} after the answer {answer['outcome']!r}"
        return Ended(outcome=CRASHED, detail=detail, answer=answer)
    if code == NO_ANSWER:
        return Ended(outcome=BROKEN, detail=f"its answer could not be written: {said}")
    died = how_it_died(code)
    if died in FROM_OUTSIDE:
        return Ended(outcome=BROKEN, detail=f"{died} from outside, as when the machine's memory is full")
    return Ended(outcome=CRASHED, detail=f"{died}{': ' + said if said else ''}")


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


def _environment(threads: int | None) -> dict[str, str]:
    """Ours, with this very package first: a child must not find another xinfer, nor print a crash report of its own.

    `threads` are NumPy's, unless the user has said how many.
    """
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    given = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    return {**given, **os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": ""}
