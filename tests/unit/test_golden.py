"""The reference against logits that transformers computed, from files made by tools/make_golden.py: no torch needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.golden import format as golden

from xinfer.model.reference import ReferenceModel
from xinfer.model.synthetic import PRESETS
from xinfer.model.weights import ModelWeights

LIMIT = 1e-5  # relative L2 error


def error(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_logits_are_those_of_transformers(preset: str, checkpoint: Callable[..., Path]) -> None:
    wanted = golden.read(preset)
    with ModelWeights.open(checkpoint(preset, seed=golden.SEED)) as weights:
        assert golden.weights_checksum(weights) == wanted.weights, "other weights than then: run tools/make_golden.py"
        kept, streamed = ReferenceModel(weights, keep=True), ReferenceModel(weights, keep=False)
        cache = kept.make_cache(golden.LENGTH)
        cuts = [0, 1, 2, 64, 65, 200, *range(290, golden.LENGTH + 1)]
        cached = np.concatenate([kept.forward(wanted.tokens[a:b], cache) for a, b in itertools.pairwise(cuts)])
        errors = {
            "full": error(kept.forward(wanted.tokens)[wanted.positions], wanted.logits),
            "cached": error(cached[wanted.positions], wanted.logits),
            "not kept": error(streamed.forward(wanted.tokens)[wanted.positions], wanted.logits),
        }
    assert max(errors.values()) < LIMIT, errors


def test_every_preset_has_a_file_and_all_are_small() -> None:
    files = {path.stem: path.stat().st_size for path in golden.FOLDER.glob("*.safetensors")}
    assert files.keys() == PRESETS.keys()
    assert len(files) >= 8
    assert sum(files.values()) < 1_500_000
