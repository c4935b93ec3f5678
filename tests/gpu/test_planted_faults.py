"""Planted kernel faults: `verify` names layer and op, `doctor` the variant, and the engine that heeds the quarantine
gives the right text.

Each fault is one changed line in one variant that a step or a prompt of the test's checkpoint uses; the op has another
variant to fall back on.
"""

from __future__ import annotations

from pathlib import Path

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
STEP_QKV = "linear_gemv.bf16.t1.l64r1.norm.wave"
STEP_PRODUCT = "linear_gemv.bf16.t1.l64r1.wave"
STEP_ATTENTION = "attention.f16.tiled64_turn"
TURNED = "return d < half_dim ? a * turn.x - b * turn.y : b * turn.x + a * turn.y;"

FAULTS = [
    Fault(
        "wrong RoPE pairing",
        STEP_ATTENTION,
        "q[first + half_dim + i]",
        "q[first + (half_dim + i + 1) % constants.head_dim]",
        "attn",
    ),
    Fault("RoPE turns the other way", STEP_ATTENTION, TURNED, TURNED.replace("- b", "+ b"), "attn"),
    Fault(
        "swapped KV head",
        "attention.f16.prefill64",
        "uint kv_head = head / (",
        "uint kv_head = constants.n_kv_heads - 1 - head / (",
        "attn",
    ),
    Fault("missing bias", STEP_QKV, "value += bias[constants.bias_offset + row];", "value += 0.0;", "qkv"),
    Fault(
        "dropped residual",
        STEP_PRODUCT,
        "value += y[constants.y_offset + t",
        "value += 0.0 * y[constants.y_offset + t",
        "o",
    ),
    Fault(
        "off by one at the row's tail",
        "linear_gemm.bf16.plain",
        "column < constants.columns;",
        "column + 1 < constants.columns;",
        "qkv",
    ),
    Fault("wrong eps", "rms_norm.wave", "+ constants.eps)", "+ 1e3 * constants.eps)", "input_ln"),
    Fault(
        "missing barrier: half of the partial sums",
        "linear_gemv.bf16.t8.l32r2.wave",
        "for (uint part = 0; part < n_parts; part++)",
        "for (uint part = 0; part < n_parts; part += 2)",
        "qkv",
    ),
    Fault(
        "no causal mask",
        "attention.f16.tiled64",
        "a_split, position + 1u);",
        "a_split, position + 2u);",
        "attn",
        file="attention.hlsli",
    ),
    Fault(
        "an endless loop's stand-in: nothing is written",
        "rope_append.f16",
        "uint row = at.y, half_dim",
        "if (constants.n_heads != 0u) return;\n    uint row = at.y, half_dim",
        "append",
    ),
    Fault(
        "splits weighed as if they were alike",
        "attention.combine",
        "exp(weights[s2] - largest)",
        "1.0",
        "attn",
    ),
    Fault(
        "NaN",
        "linear_gemv.bf16.t4.l32r2.wave",
        "float value = total_of(set, n_parts, t, r);",
        "float value = total_of(set, n_parts, t, r) * asfloat(0x7fc00000u);",
        "qkv",
    ),
    Fault(
        "gate and up exchanged",
        "linear_gemv.bf16.t1.l32r1.norm.swiglu.wave",
        "value = silu(value) * up;",
        "value = silu(up) * value;",
        "swiglu",
    ),
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


def generate(copy: Copy, model: Path) -> list[int]:
    """Greedy tokens of a prompt that runs through every kind of pass."""
    arguments = ("generate", "to be or not to be " * 6, "--model", str(model), "--device", "vulkan")
    report = copy.report(*arguments, "--max-tokens", "12", "--temperature", "0", "--ignore-eos", status=0)
    tokens: list[int] = report["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def right_tokens(healthy: Copy, model: Path) -> list[int]:
    tokens = generate(healthy, model)
    cpu = healthy.report(
        *("generate", "to be or not to be " * 6, "--model", str(model), "--device", "cpu"),
        *("--max-tokens", "12", "--temperature", "0", "--ignore-eos"),
        status=0,
    )
    assert tokens == cpu["token_ids"]
    return tokens


def test_a_healthy_copy_is_right(healthy: Copy, model: Path) -> None:
    report = healthy.report("verify", str(model), "--device", "vulkan", "--tokens", "2", status=0)
    assert report["right"]
    assert report["first"] is None
    assert report["recordings"] == []
    used = {name for case in report["errors"]["by_case"] for names in case["variants"].values() for name in names}
    assert {fault.variant for fault in FAULTS if fault.variant != "rope_append.f16"} <= used
    assert report["debug_layer"]["messages"] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_and_avoided(fault: Fault, tmp_path: Path, model: Path, right_tokens: list[int]) -> None:
    copy = Copy(copy_with(fault, tmp_path), tmp_path / "quarantine.json")

    report = copy.report("verify", str(model), "--device", "vulkan", "--tokens", "2", status=1)
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

    done = copy.run("generate", "x", "--model", str(model), "--device", "vulkan", "--max-tokens", "1")
    assert done.stderr.count(fault.variant) == 1
    assert generate(copy, model) == right_tokens
    verified = copy.report("verify", str(model), "--device", "vulkan", "--tokens", "2", status=0)
    assert verified["quarantine"] == [fault.variant]


def test_doctor_blames_no_other_variant_of_the_op(tmp_path: Path) -> None:
    """All of rms_norm's variants, one of them faulty; then the faulty one is mended, and its entry is lifted."""
    fault = next(fault for fault in FAULTS if fault.variant == "rms_norm.wave")
    copy = Copy(copy_with(fault, tmp_path), tmp_path / "quarantine.json")
    report = copy.report("doctor", "--device", "vulkan", "--only", "rms_norm.*", status=1)
    outcomes = {entry["variant"]: entry["outcome"] for entry in report["adapters"][0]["variants"]}
    assert outcomes == {"rms_norm.plain": "right", "rms_norm.wave": "wrong"}

    mended = Copy(copy_with(None, tmp_path / "mended"), copy.quarantine)
    report = mended.report("doctor", "--device", "vulkan", "--only", "rms_norm.*", status=0)
    assert report["adapters"][0]["lifted"] == ["rms_norm.wave"]
    assert report["adapters"][0]["quarantined"] == []
