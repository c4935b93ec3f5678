"""Bars appear for what takes long, move, and vanish when it is done."""

import io

import pytest
from rich.console import Console

from xinfer import progress
from xinfer.progress import Bars


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
