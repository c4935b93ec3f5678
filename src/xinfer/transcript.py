"""The ids of a conversation so far, with each answer as it was generated.

A sampled answer need not be cut into tokens as the tokenizer would cut its text. Encoding the whole conversation again
for every turn would then give other ids than the KV cache holds, and all that follows would be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xinfer.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and what was generated after it."""

    prompt: str
    prompt_ids: Sequence[int]
    answer_ids: list[int] = field(default_factory=list)


def encode_after(turn: Turn | None, prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of the next prompt: those of `turn` as far as it says the same, and the tokenizer's for the rest.

    The ids of a turn are used only up to where the tokenizer itself would begin a new token, so that what follows is
    cut as it would be by itself.
    """
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    if turn is None or not prompt.startswith(turn.prompt):
        return ids
    for end, count in (_same(turn, prompt, tokenizer), (len(turn.prompt), 0)):
        head = tokenizer.encode(prompt[:end], add_special_tokens=False)
        if ids[: len(head)] == head:
            return [*turn.prompt_ids, *turn.answer_ids[:count], *ids[len(head) :]]
    return ids


def _same(turn: Turn, prompt: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """How far `prompt` says what `turn` says: characters, and ids of the answer that end with a whole one."""
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
    end = len(turn.prompt)
    same = end, 0
    for count, token in enumerate(turn.answer_ids, start=1):
        piece = decoder.push(token)
        if not prompt.startswith(piece, end):
            break
        end += len(piece)
        if not decoder.pending:
            same = end, count
    return same
