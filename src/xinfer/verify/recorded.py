"""The recordings that users run, against the ops that they are made of.

Kernels are deterministic: a recording of ops, each of which was judged by itself, gives the same bits as those ops one
at a time. Where it does not, something between the ops is wrong: a missing barrier, or a driver that reorders.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xinfer.errors import OutOfMemoryError
from xinfer.gpu.api import Ticket
from xinfer.gpu_model.forward import download_rows
from xinfer.gpu_model.steps import LOAD, READ, STEP, Steps
from xinfer.kv_cache import KVCache
from xinfer.trials.judge import Array
from xinfer.verify.findings import Case
from xinfer.verify.watch import cached_rows, patience

Parts = Sequence[tuple[int, NDArray[np.int64]]]  # each its begin, and its ids

GARBAGE = 0x7E00_7E00  # NaN in f16, and far from everything in float32
SHORT = 65  # tokens of prompts that are run in both forms
GUESSES = 16  # as many as a pass takes at most
LIMIT = 1e-4  # relative L2 error of what may be another rounding, which a driver may choose for another pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a recording made differently from its ops."""

    case: str
    what: str  # "keys and values of layer 3", "the last layer's output", "logits of step 2", "token of step 2"
    error: float  # relative L2

    @property
    def wrong(self) -> bool:
        """Whether it is more than another rounding."""
        return not self.error <= LIMIT


@dataclass(slots=True)
class Trace:
    """What the device made in one case: x after the last layer, K and V of every layer, logits and tokens of steps."""

    case: Case
    x: list[Array]  # a chunk of a prompt, or a step, each (rows, hidden)
    keys: list[Array] = field(default_factory=list)  # a layer each: (n, KV heads, D), of the case's own positions
    values: list[Array] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)  # a step each: (vocab,)
    chosen: list[int] = field(default_factory=list)


