"""`xinfer tune`: what it would choose of kernels that take times of our making, and that what it chose is then used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer import LLM
from xinfer.bench import loops, tuner
from xinfer.bench.tune import as_text, forget, tune
from xinfer.errors import RequestError
from xinfer.gpu.api import Device
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.gpu_model.layout import Split
from xinfer.gpu_model.tuning import AttentionChoice, Tuning
from xinfer.inspection import predict_model, render_prediction
from xinfer.llm import load_model
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights
from xinfer.quarantine import Quarantine
from xinfer.tuning_file import TuningFile, shapes_of
from xinfer.verify.coverage import recorded_variants
from xinfer.verify.run import verify

SPEC = SyntheticSpec(num_hidden_layers=2, dtype="float16")


@pytest.fixture(autouse=True)
def _built(monkeypatch: pytest.MonkeyPatch) -> None:
    build_shaders.build()
    for module in (loops, tuner):
        monkeypatch.setattr(module, "WARM_STEPS", 1)
    monkeypatch.setattr(tuner, "SCREENED", 1)
    monkeypatch.setattr(tuner, "TURNS", 2)


@pytest.fixture
def model(device: Device, checkpoint: CheckpointFactory) -> Iterator[QwenModel]:
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        loaded = QwenModel.load(weights, device)
    with loaded:
        yield loaded


class Costs:
    """Seconds that steps and prompts are said to take, by what they are recorded with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: QwenModel, saved: dict[str, float]) -> None:
        self.saved = saved  # by op and variant, or variant and splits
        self.model = model
        monkeypatch.setattr(tuner, "time_loop", lambda *_, **__: self.seconds())
        monkeypatch.setattr(tuner, "_seconds", lambda _: self.seconds())

    def seconds(self) -> float:
        tuning = self.model.steps.tuning
        used = [f"{op} {name}" for op, name in tuning.decode.items()]
        used += [f"{choice.variant}/{choice.n_splits}" for choice in tuning.attention.values()]
        used += [f"{rows} {op} {name}" for rows, by_op in tuning.prompts.items() for op, name in by_op.items()]
        return 1.0 - sum(self.saved.get(name, 0.0) for name in used)


def test_the_fastest_right_kernel_of_each_op_is_chosen(model: QwenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    products, attention = model.steps.sites().products(1), model.steps.sites().attention()
    down, prompt = products["down"], model.steps.sites().products(32)["o"]
    assert min(map(len, (down, prompt, attention))) > 1
    tiled = next(name for name in attention if "tiled" in name)
    saved = {f"down {down[1]}": 0.05, f"down {down[-1]}": 0.2, f"{tiled}/1": 0.1, f"32 o {prompt[-1]}": 0.3}
    Costs(monkeypatch, model, saved)
    model._chunk = 32
    told: list[tuple[Any, ...]] = []
    found = tuner.Tuner(model, contexts=[8], prompts=[32], n_tokens=1, tell=lambda *at: told.append(at)).run()
    assert found.tuning.decode == {"down": down[-1]}
    assert found.tuning.attention == {512: AttentionChoice(tiled, 1)}
    assert found.tuning.prompts == {32: {"o": prompt[-1]}}
    assert not found.wrong
    assert not model.steps.tuning
    assert [total["kind"] for total in found.totals] == ["decode", "prompt"]
    assert found.totals[0]["gain"] == pytest.approx(1 / 0.7 - 1)
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]


