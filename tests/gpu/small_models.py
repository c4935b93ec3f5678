"""What models of the tests take of a device, by hand."""

from __future__ import annotations

from xinfer.gpu_model.layout import RESIDENT, Split, WeightsLayout
from xinfer.gpu_model.memory import MemoryPlan, cache_shape
from xinfer.model.weights import ModelWeights


def plan_of(weights: ModelWeights, *, split: Split = RESIDENT, rows: int = 64) -> MemoryPlan:
    """With a cache of f16, and prompts in chunks of so many rows."""
    shape = cache_shape(weights.config, "f16")
    return MemoryPlan(config=weights.config, layout=WeightsLayout(weights), shape=shape, rows=rows, split=split)
