"""Bars appear for what takes long, move, and vanish when it is done."""

import io
import time

import pytest
from rich.console import Console

from xinfer import progress, progress_lines
from xinfer.cli.loading import progress_bars
from xinfer.progress import Bars
from xinfer.progress_lines import Lines


@pytest.fixture
def screen() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def bars(screen: io.StringIO) -> Bars:
    return Bars(Console(file=screen, force_terminal=True, width=100))


def test_what_is_quick_shows_nothing(bars: Bars, screen: io.StringIO) -> None:
    with bars:
        for done in range(11):
            bars.update("load", done, 10)
    assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("stage", "title", "unit"), [("load", "loading weights", "MB"), ("prefill", "reading", "tokens")]
)
def test_what_takes_long_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, bars: Bars, screen: io.StringIO, stage: str, title: str, unit: str
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with bars:
        bars.update(stage, 1_000_000, 10_000_000)
        bars.update(stage, 5_000_000, 10_000_000)
    shown = screen.getvalue()
    assert title in shown
    assert unit in shown


def test_a_new_stage_gets_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch, bars: Bars, screen: io.StringIO) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with bars:
        bars.update("load", 1, 10)
        bars.update("load", 10, 10)
        bars.update("prefill", 1, 10)
        bars.update("prefill", 10, 10)
    assert "loading weights" in screen.getvalue()
    assert "reading the prompt" in screen.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lines = [100.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    told = Lines(lines.append)
    for done in range(41):  # a kernel a second
        told.update("doctor", done, 40, f"kernel{done}")
        now[0] += 1
    assert lines == [f"trying kernels: {n} of 40, kernel{n}, about {40 - n} s left" for n in (10, 20, 30)]
    told.update("load", 0, 4_000_000_000)
    now[0] += 9.5
    told.update("load", 1_500_000_000, 4_000_000_000)
    assert len(lines) == 3  # a new stage begins anew
    now[0] += 1
    told.update("load", 2_000_000_000, 4_000_000_000)
    assert lines[3:] == ["loading weights: 2.0 of 4.0 GB, about 10 s left"]


def test_without_a_terminal_stderr_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_lines, "INTERVAL_S", 0.0)
    with progress_bars() as update:
        assert update is not None
        update("verify", 0, 3)
        update("verify", 1, 3)
    with progress_bars(quiet=True) as update:
        assert update is None
    out, err = capsys.readouterr()
    assert out == ""
    assert "comparing with the reference: 1 of 3 passes" in err
