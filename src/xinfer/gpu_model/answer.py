"""An answer whose tokens the device chooses: steps in the queue, tokens read behind them."""

from __future__ import annotations

from typing import Protocol

from xinfer.choice import Choice
from xinfer.gpu.api import Ticket
from xinfer.gpu_model.steps import LOAD, RING, STEP, Steps
from xinfer.kv_cache import KVCache
from xinfer.ops import BAD_TOKEN

STEPS_AHEAD = 3  # decode steps in the queue before the first of their tokens is read


class StateHolder(Protocol):
    """Who says whose state lies on the device."""

    def claim(self, answer: Answer | None) -> bool:
        """Make it `answer`'s own; whether it was not, and must be loaded."""

    def disclaim(self, answer: Answer) -> None:
        """Nobody's state lies on the device any more."""


class Answer:
    """The tokens chosen after one token, a step each. Answers take turns: the state on the device is of one only."""

    def __init__(
        self, holder: StateHolder, steps: Steps, token: int, cache: KVCache, choice: Choice, *, limit: int
    ) -> None:
        self.cache = cache
        self.limit = min(limit, cache.capacity - cache.length)  # tokens at most
        self.closed = False
        self._holder = holder
        self._steps = steps
        self._fed = [token]  # what the steps are given: the first token, then each one chosen
        self._start = cache.length  # position of the first
        self._choice = choice
        self._submitted = 0
        self._tickets: list[Ticket | None] = [None] * RING

    @property
    def n_read(self) -> int:
        """Tokens read back."""
        return len(self._fed) - 1

    def token(self, n: int) -> int:
        """Token number n, asked for in order; BAD_TOKEN where its logits were not finite. Waits for it."""
        assert self.cache.length == self._start + n, "the cache was used by others during an answer"
        while self._submitted < min(self.limit, n + STEPS_AHEAD) and self._fed[-1] != BAD_TOKEN:
            self._submit()
        if self.n_read <= n:
            self._read()
        return self._fed[n + 1]

    def fed(self, n: int) -> int:
        """What step n was given."""
        return self._fed[n]

    def read_all(self) -> None:
        """Wait for every step in flight and read its token."""
        while self.n_read < self._submitted:
            self._read()

    def _submit(self) -> None:
        position = self._start + self._submitted
        self.cache.reserve(position + 1)
        recording = self._steps.choosing(self._choice)
        segments: tuple[str, ...] = (STEP,)
        claimed = self._holder.claim(self)
        if claimed:
            # Whoever claimed it in between has read what was in flight: the last token is known.
            assert self.n_read == self._submitted
            self._steps.stage_one(self._fed[-1], self.cache, position=position, steps=self._submitted)
            segments = (LOAD, *self._steps.stage_choice(self._choice.after(self._fed[1:])), STEP)
        try:
            self._tickets[self._submitted % RING] = self._steps.submit(recording, segments)
        except BaseException:
            if claimed:  # whether the state has arrived is not known
                self._holder.disclaim(self)
            raise
        self._submitted += 1

    def _read(self) -> None:
        n = self.n_read
        ticket = self._tickets[n % RING]
        assert ticket is not None
        self._steps.wait(ticket)
        self._fed.append(self._steps.chosen(n))
