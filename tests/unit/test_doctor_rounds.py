"""Several processes at a time: who is tried again alone, who is not, and what is left when it is broken off."""

from __future__ import annotations

import pytest

from xinfer.doctor import rounds
from xinfer.doctor.isolated import HUNG, LOST, RIGHT, SKIPPED, WRONG, Ended
from xinfer.doctor.rounds import Round, Tried

GOOD = Ended(outcome=RIGHT, answer={"outcome": RIGHT})


class Child:
    """Ends after so many polls."""

    seconds = 1.0

    def __init__(self, polls: int, end: Ended) -> None:
        self.left = polls
        self.end = end
        self.killed = False

    def ended(self) -> Ended | None:
        self.left -= 1
        return self.end if self.left <= 0 else None

    def kill(self) -> None:
        self.killed = True


class Ward:
    """Children by name, a list of (polls, end) each, one for each time that it is started."""

    def __init__(self, ends: dict[str, list[tuple[int, Ended]]]) -> None:
        self.ends = ends
        self.started: list[tuple[str, tuple[str, ...]]] = []  # with those that ran already
        self.children: dict[str, Child] = {}
        self.settled: list[Tried] = []
        self.most = 0

    def start(self, name: str) -> Child:
        running = tuple(n for n, child in self.children.items() if child.left > 0)
        self.started.append((name, running))
        self.most = max(self.most, len(running) + 1)
        self.children[name] = Child(*self.ends[name].pop(0))
        return self.children[name]

    def run(self, at_a_time: int) -> dict[str, Tried]:
        names = list(self.ends)
        Round(start=self.start, at_a_time=at_a_time, settle=self.settled.append, tick=lambda *_: None).run(names)
        return {tried.name: tried for tried in self.settled}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "POLL_S", 0)


@pytest.mark.parametrize("at_a_time", [1, 2, 5, 50])
def test_never_more_than_so_many_at_a_time_and_each_once(at_a_time: int) -> None:
    ward = Ward({f"k{i}": [(1 + i % 4, GOOD)] for i in range(20)})
    found = ward.run(at_a_time)
    assert len(found) == len(ward.settled) == len(ward.started) == 20
    assert ward.most == min(at_a_time, 20)


def test_a_failure_alone_counts_at_once() -> None:
    ward = Ward({"a": [(2, Ended(outcome=HUNG))], "b": [(1, GOOD)]})
    found = ward.run(1)
    assert found["a"].ended.outcome == HUNG
    assert found["a"].beside is None
    assert len(ward.started) == 2


def test_who_ended_first_was_beside_others_too() -> None:
    """a is gone before c starts, and b ends last: both ran beside another."""
    lost = Ended(outcome=LOST)
    ward = Ward({"a": [(1, lost), (1, GOOD)], "b": [(4, lost), (2, lost)], "c": [(1, GOOD)]})
    found = ward.run(2)
    assert [name for name, _ in ward.started] == ["a", "b", "a", "b", "c"]
    assert all(running == () for name, running in ward.started[2:4])  # alone
    assert (found["a"].ended.outcome, found["a"].beside) == (RIGHT, lost)
    assert (found["b"].ended.outcome, found["b"].beside) == (LOST, lost)


@pytest.mark.parametrize("end", [Ended(outcome=WRONG), Ended(outcome=SKIPPED, answer={"short": True})])
def test_results_and_memory_that_others_may_have_spoiled_are_tried_again(end: Ended) -> None:
    found = Ward({"a": [(1, end), (1, GOOD)], "b": [(1, GOOD)]}).run(2)
    assert found["a"].ended == GOOD


def test_what_a_device_lacks_is_not_tried_again() -> None:
    found = Ward({"a": [(1, Ended(outcome=SKIPPED, answer={}))], "b": [(1, GOOD)]}).run(2)
    assert found["a"].ended.outcome == SKIPPED


def test_when_it_is_broken_off_no_child_is_left() -> None:
    ward = Ward({"a": [(10**9, GOOD)], "b": [(10**9, GOOD)]})
    ticks = iter(range(100))

    def tick(_done: int, _current: str) -> None:
        if next(ticks) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Round(start=ward.start, at_a_time=2, settle=ward.settled.append, tick=tick).run(["a", "b"])
    assert all(child.killed for child in ward.children.values())


def test_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "cores", lambda: 16)
    monkeypatch.setattr(rounds, "available_memory", lambda: 64 << 30)
    assert rounds.width(140 << 30, 2 << 30) == rounds.MOST_AT_A_TIME
    assert rounds.width(8 << 30, 2 << 30) == 4
    assert rounds.width(1 << 30, 2 << 30) == 1
    monkeypatch.setattr(rounds, "available_memory", lambda: 5 << 30)
    assert rounds.width(140 << 30, 2 << 30) == 2
    monkeypatch.setattr(rounds, "cores", lambda: 1)
    assert rounds.width(140 << 30, 2 << 30) == 1
