"""What a trial is, and how its outcome is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from xinfer.gpu.api import Device
from xinfer.ops import KernelSet
from xinfer.shaders.catalog import Variant, variants
from xinfer.trials.bench import TIMEOUT_S, Bench
from xinfer.trials.judge import Expected, Judgement, judge, worst


@dataclass(frozen=True, slots=True)
class Check:
    """One result of a trial, and the variant that made it."""

    variant: str
    what: str
    found: NDArray[Any]
    expected: Expected


class Trial(Protocol):
    """One op on given inputs."""

    @property
    def op(self) -> str:
        """Its name."""

    @property
    def shape(self) -> str:
        """Its sizes, for people."""

    def fits(self, variant: Variant) -> bool:
        """Whether a variant computes this op on these inputs, whatever the device can run."""

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Run it by one variant; a check for each result, some perhaps of other variants that had to help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one variant did in a trial."""

    variant: str
    judgement: Judgement | None  # None: the variant made nothing that could be judged
    n_outside: int = 0  # words written outside of the outputs
    what: str = ""

    @property
    def right(self) -> bool:
        """Whether everything was right, and nothing else was touched."""
        judged = self.judgement is not None and self.judgement.right and self.judgement.n > 0
        return judged and self.n_outside == 0

    @property
    def ratio(self) -> float:
        """The worst error, in units of its tolerance."""
        return 0.0 if self.judgement is None else self.judgement.ratio

    def __str__(self) -> str:
        if self.judgement is None:
            return f"{self.variant} was not run"
        if self.n_outside:
            return f"{self.n_outside} words were written outside of the output"
        return f"{self.what}: {self.judgement}"


def candidates(trial: Trial, kernels: KernelSet) -> list[str]:
    """Every variant that fits a trial and that the device can run, quarantined ones too."""
    free = KernelSet(kernels.device)
    return [variant.id for variant in variants().values() if trial.fits(variant) and free.usable(variant.id)]


def attempt(trial: Trial, device: Device, kernels: KernelSet, variant: str, *, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run a trial by one variant and judge what that variant made. Raises DeviceError where it does not end well."""
    with Bench(device, kernels, timeout_s=timeout_s) as bench:
        checks = [check for check in trial.run(bench, variant) if check.variant == variant]
        if variant not in bench.used or not checks:
            return Outcome(variant=variant, judgement=None)
        judged = {check.what: judge(check.found, check.expected) for check in checks}
        judgement = worst(judged.values())
        what = next(name for name, found in judged.items() if found is judgement)
        return Outcome(variant=variant, judgement=judgement, n_outside=bench.n_outside, what=what)
