"""A decode step whose layers are one dispatch each, beside the step of five dispatches a layer, in the same run.

    python benchmarks/layer_kernel.py [--sizes 0.5b,1.5b,7b] [--seconds 230] [--json FILE] [--device NAME]

Random f16 checkpoints in the shapes of Qwen2.5. For each size: the logits of a step of either kind, which must agree to
1e-5; tokens a second at three contexts; the time of each phase of the layer's kernel, alone and as the part that it
adds to the phases before it in one dispatch; and a table of the kernel's forms by the workgroups that stay. A form that
fails, or whose barriers are given up, says so in its line and does not end the run. Every line is printed at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from h200 import Deadline, loaded, write_checkpoint
from xinfer import gpu, ops
from xinfer.bench.loops import filled_device_cache
from xinfer.errors import XinferError
from xinfer.gpu.api import Device, Recording
from xinfer.gpu_model import QwenModel
from xinfer.gpu_model.tuning import LayerChoice, Tuning
from xinfer.ops import LayerRows, Phase, Recorder
from xinfer.ops._attention import FEW_KEYS
from xinfer.ops._layer import RESIDENT_GROUPS
from xinfer.shaders.catalog import LAYER_FORMS, layer_id

LIMIT = 1e-5  # relative L2 distance of the logits
CONTEXTS = (128, 4096, 32_768)
TOKENS, WARM = 96, 32
GROUPS = max(RESIDENT_GROUPS.values())


def tuning(model: QwenModel, heads: int, form: int = 0, groups: int = GROUPS) -> Tuning:
    """The layer's kernel in one of its forms."""
    dim_max = 64 if model.config.head_dim <= 64 else 128
    name = layer_id("f16", "f16", dim_max, heads, LAYER_FORMS[form])
    return Tuning(layer=LayerChoice(name, groups))


def heads_for(model: QwenModel, context: int) -> int:
    """Heads that share a load of keys, as the ops would choose."""
    return 2 if context * model.config.num_key_value_heads <= FEW_KEYS else 8


def ready(model: QwenModel, wanted: Tuning) -> None:
    """Use a tuning from now on. Raises ValueError where the kernel does not take this model, or this device."""
    model.given_up.clear()
    model.steps.kernels.quarantine = frozenset()
    model.tune(wanted)
    if wanted.layer and model.steps.network().layer_plan is None:
        raise ValueError("the kernel does not take this model")


def check_kept(model: QwenModel) -> None:
    """Raise ValueError where barriers were given up: what was measured is another kernel."""
    if model.given_up:
        raise ValueError("its barriers were given up: the workgroups were not all there at the same time")


def logits(model: QwenModel) -> Any:
    """Of the step behind a fixed prompt."""
    prompt = np.random.default_rng(5).integers(0, model.config.vocab_size, 150)
    cache = model.make_cache(len(prompt))
    model.extend(prompt[:-1], cache)
    found = model.forward(prompt[-1:], cache, last_only=True)
    check_kept(model)
    return found


def seconds_a_token(model: QwenModel, context: int, *, repeats: int) -> float:
    """The median of some decode loops, by the wall."""
    cache = filled_device_cache(model, context, TOKENS + WARM + 1)
    runs = []
    for _ in range(repeats):
        cache.truncate(context)
        tokens = model.greedy(7, cache, limit=TOKENS + WARM)
        for _ in range(WARM):
            next(tokens)
        began = time.perf_counter()
        for _ in tokens:
            pass
        runs.append((time.perf_counter() - began) / TOKENS)
    check_kept(model)
    return statistics.median(runs)


def phase_seconds(model: QwenModel, first: Phase, last: Phase) -> float:
    """Seconds of a range of phases in a layer, over all layers of a step, by the device's clock."""
    steps, device = model.steps, model.device
    network, space = steps.network(), steps.one
    plan = network.layer_plan
    assert plan is not None
    rows = LayerRows(
        x=space.rows("x", 1), qkv=space.rows("qkv", 1), attn=space.rows("attn", 1), gated=space.rows("gate", 1)
    )
    recording: Recording = device.create_recording("phases")
    try:
        steps.record_load(recording, space, 1)
        recording.timestamp("begin")
        on, arrivals = Recorder(recording, steps.kernels), 0
        for i, w in enumerate(network.weights.layers):
            arrivals = ops.decode_layer(
                *(on, plan, space.states(1)[1], network.rope_table, w, rows, network.cache(i)),
                eps=model.config.rms_norm_eps,
                scratch=network.scratch,
                phases=(first, last),
                arrivals=arrivals,
                label="phases",
            )
            recording.barrier()
        recording.timestamp("end")
        recording.finish()
        cache = model.make_cache(200)
        cache.reserve(130)
        runs = []
        for _ in range(30):  # the clocks fall between single submissions: the fastest third counts
            steps.stage_one(7, cache, position=128)
            steps.wait(steps.submit(recording), urgent=True)
            runs.append(device.timestamps(recording)[1][1])
    finally:
        recording.release()
    return statistics.median(sorted(runs)[:10]) / len(network.weights.layers)


