"""`QwenModel`: what the engine runs on a device, and how a number that is none is traced to its op."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from numpy.typing import ArrayLike

from xinfer.choice import Choice
from xinfer.errors import NumericalError, OutOfMemoryError
from xinfer.gpu.api import Device
from xinfer.gpu_model.answer import STEPS_AHEAD, Answer
from xinfer.gpu_model.forward import Array, Tap
from xinfer.gpu_model.layout import Split
from xinfer.gpu_model.loading import Progress
from xinfer.gpu_model.memory import MemoryPlan, plan_for
from xinfer.gpu_model.options import Mode, ModelOptions
from xinfer.gpu_model.prediction import step_seconds
from xinfer.gpu_model.prompt import chunks_at_once, run_together
from xinfer.gpu_model.speculation import Lookup, agreement
from xinfer.gpu_model.steps import LOAD, READ, ROW_BUCKETS, STEP, Steps
from xinfer.gpu_model.tuning import Tuning
from xinfer.gpu_model.watch import BudgetWatch, layers_to_move, layers_to_return
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.kv_cache import KVCache
from xinfer.model.config import Qwen2Config
from xinfer.model.tokens import checked_ids
from xinfer.model.weights import ModelWeights
from xinfer.ops import BAD_TOKEN

FIRST_CHUNK = 8  # rows of the first chunk, which is timed
FIRST_WHOLE_CHUNK = 32  # of a sequence of which all logits are wanted
F16_MOST = 65_504
TURN_MOST = 2**0.5  # what rope can make of a number
CACHED = frozenset({"k", "k_rope", "v"})  # taps of what a layer caches
CHUNK_SECONDS = 0.4  # what a chunk may take: watchdogs strike after 2 s (Windows) to 10 s (Linux)


class QwenModel:
    """A model resident on a device, made by `load`. One thread runs it at a time, the others wait.

    `forward` is the reference's: the same arguments, logits and taps. `extend` and `choose` are the fast path.
    """

    def __init__(
        self,
        device: Device,
        config: Qwen2Config,
        weights: DeviceWeights,
        plan: MemoryPlan,
        *,
        context: int,
        mode: Mode = "auto",
        exact: bool = False,
        quarantine: Iterable[str] = (),
        tuning: Tuning | None = None,
        on_compile: Progress | None = None,
    ) -> None:
        self.config = config
        self.plan = plan  # what it takes of the device's memory, and which layers are streamed
        self.device = device
        self._weights = weights
        self._steps = Steps(
            *(device, config, weights, plan),
            context=context,
            exact=exact,
            quarantine=quarantine,
            tuning=tuning,
            on_compile=on_compile,
        )
        self._lock = threading.RLock()
        # Rows of the next chunk of a prompt. Where layers are streamed each is a submission of its own, and each chunk
        # has to wait for all of them: then a chunk is as large as it can be.
        self._chunk = plan.rows if plan.split.streamed else FIRST_CHUNK
        self._parts = 1 + len(plan.split.streamed)
        self._mode = mode
        self._moved: list[int] = []  # layers that memory was taken from since the beginning
        self._chunk_limit = plan.rows
        self._owner: Answer | None = None  # whose state lies on the device
        self._watch = BudgetWatch(device)
        self.pool = self._steps.pool

    @classmethod
    def load(
        cls,
        weights: ModelWeights,
        device: Device,
        options: ModelOptions | None = None,
        *,
        split: Split | None = None,
        quarantine: Iterable[str] = (),
        tuning: Callable[[MemoryPlan], Tuning] | None = None,
        progress: Progress | None = None,
        on_compile: Progress | None = None,
    ) -> Self:
        """Upload the weights that fit, once; the others are copied to the device again for each step.

        The checkpoint is not needed afterwards; closing it is left to the caller.

        Args:
            weights: an open checkpoint.
            device: where to; it must live longer than the model.
            options: how it lies there and runs; None: `ModelOptions()`.
            split: which layers are streamed and through how many slots, for tests.
            quarantine: ids of kernel variants that must not be used; others are chosen in their place.
            tuning: gives the variants that are preferred to those that ops would choose, for what has been planned;
                those that cannot be used here are passed over, and it is not asked where `options` say so.
            progress: called with bytes read and bytes in all.
            on_compile: called with kernels made and kernels in all, each time that a recording takes new ones.

        Raises:
            OutOfMemoryError: the device has too little memory; nothing has been read. It says what is missing and
                which context would fit.
            WeightsError: the checkpoint cannot be read, or has values beyond the range of f16.
            DeviceError: the quarantine leaves no variant of an op.
        """
        options = options or ModelOptions()
        config, most = weights.config, options.context or weights.config.max_context
        device.limit_memory(options.vram_budget)
        plan = plan_for(weights, device, options, split=split)
        loaded = DeviceWeights(device, weights, plan.layout, split=plan.split)
        try:
            loaded.load(weights, progress)
            return cls(
                *(device, config, loaded, plan),
                context=most,
                mode=options.mode,
                exact=options.exact,
                quarantine=quarantine,
                tuning=tuning(plan) if tuning is not None and options.tuning else None,
                on_compile=on_compile,
            )
        except BaseException:
            loaded.release()
            raise

    @property
    def bytes_sent(self) -> int:
        """Bytes of streamed layers that went to the device so far."""
        return self._weights.bytes_sent

    @property
    def steps(self) -> Steps:
        """What it runs, for those who look at single ops (`xinfer verify`)."""
        return self._steps

    def make_cache(self, capacity: int) -> KVCache:
        """An empty cache for at most `capacity` tokens."""
        return self.pool.make_cache(capacity)

    def forward(
        self, tokens: ArrayLike, cache: KVCache | None = None, *, last_only: bool = False, tap: Tap | None = None
    ) -> Array:
        """Logits after each token, (T, vocab), or after the last one, (1, vocab); as `ReferenceModel.forward`.

        With a tap every op runs by itself and its result is read back: slow.

        Raises:
            RequestError: no tokens, or one outside the vocabulary. The cache is as before.
            ContextLengthError: the cache has no room for them. It is as before.
            NumericalError: the logits have a NaN or an infinity; layer and op are named. Not where a tap looks itself.
        """
        ids = checked_ids(tokens, self.config.vocab_size).tolist()
        with self._lock:
            if cache is None:
                cache = self.make_cache(len(ids))
            start = cache.length
            self._reserve(cache, start + len(ids))
            try:
                if tap is not None:
                    return self._tapped(ids, cache, last_only=last_only, tap=tap)
                if not last_only:
                    return self._all_logits(ids, cache)
                self._extend(ids[:-1], cache, lambda _: None)
                return self._last_logits(ids[-1], cache)
            except BaseException:
                cache.truncate(start)
                raise

    def tokens_at_once(self) -> int:
        """Tokens of a prompt that pass through each streamed layer together, which is sent once for all of them."""
        with self._lock:
            if self._steps.resident:
                return 1
            rows = min(self._chunk, self._steps.max_rows)
            return rows * chunks_at_once(self._steps, rows)

    def extend(self, tokens: ArrayLike, cache: KVCache, *, progress: Callable[[int], None] | None = None) -> None:
        """Append tokens to the cache, without logits. Raises as `forward` does.

        `progress` is told now and then how many tokens are done, or would be by the share of the layers that has run.
        """
        ids = checked_ids(tokens, self.config.vocab_size).tolist()
        with self._lock:
            start = cache.length
            self._reserve(cache, start + len(ids))
            try:
                self._extend(ids, cache, progress or (lambda _: None))
            except BaseException:
                cache.truncate(start)
                raise

    def replay(self, lost: KVCache, cache: KVCache) -> None:
        """Fill an empty cache with what another had, whose device is gone, in passes of the same rows.

        The same kernels then sum in the same order: the keys and values are the same to the last bit.
        """
        begin = 0
        with self._lock:
            for n, rows in lost.passes:
                self._reserve(cache, cache.length + n)
                chunk = lost.ids[begin : begin + n]
                self._run_chunk(chunk, cache, rows=rows)
                cache.append(chunk, rows=rows)
                begin += n

    def greedy(self, token: int, cache: KVCache, *, limit: int, n_valid: int | None = None) -> Generator[int]:
        """As `choose`, the likeliest tokens; `n_valid` None allows the whole vocabulary."""
        return self.choose(token, cache, Choice(n_valid=n_valid or self.config.vocab_size), limit=limit)

    def can_choose(self, choice: Choice) -> bool:
        """Whether `choose` takes this choice: else the logits have to be read."""
        return self._steps.can_choose(choice)

    def choose(self, token: int, cache: KVCache, choice: Choice, *, limit: int) -> Generator[int]:
        """The token that is chosen behind `token`, the one after that, and so on, `limit` of them.

        `token`, and then each token but the last one yielded, is in the cache when a token is yielded. Steps are queued
        ahead of the reading; when the iterator is dropped, what they left behind the cache's length is overwritten.

        Args:
            token: what stands behind the cache.
            cache: what came before; it grows by a token a step.
            choice: how, of which the device keeps count where penalties ask for it.
            limit: tokens at most.

        Raises:
            NumericalError: a step made a NaN or an infinity; layer and op are named.
        """
        ids = checked_ids([token], self.config.vocab_size).tolist()
        if choice.speculate and choice.is_argmax:
            ids[0], limit = yield from self._speculated(ids[0], cache, choice, limit)
            if not limit:
                return
        answer = Answer(self, self._steps, ids[0], cache, choice, limit=limit)
        try:
            for n in range(answer.limit):
                with self._lock:
                    self._keep_within_budget()
                    self._reserve(cache, cache.length + min(STEPS_AHEAD, answer.limit - n))
                    chosen = answer.token(n)
                    if chosen == BAD_TOKEN:
                        self.trace([answer.fed(n)], cache)
                    cache.append([answer.fed(n)], rows=1)
                yield chosen
        finally:
            answer.closed = True

    def _speculated(
        self, token: int, cache: KVCache, choice: Choice, limit: int
    ) -> Generator[int, None, tuple[int, int]]:
        """As `choose`, with guesses that are checked together; a token joins the cache when it is yielded.

        Returned are the token and the limit to go on with one by one: where no memory is left to check guesses in.
        """
        lookup, tally = Lookup([*cache.ids, token]), choice.tally
        left, most = min(limit, cache.capacity - cache.length), choice.speculate
        width = most
        while left and most:
            with self._lock:
                self._keep_within_budget()
                rows = [token, *lookup.guess(min(width, left - 1))]
                self._reserve(cache, cache.length + len(rows))
                try:
                    chosen = self._checked(rows, cache, choice)
                except OutOfMemoryError:
                    self._steps.forget_checks()
                    most = width = (len(rows) - 1) // 2
                    if not most:
                        self._watch.tell_no_guesses()
                    continue
            n = agreement(rows[1:], chosen)
            # Where guesses go wrong few are made, and more again as they come true.
            width = n + 1 if n < len(rows) - 1 else min(2 * width, most)
            tally.guessed += len(rows) - 1
            tally.accepted += n
            for fed, found in zip(rows[: n + 1], chosen, strict=False):
                if found == BAD_TOKEN:
                    with self._lock:
                        self.trace([fed], cache)
                cache.append([fed], rows=1)
                lookup.add(found)
                yield found
            token, left = chosen[n], left - n - 1
        return token, left

    def _checked(self, rows: list[int], cache: KVCache, choice: Choice) -> list[int]:
        """What is chosen behind each of these tokens, which follow the cache."""
        steps = self._steps
        recording = steps.check(len(rows), choice.n_valid)
        steps.stage_check(rows, cache)
        steps.wait(steps.submit(recording, (LOAD, STEP)), urgent=True)
        return steps.checked(len(rows))

    def step_times(
        self, cache: KVCache, token: int = 0, *, each_op: bool = True, repeats: int = 1
    ) -> list[list[tuple[str, float]]]:
        """(op, seconds) of decode steps behind what `cache` holds, by the device's clock. The cache stays.

        A timestamp after each op costs about a microsecond; without `each_op` there is one entry, the whole step.
        """
        steps = self._steps
        with self._lock:
            cache.reserve(cache.length + 1)
            self.claim(None)
            recording = self.device.create_recording("timed step")
            try:
                recording.copy(*steps.one.states(1))
                steps.record_step(recording, self.config.vocab_size, timed="ops" if each_op else "whole")
                recording.finish()
                runs = []
                for _ in range(repeats):
                    steps.stage_one(token, cache, position=cache.length)
                    steps.wait(steps.submit(recording))
                    runs.append(self.device.timestamps(recording))
            finally:
                recording.release()
        return [[(label, end - begin) for (_, begin), (label, end) in itertools.pairwise(stamps)] for stamps in runs]

    def token_seconds(self) -> float:
        """What a step takes, from a few that are run and forgotten."""
        with self._lock:
            self.claim(None)
            return step_seconds(self._steps, 0, patience=0.02)

    def tune(self, tuning: Tuning) -> None:
        """Let recordings use these variants; `Tuning()` goes back to what the ops choose."""
        with self._lock:
            self._steps.tune(tuning)

    def close(self) -> None:
        """Give everything back to the device; may be called twice."""
        with self._lock:
            self._steps.close()
            self._weights.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def claim(self, answer: Answer | None) -> bool:
        """Make the state on the device `answer`'s own; whether it was another's, and must be loaded."""
        if self._owner is answer and answer is not None:
            return False
        if self._owner is not None and not self._owner.closed:
            self._owner.read_all()  # its steps in flight are read before the ring is written by others
        self._owner = answer
        return True

    def disclaim(self, answer: Answer) -> None:
        """Nobody's state lies on the device any more: `answer` could not load its own."""
        if self._owner is answer:
            self._owner = None

    def trace(self, ids: list[int], cache: KVCache) -> NoReturn:
        """Run `ids` behind `cache` again, look at every op, and raise NumericalError that names the first bad one.

        What stands there first may be attention over keys and values that went bad long before: then the whole sequence
        is run again.
        """
        where, cached = self._first_bad(ids, cache)
        if where is not None and where.endswith(".attn") and cache.length:
            again = self.make_cache(cache.length + len(ids))
            again.reserve(cache.length + len(ids))
            found, cached = self._first_bad([*cache.ids, *ids], again)
            where = found or where
        position = f"near position {cache.length + len(ids) - 1} (token {ids[-1]})"
        if where is None:
            raise NumericalError(
                f"the logits {position} had a NaN or an infinity, but not when the step was run again: the device "
                f"{self.device.info.name} or its driver computes unreliably; try again, or device='cpu'"
            )
        layer, _, op = where.rpartition(".")
        place = f"op {op} of layer {layer.removeprefix('layers.')}" if layer else f"op {op}"
        why = "the weights may be damaged, or the device computed wrongly: try --device cpu (device='cpu')"
        if where.endswith(".attn") and cached > F16_MOST / TURN_MOST and self._steps.network().cache(0).format == "f16":
            why = (
                f"keys or values reach {cached:,.0f}, and an f16 cache holds {F16_MOST:,} at most: use --kv-cache f32 "
                "(kv_cache='f32')"
            )
        raise NumericalError(
            f"{place} ({where}) made the first NaN or infinity {position} on {self.device.info.name}; {why}"
        )

    def _keep_within_budget(self) -> None:
        """Give up layers where the system takes memory back, and let them return; between steps, every now and then."""
        excess = self._watch.excess()
        if excess:
            self._watch.tell(*self._move_out(excess), excess)
        elif self._moved:
            sizes = [part.size for part in self.plan.layout.layers]
            room = self._watch.room(min(sizes))
            if room:
                self._move_back(layers_to_return(self._weights.split, sizes, self._moved, room))

    def _move_out(self, n_bytes: int) -> tuple[int, int]:
        """Stream more layers, so that so many bytes become free where that can be: how many layers, and bytes freed."""
        chosen = layers_to_move(self._weights.split, [part.size for part in self.plan.layout.layers], n_bytes)
        if not chosen:
            return 0, 0
        self._pause()
        try:
            freed = self._weights.move_out(chosen)
        except OutOfMemoryError:  # the host has none either
            return 0, 0
        self._moved += chosen
        self._split_changed()
        return len(chosen), freed

    def _move_back(self, chosen: list[int]) -> None:
        """Let these layers stay on the device again."""
        if not chosen:
            return
        self._pause()
        try:
            self._weights.move_back(chosen)
        except OutOfMemoryError:  # others were quicker
            return
        self._moved = [i for i in self._moved if i not in chosen]
        self._split_changed()
        self._watch.tell_returned(len(chosen), len(self._weights.split.streamed))

    def _pause(self) -> None:
        """Nothing is in flight, and what was recorded is forgotten: layers are about to move."""
        if self._owner is not None and not self._owner.closed:
            self._owner.read_all()
        self._steps.layers_moved()

    def _split_changed(self) -> None:
        self.plan = replace(self.plan, split=self._weights.split)
        self._parts = 1 + len(self.plan.split.streamed)

    def _reserve(self, cache: KVCache, n_tokens: int) -> None:
        """Have room for so many tokens in the cache; where memory is short, layers give theirs.

        Raises:
            OutOfMemoryError: that does not suffice, or nothing may be streamed. It says what would help.
        """
        try:
            cache.reserve(n_tokens)
            self._steps.network()  # what attention needs for as many
        except OutOfMemoryError as error:
            if not error.missing:
                raise
            if self._mode == "resident":
                raise OutOfMemoryError(
                    f"{error}; or let layers be streamed: --mode auto (mode='auto')",
                    needed=error.needed,
                    free=error.free,
                ) from error
            n_layers, freed = self._move_out(error.missing)
            if not n_layers:
                raise
            self._watch.tell_grown(n_layers, freed, n_tokens)
            cache.reserve(n_tokens)
            self._steps.network()

    def _extend(self, ids: list[int], cache: KVCache, progress: Callable[[int], None]) -> None:
        begin = 0
        while begin < len(ids):
            rows = min(self._chunk, self._steps.max_rows)
            n = 1 if self._steps.resident else chunks_at_once(self._steps, rows)
            part = ids[begin : begin + n * rows]
            if len(part) <= rows:
                break
            self._keep_within_budget()
            if self._steps.resident:  # layers have just come back
                continue
            tell = functools.partial(self._tell_share, progress, begin, len(part))
            chunks = [part[i : i + rows] for i in range(0, len(part), rows)]
            for chunk, padded in zip(chunks, run_together(self._steps, chunks, cache, tell), strict=True):
                cache.append(chunk, rows=padded)
            begin += len(part)
        for at, chunk in self._chunks(ids[begin:], cache, whole=False):
            progress(begin + at + len(chunk))

    @staticmethod
    def _tell_share(progress: Callable[[int], None], begin: int, n: int, share: float) -> None:
        progress(begin + int(share * n))

    def _chunks(self, ids: list[int], cache: KVCache, *, whole: bool) -> Generator[tuple[int, list[int]]]:
        """Run ids in chunks, each as large as the ones before let it be: (its begin, its ids) behind its run.

        A chunk joins the cache when the next one is asked for.
        """
        begin, self._chunk_limit = 0, self._steps.max_rows
        while begin < len(ids):
            chunk = ids[begin : begin + min(self._chunk, self._steps.max_rows)]
            rows = self._steps.bucket(len(chunk))
            self._adapt(rows, self._run_chunk(chunk, cache, rows=rows, whole=whole))
            yield begin, chunk
            cache.append(chunk, rows=rows)
            begin += len(chunk)

    def _run_chunk(self, chunk: list[int], cache: KVCache, *, rows: int, whole: bool = False) -> float:
        """Run a chunk, padded to `rows`, behind the cache; the seconds that the device took."""
        self._keep_within_budget()
        steps = self._steps
        recording = steps.prefill(rows, whole=whole)
        steps.stage_chunk(chunk, cache, rows=rows)
        started = time.perf_counter()
        steps.wait(steps.submit(recording))
        return time.perf_counter() - started

    def _adapt(self, rows: int, seconds: float) -> None:
        """Choose the rows of the next chunk by the time that a full one took.

        A larger chunk takes at most in proportion, since the weights are read once in each. It may project to twice
        CHUNK_SECONDS; what was too slow is not tried again in the same prompt.
        """
        if rows < self._chunk:
            return
        limit = CHUNK_SECONDS * self._parts
        if seconds > limit:
            self._chunk_limit = rows - 1
        most = min(self._chunk_limit, rows * 2 * limit / seconds)
        self._chunk = max((size for size in ROW_BUCKETS if size <= most), default=1)

    def _last_logits(self, token: int, cache: KVCache) -> Array:
        steps = self._steps
        self.claim(None)
        self._keep_within_budget()
        recording = steps.decode(self.config.vocab_size)
        steps.stage_one(token, cache, position=cache.length)
        steps.wait(steps.submit(recording, (LOAD, STEP, READ)), urgent=True)
        if steps.chosen(0) == BAD_TOKEN:
            self.trace([token], cache)
        logits = np.frombuffer(steps.logits_back.read(), np.float32)
        cache.append([token], rows=1)
        return logits[np.newaxis]

    def _all_logits(self, ids: list[int], cache: KVCache) -> Array:
        """The slow way to every logit, (T, vocab): nothing of it is kept recorded but the layers."""
        logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        self._chunk = max(self._chunk, FIRST_WHOLE_CHUNK)
        for begin, chunk in self._chunks(ids, cache, whole=True):
            found = logits[begin : begin + len(chunk)]
            self._steps.head(found)
            if not np.isfinite(found).all():
                self.trace(chunk, cache)
        return logits

    def _tapped(self, ids: list[int], cache: KVCache, *, last_only: bool, tap: Tap) -> Array:
        """One op at a time, all rows at once where they fit: taps come in chunks where not."""
        steps = self._steps
        logits = np.empty((len(ids), self.config.vocab_size), np.float32)
        for begin in range(0, len(ids), steps.max_rows):
            chunk = ids[begin : begin + steps.max_rows]
            steps.stage_chunk(chunk, cache, rows=len(chunk))
            made = steps.tapped(len(chunk), tap, last_only=last_only)
            logits[begin + len(chunk) - len(made) : begin + len(chunk)] = made
            cache.append(chunk, rows=len(chunk))
        return logits[-1:] if last_only else logits

    def _first_bad(self, ids: list[int], cache: KVCache) -> tuple[str | None, float]:
        """The first tap with a NaN or an infinity, and the largest number that its layer had to cache.

        The cache's length stays.
        """
        length, largest = cache.length, dict[str, float]()

        def look(name: str, values: Array) -> None:
            if not np.isfinite(values).all():
                raise _FoundError(name)
            layer, _, what = name.rpartition(".")
            if what in CACHED:
                largest[layer] = max(largest.get(layer, 0.0), float(np.abs(values).max(initial=0)))

        try:
            self._tapped(ids, cache, last_only=True, tap=look)
        except _FoundError as found:
            return str(found), largest.get(str(found).rpartition(".")[0], 0.0)
        finally:
            cache.truncate(length)
        return None, 0.0


class _FoundError(Exception):
    """A tap's values are not finite; its name."""
