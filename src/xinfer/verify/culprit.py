"""Which kernel is behind a divergence, and whether it or the driver is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xinfer import gpu
from xinfer.errors import XinferError
from xinfer.gpu.api import Device, DeviceInfo
from xinfer.ops import KernelSet
from xinfer.trials.base import Outcome, Trial, attempt, candidates
from xinfer.verify.findings import END_OPS, LAYER_OPS, Finding

MOST_GROUPS = 6  # kinds of divergence that are looked into
MOST_OTHERS = 3  # other drivers that are asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One variant on one trial: right, or what was off, or why it did not run."""

    variant: str
    right: bool
    detail: str
    ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One op by itself, on the inputs of the divergence, by every variant that fits."""

    op: str
    shape: str
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """The same kernel on the same inputs with another driver or API."""

    device: str
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A divergence, how far it reaches, and what is behind it."""

    finding: Finding  # the first of its kind
    layers: tuple[int | None, ...]  # where else the same op diverges by the same variants
    cases: tuple[str, ...]
    alone: tuple[Alone, ...]
    elsewhere: tuple[Elsewhere, ...]
    culprits: tuple[str, ...] = field(default=())  # variants, wrong by themselves too
    verdict: str = ""


def network_order(finding: Finding) -> tuple[int, int]:
    """Where in the network a finding is: embedding, layers, head."""
    if finding.layer is None:
        return (-1 if finding.op == "embed" else 1 << 30), END_OPS.index(finding.op) if finding.op in END_OPS else 0
    return finding.layer, LAYER_OPS.index(finding.op)


def first_not_finite(findings: Sequence[Finding]) -> Finding | None:
    """The first phase of which the reference, too, makes NaN or infinity; None where there is none."""
    return min((f for f in findings if f.judgement.n_skipped), key=network_order, default=None)


def diagnose(findings: Sequence[Finding], device: Device, kernels: KernelSet) -> list[Diagnosis]:
    """Look into the first divergence of each kind, a kind being an op and the variants that made it."""
    groups: dict[tuple[str, tuple[str, ...]], list[Finding]] = {}
    for finding in sorted((f for f in findings if not f.judgement.right), key=network_order):
        groups.setdefault((finding.op, finding.variants), []).append(finding)
    return [_diagnose(group, device, kernels) for group in list(groups.values())[:MOST_GROUPS]]


def _diagnose(group: list[Finding], device: Device, kernels: KernelSet) -> Diagnosis:
    first = group[0]
    trials = first.trials() if first.trials is not None else []
    alone = tuple(_alone(trial, device, kernels) for trial in trials)
    wrong = {attempt.variant for part in alone for attempt in part.attempts if not attempt.right}
    culprits = tuple(variant for variant in first.variants if variant in wrong)
    elsewhere: tuple[Elsewhere, ...] = ()
    if culprits and trials:
        elsewhere = tuple(_ask_others(trials[0], culprits[0], device.info))
    return Diagnosis(
        finding=first,
        layers=tuple(dict.fromkeys(finding.layer for finding in group)),
        cases=tuple(dict.fromkeys(finding.case for finding in group)),
        alone=alone,
        elsewhere=elsewhere,
        culprits=culprits,
        verdict=verdict(first.variants, culprits, alone, elsewhere, driver_of(device.info)),
    )


def _alone(trial: Trial, device: Device, kernels: KernelSet) -> Alone:
    names = candidates(trial, kernels)
    with KernelSet(device) as free:  # without the quarantine: its variants are looked at, too
        made = [_attempt(trial, device, free, name) for name in names]
        attempts = tuple(attempt for attempt in made if attempt is not None)
    return Alone(op=trial.op, shape=trial.shape, attempts=attempts)


def _attempt(trial: Trial, device: Device, kernels: KernelSet, variant: str) -> Attempt | None:
    """How a variant did; None where these inputs do not come to it, as few keys do not to what combines splits."""
    try:
        outcome: Outcome = attempt(trial, device, kernels, variant)
    except (XinferError, ValueError) as error:
        return Attempt(variant=variant, right=False, detail=str(error))
    if outcome.judgement is None:
        return None
    return Attempt(variant=variant, right=outcome.right, detail=str(outcome), ratio=outcome.ratio)


def _ask_others(trial: Trial, variant: str, own: DeviceInfo) -> list[Elsewhere]:
    """Other APIs of the same adapter first, then other adapters."""
    others = [info for info in gpu.list_devices() if (info.api, info.index) != (own.api, own.index)]
    same = (own.vendor_id, own.device_id)
    others.sort(key=lambda info: ((info.vendor_id, info.device_id) != same, info.kind == "cpu"))
    found = []
    for info in others[:MOST_OTHERS]:
        name = f"{info.api}:{info.index} {info.name}, {driver_of(info)}"
        try:
            device = gpu.open_device(f"{info.api}:{info.index}")
            assert device is not None
            with device, KernelSet(device) as kernels:
                made = _attempt(trial, device, kernels, variant) if kernels.usable(variant) else None
                if made is not None:
                    found.append(Elsewhere(device=name, attempt=made))
        except XinferError:
            continue  # a device that cannot be opened has no opinion
    return found


def driver_of(info: DeviceInfo) -> str:
    """A driver and its version."""
    return f"{info.driver} {info.driver_version}"


def verdict(
    used: Sequence[str], culprits: Sequence[str], alone: Sequence[Alone], elsewhere: Sequence[Elsewhere], driver: str
) -> str:
    """The driver or our shader, as far as it can be told."""
    if not culprits:
        return (
            f"{' and '.join(used)} gave this in the model, but by itself the op is right on the same inputs: what is "
            "wrong depends on what ran before, on where its data lies, or comes and goes"
        )
    culprit = culprits[0]
    others = [attempt for attempt in alone[0].attempts if attempt.variant not in culprits]
    right = [attempt.variant for attempt in others if attempt.right]
    if not others:
        reach = f"{culprit} is the only variant of its op that fits here"
    elif not right:
        reach = f"all {len(alone[0].attempts)} variants that fit are wrong"
    else:
        reach = f"{culprit} is wrong, {len(right)} of {len(others)} other variants that fit are right"
    parts = [part for part in alone[1:] if part.attempts]
    if parts:
        bad = [part.op for part in parts if not all(attempt.right for attempt in part.attempts)]
        reach += f"; of the single ops it stands for, {', '.join(bad) + ' diverges, too' if bad else 'all are right'}"
    agree = [other for other in elsewhere if other.attempt.right]
    if agree:
        return f"{reach}. {culprit} is right on {agree[0].device}: suspect the driver {driver}"
    if elsewhere:
        return f"{reach}. {culprit} is wrong on {elsewhere[0].device}, too: suspect our kernel, and please report it"
    return f"{reach}. No other driver or API is here to ask, so that kernel and driver {driver} are equally suspect"