def forms(model: QwenModel) -> Iterator[tuple[str, Tuning]]:
    """What is tried at a short context, the usual form first."""
    for number, form in enumerate(LAYER_FORMS):
        lanes, n_rows, loads, ahead = form
        for groups in dict.fromkeys((GROUPS, GROUPS // 2, *((2 * GROUPS,) if lanes <= 512 else ()))):
            if groups < GROUPS and number > 0:
                continue
            what = (
                f"{groups:>4} groups of {lanes:>4}, {n_rows} rows x {loads} loads{'' if ahead else ', nothing ahead'}"
            )
            yield what, tuning(model, 2, number, groups)


def run_size(size: str, device: Device, folder: Path, deadline: Deadline) -> dict[str, Any]:
    """Everything about one size; what fails is told and left out."""
    result: dict[str, Any] = {"size": size, "decode": {}, "phases": {}, "forms": {}}
    began = time.perf_counter()
    write_checkpoint(folder, size)
    with loaded(folder, device, exact=False) as (model, _):
        say(f"## {size} (made and loaded in {time.perf_counter() - began:.0f} s)")
        expected = logits(model)
        result["decode"][CONTEXTS[0]] = both(model, CONTEXTS[0], expected)
        result["phases"] = phases(model)
        for context in CONTEXTS[1:]:
            if not deadline.over:
                result["decode"][context] = both(model, context, expected)
        for name, wanted in forms(model):
            if deadline.over:
                say("  no time is left for the other forms")
                break
            result["forms"][name] = one_form(model, name, wanted, expected)
    return result


def both(model: QwenModel, context: int, expected: Any) -> dict[str, float]:
    """Tokens a second of the step of many dispatches, and of that with a dispatch a layer."""
    found: dict[str, float] = {}
    for name, wanted in (("many", Tuning()), ("layer", tuning(model, heads_for(model, context)))):
        try:
            ready(model, wanted)
            if name == "layer":
                found["error"] = float(np.linalg.norm(logits(model) - expected) / np.linalg.norm(expected))
            seconds_a_token(model, context, repeats=2)  # a GPU that was idle takes its time to run fast again
            found[name] = 1 / seconds_a_token(model, context, repeats=5)
        except (XinferError, ValueError) as error:
            say(f"  {name} at {context}: {error}")
    if len(found) == 3:
        right = "right" if found["error"] < LIMIT else "WRONG"
        say(
            f"  decode at {context:>6}: {found['many']:7.1f} -> {found['layer']:7.1f} tok/s, "
            f"{found['layer'] / found['many']:.2f} times; logits off by {found['error']:.1e}, {right}"
        )
    return found


def phases(model: QwenModel) -> dict[str, float]:
    """Microseconds of each phase alone, and of what it adds in one dispatch, at a context of 128."""
    found: dict[str, float] = {}
    try:
        ready(model, tuning(model, 2))
        before = 0.0
        for phase in Phase:
            alone = 1e6 * phase_seconds(model, phase, phase)
            up_to = 1e6 * phase_seconds(model, Phase.QKV, phase)
            found |= {f"{phase.name} alone": alone, f"{phase.name} adds": up_to - before}
            say(f"  {phase.name:<10} alone {alone:6.2f} us, adds {up_to - before:6.2f} us, up to here {up_to:6.2f} us")
            before = up_to
    except (XinferError, ValueError) as error:
        say(f"  phases: {error}")
    return found


def one_form(model: QwenModel, name: str, wanted: Tuning, expected: Any) -> dict[str, Any]:
    """Tokens a second of one form, and how far its logits are off."""
    try:
        ready(model, wanted)
        error = float(np.linalg.norm(logits(model) - expected) / np.linalg.norm(expected))
        speed = 1 / seconds_a_token(model, CONTEXTS[0], repeats=3)
    except (XinferError, ValueError) as problem:
        say(f"  {name}: {problem}")
        return {"problem": str(problem)}
    say(f"  {name}: {speed:7.1f} tok/s, logits off by {error:.1e}{'' if error < LIMIT else ', WRONG'}")
    return {"tokens_per_second": speed, "error": error}


def say(text: str) -> None:
    """A line of the result."""
    print(text, flush=True)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--seconds", type=float, default=230.0, help="for everything; what is left then is left out")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    deadline, results = Deadline(arguments.seconds), []
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    device = gpu.open_device(arguments.device)
    assert device is not None
    with device:
        say(f"{device.info.name}, {device.info.driver} {device.info.driver_version}")
        for size in arguments.sizes.split(","):
            if deadline.over:
                say(f"no time is left for {size}")
                break
            folder = Path(tempfile.mkdtemp(prefix="xinfer-", dir=base))
            try:
                results.append(run_size(size, device, folder, deadline))
            except (XinferError, ValueError, OSError) as error:
                say(f"{size}: {error}")
            finally:
                shutil.rmtree(folder)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
