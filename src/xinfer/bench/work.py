"""What a prompt or a decode step needs at least, of any device: operations, and bytes of its memory.

A multiplication and an addition are two operations. Counted are the products with weights and attention's with keys and
values, each once; of the last layer and the head, what the last token needs. Every weight is read once, and so are the
keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from xinfer.gpu_model.memory import MemoryPlan
from xinfer.model.config import Qwen2Config


@dataclass(frozen=True, slots=True)
class Work:
    """Operations and bytes."""

    flops: int
    n_bytes: int

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.n_bytes


def step_work(plan: MemoryPlan, context: int) -> Work:
    """One token behind `context` others."""
    config = plan.config
    layers = config.num_hidden_layers * _layer(config) + config.hidden_size * config.vocab_size
    seen = sum(_seen(window, context, context + 1) for window in config.layer_windows)
    return Work(2 * layers + 4 * config.q_size * seen, _weight_bytes(plan) + _cached_bytes(plan, context + 1))


def prompt_work(plan: MemoryPlan, n_tokens: int) -> Work:
    """A prompt of n tokens, up to the logits behind the last of them."""
    config = plan.config
    *others, last = config.layer_windows
    cached = 2 * config.hidden_size * config.kv_size  # all that the last layer is needed for, but for one token
    products = len(others) * n_tokens * _layer(config) + (n_tokens - 1) * cached + _layer(config)
    products += config.hidden_size * config.vocab_size
    seen = sum(_seen(window, 0, n_tokens) for window in others) + _seen(last, n_tokens - 1, n_tokens)
    return Work(2 * products + 4 * config.q_size * seen, _weight_bytes(plan) + _cached_bytes(plan, n_tokens))


def _layer(config: Qwen2Config) -> int:
    """Weights in the matrices of a layer."""
    attention = 2 * config.hidden_size * (config.q_size + config.kv_size)
    return attention + 3 * config.hidden_size * config.intermediate_size


def _seen(window: int | None, first: int, last: int) -> int:
    """Keys that the tokens at positions `first` to `last` - 1 see, all together."""
    if window is None:
        return (last * (last + 1) - first * (first + 1)) // 2
    return sum(min(position + 1, window) for position in range(first, last))


def _weight_bytes(plan: MemoryPlan) -> int:
    """Every layer, and the head; of an embedding that is no head a few rows are read."""
    layout = plan.layout
    return sum(layer.size for layer in layout.layers) + (layout.head or layout.table).size


def _cached_bytes(plan: MemoryPlan, n_tokens: int) -> int:
    windows = plan.config.layer_windows
    kept = sum(n_tokens if window is None else min(n_tokens, window) for window in windows)
    return 2 * plan.shape.token_bytes * kept
