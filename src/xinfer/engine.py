"""Prefill and decode: token ids in, token ids out.

The engine knows no text and no device. It asks a `Model` for logits and a `Sampler` for the next id, and
keeps in step with the KV cache.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xinfer.choice import Choice
from xinfer.errors import ContextLengthError, RequestError
from xinfer.sampling import Sampled, Sampler

FinishReason = Literal["stop", "length", "context"]

PREFILL_CHUNK = 512  # tokens a forward: bounds the activations, and lets Ctrl-C and the progress bar in between
QUEUED_CHUNK = 4096  # likewise, of a model that cuts prompts by itself; more where it takes more at once


class Cache(Protocol):
    """The keys and values of one sequence, as the engine sees them."""

    @property
    def length(self) -> int:
        """Tokens whose keys and values are held."""

    @property
    def capacity(self) -> int:
        """Tokens that it can hold."""

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""


C = TypeVar("C", bound=Cache)
C_contra = TypeVar("C_contra", bound=Cache, contravariant=True)


class Model(Protocol[C]):
    """What the engine needs from a model, whatever it runs on."""

    def make_cache(self, capacity: int) -> C:
        """An empty cache for `capacity` tokens."""

    def forward(self, tokens: NDArray[np.int64], cache: C, *, last_only: bool = False) -> NDArray[np.float32]:
        """Append `tokens` (T,) to the cache; logits (T, vocab_size), or (1, vocab_size) for the last one only."""


@runtime_checkable
class QueuedModel(Protocol[C_contra]):
    """What a model may offer besides: prompts without logits, and tokens that it chooses in steps queued ahead."""

    def tokens_at_once(self) -> int:
        """Tokens of a prompt that take hardly longer together than a part of them: weights come once for all."""

    def extend(
        self, tokens: NDArray[np.int64], cache: C_contra, *, progress: Callable[[int], None] | None = None
    ) -> None:
        """Append `tokens` (T,) to the cache. `progress` is told how many of them are as good as done."""

    def can_choose(self, choice: Choice) -> bool:
        """Whether `choose` takes this choice."""

    def choose(self, token: int, cache: C_contra, choice: Choice, *, limit: int) -> Generator[int]:
        """The token chosen after `token`, then the one after that, `limit` of them.

        When a token is yielded, everything before it is in the cache. The generator may be closed at any token.
        """


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token."""

    sampled: Sampled
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Timing:
    """Where the time of one generation went, in seconds, and how many tokens each part handled."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    guessed_tokens: int = 0
    accepted_tokens: int = 0


class Engine(Generic[C]):
    """One model and the lock that lets several threads take turns on it, a forward at a time."""

    def __init__(self, model: Model[C], *, context: int) -> None:
        self.model = model
        self.queued: QueuedModel[C] | None = model if isinstance(model, QueuedModel) else None
        self.context = context  # the most tokens, prompt and answer together, of one sequence
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closed = False

    def session(self) -> Session[C]:
        """A sequence of its own, with an empty KV cache."""
        self.check_usable()
        return Session(self)

    def close(self) -> None:
        """Refuse all further work; waits for the forward that is running. Nothing in a forked child."""
        self._closed = True  # first: of many that wait for the lock none goes on
        if not self.forked:
            with self._lock:
                pass

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the model."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Refuse a forked child: locks and devices do not survive a fork."""
        if self.forked:
            raise RequestError(
                f"the model was opened in process {self._process} and this is its fork {os.getpid()}; open the model "
                "in the process that uses it, and close it before a process is forked, or let multiprocessing spawn "
                "processes: drivers do not survive a fork"
            )

    def check_usable(self) -> None:
        """Refuse work after `close`, and in a forked child."""
        self.check_process()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the model is closed; open it again")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self.check_process()  # first: a fork may have inherited a lock that nobody will release
        with self._lock:
            self._check_open()
            yield

    def forward(self, tokens: Sequence[int], cache: C) -> NDArray[np.float32]:
        """The logits (vocab_size,) after the last of `tokens`."""
        with self._turn():
            logits = self.model.forward(np.asarray(tokens, dtype=np.int64), cache, last_only=True)  # (1, vocab_size)
        last: NDArray[np.float32] = logits[0]
        return last

    def tokens_at_once(self) -> int:
        """How a prompt is cut for a `queued` model."""
        assert self.queued is not None
        with self._turn():
            return max(QUEUED_CHUNK, self.queued.tokens_at_once())

    def extend(self, tokens: Sequence[int], cache: C, progress: Callable[[int], None]) -> None:
        """Append `tokens` to the cache of a `queued` model."""
        assert self.queued is not None
        with self._turn():
            self.queued.extend(np.asarray(tokens, dtype=np.int64), cache, progress=progress)

    def can_choose(self, choice: Choice) -> bool:
        """Whether a `queued` model chooses so by itself."""
        assert self.queued is not None
        with self._turn():
            return self.queued.can_choose(choice)

    def choose(self, token: int, cache: C, choice: Choice, *, limit: int) -> Generator[int]:
        """The tokens that a `queued` model chooses."""
        assert self.queued is not None
        with closing(self.queued.choose(token, cache, choice, limit=limit)) as tokens:
            for _ in range(limit):
                with self._turn():
                    chosen = next(tokens)
                yield chosen


