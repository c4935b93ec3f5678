"""One run of `xinfer tune`: a model is loaded, tuned, and what was chosen is kept for when it is loaded again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xinfer import gpu
from xinfer.bench.loops import WARM_STEPS
from xinfer.bench.text import aligned, duration
from xinfer.bench.tuner import PROMPT_ROWS, Tuner
from xinfer.errors import DeviceError, RequestError
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.gpu_model.memory import plan_for
from xinfer.llm import load_model
from xinfer.model.config import Qwen2Config
from xinfer.model.weights import ModelWeights
from xinfer.tuning_file import TuningFile, shapes_of

Progress = Callable[..., None]  # stage, done, total, what is at hand

CONTEXTS = (128, 4096)
N_TOKENS = 64  # of a run of decode steps


def tune(
    folder: Path,
    options: ModelOptions | None = None,
    *,
    device: str = "auto",
    contexts: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Tune a checkpoint's shapes on a device and keep what was chosen; the report as plain values.

    Args:
        folder: the checkpoint.
        options: how it lies on the device; its context is what the sizes need.
        device: as for `LLM`, but not the CPU.
        contexts: tokens in the cache before the decode steps that are timed.
        prompts: rows of prompts; those that the device does not take at once are left out.
        progress: called with "tune", knobs done, how many there are, and what is at hand.
        warn: told what is wrong with the file of choices, and that a device is no GPU.

    Raises:
        DeviceError: there is no such device, it is the CPU, or what was chosen cannot be written.
        RequestError: nothing fits into the model's context, or layers are streamed.
    """
    most = Qwen2Config.from_json(folder).max_context
    behind = N_TOKENS + WARM_STEPS + 1
    sizes = [n for n in contexts or CONTEXTS if n + behind <= most]
    rows = [n for n in prompts or PROMPT_ROWS if n < most]
    if not sizes:
        raise RequestError(f"no --context leaves room for {behind} tokens more within the model's {most:,}; give less")
    room = max([*(n + behind for n in sizes), *(n + 1 for n in rows)])
    file = TuningFile(warn=warn)
    file.check()
    selector = _gpu(device)
    options = replace(options or ModelOptions(), context=room, tuning=False)
    with load_model(folder, options, device=selector, progress=progress) as loaded:
        model, opened = loaded.model, loaded.device
        assert opened is not None
        assert isinstance(model, QwenModel)
        if loaded.is_software and warn is not None:
            warn(f"warning: {loaded.device_name} is not a GPU: tuning takes many minutes on it")
        shapes = shapes_of(model.plan, exact=model.steps.exact)
        told = None if progress is None else (lambda done, of, at: progress("tune", done, of, at))
        result = Tuner(model, contexts=sizes, prompts=rows, n_tokens=N_TOKENS, tell=told).run()
        file.keep(opened.info, shapes, result.tuning)
        return {
            "model": str(folder),
            "device": loaded.device_name,
            "driver": f"{opened.info.driver} {opened.info.driver_version}",
            "shapes": shapes,
            "chosen": result.tuning.as_json(),
            "tried": result.tried,
            "totals": result.totals,
            "wrong": sorted(set(result.wrong)),
            "file": str(file.path),
        }


def forget(folder: Path, *, device: str = "auto", warn: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Drop what was chosen for a checkpoint's shapes on a device."""
    opened = gpu.open_device(_gpu(device))
    assert opened is not None
    with opened, ModelWeights.open(folder) as weights:
        plan = plan_for(weights, opened, ModelOptions(context=2))
        file = TuningFile(warn=warn)
        n = file.forget(opened.info, shapes_of(plan, exact=False))
        return {"model": str(folder), "device": opened.info.name, "forgotten": n, "file": str(file.path)}


def _gpu(device: str) -> str:
    """The selector of a GPU. Raises DeviceError where it is the CPU, which has no kernels to choose among."""
    info = None if device.strip().lower() == "cpu" else gpu.choose_device(device)
    if info is None:
        raise DeviceError(f"device {device!r} is the CPU here, and has no kernels to choose among; name a GPU")
    return f"{info.api}:{info.index}"


def as_text(report: dict[str, Any]) -> str:
    """What was tried, what came of it, and where it is kept."""
    table = [["", "by rule", "chosen", "before", "after"]]
    for entry in report["tried"]:
        times = [duration(entry[name]) if name in entry else "-" for name in ("before_seconds", "after_seconds")]
        chosen = "the same" if entry["chosen"] == entry["default"] else entry["chosen"]
        table.append([f"{entry['op']}, {entry['kind']} {entry['tokens']:,}", entry["default"], chosen, *times])
    lines = [f"{report['model']} on {report['device']}, driver {report['driver']}", "", *aligned(table), ""]
    lines += [
        f"{total['kind']} {total['tokens']:,}: {duration(total['before_seconds'])} by rule, "
        f"{duration(total['after_seconds'])} with what was chosen ({total['gain']:+.1%})"
        for total in report["totals"]
    ]
    if report["wrong"]:
        lines.append(f"Not right here, and not used: {', '.join(report['wrong'])}; xinfer doctor tries every kernel.")
    kept = any(report["chosen"].values())
    lines.append(
        f"Kept in {report['file']}: used from now on, unless --no-tuning is given."
        if kept
        else "No choice makes a step or a prompt faster by 2%: kernels stay as they are chosen by rule."
    )
    return "\n".join(lines)
