"""Models larger than the memory they are given: tokens a second, and the bus's share of the time.

    python benchmarks/streaming.py [--runs 7b:4,7b:8,32b:16,72b:40] [--device NAME] [--turns N] [--warm TOKENS]
                                   [--tokens TOKENS] [--prompt TOKENS] [--in-flight N] [--json FILE]
                                   [--timeline FILE.svg] [--touch GB] [--share]

Random f16 weights in the shapes of Qwen2.5; a few distinct layers are repeated as often as the shape has layers, and
every one is sent each time. The bus is measured in the same run, by the same transfers without a model, before and
behind all runs. Runs of one size must give the same tokens, whatever their budget. The timeline is of the first run in
which a layer can come while another runs: when each layer is copied and when it runs, by the device's clock.

A virtual machine gets its memory when it is first touched, several times more slowly than a page is made afterwards.
--touch does that once, before anything is measured, so that loads show what they cost and not what the machine's
first use does.

Where the host's memory cannot hold the streamed layers they are read again for each step. With --share the layers that
are repeated share the memory that they are sent from, so that it does; how long the load takes means nothing then.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import h200
import timeline
from xinfer import gpu
from xinfer.gpu.api import Buffer, BufferKind, Device
from xinfer.gpu_model import ModelOptions, QwenModel, memory, predict
from xinfer.gpu_model.answer import STEPS_AHEAD
from xinfer.gpu_model.loading import n_readers
from xinfer.model import names
from xinfer.model.weights import ModelWeights

LARGE: dict[str, dict[str, Any]] = {
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "72b": {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
DISTINCT = 3
BUS_S = 2.0  # that the bus is measured for: devices take a while to come out of idle


@contextmanager
def sources(device: Device, *, shared: bool) -> Iterator[None]:
    """With `shared`, models that are loaded within send repeated layers from the same memory, and all of them fit."""
    made: dict[int, Buffer] = {}
    create = device.create_buffer

    def create_shared(size: int, kind: BufferKind = "device", label: str = "") -> Buffer:
        found = re.fullmatch(r"layer (\d+), host", label)
        if found is None:
            return create(size, kind, label)
        i = int(found[1]) % DISTINCT
        if i not in made:
            made[i] = create(size, kind, label)
        return made[i]

    with ExitStack() as patched:
        if shared:
            patched.enter_context(mock.patch.object(device, "create_buffer", create_shared))
            patched.enter_context(mock.patch.object(memory, "available_memory", return_value=1 << 50))
        yield


@contextmanager
def repeated(size: str, base: Path | None) -> Iterator[ModelWeights]:
    """A checkpoint of few layers, open as one of many."""
    shape = h200.SHAPES[size]
    distinct = min(DISTINCT, shape["num_hidden_layers"])
    folder = Path(tempfile.mkdtemp(prefix="xinfer-", dir=base))
    try:
        h200.SHAPES[size] = {**shape, "num_hidden_layers": distinct}
        h200.write_checkpoint(folder, size)
        h200.SHAPES[size] = shape
        with ModelWeights.open(folder) as weights:
            n_layers = shape["num_hidden_layers"]
            tensors = dict(weights.tensors)
            for i in range(distinct, n_layers):
                for field in names.LAYER_FIELDS:
                    source = names.layer_tensor_name(i % distinct, field)
                    tensors[names.layer_tensor_name(i, field)] = weights.tensors[source]
            config = dataclasses.replace(
                weights.config, num_hidden_layers=n_layers, layer_windows=weights.config.layer_windows[:1] * n_layers
            )
            yield _Repeated(folder, config, tensors, weights._files.values())
    finally:
        h200.SHAPES[size] = shape
        shutil.rmtree(folder)


class _Repeated(ModelWeights):
    """Opened again, it is the same files under the same names."""

    def reopen(self) -> ModelWeights:
        return _Repeated(self.folder, self.config, self.tensors, self._files.values())

    def close(self) -> None:
        """Whose files they are closes them."""


def bus_speed(device: Device, size: int = 512 << 20, times: int = 32) -> float:
    """Bytes a second from upload buffers into device memory, one transfer behind the other, after a warm-up."""
    sources = [device.create_buffer(size, "upload", "bus") for _ in range(2)]
    targets = [device.create_buffer(size, "device", "bus") for _ in range(2)]
    for source in sources:
        source.write(np.random.default_rng(0).bytes(1 << 20) * (size >> 20))

    def move(n: int) -> float:
        began = time.perf_counter()
        for i in range(n):
            device.transfer(sources[i % 2][:], targets[i % 2][:])
        device.flush_uploads()
        return time.perf_counter() - began

    move(times)
    seconds = move(times)
    for buffer in (*sources, *targets):
        buffer.release()
    return size * times / seconds


def touch(n_bytes: int) -> float:
    """Bytes a second at which so much of the host's memory is written, by many threads."""
    memory, piece = np.empty(n_bytes, np.uint8), 64 << 20
    began = time.perf_counter()
    with ThreadPoolExecutor(n_readers()) as threads:
        list(threads.map(lambda at: memory[at : at + piece].fill(1), range(0, n_bytes, piece)))
    return n_bytes / (time.perf_counter() - began)


