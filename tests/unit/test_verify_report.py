"""Judgements, verdicts and the pages of `verify`, on findings that are made up."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from xinfer.cli.verify import verify
from xinfer.gpu.null import INFO
from xinfer.model.config import Qwen2Config
from xinfer.trials import expected
from xinfer.trials.judge import OFF_SCALE, Expected, judge
from xinfer.verify.culprit import Alone, Attempt, Diagnosis, Elsewhere, network_order, verdict
from xinfer.verify.findings import LAYER_OPS, Case, Finding, finding
from xinfer.verify.layers import JUDGES
from xinfer.verify.page import as_page
from xinfer.verify.recorded import Difference
from xinfer.verify.report import TOLERANCE, Verified, as_dict, as_text
from xinfer.verify.run import compare

CONFIG = Qwen2Config.from_json(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 30,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
)


def array(*values: float) -> Any:
    return np.array(values, np.float32)


def test_a_judgement_finds_the_worst_element() -> None:
    judged = judge(array(1, 2.5, 3), Expected(array(1, 2, 3), array(0.1, 0.25, 0.1)))
    assert (judged.n_wrong, judged.n, judged.where) == (1, 3, (1,))
    assert judged.ratio == 2
    assert "2.5 instead of 2, off by 0.5 where 0.25 is allowed" in str(judged)


@pytest.mark.parametrize("found", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_off_the_scale(found: float) -> None:
    judged = judge(array(found, 0), Expected(array(1, 0), array(1e9)))
    assert not judged.right
    assert judged.ratio == OFF_SCALE


def test_nothing_is_judged_where_the_reference_is_not_finite() -> None:
    judged = judge(array(3, 1), Expected(array(np.nan, 1), array(np.nan, 0.1)))
    assert judged.right
    assert (judged.n, judged.n_skipped) == (1, 1)


def test_where_nothing_may_differ_anything_is_wrong() -> None:
    assert judge(array(1, 2), expected.exact(array(1, 2))).right
    assert judge(array(1, np.nextafter(np.float32(2), 3)), expected.exact(array(1, 2))).ratio == OFF_SCALE


def test_a_dropped_product_is_beyond_the_tolerance_of_a_long_sum() -> None:
    """The tolerance must be wide enough for any order of the sum, and far too narrow for one product left out."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 4864), np.float32), rng.standard_normal((64, 4864), np.float32)
    wanted = expected.linear(x, expected.Weights(w))
    backwards = np.add.accumulate((w * x)[:, ::-1], axis=1, dtype=np.float32)[:, -1]
    assert judge(backwards[np.newaxis], wanted).right
    without_last = (x[:, :-1] @ w[:, :-1].T).astype(np.float32)
    assert judge(without_last, wanted).n_wrong > 60


def attempts(**right: bool) -> tuple[Attempt, ...]:
    return tuple(Attempt(variant=name, right=value, detail="") for name, value in right.items())


def test_verdicts() -> None:
    alone = (Alone(op="linear", shape="", attempts=attempts(bad=False, good=True, fine=True)),)
    other = Elsewhere(device="d3d12:0 Radeon", attempt=attempts(bad=True)[0])
    also = Elsewhere(device="d3d12:0 Radeon", attempt=attempts(bad=False)[0])
    assert "bad is wrong, 2 of 2 other variants that fit are right" in verdict(["bad"], ["bad"], alone, [], "amd 1")
    assert verdict(["bad"], ["bad"], alone, [other], "amd 1").endswith("suspect the driver amd 1")
    assert verdict(["bad"], ["bad"], alone, [also], "amd 1").endswith("suspect our kernel, and please report it")
    assert "equally suspect" in verdict(["bad"], ["bad"], alone, [], "amd 1")
    every = (Alone(op="linear", shape="", attempts=attempts(bad=False, worse=False)),)
    assert "all 2 variants that fit are wrong" in verdict(["bad"], ["bad"], every, [], "amd 1")
    assert "by itself the op is right" in verdict(["bad"], [], alone, [], "amd 1")
    singles = (*alone, Alone(op="rms_norm", shape="", attempts=attempts(norm=False)))
    assert "rms_norm diverges, too" in verdict(["bad"], ["bad"], singles, [], "amd 1")


def test_two_reports_are_compared() -> None:
    def report(selector: str, *ops: str) -> dict[str, Any]:
        device = {"selector": selector, "driver": "amd"}
        found = {"right": not ops, "device": device, "divergences": [{"op": op} for op in ops]}
        return {**found, "not_finite": None}

    assert "both right" in compare(report("vulkan:0"), report("d3d12:0"))
    assert "suspect the driver of vulkan:0" in compare(report("vulkan:0", "qkv"), report("d3d12:0"))
    assert "suspect the driver of d3d12:0" in compare(report("vulkan:0"), report("d3d12:0", "qkv"))
    assert "suspect our kernel" in compare(report("vulkan:0", "qkv"), report("d3d12:0", "qkv", "o"))
    assert "suspect both drivers" in compare(report("vulkan:0", "qkv"), report("d3d12:0", "o"))


def found(layer: int | None, op: str, error: float, case: str = "prompt of 1 token") -> Finding:
    values = array(1 + error)
    return finding(case, layer, op, ["a.kernel"], [("it", values, Expected(array(1), array(0.1)))], list)


