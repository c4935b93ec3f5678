"""What was found against what was expected: how far off, and how far off it may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

OFF_SCALE = 1e9  # the ratio of what is not finite, or differs where nothing may


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reference makes of an op's inputs, and how far a right kernel may be from it.

    `tolerance` has the shape of `values`, or one that NumPy stretches to it. Where `values` are not finite, because the
    inputs were not, nothing is judged.
    """

    values: Array
    tolerance: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The worst element of a comparison. `ratio` is its error in units of its tolerance: above 1 is wrong."""

    ratio: float
    error: float
    tolerance: float
    n_wrong: int
    n: int  # numbers judged
    n_skipped: int  # numbers that the reference, too, has as NaN or infinity
    where: tuple[int, ...]
    found: float
    expected: float

    @property
    def right(self) -> bool:
        """Whether every element is within its tolerance."""
        return self.n_wrong == 0

    def __str__(self) -> str:
        if self.n == 0:
            return "nothing could be judged, since what it was given was not finite"
        place = ", ".join(map(str, self.where))
        return (
            f"{self.n_wrong:,} of {self.n:,} numbers are off; the worst at [{place}]: {self.found:.7g} instead of "
            f"{self.expected:.7g}, off by {self.error:.3g} where {self.tolerance:.3g} is allowed"
        )


def judge(found: NDArray[Any], expected: Expected) -> Judgement:
    """Compare every element; a number that is not finite is wrong where a finite one was expected."""
    values = expected.values
    assert found.shape == values.shape
    tolerance = np.broadcast_to(expected.tolerance, values.shape)
    judged = np.isfinite(values)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.abs(found - values)
        ratio = np.where(error == 0, 0, error / tolerance)
        ratio[~np.isfinite(ratio) | (ratio > OFF_SCALE)] = OFF_SCALE
    ratio[~judged] = 0
    at = np.unravel_index(int(np.argmax(ratio)), values.shape)
    return Judgement(
        ratio=float(ratio[at]),
        error=float(error[at]),
        tolerance=float(tolerance[at]),
        n_wrong=int(np.count_nonzero(ratio > 1)),
        n=int(np.count_nonzero(judged)),
        n_skipped=int(np.count_nonzero(~judged)),
        where=tuple(int(i) for i in at),
        found=float(found[at]),
        expected=float(values[at]),
    )


def worst(judgements: Iterable[Judgement]) -> Judgement:
    """The one that is furthest off."""
    return max(judgements, key=lambda judgement: judgement.ratio)
