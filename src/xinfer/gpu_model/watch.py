"""The memory that the system leaves us, watched while a model runs, and layers moved out where it becomes too little.

The budget of a device shrinks when other programs want its memory. Whoever goes on using more is paged by the driver,
silently and slowly: layers are given up instead, and streamed from then on. The answers stay the same, bit for bit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from xinfer.gpu.api import Device
from xinfer.gpu_model.layout import SLOTS, Split

EVERY_S = 0.25  # between two questions to the driver

_log = logging.getLogger("xinfer")  # warnings go to stderr where nobody has set up logging


class BudgetWatch:
    """Asks the device now and then by how much its budget is exceeded."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = device
        self._clock = clock
        self._next = clock() + EVERY_S
        self._told = False  # that there is nothing left to give up

    def excess(self) -> int:
        """Bytes in use beyond the budget; 0 also where it is too early to ask again."""
        now = self._clock()
        if now < self._next:
            return 0
        self._next = now + EVERY_S
        status = self._device.memory()
        return max(0, status.used - status.budget)

    def tell(self, n_layers: int, freed: int, excess: int) -> None:
        """Say what was done about it, once where there is nothing left to be done."""
        if n_layers:
            _log.warning(
                "other programs need the memory of %s, %.2f GB more than is free: %d layers were moved to the host's "
                "memory, %.2f GB were given back, and the layers are streamed from now on; answers stay the same, and "
                "become slower",
                self._device.info.name,
                excess / 1e9,
                n_layers,
                freed / 1e9,
            )
        elif not self._told:
            self._told = True
            _log.warning(
                "other programs need the memory of %s, %.2f GB more than is free, and no layer can be moved out: the "
                "driver may move memory by itself, which is slow; close other programs, or use a smaller context",
                self._device.info.name,
                excess / 1e9,
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


def _distance(i: int, streamed: Sequence[int], n: int) -> int:
    """Layers to the nearest streamed one; steps follow each other, so that the last layer is beside the first."""
    return min((min((i - j) % n, (j - i) % n) for j in streamed), default=n)