def steady_bus_speed(device: Device) -> float:
    """The best of some measurements, one behind the other."""
    size, until = min(512 << 20, device.memory().free // 8), time.perf_counter() + BUS_S
    best = bus_speed(device, size)
    while time.perf_counter() < until:
        best = max(best, bus_speed(device, size))
    return best


def run(
    size: str, budget: int | None, weights: ModelWeights, device: Device, bus: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Decode and prefill of one size in a budget; predicted and measured in turns: machines change their speed.

    With several turns what is measured is compared with the predictions before and behind it, by their geometric mean.
    """
    room = arguments.prompt + arguments.warm + arguments.tokens + STEPS_AHEAD + 32  # and the picture's
    options, found = ModelOptions(vram_budget=budget, context=room), dict[str, Any]()
    shares: dict[str, list[float]] = {}
    before = foretell(weights, device, options, shared=arguments.share)
    for turn in range(arguments.turns):
        began = time.perf_counter()
        with sources(device, shared=arguments.share), QwenModel.load(weights, device, options) as model:
            found = {"size": size, "budget": budget, "load_seconds": time.perf_counter() - began}
            found |= measured(model, bus, room, arguments)
            split = model.plan.split
            if arguments.timeline and turn == arguments.turns - 1 and split.streamed and split.pinned:
                spans = timeline.record(model)
                found["timeline"] = timeline.shares(spans)
                if split.n_slots > 1 and arguments.picture is None:
                    title = f"{size} in {(budget or found['peak']) / 1e9:.0f} GB on {device.info.name}"
                    arguments.picture = timeline.write(spans, arguments.timeline, title)
        after = foretell(weights, device, options, shared=arguments.share) if arguments.turns > 1 else before
        for name in before:
            shares.setdefault(name, []).append((before[name] * after[name]) ** 0.5 / found[name])
        before = after
    device.limit_memory(None)
    return found | {"predicted_over_measured": shares}


def foretell(weights: ModelWeights, device: Device, options: ModelOptions, *, shared: bool) -> dict[str, float]:
    """What is predicted, under the names of what is measured."""
    with sources(device, shared=shared):
        predicted = predict(weights, device, options)
    found = {
        "load_seconds": predicted.load_seconds,
        "tokens_per_second": 1 / predicted.token_seconds_at_context,
        "peak": predicted.vram,
    }
    return {name: value for name, value in found.items() if name != "load_seconds" or not shared}


def measured(model: QwenModel, bus: float, room: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A prompt, tokens that are not measured, and tokens that are."""
    warm, n_tokens = arguments.warm, arguments.tokens
    prompt = np.random.default_rng(5).integers(0, model.config.vocab_size, arguments.prompt)
    cache, split = model.make_cache(room), model.plan.split
    began = time.perf_counter()
    model.extend(prompt[:-1], cache)
    prefill = len(prompt) / (time.perf_counter() - began)
    # Steps are queued ahead of the token that is asked for, here as many at the beginning as at the end.
    tokens = model.greedy(int(prompt[-1]), cache, limit=warm + n_tokens + STEPS_AHEAD)
    chosen = [next(tokens) for _ in range(warm)]
    sent, began = model.bytes_sent, time.perf_counter()
    chosen += [next(tokens) for _ in range(n_tokens)]
    seconds = (time.perf_counter() - began) / n_tokens
    sent = model.bytes_sent - sent
    chosen += list(tokens)  # so that nothing is in flight when the memory is given back
    a_token = model.plan.a_token
    return {
        "streamed": len(split.streamed),
        "slots": split.n_slots,
        "pinned": split.pinned,
        "rows": model.plan.rows,
        "peak": model.device.memory().peak,
        "tokens_per_second": 1 / seconds,
        "bytes_a_token": a_token,
        "sent_while_measured": sent,
        "bus_share": a_token / seconds / bus,
        "prefill": prefill,
        "tokens": chosen,
    }


def line(found: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """A run in words."""
    same = [other for other in results if other["size"] == found["size"] and other["tokens"] != found["tokens"]]
    return (
        f"{found['streamed']} layers streamed through {found['slots']} slots"
        f"{'' if found['pinned'] else ', read again each time'}; {found['tokens_per_second']:.2f} tok/s, "
        f"{found['bytes_a_token'] / 1e9:.2f} GB a token, {found['bus_share']:.0%} of the bus; prefill "
        f"{found['prefill']:.0f} tok/s; peak {found['peak'] / 1e9:.2f} GB; loaded in "
        f"{found['load_seconds']:.1f} s; {against(found)}{'; OTHER TOKENS' if same else ''}"
    )


def against(found: dict[str, Any]) -> str:
    """What had been predicted, as a share of what was then measured."""
    shares = [
        f"{name} {statistics.median(values):.2f}"
        + (f" ({min(values):.2f} to {max(values):.2f} in {len(values)} turns)" if len(values) > 1 else "")
        for name, values in found["predicted_over_measured"].items()
    ]
    text = f"predicted over measured: {', '.join(shares)}"
    if "timeline" in found:
        of_step = found["timeline"]
        text += f"; in a step the bus is busy {of_step['bus_busy']:.0%} of the time, by the device's clock, and "
        text += f"{of_step['compute_hidden']:.0%} of the layers' {1e3 * of_step['compute_seconds']:.1f} ms are hidden"
    return text


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="7b:2,7b:4,7b:8,7b:12,7b:0,32b:16", help="SIZE:GB; 0 is no budget")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--turns", type=int, default=1, help="predict and measure so often in turn")
    parser.add_argument("--warm", type=int, default=3, help="tokens before those that are measured")
    parser.add_argument("--tokens", type=int, default=8, help="tokens that are measured")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before those")
    parser.add_argument("--in-flight", type=int, help="transfers in the queue at most, in place of 20")
    parser.add_argument("--touch", type=float, metavar="GB", help="use so much of the host's memory once, before")
    parser.add_argument("--share", action="store_true", help="send repeated layers from the same memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="a picture of one step")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; /dev/shm where there is one")
    arguments = parser.parse_args()
    arguments.picture = None  # what was drawn
    h200.SHAPES.update(LARGE)
    base = arguments.folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    device = gpu.open_device(arguments.device)
    assert device is not None
    results: list[dict[str, Any]] = []
    for turn in ("first", "second") if arguments.touch else ():
        speed = touch(round(arguments.touch * 1e9))
        print(f"{arguments.touch:g} GB of memory written the {turn} time: {speed / 1e9:.1f} GB/s", flush=True)
    with device:
        if arguments.in_flight:
            device._transfers.most = arguments.in_flight  # type: ignore[attr-defined]
        bus = steady_bus_speed(device)
        print(f"{device.info.name}: the bus moves {bus / 1e9:.1f} GB/s", flush=True)
        for size, group in itertools.groupby(arguments.runs.split(","), lambda wanted: wanted.partition(":")[0]):
            with repeated(size, base) as weights:
                for wanted in group:
                    limit = round(float(wanted.partition(":")[2]) * 1e9) or None
                    try:
                        found = run(size, limit, weights, device, bus, arguments)
                    except Exception as error:  # one that does not fit must not end the others
                        print(f"{wanted}: {type(error).__name__}: {error}", flush=True)
                        device.limit_memory(None)
                        continue
                    results.append(found)
                    print(f"{wanted} GB: {line(found, results)}", flush=True)
                    if arguments.json:
                        arguments.json.write_text(json.dumps({"bus": bus, "runs": results}, indent=1))
        print(f"the bus moves {steady_bus_speed(device) / 1e9:.1f} GB/s now", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
