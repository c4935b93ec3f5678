"""Models larger than the memory they are given: tokens a second, and the bus's share of the time.

    python benchmarks/streaming.py [--runs 7b:4,7b:8,32b:16,72b:40] [--device NAME] [--json FILE] [--timeline FILE.svg]

Random f16 weights in the shapes of Qwen2.5; a few distinct layers are repeated as often as the shape has layers, and
every one is sent each time. The bus is measured in the same run, by the same transfers without a model. Runs of one
size must give the same tokens, whatever their budget. The timeline is of the last run that streams: when each layer is
copied and when it runs, by the device's clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import h200
import timeline
from xinfer import gpu
from xinfer.gpu.api import Device
from xinfer.gpu_model import ModelOptions, QwenModel, predict
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
PROMPT_TOKENS, N_TOKENS, WARM = 512, 8, 3
ROOM = PROMPT_TOKENS + 64  # tokens of the cache


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


def run(
    size: str, budget: int | None, device: Device, base: Path | None, bus: float, picture: Path | None
) -> dict[str, Any]:
    """Decode and prefill of one size in a budget."""
    with repeated(size, base) as weights:
        predicted = predict(weights, device, ModelOptions(vram_budget=budget, context=ROOM))
        began = time.perf_counter()
        with QwenModel.load(weights, device, ModelOptions(vram_budget=budget, context=ROOM)) as model:
            loaded = time.perf_counter() - began
            prompt = np.random.default_rng(5).integers(0, model.config.vocab_size, PROMPT_TOKENS)
            cache = model.make_cache(ROOM)
            began = time.perf_counter()
            model.extend(prompt[:-1], cache)
            prefill = len(prompt) / (time.perf_counter() - began)
            tokens = model.greedy(int(prompt[-1]), cache, limit=N_TOKENS + WARM)
            chosen = [next(tokens) for _ in range(WARM)]
            sent, began = model.bytes_sent, time.perf_counter()
            chosen += list(tokens)
            seconds = (time.perf_counter() - began) / N_TOKENS
            split = model.plan.split
            a_token = sum(model.plan.layout.layers[i].size for i in split.streamed)
            found = {
                "size": size,
                "budget": budget,
                "streamed": len(split.streamed),
                "slots": split.n_slots,
                "pinned": split.pinned,
                "rows": model.plan.rows,
                "peak": device.memory().peak,
                "load_seconds": loaded,
                "tokens_per_second": 1 / seconds,
                "bytes_a_token": a_token,
                "sent_while_measured": model.bytes_sent - sent,
                "bus_share": a_token / seconds / bus,
                "prefill_512": prefill,
                "predicted": {
                    "load_seconds": predicted.load_seconds,
                    "tokens_per_second": 1 / predicted.token_seconds_at_context,
                    "peak": predicted.vram,
                },
                "tokens": chosen,
            }
            if picture and split.streamed:
                title = f"{size} in {device.memory().peak / 1e9:.1f} GB on {device.info.name}"
                found["timeline"] = timeline.write(model, picture, title)
    device.limit_memory(None)
    return found


def against(found: dict[str, Any]) -> str:
    """What had been predicted, as a share of what was then measured."""
    shares = [f"{name} {value / found[name]:.2f}" for name, value in found["predicted"].items()]
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
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeline", type=Path, metavar="FILE.svg", help="a picture of one step")
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; /dev/shm where there is one")
    arguments = parser.parse_args()
    h200.SHAPES.update(LARGE)
    base = arguments.folder or (Path("/dev/shm") if Path("/dev/shm").is_dir() else None)
    device = gpu.open_device(arguments.device)
    assert device is not None
    results: list[dict[str, Any]] = []
    with device:
        bus = bus_speed(device, min(512 << 20, device.memory().free // 8))
        print(f"{device.info.name}: the bus moves {bus / 1e9:.1f} GB/s", flush=True)
        for wanted in arguments.runs.split(","):
            size, _, budget = wanted.partition(":")
            limit = round(float(budget) * 1e9) or None
            try:
                found = run(size, limit, device, base, bus, arguments.timeline)
            except Exception as error:  # one that does not fit must not end the others
                print(f"{wanted}: {type(error).__name__}: {error}", flush=True)
                device.limit_memory(None)
                continue
            results.append(found)
            same = [other for other in results if other["size"] == size and other["tokens"] != found["tokens"]]
            print(
                f"{wanted} GB: {found['streamed']} layers streamed through {found['slots']} slots"
                f"{'' if found['pinned'] else ', read again each time'}; {found['tokens_per_second']:.2f} tok/s, "
                f"{found['bytes_a_token'] / 1e9:.2f} GB a token, {found['bus_share']:.0%} of the bus; prefill of 512 "
                f"{found['prefill_512']:.0f} tok/s; peak {found['peak'] / 1e9:.2f} GB; loaded in "
                f"{found['load_seconds']:.1f} s; {against(found)}{'; OTHER TOKENS' if same else ''}",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps({"bus": bus, "runs": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
