"""Progress bars on stderr for what takes longer than a moment."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from xinfer.progress_lines import TITLES

PATIENCE = 0.5  # seconds of silence before a bar appears

_COLUMNS: dict[str, tuple[ProgressColumn, ...]] = {
    "load": (DownloadColumn(), TransferSpeedColumn()),  # bytes
    "prefill": (MofNCompleteColumn(), TextColumn("tokens")),
    "compile": (MofNCompleteColumn(), TextColumn("kernels")),
    "measure": (MofNCompleteColumn(), TextColumn("measurements")),
    "bench": (MofNCompleteColumn(), TextColumn("measurements")),
    "tune": (MofNCompleteColumn(), TextColumn("ops")),
    "synth": (MofNCompleteColumn(), TextColumn("tensors")),
    "verify": (MofNCompleteColumn(), TextColumn("passes")),
    "doctor": (MofNCompleteColumn(), TextColumn("kernels")),
}


class Bars:
    """One bar at a time: it appears when its stage has run for `PATIENCE` and vanishes when the stage is done.

    With `first`, the stage that all the rest serves, its bar comes back behind each other one until it is done itself.
    """

    def __init__(self, console: Console | None = None, *, first: str | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._lock = threading.RLock()
        self._first = first
        self._stage: str | None = None
        self._at: tuple[int, int | None, str] = (0, None, "")
        self._timer: threading.Timer | None = None
        self._progress: Progress | None = None

    def update(self, stage: str, done: int, total: int | None, current: str = "") -> None:
        """Say how far a stage has come, and what is at hand; a total of None is not known yet."""
        with self._lock:
            if stage != self._stage:
                self._begin(stage)
            self._at = done, total, current
            if total is not None and done >= total:
                self._end()
            elif self._progress is not None:
                self._move(self._progress)

    def _begin(self, stage: str) -> None:
        self._hide()
        self._stage, self._at = stage, (0, None, "")
        self._timer = threading.Timer(PATIENCE, self._show, [stage])
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        ended, self._stage = self._stage, None
        self._hide()
        if ended == self._first:
            self._first = None
        elif self._first is not None:
            self._begin(self._first)

    def _show(self, stage: str) -> None:
        with self._lock:
            if self._stage != stage or self._progress is not None or self._timer is not threading.current_thread():
                return
            self._progress = Progress(
                TextColumn(TITLES.get(stage, stage)),
                BarColumn(),
                *_COLUMNS.get(stage, (MofNCompleteColumn(),)),
                TimeRemainingColumn(),
                TextColumn("{task.fields[current]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._progress.add_task(stage, total=None, current="")
            self._move(self._progress)
            self._progress.start()

    def _move(self, bar: Progress) -> None:
        done, total, current = self._at
        bar.update(bar.task_ids[0], completed=done, total=total, current=current)

    def _hide(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Bars:
        if self._first is not None:
            self.update(self._first, 0, None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._stage = None
            self._hide()
