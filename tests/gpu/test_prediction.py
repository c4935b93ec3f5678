"""What `xinfer inspect --device` foretells: the memory to the byte here, the speeds in benchmarks/streaming.py."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from tests.conftest import CheckpointFactory
from tests.gpu.small_models import plan_of

import build_shaders
from xinfer import gpu
from xinfer.cli.options import byte_count
from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu.api import Buffer, BufferKind, Device, DeviceKind
from xinfer.gpu_model import Mode, ModelOptions, QwenModel, memory, predict, prediction
from xinfer.gpu_model.layout import RESIDENT, Split
from xinfer.inspection import predict_model, render_prediction
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights

SPEC = SyntheticSpec(num_hidden_layers=6, hidden_size=256, intermediate_size=1024, dtype="float16")
Made = list[tuple[int, BufferKind, str]]
UNTIED = dataclasses.replace(SPEC, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    build_shaders.build()
    monkeypatch.setattr(prediction, "STEPS_S", 0.01)
    monkeypatch.setattr(prediction, "LOADING_S", 0.05)
    monkeypatch.setattr(prediction, "SAMPLE_SOFTWARE", 1)


@pytest.fixture
def device(device: Device) -> Iterator[Device]:
    """One of its own: budgets are to the byte, and other tests may have left something on the shared one."""
    opened = gpu.open_device(f"{device.info.api}:{device.info.index}")
    assert opened is not None
    with opened:
        yield opened


@pytest.mark.parametrize(("spec", "mode"), [(SPEC, "auto"), (SPEC, "streaming"), (UNTIED, "streaming")])
def test_memory_is_what_the_model_then_takes(
    device: Device, checkpoint: CheckpointFactory, made_buffers: Made, spec: SyntheticSpec, mode: Mode
) -> None:
    with ModelWeights.open(checkpoint(spec)) as weights:
        budget = None
        if mode == "streaming":
            whole = plan_of(weights)
            budget = whole.needed(512) - 2 * whole.layout.slot_bytes
        stages: list[tuple[int, int]] = []
        found = predict(
            weights,
            device,
            ModelOptions(mode=mode, context=512, vram_budget=budget),
            progress=lambda *at: stages.append(at),
        )
        assert stages == [(n, prediction.N_STAGES) for n in range(1, prediction.N_STAGES + 1)]
        made_buffers.clear()
        with QwenModel.load(weights, device, ModelOptions(mode=mode, context=512, vram_budget=budget)) as model:
            model.make_cache(512).reserve(512)
            assert model.plan.split == found.plan.split
        device.limit_memory(None)
    assert (mode == "streaming") == bool(found.plan.split.streamed)
    weight_bytes = sum(
        n for n, kind, label in made_buffers if kind == "device" and label.startswith(("layer", "slot", "LM"))
    )
    weight_bytes += sum(n for n, kind, label in made_buffers if kind == "device" and label == "embedding")
    assert weight_bytes == found.plan.weights
    assert sum(n for n, kind, label in made_buffers if kind == "upload" and label.endswith(("host", "embedding"))) == (
        found.plan.on_host
    )
    taken = sum(n for n, kind, _ in made_buffers if kind == "device")  # a pool that grew has taken twice
    assert found.plan.weights + found.plan.shape.total_bytes(found.plan.shape.blocks_for(512)) <= taken <= found.vram


def test_a_budget_for_one_slot_is_enough(device: Device, checkpoint: CheckpointFactory, made_buffers: Made) -> None:
    """What is timed takes no more layers than the model has memory for."""
    with ModelWeights.open(checkpoint(UNTIED)) as weights:
        streamed = Split(streamed=tuple(range(6)), n_slots=1, table_on_host=True)
        least = plan_of(weights, split=streamed).needed(64)
        found = predict(weights, device, ModelOptions(mode="streaming", context=64, vram_budget=least))
        assert found.plan.split.n_slots == 1
        assert len(found.plan.split.streamed) == 6
        assert found.tokens_per_second > 0
        assert [label for _, kind, label in made_buffers if kind == "device" and "layer" in label][:1] == ["layer 0"]
        assert "layer 1" not in {label for _, _, label in made_buffers}
        with pytest.raises(OutOfMemoryError, match="--vram-budget"):
            predict(weights, device, ModelOptions(mode="streaming", context=64, vram_budget=least - 1))


def _collect(device: Device) -> None:
    """Have it give back what waits to be, and staging: how much of that there is depends on who was first."""
    device._transfers.release()  # type: ignore[attr-defined]
    device.collect()  # type: ignore[attr-defined]


def test_speeds_are_positive_and_everything_is_given_back(device: Device, checkpoint: CheckpointFactory) -> None:
    device.flush_uploads()
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        predict(weights, device)  # kernels come to stay
        _collect(device)
        before, budget = device.live_objects(), device.memory().budget
        found = predict(weights, device, ModelOptions(context=400, vram_budget=300 << 20))
        _collect(device)
        assert device.live_objects() == before
        assert device.memory().budget == budget
    for name in ("load_speed", "bus_speed", "memory_speed", "load_seconds", "token_seconds"):
        assert getattr(found, name) > 0, name
    assert found.token_seconds_at_context >= found.token_seconds


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_read_counts_and_not_what_becomes_of_it(
    device: Device,
    checkpoint: CheckpointFactory,
    monkeypatch: pytest.MonkeyPatch,
    dtype: Literal["float32", "float16", "bfloat16"],
) -> None:
    """float32 is stored in twice the bytes that it takes of the device."""
    speed = 1e4
    monkeypatch.setattr(prediction._Probe, "read", lambda _: (0.0, speed, speed))
    with ModelWeights.open(checkpoint(dataclasses.replace(SPEC, dtype=dtype))) as weights:
        found = predict(weights, device, ModelOptions(context=64))
        assert found.load_seconds == pytest.approx(weights.nbytes / speed, rel=0.05)
        monkeypatch.setattr(memory, "available_memory", lambda: 0)
        again = predict(weights, device, ModelOptions(context=64, mode="streaming"))
        assert not again.plan.split.pinned
        share = len(again.plan.split.streamed) / len(again.plan.layout.layers)
        assert again.token_seconds == pytest.approx(share * weights.nbytes / speed, rel=0.1)


def test_what_does_not_fit_is_told_before_anything_is_measured(device: Device, checkpoint: CheckpointFactory) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights, pytest.raises(OutOfMemoryError, match="are missing"):
        predict(weights, device, ModelOptions(vram_budget=1 << 20))


@pytest.mark.parametrize("mode", ["auto", "resident"])
def test_the_budget_that_is_advised_suffices(device: Device, checkpoint: CheckpointFactory, mode: Mode) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        with pytest.raises(OutOfMemoryError) as caught:
            QwenModel.load(weights, device, ModelOptions(mode=mode, vram_budget=1000))
        (advised,) = re.findall(r"give it (\S+) or more", str(caught.value))
        budget = byte_count(advised)
        assert budget is not None
        with QwenModel.load(weights, device, ModelOptions(mode=mode, vram_budget=budget)) as model:
            assert model.forward([1], last_only=True).shape == (1, SPEC.vocab_size)
    device.limit_memory(None)


def test_the_report_is_json_and_text(device: Device, checkpoint: CheckpointFactory) -> None:
    selector = f"{device.info.api}:{device.info.index}"
    report = json.loads(
        json.dumps(predict_model(checkpoint(SPEC), selector, ModelOptions(mode="streaming", context=300)))
    )
    assert report["layers"] == 6
    assert report["streamed_layers"] == 2
    assert report["ram"] == report["bytes_a_token_over_the_bus"] > 0
    text = render_prediction(report)
    assert "2 of 6 streamed from RAM" in text
    assert "tok/s" in text
    with pytest.raises(DeviceError, match="is the CPU"):
        predict_model(checkpoint(SPEC), "cpu")


def test_copies_hide_behind_steps_only_on_a_queue_of_their_own(device: Device, checkpoint: CheckpointFactory) -> None:
    """Worked by hand: 6 layers of 1 s each, and copies of 3 s a layer."""
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        plan = plan_of(weights)
    one = dataclasses.replace(device.info, features=device.info.features - {"transfer_queue"})
    two = dataclasses.replace(device.info, features=device.info.features | {"transfer_queue"})
    bus = plan.layout.slot_bytes / 3

    def seconds(split: Split, info: object, load: float = 1.0) -> float:
        return prediction._layers(dataclasses.replace(plan, split=split), info, 1.0, bus, load)  # type: ignore[arg-type]

    assert seconds(RESIDENT, one) == 6
    assert seconds(Split(streamed=(0, 3), n_slots=2), one) == pytest.approx(6 + 6)
    assert seconds(Split(streamed=(0, 2, 4), n_slots=2), two) == pytest.approx(9)
    assert seconds(Split(streamed=(0,), n_slots=2), two) == pytest.approx(6)
    assert seconds(Split(streamed=(0, 2, 4), n_slots=1), two) == pytest.approx(9 + 3)
    from_disk = Split(streamed=(0, 3), n_slots=2, pinned=False)
    assert seconds(from_disk, one, load=bus / 2) == pytest.approx(12 + 6)


def test_what_a_layer_costs(device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU by steps of more and of fewer layers; on the CPU by its clock: no two steps take the same there."""
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        monkeypatch.setattr(device, "info", dataclasses.replace(device.info, kind="discrete"))
        monkeypatch.setattr(prediction, "step_seconds", lambda steps, _: 10.0 + steps.config.num_hidden_layers)
        assert predict(weights, device).token_seconds == pytest.approx(16)
        monkeypatch.setattr(device, "info", dataclasses.replace(device.info, kind="cpu"))
        monkeypatch.setattr(prediction, "step_seconds", lambda *_: 10.0)
        monkeypatch.setattr(prediction, "layers_share", lambda *_: 0.25)
        assert predict(weights, device).token_seconds == pytest.approx(7.5 + 6 * 1.25)


