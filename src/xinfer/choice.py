"""How tokens are chosen from logits, in plain numbers: what a request comes down to, and a device can do by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

SPECULATE_MOST = 15  # tokens guessed at a time


@dataclass(slots=True)
class Tally:
    """How guessing went: tokens that were guessed, and those of them that turned out to be the answer's."""

    guessed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one answer's tokens are chosen; the values are those of `sampling.SamplingParams`, none left open.

    Attributes:
        n_valid: ids from here on are never chosen.
        bias: added to the scores of these ids; minus infinity forbids one.
        prompt_ids: what the repetition penalty covers besides the answer.
        answer_ids: the tokens chosen so far, which every penalty covers.
        speculate: guess so many tokens from earlier text and check them in one pass, where the best one is chosen.
        tally: how that went.
    """

    n_valid: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    answer_ids: Sequence[int] = ()
    speculate: int = 0
    tally: Tally = field(default_factory=Tally, compare=False)

    @property
    def penalizes(self) -> bool:
        """Whether the ids that are there already matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_argmax(self) -> bool:
        """Whether the largest logit is taken, the lowest id on ties, and nothing else matters."""
        return self.temperature == 0.0 and not self.penalizes and not self.bias

    def after(self, ids: Sequence[int]) -> Choice:
        """The same, once these tokens have been chosen."""
        return replace(self, answer_ids=(*self.answer_ids, *ids)) if self.penalizes else self