def test_what_is_wrong_or_gains_too_little_is_not_chosen(model: QwenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    products = model.steps.sites().products(1)
    down, o = products["down"], products["o"]
    forward = model.forward

    def off(*arguments: Any, **options: Any) -> Any:
        logits = forward(*arguments, **options)
        return logits * (1 + 1e-2 * (model.steps.tuning.decode.get("down") == down[-1]))

    monkeypatch.setattr(model, "forward", off)
    Costs(monkeypatch, model, {f"down {down[-1]}": 0.5, f"o {o[-1]}": 0.01})
    found = tuner.Tuner(model, contexts=[8], prompts=[], n_tokens=1).run()
    assert found.wrong == [down[-1]]
    assert {entry["op"]: entry["chosen"] for entry in found.tried}["o"] == o[-1]
    assert not found.tuning  # 1% is too little for all of it


def test_noise_decides_nothing(model: QwenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    monkeypatch.setattr(tuner, "TURNS", 9)
    monkeypatch.setattr(tuner, "time_loop", lambda *_, **__: float(rng.normal(1, 0.1)))
    monkeypatch.setattr(tuner.Tuner, "_right", lambda *_: True)
    assert not tuner.Tuner(model, contexts=[8], prompts=[], n_tokens=1).run().tuning


def test_streamed_layers_are_not_tuned(device: Device, checkpoint: CheckpointFactory) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        model = QwenModel.load(weights, device, split=Split(streamed=(0, 1), n_slots=1))
    with model, pytest.raises(RequestError, match="the bus decides"):
        tuner.Tuner(model, contexts=[8])


def chosen(model: QwenModel) -> Tuning:
    """Another kernel than the usual for all that can be tuned in steps, and for prompts of 32."""
    sites = model.steps.sites()
    attention = [name for name in sites.attention() if "tiled" in name][-1]
    return Tuning(
        decode={op: names[-1] for op, names in sites.products(1).items() if len(names) > 1},
        attention={512: AttentionChoice(attention, 3)},
        prompts={32: {op: names[-1] for op, names in sites.products(32).items()}},
    )


def test_any_choice_gives_the_same_logits_and_tokens(model: QwenModel) -> None:
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 34)

    def run() -> tuple[Any, list[int]]:
        model._chunk = 32
        cache = model.make_cache(100)
        logits = model.forward(ids[:-1], cache, last_only=True)
        return logits, list(model.greedy(int(ids[-1]), cache, limit=5))

    logits, tokens = run()
    usual = recorded_variants(model.steps, model.steps.network(), model.steps.one, 1)
    model.tune(chosen(model))
    other, others = run()
    assert np.linalg.norm(other - logits) < 1e-4 * np.linalg.norm(logits)
    assert others == tokens
    used = recorded_variants(model.steps, model.steps.network(), model.steps.one, 1)
    assert {*model.steps.tuning.decode.values()} <= used != usual
    rows = recorded_variants(model.steps, model.steps.network(), model.steps.many, 32)
    assert {*model.steps.tuning.prompts[32].values()} <= rows


def test_what_is_kept_is_used_wherever_a_model_is_loaded(
    device: Device, checkpoint: CheckpointFactory, model: QwenModel
) -> None:
    selector, folder = f"{device.info.api}:{device.info.index}", checkpoint(SPEC)
    tuning = chosen(model)
    file = TuningFile()
    file.keep(device.info, shapes_of(model.plan, exact=False), tuning)
    with load_model(folder, device=selector) as loaded:
        assert loaded.model.steps.tuning == tuning  # type: ignore[union-attr]
        assert loaded.tuned
    with load_model(folder, ModelOptions(tuning=False), device=selector) as loaded:
        assert not loaded.tuned
    with load_model(folder, ModelOptions(kv_cache="f32"), device=selector) as loaded:
        assert not loaded.tuned
    down = tuning.decode["down"]
    Quarantine().add(device.info, down, "wrong")
    with load_model(folder, device=selector) as loaded:
        assert loaded.model.steps.tuning.decode == {op: n for op, n in tuning.decode.items() if n != down}  # type: ignore[union-attr]
    Quarantine().lift(device.info, [down])
    report = json.dumps(verify(folder, device=selector, n_steps=1, longest=2))
    assert all(name in report for name in tuning.decode.values())
    prediction = predict_model(folder, selector)
    assert prediction["tuned"]
    assert "as xinfer tune has chosen them" in render_prediction(prediction)
    with LLM(folder, device=selector) as llm:
        assert llm.generate("a", max_tokens=2).stats.tuned
    assert forget(folder, device=selector)["forgotten"] == 1
    assert not predict_model(folder, selector)["tuned"]


def test_a_run_is_reported_and_kept(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = f"{device.info.api}:{device.info.index}"
    seen: list[str] = []

    def run(self: tuner.Tuner) -> tuner.Result:
        name = self._model.steps.sites().products(1)["down"][-1]
        seen.append(name)
        return tuner.Result(tuning=Tuning(decode={"down": name}))

    monkeypatch.setattr(tuner.Tuner, "run", run)
    report = json.loads(json.dumps(tune(checkpoint(SPEC), device=selector, contexts=[8], prompts=[])))
    assert report["chosen"]["decode"] == {"down": seen[0]}
    assert Path(report["file"]).is_file()
    assert "unless --no-tuning is given" in as_text(report)
    with load_model(checkpoint(SPEC), device=selector) as loaded:
        assert loaded.model.steps.tuning.decode == {"down": seen[0]}  # type: ignore[union-attr]
