"""The harness sees harm: each fault is planted, and found at the case that does it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.fuzz.harness import MEGABYTE, Report, normalised, run_cases
from tests.fuzz.planted import HARMFUL
from tests.fuzz.test_mutated_checkpoints import GROWTH_BYTES, GROWTH_FILES, check

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures a process through /proc and resource")

FIRST = 500  # any number: what is planted does not look at the case


def run_planted(fault: str, folder: Path, *, cases: int = 6, warm_up: int = 2) -> Report:
    numbers = range(FIRST, FIRST + cases)
    patience = 5 if fault == "hang" else 60
    return run_cases(numbers, folder, use=f"tests.fuzz.planted:{fault}", wall_seconds=patience, warm_up=warm_up)


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("traceback", "traceback", "KeyError"),
        ("panic", "traceback", "PanicException"),
        ("native_message", "output", "panicked at"),
        ("warning", "output", "overflow encountered"),
        ("empty_message", "message", "an empty message"),
        ("escape_in_message", "message", "x1b"),
        ("hang", "hang", "no end after 5 seconds"),
        ("slow", "slow", "2.1"),
        ("abort", "died", "-6"),
        ("leave", "died", "status 0"),
        ("segfault", "died", "-11"),
        ("peak", "peak", "300 MB while it ran"),
    ],
)
def test_a_planted_fault_is_named(fault: str, kind: str, detail: str, tmp_path: Path) -> None:
    report = run_planted(fault, tmp_path)
    (failure,) = report.failures
    assert (failure.kind, failure.number) == (kind, FIRST + HARMFUL - 1)
    assert detail in failure.detail
    assert f"python -m tests.fuzz.worker {failure.number}" in str(failure)
    lost = kind in ("hang", "died")
    assert len(report.outcomes) == (5 if lost else 6), "the cases after it are run, in a new worker where need be"


def test_a_leak_shows_in_the_sum(tmp_path: Path) -> None:
    report = run_planted("leak", tmp_path, cases=40)
    assert not report.failures
    ((grown, _),) = report.growth
    assert 36 * MEGABYTE <= grown <= 48 * MEGABYTE
    assert grown > GROWTH_BYTES
    with pytest.raises(AssertionError, match="MB were left after the cases"):
        check(report, 40)


def test_open_files_show(tmp_path: Path) -> None:
    report = run_planted("files_left_open", tmp_path, cases=10)
    ((_, files),) = report.growth
    assert files == 8 > GROWTH_FILES


def test_no_harm_no_failure(tmp_path: Path) -> None:
    report = run_planted("nothing", tmp_path, cases=100)
    assert not report.failures
    assert len(report.outcomes) == 100
    ((grown, files),) = report.growth
    assert grown < 8 * MEGABYTE
    assert files == 0
    with pytest.raises(AssertionError, match="almost no case is refused"):
        check(report, 100)


def test_messages_are_compared_without_what_varies() -> None:
    one = "/tmp/a/case/model: 'model.norm.weight' has shape (64,); expected (48,)"
    other = "/tmp/b/model: 'x' has shape (1, 2); expected (7,)"
    assert normalised(one) == normalised(other)
    assert normalised(one) != normalised("/tmp/a/model: 'x' has dtype I8; expected F32")