class Session(Generic[C]):
    """One sequence: the ids whose keys and values are in its cache, kept from one call to the next.

    Not for two threads at once; make a session for each.
    """

    def __init__(self, engine: Engine[C]) -> None:
        self._engine = engine
        self._cache = engine.model.make_cache(engine.context)
        self._ids: list[int] = []
        self._answers = 0  # begun so far; only the last of them may go on

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids in the cache."""
        return tuple(self._ids)

    def reset(self) -> None:
        """Forget the sequence; an answer that was under way cannot go on."""
        self._answers += 1
        self._truncate(0)

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        timing: Timing | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Step]:
        """Continue `prompt_ids`, one `Step` a token, until a stop id, `max_tokens` or the context's end.

        What the cache already holds of the prompt is not computed again. The iterator may be dropped at any token; it
        cannot go on once another answer has begun.

        Raises:
            RequestError: the prompt is empty, or another answer has begun on this session.
            ContextLengthError: the prompt leaves no room for an answer.
            NumericalError: the logits of a step are not finite.
        """
        check_prompt(prompt_ids, self._engine.context)
        self._answers += 1
        return self._steps(self._answers, prompt_ids, sampler, max_tokens, stop_ids, timing or Timing(), on_prefill)

    def _steps(
        self,
        answer: int,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        max_tokens: int | None,
        stop_ids: Collection[int],
        timing: Timing,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Iterator[Step]:
        timing.prompt_tokens = len(prompt_ids)
        room = self._engine.context - len(prompt_ids)
        limit = room if max_tokens is None else min(room, max_tokens)
        with closing(self._draws(prompt_ids, sampler, limit, timing, on_prefill)) as draws:
            for n in range(1, limit + 1):
                if answer != self._answers:
                    raise RequestError("another answer has begun on this conversation; this one cannot go on")
                started = time.perf_counter()
                sampled = next(draws)
                reason: FinishReason | None = None
                if sampled.token in stop_ids:
                    reason = "stop"
                elif n == max_tokens:
                    reason = "length"
                elif n == room:
                    reason = "context"
                timing.generated_tokens = n
                if n == 1:  # the prompt's last token has paid for it
                    timing.prefill_seconds = time.perf_counter() - started
                else:
                    timing.decode_seconds += time.perf_counter() - started
                yield Step(sampled, reason)
                if reason is not None:
                    return

    def _draws(
        self,
        prompt_ids: Sequence[int],
        sampler: Sampler,
        limit: int,
        timing: Timing,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Generator[Sampled]:
        """The tokens of an answer; what was drawn is appended when the next one is asked for."""
        # The last token is always computed: its logits are what the caller wants.
        reused = min(_common_prefix(self._ids, prompt_ids), len(prompt_ids) - 1)
        self._truncate(reused)
        timing.cached_tokens = reused
        if self._engine.queued is None:
            logits = self._prefill(prompt_ids, reused, on_prefill)
        else:
            self._extend(prompt_ids, reused, on_prefill)
            choice = sampler.choice
            if choice is not None and self._engine.can_choose(choice):
                yield from self._chosen(prompt_ids[-1], choice, limit, timing)
                return
            logits = self._append(prompt_ids[-1:])
        for n in range(limit):
            sampled = sampler.sample(logits, position=len(prompt_ids) + n)
            yield sampled
            logits = self._append([sampled.token])

    def _prefill(
        self, prompt_ids: Sequence[int], start: int, on_prefill: Callable[[int, int], None] | None
    ) -> NDArray[np.float32]:
        """Append the prompt from `start` on; the logits (vocab_size,) after it."""
        logits = np.empty(0, np.float32)
        if on_prefill is not None:
            on_prefill(0, len(prompt_ids) - start)
        for begin in range(start, len(prompt_ids), PREFILL_CHUNK):
            chunk = prompt_ids[begin : begin + PREFILL_CHUNK]
            logits = self._append(chunk)  # (vocab_size,)
            if on_prefill is not None:
                on_prefill(begin + len(chunk) - start, len(prompt_ids) - start)
        return logits

    def _extend(self, prompt_ids: Sequence[int], start: int, on_prefill: Callable[[int, int], None] | None) -> None:
        """Append the prompt from `start` on, but for its last token."""
        last, begin = len(prompt_ids) - 1, start

        def tell(done: int) -> None:
            if on_prefill is not None:
                on_prefill(begin + done - start, last - start)

        tell(0)
        while begin < last:
            chunk = prompt_ids[begin : min(begin + self._engine.tokens_at_once(), last)]
            with self._repaired():
                self._engine.extend(chunk, self._cache, tell)
            self._ids.extend(chunk)
            tell(len(chunk))
            begin += len(chunk)

    def _chosen(self, token: int, choice: Choice, limit: int, timing: Timing) -> Iterator[Sampled]:
        answer = self._engine.choose(token, self._cache, choice, limit=limit)
        with self._repaired(), closing(answer) as tokens:
            for chosen in tokens:
                self._ids.append(token)
                token = chosen
                timing.guessed_tokens, timing.accepted_tokens = choice.tally.guessed, choice.tally.accepted
                yield Sampled(chosen, None, ())

    def _append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        with self._repaired():
            logits = self._engine.forward(tokens, self._cache)
        self._ids.extend(tokens)
        return logits

    @contextmanager
    def _repaired(self) -> Iterator[None]:
        """Ctrl-C or an error may leave the cache half written: keep only what is known to be whole."""
        try:
            yield
        except BaseException:
            self._truncate(min(len(self._ids), self._cache.length))
            raise

    def _truncate(self, length: int) -> None:
        self._cache.truncate(length)
        del self._ids[length:]


def check_prompt(prompt_ids: Sequence[int], context: int) -> None:
    """Refuse a prompt that cannot be answered within `context` tokens."""
    if not prompt_ids:
        raise RequestError("the prompt has no tokens; expected at least one: give some text")
    check_length(len(prompt_ids), context)


def check_length(tokens: int, context: int, *, bound: str = "") -> None:
    """Refuse a prompt of so many tokens, or "at least" so many, if it leaves no room for an answer."""
    if tokens >= context:
        raise ContextLengthError(
            f"the prompt has {bound}{tokens:,} tokens and the context holds {context:,}, the answer included; "
            "shorten the prompt, or ask for a larger context if the model has one (xinfer inspect shows it)"
        )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for n, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return n
    return min(len(left), len(right))
