"""`verify` on a device: every structure is right, weights are read once, recordings that lie are found."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.conftest import CheckpointFactory
from tests.gpu.conftest import missing
from typer.testing import CliRunner

import build_shaders
from xinfer import gpu
from xinfer.cli.app import app
from xinfer.errors import DeviceError, NumericalError
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.gpu_model.checks import CheckedRows
from xinfer.gpu_model.forward import Pass, RowsAlone
from xinfer.gpu_model.steps import ROW_BUCKETS, Steps
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights
from xinfer.quarantine import Quarantine
from xinfer.verify import session
from xinfer.verify.run import verify
from xinfer.verify.session import LENGTHS, plan_cases


@pytest.fixture(scope="module", autouse=True)
def _needs_vulkan(_environment: None) -> None:
    try:
        gpu.choose_device("vulkan")
    except DeviceError as error:
        missing(str(error))
    build_shaders.build()


def run(folder: Path, **options: Any) -> dict[str, Any]:
    return verify(folder, device="vulkan", **{"n_steps": 2, "longest": 65, **options})


@pytest.mark.parametrize("preset", ["odd_sizes", "sliding", "untied", "f16", "wide_heads", "large_k_bias", "yarn"])
def test_every_structure_is_right(checkpoint: CheckpointFactory, preset: str) -> None:
    report = run(checkpoint(preset))
    assert report["right"], report["first"]
    assert report["recordings"] == []
    assert 0 < report["worst"]["ratio"] <= 1
    assert report["debug_layer"]["messages"] == []
    n_layers = report["model"]["layers"]
    for case in report["errors"]["by_case"]:
        assert len(case["layers"]) == n_layers
        ops = dict(zip(report["errors"]["ops"], case["layers"][n_layers - 1], strict=True))
        for op in ("qkv", "attn", "o", "swiglu", "down"):
            assert ops[op] is not None, f"{op} of the last layer was not judged in {case['case']}"


LONG = SyntheticSpec(  # of a long context: the cache has room for a part of it
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=16_384,
    dtype="bfloat16",
)


def judged(report: dict[str, Any]) -> set[str]:
    return {name for case in report["errors"]["by_case"] for names in case["variants"].values() for name in names}


@pytest.mark.parametrize("head_dim", [64, 12])
def test_every_kernel_that_the_model_records_is_judged(checkpoint: CheckpointFactory, head_dim: int) -> None:
    """At every number of rows, when the cache is small and when it has grown to the whole context."""
    folder = checkpoint(dataclasses.replace(LONG, head_dim=head_dim))
    report = run(folder, n_steps=1, longest=65)
    assert report["right"], report["first"]
    used: set[str] = set()
    with gpu.open_device("vulkan") as device, ModelWeights.open(folder) as weights:  # type: ignore[union-attr]
        for context in (300, 16_384):
            with QwenModel.load(weights, device, ModelOptions(context=context)) as model:
                model.make_cache(context).reserve(context)
                used |= kernels_of(model)
    assert used - judged(report) == set(report["not_tried"])
    turning = {name for name in used if "_turn" in name}
    assert len(turning) == (2 if head_dim == 64 else 0)


def kernels_of(model: QwenModel) -> set[str]:
    """The kernels of everything that the model can record, by what the recordings note."""
    steps = model.steps
    recordings: list[Any] = [steps.decode(steps.config.vocab_size)]
    recordings += [steps.prefill(n, whole=whole) for n in ROW_BUCKETS if n <= steps.max_rows for whole in (True, False)]
    return {op.code.id for made in recordings for _, ops in made._notes.segments for op in ops if op.code}


def test_a_prompt_is_added_for_each_kernel_that_no_case_comes_to(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(LONG)
    monkeypatch.setattr(session, "LENGTHS", (1, 65))
    few = run(folder, n_steps=1, longest=65)
    names = [case["name"] for case in few["cases"]]
    assert "prompt of 2 tokens" in names
    assert "prompt of 8 tokens" in names
    assert names[-1] == "1 steps after 65, full context of 16,384"
    assert few["right"]
    shortest = run(folder, n_steps=1, longest=1)
    assert any("linear_gemm" in name for name in shortest["not_tried"])


def test_weights_of_a_layer_are_read_once(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model larger than RAM can be verified: no layer is kept, none is read again."""
    reads: Counter[str] = Counter()
    read = ModelWeights.read

    def counted(self: ModelWeights, name: str) -> Any:
        reads[name] += 1
        return read(self, name)

    monkeypatch.setattr(ModelWeights, "read", counted)
    folder = checkpoint("bf16")  # the device's own loader reads these another way
    assert run(folder)["right"]
    layers = {name: count for name, count in reads.items() if ".layers." in name and name.endswith("proj.weight")}
    assert layers
    assert set(layers.values()) == {1}


