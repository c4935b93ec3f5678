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


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)


def wait_for(text: str, screen: io.StringIO) -> None:
    until = time.monotonic() + 10
    while text not in screen.getvalue():
        assert time.monotonic() < until, f"{text!r} is not in {screen.getvalue()!r}"
        time.sleep(0.01)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("stage", "title", "unit"), [("load", "loading weights", "MB"), ("prefill", "reading", "tokens")]
)
def test_what_takes_long_shows_how_far_it_is(
    bars: Bars, screen: io.StringIO, stage: str, title: str, unit: str
) -> None:
    with bars:
        bars.update(stage, 1_000_000, 10_000_000)
        wait_for(title, screen)
        bars.update(stage, 5_000_000, 10_000_000)
        wait_for("50" if stage == "prefill" else "5.0", screen)
    assert unit in screen.getvalue()


@pytest.mark.usefixtures("at_once")
def test_a_long_first_step_has_a_bar_although_nothing_more_is_said(bars: Bars, screen: io.StringIO) -> None:
    with bars:
        bars.update("verify", 0, 10)
        wait_for("comparing with the reference", screen)


@pytest.mark.usefixtures("at_once")
def test_a_new_stage_gets_a_bar_of_its_own(bars: Bars, screen: io.StringIO) -> None:
    with bars:
        bars.update("load", 1, 10)
        wait_for("loading weights", screen)
        bars.update("load", 10, 10)
        bars.update("prefill", 1, 10)
        wait_for("reading the prompt", screen)
        bars.update("prefill", 10, 10)


@pytest.mark.usefixtures("at_once")
def test_what_a_command_is_about_has_a_bar_before_and_between_its_stages(screen: io.StringIO) -> None:
    with Bars(Console(file=screen, force_terminal=True, width=100), first="tune") as bars:
        wait_for("trying kernels", screen)
        bars.update("load", 1, 10)
        wait_for("loading weights", screen)
        screen.truncate(0)
        bars.update("load", 10, 10)
        wait_for("trying kernels", screen)
        bars.update("tune", 3, 4)
        wait_for("3/4", screen)
        bars.update("tune", 4, 4)
        screen.truncate(0)
        time.sleep(0.1)
        assert "trying" not in screen.getvalue()


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
