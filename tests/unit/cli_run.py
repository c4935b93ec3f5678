"""Runs the command as a user does: what lands on stdout, what on stderr, and the exit status."""

import os
import signal
import subprocess
import sys


def hear_interrupts() -> None:
    """In a child: undo what `nohup` or a shell's `&` may have done to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(
    *arguments: object, stdin: bytes = b"", status: int = 0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "xinfer", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )
    result = subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result
