"""Tries one kernel variant on one device: `python -m xinfer.doctor.child`, a job on stdin.

The job: {"device", "variant", "scale", "timeout_s", "answer"}; the answer, a file: {"outcome", "detail", "ratio",
"trials"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from xinfer import gpu
from xinfer.doctor import menu
from xinfer.doctor.isolated import HUNG, LOST, REFUSED, RIGHT, SKIPPED, WRONG
from xinfer.errors import DeviceError, DeviceLostError
from xinfer.gpu.api import Device
from xinfer.ops import KernelSet
from xinfer.shaders.catalog import variants
from xinfer.trials.base import attempt

SCALES = {scale.name: scale for scale in (menu.SCALED_DOWN, menu.USUAL, menu.DEEP)}
STILL_RUNS = "has not ended after"  # how the backends begin to say that a wait ran out


def main() -> int:
    """The process."""
    job = json.load(sys.stdin)
    device = gpu.open_device(job["device"])
    if device is None:
        raise DeviceError(f"no device {job['device']!r}")
    answer = _examine(device, job)
    write_answer(Path(job["answer"]), answer)
    device.close()
    return 0


def write_answer(target: Path, answer: dict[str, Any]) -> None:
    """Whole or not at all: the process may be killed at any time."""
    partial = target.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.replace(target)


def _examine(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return try_variant(device, job["variant"], SCALES[job["scale"]], timeout_s=job["timeout_s"])
    except DeviceLostError as error:
        reason = device.removed_reason()
        return {"outcome": LOST, "detail": str(reason) if reason.lost else str(error)}
    except DeviceError as error:
        return {"outcome": HUNG if STILL_RUNS in str(error) else REFUSED, "detail": str(error)}


def try_variant(device: Device, variant: str, scale: menu.Scale, *, timeout_s: float) -> dict[str, Any]:
    """Every trial of a variant, up to the first that goes wrong. Raises DeviceError where one does not end well."""
    with KernelSet(device) as kernels:
        if not kernels.usable(variant):
            return {"outcome": SKIPPED, "detail": "the device lacks what it needs"}
        ratio, n = 0.0, 0
        for trial in menu.trials_for(variants()[variant], scale):
            outcome = attempt(trial, device, kernels, variant, timeout_s=timeout_s)
            ratio, n = max(ratio, outcome.ratio), n + 1
            if not outcome.right:
                return {"outcome": WRONG, "detail": f"{trial.shape}: {outcome}", "ratio": ratio, "trials": n}
        assert n, f"no trial of {variant}"
        return {"outcome": RIGHT, "ratio": ratio, "trials": n}


if __name__ == "__main__":
    sys.exit(main())