@pytest.mark.parametrize(
    ("kind", "spare", "pinned", "most"),
    [("cpu", 2, 4, 0), ("discrete", 0, 4, 2 << 30), ("discrete", 0, 2, 1)],
)
def test_loads_are_timed_with_memory_that_is_new(
    device: Device,
    checkpoint: CheckpointFactory,
    made_buffers: Made,
    monkeypatch: pytest.MonkeyPatch,
    kind: DeviceKind,
    spare: int,
    pinned: int,
    most: int,
) -> None:
    """Where the host writes it in place: as many layers as the plan has room for. Pinned ones at once, up to a size."""
    with ModelWeights.open(checkpoint(UNTIED)) as weights:
        split = Split(streamed=(1, 3, 4, 5), n_slots=2, table_on_host=True)
        budget = plan_of(weights, split=split).needed(64)
        monkeypatch.setattr(device, "info", dataclasses.replace(device.info, kind=kind))
        monkeypatch.setattr(prediction, "SAMPLE", 1 if kind == "discrete" else prediction.SAMPLE)
        monkeypatch.setattr(prediction, "PINNED", most)
        found = predict(weights, device, ModelOptions(mode="streaming", context=64, vram_budget=budget))
        assert (len(found.plan.split.streamed), found.plan.split.n_slots) == (4, 2)
    assert sum(1 for _, _, label in made_buffers if label == "spare") == spare
    assert sum(1 for _, _, label in made_buffers if label == "bus") == pinned


