"""What the resident forward does on a real GPU: correctness first, then speed, beside a peer in the same run.

    python benchmarks/h200.py [--sizes 0.5b,1.5b,7b] [--peers] [--json FILE] [--device NAME]

Random f16 checkpoints in the shapes of Qwen2.5 are written to a temporary folder. For each: greedy tokens and logits
against the NumPy reference, decode at three context lengths (the cache filled with random keys and values), prefill,
the load's bandwidth, the host's share of a step, and one decode step op by op by the device's clock. Every part has a
time limit, so that a run ends.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import gpu, ops
from xinfer.bench.loops import filled_device_cache, time_prompt
from xinfer.bench.speeds import memory_speed
from xinfer.bench.tuner import Tuner
from xinfer.bench.work import step_work
from xinfer.gpu.api import Device
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.gpu_model.tuning import Tuning
from xinfer.model import names
from xinfer.model.config import Qwen2Config
from xinfer.model.reference import ReferenceModel
from xinfer.model.weights import ModelWeights

PARITY_TOKENS = {"tiny": 24, "0.5b": 64, "1.5b": 32, "7b": 16}
PARITY_LIMIT = 1e-4  # of exact activations
HALF_LIMIT = 2e-3  # of the others

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # to try this file on
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}


def config_json(size: str) -> dict[str, Any]:
    """The config.json of a size."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "torch_dtype": "float16",
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        **SHAPES[size],
    }


