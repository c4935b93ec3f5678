"""Prompts and decode steps in the loops that users run, timed again and again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.errors import NumericalError
from xinfer.gpu_model import QwenModel
from xinfer.kv_cache import KVCache
from xinfer.model.reference import ReferenceCache, ReferenceModel

Model = QwenModel | ReferenceModel
Cache = KVCache | ReferenceCache

WARM_S = 1.5  # a GPU that was idle takes its time to run fast again
WARM_STEPS = 8  # before those that are timed: the first ones fill the queue
NOISE = 1 << 20  # random numbers that keys and values are filled with, over and over


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds of several runs: the median, the quartiles, and all of them in order."""

    median: float
    quartile_low: float
    quartile_high: float
    runs: tuple[float, ...]

    def as_json(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return {**asdict(self), "runs": list(self.runs)}


def spread_of(runs: Sequence[float]) -> Spread:
    """Median and quartiles of at least one run; between two of them they are interpolated."""
    if len(runs) == 1:
        return Spread(median=runs[0], quartile_low=runs[0], quartile_high=runs[0], runs=(runs[0],))
    low, middle, high = statistics.quantiles(runs, n=4, method="inclusive")
    return Spread(median=middle, quartile_low=low, quartile_high=high, runs=tuple(runs))


def repeated(measure: Callable[[], float], times: int, *, warm_s: float) -> Spread:
    """`times` measurements, behind at least one and `warm_s` seconds more of them that do not count.

    The first one does not warm anything up: while kernels are made for it, a device idles.
    """
    measure()
    until = time.perf_counter() + warm_s
    while time.perf_counter() < until:
        measure()
    return spread_of([measure() for _ in range(times)])


def warm_seconds(model: Model) -> float:
    """How long to run before anything counts: on CPUs, a software driver's too, one run is enough."""
    return WARM_S if isinstance(model, QwenModel) and model.device.info.kind != "cpu" else 0.0


def time_prompt(model: Model, n_tokens: int, *, repeats: int) -> Spread:
    """Seconds from a prompt of random tokens to the logits behind its last one.

    Raises:
        NumericalError: they have a NaN or an infinity.
    """
    ids = np.random.default_rng(3).integers(0, model.config.vocab_size, n_tokens)

    def measure() -> float:
        cache: Any = model.make_cache(n_tokens + 1)
        began = time.perf_counter()
        logits = model.forward(ids, cache, last_only=True)
        seconds = time.perf_counter() - began
        if not np.isfinite(logits).all():
            raise NumericalError(f"the logits behind {n_tokens} random tokens have a NaN or an infinity")
        return seconds

    return repeated(measure, repeats, warm_s=warm_seconds(model))


def time_steps(model: Model, context: int, *, n_tokens: int, repeats: int) -> Spread:
    """Seconds a token of `n_tokens` greedy steps behind a cache of `context` random tokens, and WARM_STEPS more."""
    cache = filled_cache(model, context, n_tokens + WARM_STEPS + 1)

    def measure() -> float:
        return time_loop(model, cache, context, n_tokens=n_tokens)

    return repeated(measure, repeats, warm_s=warm_seconds(model))


def time_loop(model: Model, cache: Cache, context: int, *, n_tokens: int) -> float:
    """Seconds a token of one run of greedy steps, behind the first `context` tokens of a cache."""
    cache.truncate(context)
    with closing(greedy(model, 7 % model.config.vocab_size, cache, n_tokens + WARM_STEPS)) as tokens:
        for _ in range(WARM_STEPS):
            next(tokens)
        began = time.perf_counter()
        for _ in range(n_tokens):
            next(tokens)
        return (time.perf_counter() - began) / n_tokens


def greedy(model: Model, token: int, cache: Any, limit: int) -> Any:
    """A generator of the `limit` likeliest tokens behind the cache and `token`, one after the other."""
    if isinstance(model, QwenModel):
        return model.greedy(token, cache, limit=limit)
    return _greedy_on_cpu(model, token, cache, limit)


def _greedy_on_cpu(model: ReferenceModel, token: int, cache: ReferenceCache, limit: int) -> Iterator[int]:
    for _ in range(limit):
        logits = model.forward([token], cache, last_only=True)
        if not np.isfinite(logits).all():
            raise NumericalError("the logits of a step have a NaN or an infinity")
        token = int(logits.argmax())
        yield token


def filled_cache(model: Model, n_tokens: int, room: int) -> Cache:
    """A cache that holds random keys and values of n_tokens, and takes `room` more."""
    if isinstance(model, QwenModel):
        return filled_device_cache(model, n_tokens, room)
    cache, config = model.make_cache(n_tokens + room), model.config
    cache.reserve(n_tokens)
    some = np.resize(_noise(), (n_tokens, config.num_key_value_heads, config.head_dim))
    for layer in range(config.num_hidden_layers):
        cache.write(layer, some, some)
    cache.advance(n_tokens)
    return cache


def filled_device_cache(model: QwenModel, n_tokens: int, room: int) -> KVCache:
    """The same on a device. No other sequence may be in the model's pool: all of it is filled."""
    cache = model.make_cache(n_tokens + room)
    cache.reserve(n_tokens + room)
    a_value = model.pool.shape.token_bytes // model.config.kv_size
    block = _noise().astype(np.float16 if a_value == 2 else np.float32).view(np.uint8)
    for layer in range(model.config.num_hidden_layers):
        for half in (model.pool.keys(layer), model.pool.values(layer)):
            for start in range(0, half.size, block.size):
                stop = min(start + block.size, half.size)
                model.device.upload(half[start:stop], block[: stop - start].data)
    model.device.flush_uploads()
    cache.append([1] * n_tokens, rows=1)
    return cache


def _noise() -> NDArray[np.float32]:
    return np.random.default_rng(2).standard_normal(NOISE, dtype=np.float32)
