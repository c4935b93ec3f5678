"""`xinfer bench` on a device: its own speeds are those of right numbers, and the report adds up."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer.bench import loops, run, speeds
from xinfer.bench.loops import filled_cache
from xinfer.bench.plot import draw
from xinfer.bench.text import as_text
from xinfer.errors import NumericalError
from xinfer.gpu.api import Bindable, Device
from xinfer.gpu_model import KVType, ModelOptions, QwenModel
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights
from xinfer.ops import KernelSet

SPEC = SyntheticSpec(num_hidden_layers=2, dtype="float16")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    build_shaders.build()
    monkeypatch.setattr(speeds, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(speeds, "READ_BYTES_SOFTWARE", 1 << 20)
    monkeypatch.setattr(speeds, "SENT_BYTES_SOFTWARE", 1 << 20)
    monkeypatch.setattr(speeds, "PRODUCTS", ((256, 256, 64),))
    monkeypatch.setattr(speeds, "READ_COLUMNS", 1024)
    monkeypatch.setattr(speeds, "REPEATS", 1)
    for module in (loops, run):
        monkeypatch.setattr(module, "WARM_STEPS", 1)


def test_the_report_adds_up(device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "WARM_S", 0.0)
    selector = f"{device.info.api}:{device.info.index}"
    stages: list[tuple[object, ...]] = []
    report = run.bench(
        checkpoint(SPEC),
        device=selector,
        prompts=[5],
        contexts=[17],
        decode_tokens=2,
        repeats=1,
        progress=lambda *told: stages.append(told),
    )
    report = json.loads(json.dumps(report))
    assert [told for told in stages if told[0] == "bench"] == [
        ("bench", 0, 3, "prompt of 5"),
        ("bench", 1, 3, "decode behind 17"),
        ("bench", 2, 3, "the device itself"),
        ("bench", 3, 3, ""),
    ]
    own = report["speeds"]
    for row in report["rows"]:
        seconds = row["seconds"]["median"]
        assert row["share_of_memory_speed"] == pytest.approx(row["bytes"] / seconds / own["memory"])
        assert row["share_of_matrix_rate"] == pytest.approx(row["flops"] / seconds / own["matrix"])
    assert report["memory"]["device_peak"] > 4 * report["parameters"] / 2
    assert min(own["memory"], own["bus"], own["matrix"]) > 0
    assert device.info.name in as_text(report)
    if importlib.util.find_spec("matplotlib"):  # which the folder of vkd3d lacks
        with Path(os.devnull).open("wb") as file:
            draw(report, file, "png")


def test_wrong_numbers_have_no_speed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    download = device.download

    def off(source: Bindable, timeout_s: float = 60.0) -> bytes:
        values = np.frombuffer(download(source, timeout_s), np.float32).copy()
        values[len(values) // 2] += 30
        return values.tobytes()

    with KernelSet(device) as kernels:
        assert speeds.measure_speeds(device, kernels).matrix_kernel.startswith("linear_")
        monkeypatch.setattr(device, "download", off)
        with pytest.raises(NumericalError, match="reading of memory gave wrong numbers"):
            speeds.memory_speed(device, kernels)
        with pytest.raises(NumericalError, match="linear_"):
            speeds.matrix_speed(device, kernels)


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_a_filled_cache_holds_random_numbers(device: Device, checkpoint: CheckpointFactory, kv: KVType) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        model = QwenModel.load(weights, device, ModelOptions(kv_cache=kv))
    with model:
        cache = filled_cache(model, 40, 3)
        assert cache.length == 40
        for half in (model.pool.keys(1), model.pool.values(0)):
            values = np.frombuffer(device.download(half), np.float16 if kv == "f16" else np.float32).astype(float)
            assert abs(values.mean()) < 0.1
            assert values.std() == pytest.approx(1, abs=0.1)
        assert len(list(model.greedy(1, cache, limit=3))) == 3  # type: ignore[arg-type]
