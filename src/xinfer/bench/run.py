"""One run of `xinfer bench`: which sizes, in which order, and what is reported of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xinfer import gpu
from xinfer._version import __version__
from xinfer.bench.loops import WARM_STEPS, Spread, time_prompt, time_steps
from xinfer.bench.speeds import Speeds, measure_speeds
from xinfer.bench.work import Work, prompt_work, step_work
from xinfer.errors import RequestError
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.gpu_model.memory import MemoryPlan
from xinfer.llm import CPU, LoadedModel, load_model
from xinfer.model.config import Qwen2Config
from xinfer.ops import KernelSet

Progress = Callable[..., None]  # stage, done, total, what is at hand


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured: tokens of prompts, tokens in the cache before decode steps, steps of a run, and runs."""

    prompts: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_tokens: int
    repeats: int


ON_GPU = Sizes(prompts=(128, 512, 2048), contexts=(128, 4096), decode_tokens=64, repeats=5)
ON_CPU = Sizes(prompts=(32, 128), contexts=(128,), decode_tokens=8, repeats=3)


def bench(
    folder: Path,
    options: ModelOptions | None = None,
    *,
    device: str = "auto",
    prompts: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    decode_tokens: int | None = None,
    repeats: int | None = None,
    needs_gpu: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a checkpoint on a device; the report as plain values.

    Args:
        folder: the checkpoint.
        options: how it lies on the device; its context is what the sizes need.
        device: as for `LLM`.
        prompts: their lengths; None chooses by the kind of device, and so it is with the next three.
        contexts: tokens in the cache before the decode steps that are timed.
        decode_tokens: steps of one run.
        repeats: runs of each.
        needs_gpu: what was asked for that only a GPU has, for the message where it is the CPU.
        progress: called with "bench", measurements done, how many there are, and what is at hand.

    Raises:
        RequestError: no size fits into the model's context.
        DeviceError: there is no such device.
        NumericalError: numbers are not finite, or not right.
    """
    info = None if device.strip().lower() == CPU else gpu.choose_device(device)
    if info is None and needs_gpu:
        raise RequestError(f"{needs_gpu} is for GPUs, and device {device!r} is the CPU here; leave it out")
    usual = ON_CPU if info is None or info.kind == "cpu" else ON_GPU
    config = Qwen2Config.from_json(folder)
    asked = Sizes(
        prompts=tuple(prompts or usual.prompts),
        contexts=tuple(contexts or usual.contexts),
        decode_tokens=decode_tokens or usual.decode_tokens,
        repeats=repeats or usual.repeats,
    )
    sizes, left_out = fitting(asked, config.max_context)
    selector = device if info is None else f"{info.api}:{info.index}"
    options = replace(options or ModelOptions(), context=room(sizes))
    with load_model(folder, options, device=selector, progress=progress) as loaded:
        return _Run(loaded, sizes, progress).report() | {"model": str(folder), "left_out": left_out}


def fitting(asked: Sizes, max_context: int) -> tuple[Sizes, list[str]]:
    """The sizes that a context holds, and what is left out and why.

    Raises:
        RequestError: that is all of them.
    """
    behind = asked.decode_tokens + WARM_STEPS
    prompts = tuple(n for n in asked.prompts if n <= max_context)
    contexts = tuple(n for n in asked.contexts if n + behind <= max_context)
    left_out = [f"prompts of {n:,} tokens" for n in asked.prompts if n not in prompts]
    left_out += [f"decode behind {n:,} tokens" for n in asked.contexts if n not in contexts]
    left_out = [f"{what}: the model's context ends at {max_context:,}" for what in left_out]
    if not prompts and not contexts:
        raise RequestError(f"nothing is left to measure ({'; '.join(left_out)}); ask for shorter ones")
    sizes = Sizes(prompts=prompts, contexts=contexts, decode_tokens=asked.decode_tokens, repeats=asked.repeats)
    return sizes, left_out


def room(sizes: Sizes) -> int:
    """Tokens that the longest sequence has."""
    return max([*sizes.prompts, *(n + sizes.decode_tokens + WARM_STEPS for n in sizes.contexts), 2])


class _Run:
    """A loaded model, and what is measured of it."""

    def __init__(self, loaded: LoadedModel, sizes: Sizes, progress: Progress | None) -> None:
        self._loaded = loaded
        self._sizes = sizes
        self._progress = progress
        self._total = len(sizes.prompts) + len(sizes.contexts) + (loaded.device is not None)
        self._done = 0

    def report(self) -> dict[str, Any]:
        """Measure everything: the model first, then, when its memory is free again, the device itself."""
        model, device, sizes = self._loaded.model, self._loaded.device, self._sizes
        found: list[tuple[str, int, Spread]] = []
        for n in sizes.prompts:
            self._tell(f"prompt of {n:,}")
            found.append(("prompt", n, time_prompt(model, n, repeats=sizes.repeats)))
        for n in sizes.contexts:
            self._tell(f"decode behind {n:,}")
            steps = time_steps(model, n, n_tokens=sizes.decode_tokens, repeats=sizes.repeats)
            found.append(("decode", n, steps))
        report: dict[str, Any] = {
            "version": __version__,
            "device": self._loaded.device_name,
            "fallback": self._loaded.fallback,
            "parameters": model.config.num_parameters(),
            "decode_tokens": sizes.decode_tokens,
            "repeats": sizes.repeats,
        }
        if device is None or not isinstance(model, QwenModel):
            rows = [_row(kind, n, seconds) for kind, n, seconds in found]
            report |= {"rows": rows, "memory": {"process_peak": process_peak()}, "speeds": None}
            self._tell(None)
            return report
        plan, peak, quarantine = model.plan, device.memory().peak, model.steps.kernels.quarantine
        self._tell("the device itself")
        model.close()
        device.limit_memory(None)
        with KernelSet(device, quarantine=quarantine) as kernels:
            speeds = measure_speeds(device, kernels)
        self._tell(None)
        return report | {
            "driver": f"{device.info.driver} {device.info.driver_version}",
            "rows": [
                _row(kind, n, seconds) | _shares(_work(kind, n, plan, sizes), seconds.median, kind, plan, speeds)
                for kind, n, seconds in found
            ],
            "memory": {"device_peak": peak, "process_peak": process_peak()},
            "streamed_layers": len(plan.split.streamed),
            "kv_cache_bytes_a_token": 2 * plan.shape.n_layers * plan.shape.token_bytes,
            "speeds": asdict(speeds),
        }

    def _tell(self, at_hand: str | None) -> None:
        """What is measured next; None when all is done."""
        if self._progress is not None:
            done = self._total if at_hand is None else self._done
            self._progress("bench", done, self._total, at_hand or "")
        self._done += 1


def _row(kind: str, n: int, seconds: Spread) -> dict[str, Any]:
    """A prompt's, or a decode step's: seconds of it, and tokens a second."""
    rate = (n if kind == "prompt" else 1) / seconds.median
    return {"kind": kind, "tokens": n, "seconds": seconds.as_json(), "tokens_per_second": rate}


def _work(kind: str, n: int, plan: MemoryPlan, sizes: Sizes) -> Work:
    """What the row's median is held against; of decode steps the one in the middle of those that were timed."""
    return prompt_work(plan, n) if kind == "prompt" else step_work(plan, n + WARM_STEPS + sizes.decode_tokens // 2)


def _shares(work: Work, seconds: float, kind: str, plan: MemoryPlan, speeds: Speeds) -> dict[str, Any]:
    """What the work needs at least, over what the device could do in the time."""
    shares = {
        "flops": work.flops,
        "bytes": work.n_bytes,
        "share_of_memory_speed": work.n_bytes / seconds / speeds.memory,
        "share_of_matrix_rate": work.flops / seconds / speeds.matrix,
    }
    if plan.split.streamed and kind == "decode":
        shares["share_of_bus_speed"] = plan.a_token / seconds / speeds.bus
    return shares


def process_peak() -> int | None:
    """Bytes of the host's memory that this process had at most; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
