"""`xinfer tune`: which kernels make a model's steps and prompts sooner on a device, found by trying them.

One op after the other is given another kernel within whole steps, as users run them: alone, or between single steps,
short kernels look slower than they are. A kernel replaces another where the logits stay the same within what rounding
does, and where it is faster than the spread of the runs in which the two took turns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.bench.loops import WARM_S, WARM_STEPS, filled_device_cache, repeated, spread_of, time_loop
from xinfer.errors import NumericalError, RequestError
from xinfer.gpu_model import QwenModel
from xinfer.gpu_model.tuning import AttentionChoice, Tuning, keys_bucket

MIN_GAIN = 0.02  # of a whole step, or prompt, for any choice to be kept
SCREENED = 2  # runs of each candidate before the best meets the one in use
TURNS = 5  # runs of each when two are compared
# Of logits, relative L2. Sums in another order move them by 1e-6, and what is rounded to f16 on the way, by up to 1e-4.
LIMIT = 3e-4
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
KEYS_A_SPLIT = 32  # fewer are not worth a workgroup
PROMPT_ROWS = (128, 512, 2048)

Array = NDArray[np.float32]
Change = Callable[[Tuning], Tuning]
Tell = Callable[[int, int, str], None]  # knobs done, how many there are, what is at hand


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A loop as users run it, in which kernels are tried: decode steps behind a context, or prompts of some rows."""

    kind: str  # "decode" or "prompt"
    tokens: int
    seconds: Callable[[], float]  # of a run
    logits: Callable[[], Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One op in one place, and the kernels that it may have: the first is in use."""

    op: str
    place: Place
    values: Sequence[tuple[str, Change]]


@dataclass(slots=True)
class Result:
    """What tuning came to."""

    tuning: Tuning = field(default_factory=Tuning)
    tried: list[dict[str, Any]] = field(default_factory=list)  # a knob each
    totals: list[dict[str, Any]] = field(default_factory=list)  # a place each: before and after, in turns
    wrong: list[str] = field(default_factory=list)  # variants that changed the logits


class Tuner:
    """Tunes one loaded model, which is left as it was found: with the kernels that its ops choose."""

    def __init__(
        self,
        model: QwenModel,
        *,
        contexts: Sequence[int],
        prompts: Sequence[int] = PROMPT_ROWS,
        n_tokens: int = 64,
        tell: Tell | None = None,
    ) -> None:
        if model.plan.split.streamed:
            raise RequestError(
                "layers of this model are streamed, so that the bus decides how fast it is, not the kernels; there is "
                "nothing to tune: use a smaller model, or a larger --vram-budget"
            )
        self._model = model
        self._contexts = sorted(contexts)
        self._prompts = sorted(prompts)
        self._n_tokens = n_tokens
        self._software = model.device.info.kind == "cpu"
        self._tell = tell or (lambda *_: None)
        self._known: dict[tuple[str, int], Array] = {}  # logits of the kernels that ops choose

    def run(self) -> Result:
        """Try everything. Raises NumericalError where logits are not finite to begin with."""
        result, model = Result(), self._model
        total = len(self._contexts) + len(model.steps.sites().products(1)) + 4 * len(self._prompts)
        done = 0
        try:
            for place, knobs in self._places():
                model.tune(Tuning())
                self._known[place.kind, place.tokens] = _finite(place)
                warm = 0.0 if self._software else WARM_S
                repeated(place.seconds, 1, warm_s=warm)
                for knob in knobs:
                    self._tell(done, total, f"{knob.op}, {place.kind} {place.tokens:,}")
                    result.tuning = self._turn(knob, result)
                    done += 1
                self._judge(place, result)
            result.tuning = _kept(result)
            self._tell(total, total, "")
        finally:
            model.tune(Tuning())
        return result

    def _places(self) -> Iterator[tuple[Place, list[Knob]]]:
        """Products are tuned in steps behind the shortest context, attention behind each."""
        model = self._model
        for i, context in enumerate(self._contexts):
            place = self._steps(context)
            knobs = [] if i else [_product_knob(place, 1, op, names) for op, names in self._products(1)]
            yield place, [*knobs, self._attention_knob(place)]
        for rows in self._prompts:
            found = self._prompt(rows)
            if found is not None and rows <= model.steps.max_rows:
                yield found, [_product_knob(found, rows, op, names) for op, names in self._products(rows)]

    def _products(self, n_rows: int) -> list[tuple[str, list[str]]]:
        products = self._model.steps.sites().products(n_rows)
        return [(op, names) for op, names in products.items() if len(names) > 1]

    def _attention_knob(self, place: Place) -> Knob:
        model, context = self._model, place.tokens
        bucket = keys_bucket(model.steps.network().max_keys)
        most = max(1, context // KEYS_A_SPLIT)
        splits = [n for n in SPLITS if n <= most] or [1]

        def change(choice: AttentionChoice) -> Change:
            return lambda tuning: dataclasses.replace(tuning, attention={**tuning.attention, bucket: choice})

        names = [name for name in model.steps.sites().attention() if "tiled" in name]
        choices = [AttentionChoice(name, n) for name in names for n in splits]
        values = [("by rule", _unchanged), *((f"{c.variant}/{c.n_splits}", change(c)) for c in choices)]
        return Knob(op="attention", place=place, values=values)

    def _steps(self, context: int) -> Place:
        model, n_tokens = self._model, 2 if self._software else self._n_tokens
        cache = filled_device_cache(model, context, n_tokens + WARM_STEPS + 1)

        def logits() -> Array:
            cache.truncate(context)
            return model.forward([7 % model.config.vocab_size], cache, last_only=True)

        def seconds() -> float:
            return time_loop(model, cache, context, n_tokens=n_tokens)

        return Place(kind="decode", tokens=context, seconds=seconds, logits=logits)

    def _prompt(self, rows: int) -> Place | None:
        """A prompt whose chunk has so many rows, and one token behind it; None where chunks are smaller."""
        model = self._model
        ids = np.random.default_rng(3).integers(0, model.config.vocab_size, rows + 1)

        def logits() -> Array:
            return model.forward(ids, model.make_cache(rows + 1), last_only=True)

        for _ in range(4):  # chunks grow to what the device does in time
            cache = model.make_cache(rows + 1)
            model.forward(ids, cache, last_only=True)
            if (rows, rows) in cache.passes:
                return Place(kind="prompt", tokens=rows, seconds=lambda: _seconds(logits), logits=logits)
        return None

    def _turn(self, knob: Knob, result: Result) -> Tuning:
        """The tuning with the best of the knob's values, which are noted in `result`."""
        now, place = result.tuning, knob.place
        screened: list[tuple[float, str, Tuning]] = []
        for name, change in knob.values:
            tuning = change(now)
            self._model.tune(tuning)
            place.seconds()  # recorded, and the clocks are up again
            screened.append((min(place.seconds() for _ in range(SCREENED)), name, tuning))
        entry: dict[str, Any] = {
            "op": knob.op,
            "kind": place.kind,
            "tokens": place.tokens,
            "default": knob.values[0][0],
            "chosen": knob.values[0][0],
            "tried": {name: seconds for seconds, name, _ in screened},
        }
        result.tried.append(entry)
        own = screened[0][0]
        for seconds, name, tuning in sorted(screened[1:], key=lambda found: found[0]):
            if seconds >= own:
                break
            if not self._right(place, tuning):
                result.wrong.append(name)
                continue
            before, after, wins = self._compare(place, now, tuning)
            entry |= {"before_seconds": before, "after_seconds": after}
            if wins:
                entry["chosen"] = name
                return tuning
            break
        return now

    def _compare(self, place: Place, one: Tuning, other: Tuning) -> tuple[float, float, bool]:
        """Median seconds of two in turns, and whether the other is faster than their spread."""
        runs: tuple[list[float], list[float]] = ([], [])
        for _ in range(TURNS):
            for tuning, found in zip((one, other), runs, strict=True):
                self._model.tune(tuning)
                place.seconds()
                found.append(place.seconds())
        a, b = map(spread_of, runs)
        return a.median, b.median, b.quartile_high < a.quartile_low

    def _right(self, place: Place, tuning: Tuning) -> bool:
        self._model.tune(tuning)
        try:
            found = place.logits()
        except NumericalError:
            return False
        expected = self._known[place.kind, place.tokens]
        return bool(np.linalg.norm(found - expected) <= LIMIT * np.linalg.norm(expected))

    def _judge(self, place: Place, result: Result) -> None:
        """Everything so far against nothing, in this place."""
        before, after, wins = self._compare(place, Tuning(), result.tuning)
        result.totals.append(
            {
                "kind": place.kind,
                "tokens": place.tokens,
                "right": self._right(place, result.tuning),
                "before_seconds": before,
                "after_seconds": after,
                "gain": before / after - 1,
                "beyond_noise": wins,
            }
        )


def _kept(result: Result) -> Tuning:
    """What is worth it: of decode steps all or nothing, of prompts those rows that gain."""
    tuning = result.tuning
    steps = [total for total in result.totals if total["kind"] == "decode"]
    rows = {t["tokens"] for t in result.totals if t["kind"] == "prompt" and _worth(t)}
    prompts = {n: by_op for n, by_op in tuning.prompts.items() if n in rows}
    if any(map(_worth, steps)) and all(total["right"] and total["gain"] > -MIN_GAIN for total in steps):
        return dataclasses.replace(tuning, prompts=prompts)
    return Tuning(prompts=prompts)


def _worth(total: dict[str, Any]) -> bool:
    return bool(total["right"] and total["beyond_noise"] and total["gain"] >= MIN_GAIN)


def _product_knob(place: Place, n_rows: int, op: str, names: Sequence[str]) -> Knob:
    def change(name: str) -> Change:
        def changed(tuning: Tuning) -> Tuning:
            if n_rows == 1:
                return dataclasses.replace(tuning, decode={**tuning.decode, op: name})
            by_op = {**tuning.prompts.get(n_rows, {}), op: name}
            return dataclasses.replace(tuning, prompts={**tuning.prompts, n_rows: by_op})

        return changed

    return Knob(op=op, place=place, values=[(names[0], _unchanged), *((name, change(name)) for name in names[1:])])


def _seconds(run: Callable[[], Array]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _unchanged(tuning: Tuning) -> Tuning:
    return tuning


def _finite(place: Place) -> Array:
    logits = place.logits()
    if not np.isfinite(logits).all():
        raise NumericalError(f"the logits of {place.kind} {place.tokens:,} have a NaN or an infinity")
    return logits
