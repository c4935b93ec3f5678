"""Fixtures for every test: synthetic checkpoints, each written once per session."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xinfer.model.synthetic import PRESETS, SyntheticSpec, write_checkpoint

CheckpointFactory = Callable[..., Path]
_NUMBERS = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _quarantines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the user's own `xinfer doctor` and `xinfer tune` found is no part of a test, nor what is in their caches."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XINFER_QUARANTINE", str(folder / "quarantine.json"))
        patch.setenv("XINFER_TUNING", str(folder / "tuning.json"))
        cache = os.environ.get("XINFER_TEST_CACHE") or str(folder / "cache")
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setenv("LOCALAPPDATA", cache)
        yield folder


@pytest.fixture(autouse=True)
def _own_quarantine(_quarantines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what another test put in quarantine, or chose."""
    monkeypatch.setenv("XINFER_QUARANTINE", str(_quarantines / f"{next(_NUMBERS)}.json"))
    monkeypatch.setenv("XINFER_TUNING", str(_quarantines / f"{next(_NUMBERS)}.json"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """`checkpoint("yarn")` or `checkpoint(SyntheticSpec(...), seed=3)`: the folder. It is shared: read it only."""
    made: dict[tuple[SyntheticSpec, int], Path] = {}

    def make(which: str | SyntheticSpec = "gqa", *, seed: int = 0) -> Path:
        spec = PRESETS[which] if isinstance(which, str) else which
        if (spec, seed) not in made:
            folder = tmp_path_factory.mktemp(which if isinstance(which, str) else "spec")
            made[spec, seed] = write_checkpoint(folder, spec, seed=seed)
        return made[spec, seed]

    return make


@pytest.fixture
def own_checkpoint(checkpoint: CheckpointFactory, tmp_path: Path) -> CheckpointFactory:
    """As `checkpoint`, but a copy that the test may change."""

    def make(which: str | SyntheticSpec = "gqa", *, seed: int = 0) -> Path:
        folder = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(checkpoint(which, seed=seed), folder)
        return folder

    return make