def write_checkpoint(folder: Path, size: str) -> None:
    """Random f16 weights under which activations stay near 1; drawn once, and used from a different place each time."""
    config = config_json(size)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = names.expected_shapes(Qwen2Config.from_json(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        n_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    encoded = json.dumps(header).encode()
    normal = np.random.default_rng(0).standard_normal((1 << 24) + 1039, dtype=np.float32)
    scaled: dict[float, NDArray[np.float16]] = {}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shapes.items():
            mean, scale = _distribution(name, shape)
            if mean:
                file.write((mean + scale * normal[: shape[0]]).astype(np.float16).tobytes())
                continue
            if scale not in scaled:
                scaled[scale] = (normal * np.float32(scale)).astype(np.float16)
            block = scaled[scale]
            left, at = int(np.prod(shape)), zlib.crc32(name.encode()) % (1 << 20)
            while left:
                part = block[at : at + left]
                file.write(part.data)
                left -= len(part)
                at = 0


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    role = names.parse(name)
    assert role is not None
    if role.field in ("embed", "lm_head"):
        return 0.0, 2.0 / np.sqrt(shape[1])
    if role.field.endswith("_w"):
        return 0.0, 1.0 / np.sqrt(shape[1])
    return (0.0, 0.3) if role.field.endswith("_b") else (1.0, 0.2)


@dataclass
class Deadline:
    """Says whether a part still has time."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)

    @property
    def over(self) -> bool:
        """Whether it is time to stop."""
        return time.perf_counter() - self.began > self.seconds


# --- correctness ------------------------------------------------------------------------------------------------------


def parity(model: QwenModel, folder: Path, n_tokens: int) -> dict[str, Any]:
    """Greedy tokens of the GPU, checked one by one against one pass of the reference over them; and all logits."""
    prompt = np.random.default_rng(5).integers(0, model.config.vocab_size, 16)
    cache = model.make_cache(len(prompt) + n_tokens)
    model.extend(prompt[:-1], cache)
    chosen = list(model.greedy(int(prompt[-1]), cache, limit=n_tokens))
    ids = np.concatenate([prompt, chosen[:-1]])
    found = model.forward(ids)
    stepwise = model.forward(ids, last_only=True)
    oracle = ReferenceModel(ModelWeights.open(folder), keep=False)
    began = time.perf_counter()
    expected = oracle.forward(ids)
    seconds = time.perf_counter() - began
    oracle.close()
    own = expected[len(prompt) - 1 :]  # what each chosen token was chosen from
    behind = own.max(axis=1) - own[np.arange(n_tokens), chosen]
    scale = float(np.sqrt(np.mean(own**2)))
    return {
        "tokens": n_tokens,
        "same": int((own.argmax(axis=1) == chosen).sum()),
        "near_ties": int(((behind > 0) & (behind < 10 * PARITY_LIMIT * scale)).sum()),
        "error": float(np.linalg.norm(found - expected) / np.linalg.norm(expected)),
        "error_of_a_step": float(np.linalg.norm(stepwise[0] - expected[-1]) / np.linalg.norm(expected[-1])),
        "distinct_tokens": len(set(chosen)),
        "oracle_seconds": seconds,
    }


# --- speed ------------------------------------------------------------------------------------------------------------


@contextmanager
def stopwatch(device: Device, names: tuple[str, ...]) -> Iterator[dict[str, float]]:
    """Seconds spent in some methods of a device, by name."""
    spent = dict.fromkeys(names, 0.0)

    def timed(name: str) -> Callable[..., Any]:
        method = getattr(device, name)

        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    for name in names:
        setattr(device, name, timed(name))
    try:
        yield spent
    finally:
        for name in names:
            delattr(device, name)


def decode(model: QwenModel, context: int, deadline: Deadline) -> dict[str, float]:
    """Seconds a token around a context: by the wall, by the device's clock, and what the host did of them."""
    n, warm = 128, 16
    cache = filled_device_cache(model, context, n + warm + 1)

    def measure(spent: dict[str, float]) -> tuple[float, ...]:
        cache.truncate(context)
        tokens = model.greedy(7, cache, limit=n + warm)
        for _ in range(warm):
            next(tokens)
        spent.update(dict.fromkeys(spent, 0.0))
        began = time.perf_counter()
        for _ in range(n):
            next(tokens)
        seconds = time.perf_counter() - began
        return seconds / n, (seconds - spent["wait"]) / n, spent["submit"] / n

    with stopwatch(model.device, ("wait", "submit")) as spent:
        runs = [measure(spent)]
        while len(runs) < 5 and not deadline.over:
            runs.append(measure(spent))
    seconds, host, submit = (statistics.median(run[i] for run in runs) for i in range(3))
    cache.truncate(context)
    own = statistics.median(run[0][1] for run in model.step_times(cache, 7, each_op=False, repeats=9))
    return {"seconds": seconds, "device_seconds": own, "host_seconds": host, "submit_seconds": submit}


def profile(model: QwenModel, context: int) -> list[dict[str, Any]]:
    """One decode step op by op: median seconds over some steps, summed over the layers."""
    cache = filled_device_cache(model, context, 2)
    steps = model.step_times(cache, repeats=9)
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for entries in zip(*steps, strict=True):
        op = entries[0][0].rpartition(".")[2]
        total[op] += statistics.median(seconds for _, seconds in entries)
        count[op] += 1
    return [{"op": op, "count": count[op], "seconds": seconds} for op, seconds in total.items()]


# --- tuning -----------------------------------------------------------------------------------------------------------


def continuation(model: QwenModel, n_tokens: int) -> list[int]:
    """Greedy tokens behind a prompt that fills some tiles of attention."""
    prompt = np.random.default_rng(6).integers(0, model.config.vocab_size, 500)
    cache = model.make_cache(len(prompt) + n_tokens)
    model.extend(prompt[:-1], cache)
    return list(model.greedy(int(prompt[-1]), cache, limit=n_tokens))


def tune(model: QwenModel, options: argparse.Namespace) -> dict[str, Any]:
    """What `xinfer tune` gives, and whether the tokens stay the same."""
    plain = continuation(model, 32)
    result = Tuner(model, contexts=options.contexts, prompts=options.prefills).run()
    model.tune(result.tuning)
    same = continuation(model, 32) == plain
    model.tune(Tuning())
    return {"tried": result.tried, "totals": result.totals, "wrong": result.wrong, "same_tokens": same}


def op_bytes(config: Qwen2Config) -> dict[str, int]:
    """Bytes of weights that an op of one layer reads, where it reads any."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": 2 * hidden * (config.q_size + 2 * config.kv_size),
        "o": 2 * hidden * config.q_size,
        "swiglu": 4 * hidden * inner,
        "down": 2 * hidden * inner,
        "logits": 2 * hidden * config.vocab_size,
    }


# --- one size ---------------------------------------------------------------------------------------------------------


@contextmanager
def loaded(folder: Path, device: Device, *, exact: bool) -> Iterator[tuple[QwenModel, float]]:
    """A model on the device, and the bytes a second of its load; exact: nothing is rounded to f16 but weights."""
    with ModelWeights.open(folder) as weights:
        began = time.perf_counter()
        model = QwenModel.load(weights, device, ModelOptions(kv_cache="f32" if exact else "f16", exact=exact))
        rate = weights.nbytes / (time.perf_counter() - began)
    with model:
        yield model, rate


def run_size(size: str, device: Device, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one size."""
    result: dict[str, Any] = {"size": size}
    began = time.perf_counter()
    write_checkpoint(folder, size)
    result["write_seconds"] = time.perf_counter() - began
    long_prompt = np.random.default_rng(4).integers(0, SHAPES[size]["vocab_size"], max(options.prefills))
    with loaded(folder, device, exact=True) as (model, rate):
        result["load_bytes_per_second"] = [rate]
        exact_logits = model.forward(long_prompt, last_only=True)
        result["parity"] = parity(model, folder, PARITY_TOKENS[size])
        say(f"{size}: {result['parity']}")
    with loaded(folder, device, exact=False) as (model, rate):
        result["load_bytes_per_second"].append(rate)
        off = model.forward(long_prompt, last_only=True) - exact_logits
        result["half_error"] = float(np.linalg.norm(off) / np.linalg.norm(exact_logits))
        config = model.config
        result["decode"] = {}
        warm = Deadline(options.warm_seconds)  # the clocks have fallen while the reference worked
        while not warm.over:
            decode(model, options.contexts[0], Deadline(0))
        for context in options.contexts:
            step = decode(model, context, Deadline(options.part_seconds))
            step["bytes"] = step_work(model.plan, context).n_bytes
            result["decode"][context] = step
            say(
                f"{size}: decode at {context}: {1 / step['seconds']:.1f} tok/s, "
                f"host {step['host_seconds'] * 1e6:.0f} us, {step['bytes'] / step['seconds'] / 1e9:.0f} GB/s"
            )
        if options.tune:
            result["tuned"] = tune(model, options)
        result["profile"] = {context: profile(model, context) for context in options.contexts[:2]}
        result["profile_bytes"] = op_bytes(config)
        result["prefill"] = {}
        for n in options.prefills:
            result["prefill"][n] = n / time_prompt(model, n, repeats=5).median
            say(f"{size}: prefill of {n}: {result['prefill'][n]:.0f} tok/s")
    return result


def report(result: dict[str, Any], streamed: float) -> str:
    """A size's results for people."""
    check = result["parity"]
    agreement = (
        f"{check['same']} of {check['tokens']} greedy tokens are the reference's "
        f"({check['near_ties']} near-ties, {check['distinct_tokens']} distinct)"
    )
    errors = f"logits off by {check['error']:.1e}, a step's by {check['error_of_a_step']:.1e}"
    lines = [
        f"## {result['size']}",
        f"parity: {agreement}; {errors} (relative L2; limit {PARITY_LIMIT:.0e})",
        f"as users run it: off the exact form by {result['half_error']:.1e} (limit {HALF_LIMIT:.0e})",
        "load: " + ", ".join(f"{rate / 1e9:.1f} GB/s" for rate in result["load_bytes_per_second"]),
    ]
    for context, step in result["decode"].items():
        rate = step["bytes"] / step["seconds"]
        lines.append(
            f"decode at {context:>6}: {1 / step['seconds']:8.1f} tok/s, {step['seconds'] * 1e6:7.0f} us a step; "
            f"the device {step['device_seconds'] * 1e6:.0f}; host {step['host_seconds'] * 1e6:.0f}, of it submit "
            f"{step['submit_seconds'] * 1e6:.0f}; {rate / 1e9:.0f} GB/s, {rate / streamed:.0%} of what a kernel streams"
        )
    if "tuned" in result:
        lines += tuned_lines(result["tuned"])
    lines += [f"prefill of {n:>5}: {rate:8.0f} tok/s" for n, rate in result["prefill"].items()]
    for context, entries in result["profile"].items():
        lines.append(
            f"a step at {context}, by the device's clock ({sum(op['seconds'] for op in entries) * 1e6:.0f} us):"
        )
        for op in entries:
            each = op["seconds"] / op["count"]
            n_bytes = result["profile_bytes"].get(op["op"])
            speed = f"{n_bytes / each / 1e9:6.0f} GB/s" if n_bytes else ""
            lines.append(
                f"  {op['op']:<12} {op['count']:>3} x {each * 1e6:7.2f} us = {op['seconds'] * 1e6:8.1f} us {speed}"
            )
    return "\n".join(lines)


def tuned_lines(tuned: dict[str, Any]) -> list[str]:
    """What was tried, and what came of it."""
    lines = []
    for total in tuned["totals"]:
        before, after = total["before_seconds"] * 1e6, total["after_seconds"] * 1e6
        lines.append(
            f"tuned, {total['kind']} {total['tokens']:>6}: {before:.1f} us by rule, {after:.1f} us tuned "
            f"({total['gain']:+.1%}); {'the same' if tuned['same_tokens'] else 'OTHER'} tokens"
        )
    for entry in tuned["tried"]:
        tried = [f"{name.replace('linear_gemv.f16.', '')} {s * 1e6:.1f}" for name, s in entry["tried"].items()]
        lines.append(f"  {entry['op']}, {entry['kind']} {entry['tokens']}: {entry['chosen']}; us: {'; '.join(tried)}")
    return lines


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.5b,1.5b,7b")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--peers", default="", help="sizes to run transformers on as well, in the same run")
    parser.add_argument("--peer-seconds", type=float, default=200.0, help="time for one of them")
    parser.add_argument("--tune", action="store_true", help="try every variant of the decode step's ops")
    parser.add_argument("--warm-seconds", type=float, default=3.0, help="decode so long before anything is measured")
    parser.add_argument("--contexts", type=_numbers, default=[128, 4096, 32768])
    parser.add_argument("--prefills", type=_numbers, default=[512, 4096])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; /dev/shm where there is one")
    parser.add_argument("--part-seconds", type=float, default=10.0, help="time for the repeats of one measurement")
    arguments = parser.parse_args()
    base = arguments.folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    results: dict[str, Any] = {"sizes": []}
    device = gpu.open_device(arguments.device)
    assert device is not None
    with device:
        results["device"] = f"{device.info.name}, {device.info.driver} {device.info.driver_version}"
        with ops.KernelSet(device) as kernels:
            results["bytes_per_second"] = rate = memory_speed(device, kernels)
        print(f"{results['device']}: kernels read memory at {rate / 1e9:.0f} GB/s", flush=True)
        for size in arguments.sizes.split(","):
            folder = Path(tempfile.mkdtemp(prefix="xinfer-", dir=base))
            try:
                result = run_size(size, device, folder, arguments)
            finally:
                shutil.rmtree(folder)
            results["sizes"].append(result)
            print(report(result, rate), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1))
    if arguments.peers:
        results["peers"] = {size: run_peer(size, arguments.peer_seconds) for size in arguments.peers.split(",")}
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    return 0


def run_peer(size: str, seconds: float) -> dict[str, Any]:
    """Run transformers on the same shape, in a process of its own; what it has measured when its time is up."""
    command = [sys.executable, str(Path(__file__).with_name("peer_transformers.py")), json.dumps(config_json(size))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        errors = f"not done after {seconds:.0f} s"
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
    print(f"transformers {size}: {shown} {errors[-300:] if len(found) < 5 else ''}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
