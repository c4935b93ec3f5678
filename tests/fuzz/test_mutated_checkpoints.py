"""Ten thousand broken checkpoints: each gives a result or an `XinferError`, soon, and leaves nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.fuzz.harness import CPU_SECONDS, MEGABYTE, Report, run_cases
from tests.fuzz.mutate import ALL, MUTATIONS, QUOTAS, TENTH, case, make_bases, quota, stage_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures a process through /proc and resource")

# What a run may leave in memory: allocators and caches are not exact, a leaked tiny model for each case would be
# 300 kB a time.
GROWTH_BYTES = 24 * MEGABYTE
GROWTH_FILES = 0


def test_a_tenth_of_the_mutated_checkpoints(tmp_path: Path) -> None:
    check(run_cases(range(TENTH), tmp_path), TENTH)


@pytest.mark.soak
def test_all_mutated_checkpoints(tmp_path: Path) -> None:
    check(run_cases(range(ALL), tmp_path), ALL)


def check(report: Report, count: int) -> None:
    print(report.table())  # noqa: T201 - shown by pytest -s, and where something below fails
    assert not report.failures, f"{len(report.failures)} failures\n" + "\n".join(map(str, report.failures))
    assert len(report.outcomes) == count
    assert max(outcome["cpu"] for outcome in report.outcomes) <= CPU_SECONDS
    for grown, files in report.growth:
        assert grown <= GROWTH_BYTES, f"{grown / MEGABYTE:.1f} MB were left after the cases"
        assert files <= GROWTH_FILES, f"{files} files were left open"
    for stage in QUOTAS:
        check_stage(report, stage, count)


def check_stage(report: Report, stage: str, count: int) -> None:
    """A fuzzer whose cases all end alike tests nothing: both ends must be reached, and refusals for many reasons."""
    outcomes, messages = report.of_stage(stage), report.messages(stage)
    assert len(outcomes) == quota(stage, count)
    assert report.successes(stage) >= len(outcomes) // 50, f"{stage}: almost every case is refused\n{report.table()}"
    assert messages.total() >= len(outcomes) // 5, f"{stage}: almost no case is refused\n{report.table()}"
    assert len(messages) >= min(8, messages.total() // 3), f"{stage}: few kinds of refusal, {messages}"
    assert messages.most_common(1)[0][1] <= 0.6 * messages.total(), f"{stage}: one refusal for most, {messages}"


def test_a_number_is_a_case_for_good(tmp_path: Path) -> None:
    one, other = make_bases(tmp_path / "one"), make_bases(tmp_path / "other")
    for number in range(0, ALL, 197):
        assert case(number, one) == case(number, other)


def test_every_hundred_holds_every_quota() -> None:
    assert set(QUOTAS) == set(MUTATIONS)
    for start in (0, 300, 9900):
        stages = [stage_of(number) for number in range(start, start + 100)]
        assert {stage: stages.count(stage) for stage in QUOTAS} == QUOTAS


def test_cases_differ_from_the_sound_checkpoint(tmp_path: Path) -> None:
    """But for the few that mean to leave it sound."""
    bases = make_bases(tmp_path)
    cases = [case(number, bases) for number in range(0, TENTH, 3)]
    assert sum(one.files == bases[one.base] for one in cases) <= 0.02 * len(cases)
