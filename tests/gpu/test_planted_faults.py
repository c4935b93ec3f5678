"""Planted kernel faults: `verify` names layer and op, `doctor` the variant, and the engine that heeds the quarantine
gives the right text.

Each fault is one changed line in one variant that a step or a prompt of the test's checkpoint uses; the op has another
variant to fall back on.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import CheckpointFactory
from tests.gpu.conftest import missing
from tests.gpu.planted import Copy, Fault, copy_with

import build_shaders
from xinfer import gpu
from xinfer.errors import DeviceError
from xinfer.model.synthetic import SyntheticSpec

# bf16 matrices, heads of 64, groups of queries and biases on everything that has one: what a Qwen2 has.
SPEC = SyntheticSpec(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=300,
    dtype="bfloat16",
)
CHECK = ("--device", "vulkan", "--tokens", "1", "--longest", "64")
STEP, TWO, EIGHT, SOME, MANY = (
    *("1 steps after 17", "prompt of 2 tokens", "prompt of 8 tokens"),
    *("prompt of 17 tokens", "prompt of 64 tokens"),
)
BIAS = "value += bias[constants.bias_offset + row];"
OTHER_HALF = "q[first + half_dim + i]"
ROW = "uint row = at.y, half_dim"
TILES = "attention_tiled.hlsl"
TURNED = "float2(low * turn.x - high * turn.y,"

FAULTS = [
    Fault("wrong RoPE pairing", STEP, "attn", OTHER_HALF, "q[first + (half_dim + i + 1) % constants.head_dim]", TILES),
    Fault("RoPE turns the other way", STEP, "attn", TURNED, TURNED.replace("-", "+"), "common.hlsli"),
    Fault("swapped KV head", MANY, "attn", "kv_head = head / (", "kv_head = constants.n_kv_heads - 1 - head / ("),
    Fault("missing bias", STEP, "qkv", BIAS, "value += 0.0;"),
    Fault("dropped residual", STEP, "o", "value += y[", "value += 0.0 * y["),
    Fault(
        "off by one at the row's tail", SOME, "qkv", "column < constants.columns;", "column + 1 < constants.columns;"
    ),
    Fault("wrong eps", SOME, "input_ln", "+ constants.eps)", "+ 1e3 * constants.eps)"),
    Fault(
        "missing barrier: half of the partial sums", EIGHT, "qkv", "part < n_parts; part++", "part < n_parts; part += 2"
    ),
    Fault(
        "no causal mask", EIGHT, "attn", "a_split, position + 1u)", "a_split, position + 2u)", file="attention.hlsli"
    ),
    Fault(
        "endless loop's stand-in: nothing is written",
        SOME,
        "append",
        ROW,
        f"if (constants.n_heads != 0u) return; {ROW}",
    ),
    Fault("NaN", TWO, "qkv", "value = total_of(set, n_parts, t, r);", "value = asfloat(0x7fc00000u);"),
    Fault("gate and up exchanged", STEP, "swiglu", "silu(value) * up", "silu(up) * value"),
    Fault("splits not divided by their weights", SOME, "attn", "1.0 / total", "1.0", only="combine"),
]


@pytest.fixture(scope="module", autouse=True)
def _needs_vulkan() -> None:
    try:
        info = gpu.choose_device("vulkan")
    except DeviceError as error:
        missing(str(error))
    if info is None or info.kind != "cpu":
        pytest.skip("the variants that the faults are planted in are those of the software driver")
    build_shaders.build()


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint(SPEC, seed=1)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    folder = tmp_path_factory.mktemp("healthy")
    return Copy(copy_with(None, folder), folder / "quarantine.json")


def generate(copy: Copy, model: Path, *, device: str = "vulkan", warned: str | None = None) -> list[int]:
    """Greedy tokens behind a prompt; the quarantined variant must be named once on stderr."""
    sampling = ("--max-tokens", "12", "--temperature", "0", "--ignore-eos")
    done = copy.run(
        "generate", "to be or not to be " * 6, "--model", str(model), "--device", device, *sampling, "--json"
    )
    assert done.stderr.count("in quarantine") == (warned is not None)
    assert warned is None or done.stderr.count(warned) == 1
    tokens: list[int] = json.loads(done.stdout)["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def right_tokens(healthy: Copy, model: Path) -> list[int]:
    tokens = generate(healthy, model)
    assert tokens == generate(healthy, model, device="cpu")
    return tokens


@pytest.fixture(scope="module")
def right_report(healthy: Copy, model: Path) -> dict[str, Any]:
    return healthy.report("verify", str(model), *CHECK, status=0)


def test_a_healthy_copy_is_right(right_report: dict[str, Any]) -> None:
    assert right_report["right"]
    assert right_report["first"] is None
    assert right_report["recordings"] == []
    assert right_report["debug_layer"]["messages"] == []


@pytest.mark.parametrize("planned", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_and_avoided(
    planned: Fault, tmp_path: Path, model: Path, right_report: dict[str, Any], right_tokens: list[int]
) -> None:
    fault = planned.on(right_report)
    copy = Copy(copy_with(fault, tmp_path), tmp_path / "quarantine.json")

    report = copy.report("verify", str(model), *CHECK, status=1)
    first = report["first"]
    assert (first["op"], first["layer"]) == (fault.op, 0)
    assert fault.variant in first["variants"]
    diagnosis = report["divergences"][0]
    assert diagnosis["culprits"] == [fault.variant]
    assert all(fault.variant in entry["variants"] for entry in report["divergences"])
    alone = {entry["variant"]: entry["right"] for entry in diagnosis["alone"][0]["variants"]}
    assert alone.pop(fault.variant) is False
    assert all(alone.values())
    assert f"{fault.variant} is " in diagnosis["verdict"]

    examined = copy.report("doctor", "--device", "vulkan", "--only", fault.variant, status=1)
    (entry,) = examined["adapters"][0]["variants"]
    assert (entry["variant"], entry["outcome"]) == (fault.variant, "wrong")
    assert examined["adapters"][0]["quarantined"] == [fault.variant]

    assert generate(copy, model, warned=fault.variant) == right_tokens
    verified = copy.report("verify", str(model), *CHECK, status=0)
    assert verified["quarantine"] == [fault.variant]


def test_a_fault_that_only_a_grown_cache_would_show_is_found(
    healthy: Copy, tmp_path: Path, checkpoint: CheckpointFactory
) -> None:
    """Behind thousands of keys another kernel of attention is used; verify comes to it with a small cache."""
    model = checkpoint(dataclasses.replace(SPEC, max_position_embeddings=16_384))
    check = ("--device", "vulkan", "--tokens", "1", "--longest", "17")
    report = healthy.report("verify", str(model), *check, status=0)
    case = f"{STEP}, full context of 16,384"
    fault = Fault("RoPE turns the other way", case, "attn", TURNED, TURNED.replace("-", "+"), "common.hlsli").on(report)
    short = {name for entry in report["errors"]["by_case"][:-1] for name in entry["variants"]["attn"]}
    assert fault.variant not in short
    copy = Copy(copy_with(fault, tmp_path), tmp_path / "quarantine.json")
    first = copy.report("verify", str(model), *check, status=1)["first"]
    assert (first["case"], first["op"], first["layer"]) == (case, "attn", 0)
    assert first["variants"] == [fault.variant]


def test_doctor_blames_no_other_variant_of_the_op(tmp_path: Path, right_report: dict[str, Any]) -> None:
    """All of rms_norm's variants, one of them faulty; then the faulty one is mended, and its entry is lifted."""
    fault = next(fault for fault in FAULTS if fault.name == "wrong eps").on(right_report)
    assert fault.variant == "rms_norm.wave"
    copy = Copy(copy_with(fault, tmp_path), tmp_path / "quarantine.json")
    report = copy.report("doctor", "--device", "vulkan", "--only", "rms_norm.*", status=1)
    outcomes = {entry["variant"]: entry["outcome"] for entry in report["adapters"][0]["variants"]}
    assert outcomes == {"rms_norm.plain": "right", "rms_norm.wave": "wrong"}

    mended = Copy(copy_with(None, tmp_path / "mended"), copy.quarantine)
    report = mended.report("doctor", "--device", "vulkan", "--only", "rms_norm.*", status=0)
    assert report["adapters"][0]["lifted"] == ["rms_norm.wave"]
    assert report["adapters"][0]["quarantined"] == []
