"""The memory that the system leaves us, watched while a model runs, and layers moved out where it becomes too little.

The budget of a device shrinks when other programs want its memory. Whoever goes on using more is paged by the driver,
silently and slowly: layers are given up instead, and streamed from then on. They come back when memory has been free
for a while. The answers stay the same, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from xinfer.gpu.api import Device
from xinfer.gpu_model.layout import SLOTS, Split
from xinfer.gpu_model.memory import in_bytes

EVERY_S = 0.25  # between two questions to the driver
PATIENCE_S, MOST_PATIENCE_S = (
    10.0,
    600.0,
)  # for which memory is free before layers come back; doubled where that was rash
RESERVE = 0.03  # of the budget, which returning layers leave free

_log = logging.getLogger("xinfer")  # warnings go to stderr where nobody has set up logging


class BudgetWatch:
    """Asks the device now and then by how much its budget is exceeded, and whether it has been roomy for a while."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self._next = clock() + EVERY_S
        self._told = False  # that there is nothing left to give up
        self._told_guesses = False
        self._free = 0  # as of the last question, less the reserve
        self._roomy_since: float | None = None
        self._returned_at: float | None = None
        self._patience = PATIENCE_S

    def excess(self) -> int:
        """Bytes in use beyond the budget; 0 also where it is too early to ask again."""
        now = self._clock()
        if now < self._next:
            return 0
        self._next = now + EVERY_S
        status = self._device.memory()
        self._free = status.free - round(RESERVE * status.budget)
        return max(0, status.used - status.budget)

    def room(self, wanted: int) -> int:
        """Bytes that layers may come back into: 0 until as many as wanted have been free for a while."""
        now = self._clock()
        if self._free < wanted:
            self._roomy_since = None
        elif self._roomy_since is None:
            self._roomy_since = now
        if self._roomy_since is None or now - self._roomy_since < self._patience:
            return 0
        self._roomy_since = None
        return self._free

    def tell_returned(self, n_layers: int, n_streamed: int) -> None:
        """Say that layers came back."""
        self._returned_at, self._told = self._clock(), False
        rest = f"{n_streamed} are still streamed" if n_streamed else "none is streamed any more"
        _log.warning(
            "memory of %s is free again: %d layers came back from the host's memory, %s",
            self._device.info.name,
            n_layers,
            rest,
        )

    def tell_grown(self, n_layers: int, freed: int, n_tokens: int) -> None:
        """Say that layers gave their memory to a cache."""
        _log.warning(
            "the KV cache for %s tokens needs memory of %s: %d layers were moved to the host's memory, %s were "
            "given back, and the layers are streamed from now on; answers stay the same, and become slower",
            f"{n_tokens:,}",
            self._device.info.name,
            n_layers,
            in_bytes(freed),
        )

    def tell_no_guesses(self) -> None:
        """Say that guesses are not made any more, once."""
        if not self._told_guesses:
            self._told_guesses = True
            _log.warning(
                "the memory of %s has no room to check guesses in: tokens come one at a time; answers stay the same",
                self._device.info.name,
            )

    def tell(self, n_layers: int, freed: int, excess: int) -> None:
        """Say what was done about an excess, once where there is nothing left to be done."""
        if self._returned_at is not None and self._clock() - self._returned_at < 2 * self._patience:
            self._patience = min(2 * self._patience, MOST_PATIENCE_S)
        self._returned_at = None
        if n_layers:
            _log.warning(
                "other programs need the memory of %s, %s more than is free: %d layers were moved to the host's "
                "memory, %s were given back, and the layers are streamed from now on; answers stay the same, and "
                "become slower",
                self._device.info.name,
                in_bytes(excess),
                n_layers,
                in_bytes(freed),
            )
        elif not self._told:
            self._told = True
            _log.warning(
                "other programs need the memory of %s, %s more than is free, and no layer can be moved out: the "
                "driver may move memory by itself, which is slow; close other programs, or use a smaller context",
                self._device.info.name,
                in_bytes(excess),
            )


def layers_to_move(split: Split, sizes: Sequence[int], excess: int) -> list[int]:
    """The resident layers to give up, so that `excess` bytes become free where that can be.

    They lie as far from streamed ones as can be. Without slots yet, the first ones become the slots and free nothing.
    """
    streamed = list(split.streamed)
    left = [i for i in range(len(sizes)) if i not in streamed]
    slot = max(sizes)
    chosen: list[int] = []
    slots, freed = split.n_slots, 0
    while left and freed < excess:
        largest = [i for i in left if sizes[i] == slot] if slots < SLOTS else []
        best = max(largest or left, key=lambda i: (_distance(i, streamed, len(sizes)), -i))
        left.remove(best)
        streamed.append(best)
        chosen.append(best)
        if slots < SLOTS and sizes[best] == slot:
            slots += 1
        else:
            freed += sizes[best]
    return sorted(chosen) if freed else []  # slots alone free nothing


def layers_to_return(split: Split, sizes: Sequence[int], moved: Sequence[int], room: int) -> list[int]:
    """The layers, of those that were moved out, that `room` bytes suffice for; the last moved come first.

    Where no more layers are left to be streamed than there are slots, those take the slots for their own.
    """
    chosen: list[int] = []
    for i in reversed(moved):
        if sizes[i] <= room:
            room -= sizes[i]
            chosen.append(i)
    left = [i for i in split.streamed if i not in chosen]
    if len(left) <= split.n_slots and set(left) <= set(moved):
        chosen += left
    return sorted(chosen)


def _distance(i: int, streamed: Sequence[int], n: int) -> int:
    """Layers to the nearest streamed one; steps follow each other, so that the last layer is beside the first."""
    return min((min((i - j) % n, (j - i) % n) for j in streamed), default=n)