@pytest.mark.parametrize("room", [3, 2, 1, 0])
def test_fewer_layers_are_pinned_where_memory_is_short(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What would run is not refused for the sake of a measurement."""
    pinned: list[Any] = []
    create = device.create_buffer

    def short(size: int, kind: BufferKind = "device", label: str = "") -> Buffer:
        if label == "bus":
            pinned[:] = [buffer for buffer in pinned if not buffer.released]
            if len(pinned) >= room:
                raise OutOfMemoryError("no more")
            pinned.append(create(size, kind, label))
            return pinned[-1]  # type: ignore[no-any-return]
        return create(size, kind, label)

    with ModelWeights.open(checkpoint(UNTIED)) as weights:
        budget = plan_of(weights, split=Split(streamed=(1, 3, 4, 5), n_slots=2, table_on_host=True)).needed(64)
        monkeypatch.setattr(device, "info", dataclasses.replace(device.info, kind="discrete"))
        monkeypatch.setattr(prediction, "SAMPLE", 1)
        monkeypatch.setattr(device, "create_buffer", short)
        options = ModelOptions(mode="streaming", context=64, vram_budget=budget)
        if not room:
            with pytest.raises(OutOfMemoryError, match="no more"):
                predict(weights, device, options)
        else:
            assert predict(weights, device, options).load_seconds > 0


def test_layers_take_a_share_of_a_step(device: Device, checkpoint: CheckpointFactory) -> None:
    """Of a model with a tiny vocabulary nearly all."""
    spec = dataclasses.replace(SPEC, vocab_size=300)
    with ModelWeights.open(checkpoint(spec)) as weights, QwenModel.load(weights, device) as model:
        assert 0.6 < prediction.layers_share(model.steps, 5) < 1
