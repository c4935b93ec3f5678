"""Many kernels' processes, several at a time, so that none is blamed for what another did.

A kernel that hangs or loses the device may take down whatever runs beside it on the same GPU, and memory that several
share may not be enough. So a process that did not come to a good end while others ran counts for nothing: no more are
started, those that run end, and each that failed is tried again alone. Only that is its outcome.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xinfer.doctor.isolated import POLL_S, RIGHT, SKIPPED, Ended
from xinfer.model.memory import available_memory

MOST_AT_A_TIME = 12


class Running(Protocol):
    """What `isolated.Isolated` is."""

    @property
    def seconds(self) -> float:
        """Since it was started."""

    def ended(self) -> Ended | None:
        """How it ended; None while it runs."""

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A kernel's outcome, and what it was before where others ran beside it and it failed."""

    name: str
    ended: Ended
    seconds: float
    beside: Ended | None = None


def width(heap_bytes: int, child_bytes: int) -> int:
    """How many processes at a time: one for each core, as far as the memories of machine and GPU hold them."""
    room = min(heap_bytes, available_memory()) // child_bytes
    return max(1, min(cores(), room, MOST_AT_A_TIME))


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(kw_only=True)
class Round:
    """Tries kernels by `start`, up to `at_a_time` of them; `settle` is told each outcome as soon as it is known.

    `tick` is called again and again, with how many are settled and which is being tried.
    """

    start: Callable[[str], Running]
    at_a_time: int
    settle: Callable[[Tried], None]
    tick: Callable[[int, str], None]
    _running: dict[str, Running] = field(default_factory=dict)
    _accompanied: set[str] = field(default_factory=set)
    _failed: dict[str, Ended] = field(default_factory=dict)  # beside others
    _n_settled: int = 0

    def run(self, names: Sequence[str]) -> None:
        """Try each of them."""
        waiting = list(reversed(names))
        try:
            while waiting or self._running or self._failed:
                if self._failed and not self._running:
                    self._try_again(names)
                while waiting and not self._failed and len(self._running) < self.at_a_time:
                    self._start(waiting.pop())
                self._poll()
        finally:  # Ctrl-C: leave none behind
            for child in self._running.values():
                child.kill()
            self._running.clear()

    def _try_again(self, names: Sequence[str]) -> None:
        """Each that failed beside others, alone, in order."""
        failed, self._failed = self._failed, {}
        for name in sorted(failed, key=list(names).index):
            self._start(name)
            while self._running:
                self._poll(failed[name])

    def _start(self, name: str) -> None:
        self._accompanied.discard(name)
        self._running[name] = self.start(name)
        if len(self._running) > 1:
            self._accompanied.update(self._running)

    def _poll(self, beside: Ended | None = None) -> None:
        self.tick(self._n_settled, next(iter(self._running), ""))
        ended = {name: found for name, child in self._running.items() if (found := child.ended()) is not None}
        for name, found in ended.items():
            seconds = round(self._running.pop(name).seconds, 2)
            if name in self._accompanied and not _is_settled(found):
                self._failed[name] = found
                continue
            self._n_settled += 1
            self.settle(Tried(name=name, ended=found, seconds=seconds, beside=beside))
        if not ended:
            time.sleep(POLL_S)


def _is_settled(ended: Ended) -> bool:
    """Whether others beside it cannot have been the cause: it is right, or the device lacks what it needs."""
    short = bool(ended.answer and ended.answer.get("short"))  # of memory, which the others may have had
    return ended.outcome == RIGHT or (ended.outcome == SKIPPED and not short)