def verified(
    *findings: Finding, differences: tuple[Difference, ...] = (), damaged: Sequence[str] = ()
) -> dict[str, Any]:
    wrong = [f for f in findings if not f.judgement.right]
    diagnoses = [
        Diagnosis(finding=f, layers=(f.layer,), cases=(f.case,), alone=(), elsewhere=(), verdict="<because> & so")
        for f in wrong
    ]
    return as_dict(
        Verified(
            model="<model>",
            config=CONFIG,
            info=INFO,
            quarantine=["b.kernel"],
            debug=True,
            debug_note="",
            messages=["error VUID: <text>"],
            cases=[Case(name="prompt of 1 token", n_prompt=1)],
            not_tried=[],
            findings=findings,
            differences=differences,
            diagnoses=diagnoses,
            damaged=damaged,
            seconds=1.25,
        )
    )


RIGHT = [found(None, "embed", 0), found(0, "qkv", 0.05), found(1, "down", 0.01), found(None, "logits", 0.02)]


def test_a_right_report() -> None:
    report = verified(*RIGHT)
    assert report["right"]
    assert report["worst"]["ratio"] == pytest.approx(0.5)
    text = as_text(report)
    assert "every op is right; the largest error is 0.5 of its tolerance (qkv of layer 0" in text
    assert "bit for bit" in text
    assert "in quarantine, and not used: b.kernel" in text
    json.dumps(report, allow_nan=False)


def test_what_a_tolerance_is_stands_wherever_there_is_one() -> None:
    report = verified(*RIGHT)
    assert TOLERANCE in as_text(report)
    assert TOLERANCE in as_page(report)
    assert TOLERANCE in " ".join((verify.__doc__ or "").split())


def not_finite(layer: int | None, op: str) -> Finding:
    values = array(np.nan, 1)
    return finding("prompt of 1 token", layer, op, ["a.kernel"], [("it", values, Expected(values, array(0.1)))], list)


def test_nan_of_the_weights_is_told_with_its_place_and_is_not_right() -> None:
    report = verified(*RIGHT, not_finite(1, "down"), not_finite(1, "qkv"), damaged=["model.layers.1.q"])
    assert not report["right"]
    assert report["first"] is None
    assert report["not_finite"] == {
        "op": "qkv",
        "layer": 1,
        "case": "prompt of 1 token",
        "tensors": ["model.layers.1.q"],
    }
    said = "NOT FINITE, first at qkv of layer 1, prompt of 1 token: not by the device, but by the weights: "
    assert f"{said}model.layers.1.q; 2 numbers were not judged" in as_text(report)
    assert "every op that could be judged is right" in as_text(report)
    assert f"{said}model.layers.1.q. What could" in as_page(report)
    assert "the weights make NaN or infinity, not the devices" in compare(report, report)
    assert verified(*RIGHT)["not_finite"] is None


def test_nan_of_sums_and_nan_of_the_device_are_told_apart() -> None:
    text = as_text(verified(*RIGHT, not_finite(1, "qkv")))
    assert "which are finite themselves but too large" in text
    report = verified(*RIGHT, found(0, "attn", np.nan), not_finite(1, "qkv"))
    assert report["first"]["op"] == "attn"
    assert "NOT FINITE from qkv of layer 1" in as_text(report)
    assert "not by the device" not in as_text(report)


def test_the_first_divergence_is_the_first_in_the_network() -> None:
    report = verified(found(None, "logits", 9), found(1, "qkv", 5), found(0, "down", 1), found(0, "attn", np.nan))
    assert not report["right"]
    assert (report["first"]["layer"], report["first"]["op"]) == (0, "attn")
    assert "DIVERGED, first at attn of layer 0" in as_text(report)
    json.dumps(report, allow_nan=False)
    assert network_order(found(None, "embed", 1)) < network_order(found(0, "input_ln", 1))


def test_a_recording_that_differs_is_a_divergence_and_a_rounding_is_not() -> None:
    case = "prompt of 1 token"
    report = verified(*RIGHT, differences=(Difference(case=case, what="logits of step 1", error=float("inf")),))
    assert not report["right"]
    assert "DIVERGED: the recording of" in as_text(report)
    report = verified(*RIGHT, differences=(Difference(case=case, what="logits of step 1", error=1e-6),))
    assert report["right"]
    assert "but for rounding" in as_text(report)


def test_the_page_is_one_well_formed_file_with_a_cell_for_every_number() -> None:
    report = verified(*RIGHT, found(1, "attn", 3.0))
    page = as_page(report)
    for outside in ("http:", "https:", "src=", "url(", "@import", "<script", "<link"):
        assert outside not in page
    assert "<model>" not in page
    assert "&lt;model&gt;" in page
    assert "&lt;because&gt; &amp; so" in page
    assert "&lt;text&gt;" in page
    pictures = [ET.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in page.split("<svg")[1:]]
    titles = [title.text for title in pictures[1].iter("title")]
    assert "layer 1, attn: 30" in titles
    assert "layer 0, attn: not run by itself" in titles
    red = [cell for cell in pictures[1].iter("rect") if cell.get("fill") == "#c62f3b"]
    assert len(red) == 1


def test_every_phase_of_a_layer_has_a_judge_and_a_place_in_reports() -> None:
    """Packed forms are recorded where there are matrix cores only."""
    assert set(JUDGES) == set(LAYER_OPS)
    assert len(set(LAYER_OPS)) == len(LAYER_OPS)