def test_a_recording_that_leaves_out_a_layer_is_found(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every op is right by itself; what is recorded is not what they are."""
    layer = Pass.layer

    def skipping(self: Pass, i: int, *, cache_only: bool = False) -> None:
        if i != 1 or type(self) is not Pass:
            layer(self, i, cache_only=cache_only)

    monkeypatch.setattr(Pass, "layer", skipping)
    report = run(checkpoint("gqa"))
    assert not report["right"]
    assert report["first"] is None
    wrong = [entry for entry in report["recordings"] if entry["wrong"]]
    assert wrong[0]["what"] == "keys and values of layer 1"
    assert any(entry["what"].startswith("logits of step") for entry in wrong)


def test_a_step_recorded_in_the_wrong_order_is_found(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Steps.record_step

    def early(self: Steps, recording: Any, n_valid: int, **options: Any) -> None:
        head = Pass.head
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pass, "head", lambda self, logits, first=0: None)
            record(self, recording, n_valid, **options)  # the argmax comes before its logits
        head(Pass(self.network(), self.one, 1, recording), self.logits)

    monkeypatch.setattr(Steps, "record_step", early)
    report = run(checkpoint("gqa"))
    assert any(entry["what"].startswith("token of step") and entry["wrong"] for entry in report["recordings"])


@pytest.mark.parametrize("fault", ["a layer", "the keys", "the tokens"])
def test_a_pass_of_guesses_that_is_not_the_steps_is_found(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Single steps are right, and so is each op; what is told are the guesses' own rows."""
    if fault == "a layer":
        monkeypatch.setattr(RowsAlone, "_mlp", lambda *_: None)
    elif fault == "the keys":
        monkeypatch.setattr(RowsAlone, "_attention", lambda *_: None)
    else:
        monkeypatch.setattr(CheckedRows, "chosen", lambda _, n: [0] * n)
    report = run(checkpoint("gqa"))
    assert not report["right"]
    wrong = [entry["what"] for entry in report["recordings"] if entry["wrong"]]
    kind = {"a layer": "logits of guess 1", "the keys": "keys and values of layer 0 behind guesses"}
    assert kind.get(fault, "token of guess 1") in wrong
    assert all("guess" in what for what in wrong)


def test_the_command_writes_page_and_json(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["verify", str(checkpoint("one_layer")), "--device", "vulkan", "--tokens", "1", "--html", str(page)]
    done = CliRunner().invoke(app, [*arguments, "--longest", "17", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [case["name"] for case in report["cases"] if not case["full"]][-1] == "1 steps after 17"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.count("<svg") == 2 + len(report["cases"])  # the legend, the whole, and each case
    for outside in ("http:", "https:", "src=", "url(", "@import", "<script", "<link"):
        assert outside not in text


def test_steps_that_fail_before_anything_is_judged_do_not_end_it(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of the steps come from the engine's own queue, which gives up where logits are not finite."""

    def fail(self: QwenModel, *_: Any, **__: Any) -> Any:
        raise NumericalError("not finite")

    monkeypatch.setattr(QwenModel, "greedy", fail)
    assert run(checkpoint("one_layer"))["right"]
    monkeypatch.setattr(QwenModel, "extend", fail)
    assert run(checkpoint("one_layer"))["right"]


def test_what_is_in_quarantine_is_not_verified(checkpoint: CheckpointFactory) -> None:
    info = gpu.choose_device("vulkan")
    assert info is not None
    quarantine = Quarantine()
    quarantine.add(info, "rms_norm.wave", "wrong")
    try:
        report = run(checkpoint("one_layer"), longest=17)
    finally:
        quarantine.lift(info, ["rms_norm.wave"])
    assert report["quarantine"] == ["rms_norm.wave"]
    used = {name for case in report["errors"]["by_case"] for names in case["variants"].values() for name in names}
    assert "rms_norm.plain" in used
    assert "rms_norm.wave" not in used


def test_two_devices_are_compared(checkpoint: CheckpointFactory) -> None:
    report = run(checkpoint("one_layer"), longest=2, n_steps=1, against="vulkan:0")
    assert report["against"]["right"]
    assert "are both right" in report["both"]


def test_no_gpu_is_an_error_that_names_what_there_is(checkpoint: CheckpointFactory) -> None:
    if any(info.kind != "cpu" for info in gpu.list_devices()):
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match=r"no GPU to verify.*vulkan:0.*only a software driver"):
        verify(checkpoint("one_layer"), device="auto")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.1.self_attn.o_proj.weight", ("o", 1)),
        ("model.layers.0.post_attention_layernorm.weight", ("gate_up", 0)),
        ("model.norm.weight", ("logits", None)),
        ("model.embed_tokens.weight", ("embed", None)),
    ],
)
def test_weights_that_are_nan_are_not_the_devices_fault(
    checkpoint: CheckpointFactory, tmp_path: Path, name: str, place: tuple[str, int | None]
) -> None:
    """Op and layer, which tensor, and exit status 1."""
    folder = shutil.copytree(checkpoint("f16"), tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].reshape(-1)[:: max(1, tensors[name].size // 100)] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = CliRunner().invoke(
        app, ["verify", str(folder), *["--device", "vulkan", "--longest", "2", "--tokens", "1", "--json"]]
    )
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["divergences"] == []
    assert report["recordings"] == []
    assert report["not_finite"]["tensors"] == [name]
    op, layer = place
    assert report["not_finite"]["layer"] == layer
    assert report["not_finite"]["op"] in (op, "post_ln", "norm")  # a norm by itself where it is not fused


def test_cases_fit_into_the_context() -> None:
    for context, n_steps in itertools.product((1, 2, 3, 10, 64, 100, 4096), (0, 2, 8, 100)):
        cases = plan_cases(context, n_steps)
        assert cases
        assert all(case.n_prompt + case.n_steps <= context for case in cases)
    assert [case.n_prompt for case in plan_cases(4096, 0)] == list(LENGTHS)
    assert np.all(np.diff([case.n_prompt for case in plan_cases(100, 0)]) > 0)


def test_streamed_layers_are_verified_too(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model larger than the card: its layers come and go while they are looked at."""
    load = QwenModel.load
    modes = []

    def streaming(weights: Any, device: Any, **options: Any) -> QwenModel:
        model = load(weights, device, ModelOptions(mode="streaming"), **options)
        modes.append(model.steps.resident)
        return model

    monkeypatch.setattr(QwenModel, "load", streaming)
    report = run(checkpoint("deep"), longest=17)
    assert modes == [False]
    assert report["right"], report["first"]
    assert report["recordings"] == []