class Replay:
    """Runs a model's recordings on given prompts and steps."""

    def __init__(self, steps: Steps, cache: KVCache, ids: NDArray[np.int64]) -> None:
        self._steps = steps
        self._cache = cache
        self._ids = ids

    def prompt(self, trace: Trace, parts: Parts) -> list[Difference]:
        """A prompt by its recordings: one that runs every layer to its end, and one that only fills the cache."""
        found: list[Difference] = []
        case, n_rows = trace.case, len(parts[-1][1])
        # They differ in the last layer alone, which a short prompt shows as well.
        for whole in (True, False) if case.n_prompt <= SHORT else (False,):
            self._run_chunks(parts, whole=whole)
            found += self._compare_cache(trace, 0)
            if whole:
                made = download_rows(self._steps.device, self._steps.many.rows("x", n_rows))
                found += _compare(case, "the last layer's output", made, trace.x[-1][:n_rows])
        return _distinct(found)

    def steps(self, trace: Trace, parts: Parts) -> list[Difference]:
        """Decode steps by their recording, behind a prompt by its own: its chunks are those of `prompt`."""
        case, steps, cache, size = trace.case, self._steps, self._cache, self._steps.max_rows
        ends = [(first, self._ids[first : min(first + size, case.n_prompt)]) for first in range(0, case.n_prompt, size)]
        if cache.ids != self._ids[: case.n_prompt].tolist():  # else it is there from `prompt`
            self._run_chunks(ends, whole=False)
        found: list[Difference] = []
        recording = steps.decode(steps.config.vocab_size)
        for number, (start, ids) in enumerate(parts):
            steps.stage_one(int(ids[0]), cache, position=start)
            self._wait(steps.submit(recording, (LOAD, STEP, READ)))
            made = np.frombuffer(steps.logits_back.read(), np.float32)
            found += _compare(case, f"logits of step {number + 1}", made, trace.logits[number])
            token = steps.chosen(0)
            cache.ids.append(int(ids[0]))
            if token != trace.chosen[number] and not found:
                found.append(Difference(case=case.name, what=f"token of step {number + 1}", error=float("inf")))
        found = [*self._compare_cache(trace, case.n_prompt), *found]
        with suppress(OutOfMemoryError):  # where there is no room for guesses, none are made
            found += self._guesses(trace, ends, parts)
        return found

    def _guesses(self, trace: Trace, prompt: Parts, parts: Parts) -> list[Difference]:
        """The tokens of the steps once more, checked together as guesses are (`speculate`)."""
        case, steps, n = trace.case, self._steps, min(len(parts), GUESSES)
        tokens = [int(ids[0]) for _, ids in parts[:n]]
        recording = steps.check(n, steps.config.vocab_size)
        self._run_chunks(prompt, whole=False)
        steps.stage_check(tokens, self._cache)
        self._wait(steps.submit(recording, (LOAD, STEP)))
        self._cache.ids += tokens
        found = self._compare_cache(trace, case.n_prompt, n=n, of=" behind guesses")
        for number, (own, expected) in enumerate(zip(steps.checked_logits(n), trace.logits, strict=False)):
            found += _compare(case, f"logits of guess {number + 1}", own, expected.reshape(-1))
        wrong = [number for number, token in enumerate(steps.checked(n)) if token != trace.chosen[number]]
        if wrong and not found:
            found.append(Difference(case=case.name, what=f"token of guess {wrong[0] + 1}", error=float("inf")))
        return found

    def _run_chunks(self, parts: Parts, *, whole: bool) -> None:
        steps, cache = self._steps, self._cache
        self._wipe_cache()
        for start, ids in parts:
            cache.ids[:] = self._ids[:start].tolist()
            rows = steps.bucket(len(ids))
            recording = steps.prefill(rows, whole=whole)
            steps.stage_chunk(ids.tolist(), cache, rows=rows)
            self._wait(steps.submit(recording))
            cache.ids += ids.tolist()

    def _wait(self, ticket: Ticket) -> None:
        self._steps.device.wait(ticket, patience(self._steps.device))

    def _wipe_cache(self) -> None:
        """Forget what the single ops left there: a recording that writes nothing must not look right."""
        network, device = self._steps.network(), self._steps.device
        recording = device.create_recording("wipe the cache")
        try:
            recording.barrier()
            for i in range(self._steps.config.num_hidden_layers):
                blocks = network.cache(i)
                recording.fill(blocks.k, GARBAGE)
                recording.fill(blocks.v, GARBAGE)
            recording.finish()
            self._wait(device.submit(recording))
        finally:
            recording.release()

    def _compare_cache(self, trace: Trace, first: int, *, n: int | None = None, of: str = "") -> list[Difference]:
        """Keys and values of the case's own positions, the first n of them, which stand from `first` on."""
        case, network, found = trace.case, self._steps.network(), list[Difference]()
        for i, (all_keys, all_values) in enumerate(zip(trace.keys, trace.values, strict=True)):
            own_keys, own_values = all_keys[:n], all_values[:n]
            made_keys, made_values = cached_rows(network, i, self._cache, first + len(own_keys))
            made = np.stack([made_keys[first:], made_values[first:]])
            found += _compare(case, f"keys and values of layer {i}{of}", made, np.stack([own_keys, own_values]))
        return found


def _compare(case: Case, what: str, made: Array, ops: Array) -> list[Difference]:
    if np.array_equal(made, ops, equal_nan=True):
        return []
    both = np.isfinite(ops)
    norm = float(np.linalg.norm(ops[both])) or 1.0
    error = float(np.linalg.norm(made[both] - ops[both])) / norm
    return [Difference(case=case.name, what=what, error=error if np.isfinite(made[both]).all() else float("inf"))]


def _distinct(found: list[Difference]) -> list[Difference]:
    """Each place once, with its largest error."""
    by_place: dict[str, Difference] = {}
    for difference in found:
        kept = by_place.get(difference.what)
        if kept is None or difference.error > kept.error:
            by_place[difference.what] = difference
    return list(by_place.values())
