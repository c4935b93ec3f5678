"""How far a long stage is, as plain lines for a log: where stderr is no terminal, silence would look like a hang."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

INTERVAL_S = 10.0  # of silence before the first line, and between two

TITLES = {
    "load": "loading weights",
    "prefill": "reading the prompt",
    "compile": "compiling kernels for this GPU, once",
    "verify": "comparing with the reference",
    "doctor": "trying kernels",
    "bench": "measuring",
    "measure": "measuring",
    "tune": "trying kernels",
    "synth": "making weights",
}
_UNITS = {
    "prefill": " tokens",
    "verify": " passes",
    "compile": " kernels",
    "bench": " measurements",
    "synth": " tensors",
}


class Lines:
    """A line every `INTERVAL_S` while a stage lasts: what is done, of how much, what is at hand, and the time left."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or _to_stderr
        self._stage: str | None = None
        self._started = 0.0
        self._last = 0.0
        self._first = 0  # what was done when the stage began

    def update(self, stage: str, done: int, total: int, current: str = "") -> None:
        """Say how far a stage has come."""
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._last, self._first = stage, now, now, done
        if done >= total:
            self._stage = None
        elif now - self._last >= INTERVAL_S:
            self._last = now
            self._write(self._line(stage, done, total, current, now))

    def _line(self, stage: str, done: int, total: int, current: str, now: float) -> str:
        so_far = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        if stage != "load":
            so_far = f"{done:,} of {total:,}{_UNITS.get(stage, '')}"
        parts = [so_far, *filter(None, [current])]
        if done > self._first:
            left = (now - self._started) * (total - done) / (done - self._first)
            parts.append(f"about {left:,.0f} s left")
        return f"{TITLES.get(stage, stage)}: {', '.join(parts)}"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
