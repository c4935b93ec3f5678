"""Guesses at the next tokens: what followed the last few tokens where they stood before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LENGTHS = (3, 2)  # of what is looked up, the longer first


class Lookup:
    """A text's tokens, and what followed each pair and triple of them last."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        """One more token."""
        for n in LENGTHS:
            if len(self._ids) >= n:
                self._behind[tuple(self._ids[-n:])] = len(self._ids)
        self._ids.append(token)

    def guess(self, most: int) -> list[int]:
        """At most so many tokens; none where the last ones are new together."""
        for n in LENGTHS:
            place = self._behind.get(tuple(self._ids[-n:])) if len(self._ids) >= n else None
            if place is not None:
                return self._ids[place : place + most]
        return []


def agreement(guessed: Sequence[int], chosen: Sequence[int]) -> int:
    """How many guesses are what was chosen, from the first one on."""
    return next((i for i, (a, b) in enumerate(zip(guessed, chosen, strict=False)) if a != b), len(guessed))
