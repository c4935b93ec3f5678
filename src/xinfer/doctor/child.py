"""What is done in a process of its own: `python -m xinfer.doctor.child`, a job on stdin, the answer in a file.

A job says its "kind" and the "answer"'s file: "survey" lists the adapters; "open" opens "device" and asks for its
memory; "variant" tries one kernel "variant" on it at a "scale"; "directml" tries Windows' matrix product. Every answer
has an "outcome", perhaps a "detail", and what the kind adds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from xinfer import gpu
from xinfer.doctor import menu
from xinfer.doctor.isolated import BROKEN, HUNG, LOST, NO_ANSWER, REFUSED, RIGHT, SKIPPED, WRONG, begin, read_job
from xinfer.errors import DeviceError, DeviceHungError, DeviceLostError, OutOfMemoryError
from xinfer.gpu import directml
from xinfer.gpu.api import Device
from xinfer.ops import KernelSet
from xinfer.shaders.catalog import variants
from xinfer.trials import expected
from xinfer.trials.base import attempt
from xinfer.trials.judge import judge

SCALES = {scale.name: scale for scale in (menu.SCALED_DOWN, menu.USUAL, menu.DEEP)}
# M, N, K: where it is known to lose the device on some hardware, then the models' own.
DIRECTML_SHAPES = ((5, 32, 64), *((m, model.hidden, model.hidden) for model in menu.MODELS for m in (1, 33)))
STILL_RUNS = "has not ended"  # how the backends say that a wait ran out


def main() -> int:
    """The process."""
    job = read_job()
    target = Path(job["answer"])
    if job["kind"] == "survey":
        write_answer(target, survey())
        return 0
    if job["kind"] == "directml":
        write_answer(target, try_directml())
        return 0
    device = gpu.open_device(job["device"])
    if device is None:
        raise DeviceError(f"there is no device {job['device']!r}")
    if job["kind"] == "open":
        answer: dict[str, Any] = {"outcome": RIGHT, "memory": dataclasses.asdict(device.memory())}
    else:
        begin(job)
        answer = _examine(device, job)
    write_answer(target, answer)
    device.close()
    return 0


def survey() -> dict[str, Any]:
    """Every adapter of every API, and why an API shows none."""
    devices = [{**dataclasses.asdict(info), "features": sorted(info.features)} for info in gpu.list_devices()]
    return {"outcome": RIGHT, "devices": devices, "missing": gpu.diagnose()}


def try_directml() -> dict[str, Any]:
    """DirectML's product at the models' shapes, and where it is known to lose the device on some hardware."""
    if not directml.available():
        return {"outcome": SKIPPED, "detail": "onnxruntime is not installed (Windows: the extra [directml])"}
    ratio, provider = 0.0, ""
    for m, n, k in DIRECTML_SHAPES:
        rng = np.random.default_rng([m, n, k])
        a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
        product = directml.MatMul(m, n, k)
        judged = judge(product.run(a, b), expected.linear(a, expected.Weights(b.T)))
        ratio, provider = max(ratio, judged.ratio), product.provider
        if not judged.right:
            detail = f"M={m} N={n} K={k}: {judged}"
            return {"outcome": WRONG, "detail": detail, "ratio": ratio, "provider": provider}
    return {"outcome": RIGHT, "ratio": ratio, "provider": provider}


def write_answer(target: Path, answer: dict[str, Any]) -> None:
    """Whole or not at all: the process may be killed at any time."""
    partial = target.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(json.dumps(answer), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201
        sys.exit(NO_ANSWER)


def _examine(device: Device, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return try_variant(device, job["variant"], SCALES[job["scale"]], timeout_s=job["timeout_s"])
    except DeviceHungError as error:
        return {"outcome": HUNG, "detail": str(error)}
    except DeviceLostError as error:
        reason = device.removed_reason()
        return {"outcome": LOST, "detail": str(reason) if reason.lost else str(error)}
    except (OutOfMemoryError, MemoryError) as error:  # no fault of the kernel
        return {"outcome": SKIPPED, "detail": str(error) or "too little memory", "short": True}
    except (
        LookupError,
        TypeError,
        ValueError,
        AssertionError,
        ArithmeticError,
        AttributeError,
    ) as error:  # a fault of ours, not of the kernel
        return {"outcome": BROKEN, "detail": f"{type(error).__name__}: {error}"}
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
            if outcome.judgement is None:
                continue  # it was not come to: too few keys for splits that would be combined, say
            ratio, n = max(ratio, outcome.ratio), n + 1
            if not outcome.right:
                return {"outcome": WRONG, "detail": f"{trial.shape}: {outcome}", "ratio": ratio, "trials": n}
        assert n, f"no trial of {variant}"
        return {"outcome": RIGHT, "ratio": ratio, "trials": n}


if __name__ == "__main__":
    sys.exit(main())
