"""Benchmarks begin: their figures are for people to read, but a script that has gone stale measures nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = ("cpu", "h200", "loading", "op_shapes", "sampling", "speculation", "startup", "streaming")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=BENCHMARKS, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_says_how_it_is_run(name: str) -> None:
    assert f"usage: {name}.py" in run(f"{name}.py", "--help")


def test_texts_for_speculation_are_there() -> None:
    """Made of files of this repository, which change."""
    texts = json.loads(run("-c", "import json, speculation; print(json.dumps(speculation.prompts(400)))"))
    assert set(texts) == {"code", "summary", "continuation"}
    assert texts["code"].count(texts["code"][:300]) == 2
    assert texts["summary"].count(texts["continuation"][:80]) == 3
    assert len(texts["continuation"]) == 400
