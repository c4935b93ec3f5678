"""Verify one checkpoint on one device, or on two."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from xinfer import gpu
from xinfer.errors import DeviceError
from xinfer.gpu.api import Device
from xinfer.gpu_model import QwenModel
from xinfer.model.weights import ModelWeights
from xinfer.quarantine import Quarantine
from xinfer.tuning_file import TuningFile
from xinfer.verify.culprit import diagnose, first_not_finite
from xinfer.verify.oracle import Oracle
from xinfer.verify.report import Verified, as_dict
from xinfer.verify.session import Session

Progress = Callable[[str, int, int], None]  # stage, done, total

STEPS = 8


def verify(
    folder: Path,
    *,
    device: str = "auto",
    against: str | None = None,
    n_steps: int = STEPS,
    longest: int | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """The report of a checkpoint on a device, and of the same on a second one where `against` names it.

    Args:
        folder: the checkpoint.
        device: as `xinfer.gpu.open_device` takes it. What `xinfer doctor` put in quarantine is not used, and
            what `xinfer tune` has chosen is.
        against: another device or API; the report then holds its report, and a verdict on the two.
        n_steps: decode steps behind a short and a long prompt.
        longest: tokens of the longest prompt; None: 513, or less on a software driver that would take minutes.
        progress: called with "load", "compile" or "verify", what is done and what there is to do.
        warn: told what is wrong with the files of the quarantine and of `xinfer tune`.

    Raises:
        DeviceError: there is no such device, or it fails.
        CheckpointError: the checkpoint cannot be used.
    """
    options: dict[str, Any] = {"n_steps": n_steps, "longest": longest, "progress": progress, "warn": warn}
    report = _verify_on(folder, device, **options)
    if against is not None:
        other = _verify_on(folder, against, **options)
        report["against"], report["both"] = other, compare(report, other)
        report["right"] = report["right"] and other["right"]
    return report


def _verify_on(
    folder: Path,
    selector: str,
    *,
    n_steps: int,
    longest: int | None,
    progress: Progress | None,
    warn: Callable[[str], None] | None,
) -> dict[str, Any]:
    started = time.perf_counter()
    opened, note = _open(selector)

    def staged(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: None if progress is None else progress(stage, done, total)

    with opened as device, ModelWeights.open(folder) as weights:
        quarantine = Quarantine(warn=warn).variants_for(device.info)
        kernels: dict[str, Any] = {
            "quarantine": quarantine,
            "tuning": partial(TuningFile(warn=warn).preferred, device.info),
        }
        told: dict[str, Any] = {"progress": staged("load"), "on_compile": staged("compile")}
        with QwenModel.load(weights, device, **kernels, **told) as model:
            oracle = Oracle(weights)
            session = Session(model, oracle, n_steps=n_steps, longest=longest, progress=staged("verify"))
            session.run()
            diagnoses = diagnose(session.findings, device, model.steps.kernels)
            broken = first_not_finite(session.findings)
        return as_dict(
            Verified(
                model=folder.resolve().name,
                config=weights.config,
                info=device.info,
                quarantine=sorted(quarantine),
                debug=not note,
                debug_note=note,
                messages=[str(message) for message in device.drain_debug_messages()],
                cases=session.cases,
                not_tried=session.not_tried,
                findings=session.findings,
                differences=session.differences,
                diagnoses=diagnoses,
                damaged=[] if broken is None else oracle.not_finite(broken.layer),
                seconds=time.perf_counter() - started,
            )
        )


def _open(selector: str) -> tuple[Device, str]:
    """The device with its debug layer on, or without and why."""
    try:
        opened, note = gpu.open_device(selector, debug=True), ""
    except DeviceError as error:
        opened, note = gpu.open_device(selector), str(error)
    if opened is None:
        there = ", ".join(f"{info.api}:{info.index} ({info.name})" for info in gpu.list_devices()) or "none"
        why = "; ".join(f"{api}: {reason}" for api, reasons in gpu.diagnose().items() for reason in reasons)
        raise DeviceError(
            f"no GPU to verify was found; there are: {there}. A software driver is used when --device names it ({why})"
        )
    return opened, note


def compare(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The driver or our shader, after the same checkpoint on two devices or APIs."""
    names = [f"{report['device']['selector']} ({report['device']['driver']})" for report in (one, other)]
    if one["right"] and other["right"]:
        return f"{names[0]} and {names[1]} are both right"
    if all(report["not_finite"] and not report["divergences"] for report in (one, other)):
        return f"{names[0]} and {names[1]} agree with the reference: the weights make NaN or infinity, not the devices"
    if one["right"] != other["right"]:
        bad, good = (names[1], names[0]) if one["right"] else (names[0], names[1])
        return f"{bad} diverges and {good} does not, with kernels from the same source: suspect the driver of {bad}"
    same = {entry["op"] for entry in one["divergences"]} & {entry["op"] for entry in other["divergences"]}
    if same:
        return f"both diverge at {', '.join(sorted(same))}: suspect our kernel, and please report it"
    return "both diverge, but at different ops: suspect both drivers, and please report it"
