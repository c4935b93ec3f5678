"""Progress bars on stderr for what takes longer than a moment."""

from __future__ import annotations

import time
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
    "verify": (MofNCompleteColumn(), TextColumn("passes")),
    "doctor": (MofNCompleteColumn(), TextColumn("kernels")),
}


class Bars:
    """One bar at a time: it appears when its stage has run for `PATIENCE` and vanishes when the stage is done."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._stage: str | None = None
        self._started = 0.0
        self._progress: Progress | None = None

    def update(self, stage: str, done: int, total: int, current: str = "") -> None:
        """Say how far a stage has come, and what is at hand."""
        if stage != self._stage:
            self._hide()
            self._stage, self._started = stage, time.monotonic()
        if done >= total:
            self._hide()
            self._stage = None
        elif self._progress is None and time.monotonic() - self._started >= PATIENCE:
            self._show(stage, total)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=done, total=total, current=current)

    def _show(self, stage: str, total: int) -> None:
        self._progress = Progress(
            TextColumn(TITLES.get(stage, stage)),
            BarColumn(),
            *_COLUMNS.get(stage, (MofNCompleteColumn(),)),
            TimeRemainingColumn(),
            TextColumn("{task.fields[current]}", markup=False),
            console=self._console,
            transient=True,
        )
        self._progress.add_task(stage, total=total, current="")
        self._progress.start()

    def _hide(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hide()
