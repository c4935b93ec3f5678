"""The catalog of shaders against the SPIR-V that was built from it, and against common.hlsli; no GPU needed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import build_shaders
import spirv
from xinfer import ops, shaders
from xinfer.errors import DeviceError
from xinfer.gpu.api import MAX_BUFFERS, MAX_CONSTANTS
from xinfer.ops import _argmax as argmax
from xinfer.ops import _attention as attention
from xinfer.ops import _base as base
from xinfer.ops import _elementwise as elementwise
from xinfer.ops import _linear as linear
from xinfer.ops import _packed as packed
from xinfer.ops import _sample as sample
from xinfer.shaders import catalog
from xinfer.shaders.catalog import Variant, variants

ALL = list(variants().values())
SHADER, GROUP_NON_UNIFORM, GROUP_ARITHMETIC = 1, 61, 63
# What a device may be without: a variant that uses more says so in `needs`.
CAPABILITIES = {
    "subgroup_arithmetic": {GROUP_NON_UNIFORM, GROUP_ARITHMETIC},
    "coop_matrix": {6022, GROUP_NON_UNIFORM},  # CooperativeMatrixKHR
    "memory_model": {5345, 5346},  # VulkanMemoryModel, and its device scope
    "subgroup_shuffle": {65},
    "float16": {9},
}
# Guaranteed by every Vulkan device.
PLAIN_LANES, PLAIN_SHARED = 128, 16_384


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build_shaders.build()


@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.id)
def test_catalog_says_what_the_spirv_says(variant: Variant) -> None:
    found = spirv.interface(shaders.load(variant.id).spirv)
    assert found.bindings == tuple(range(variant.n_buffers))
    assert found.sets == {0}
    assert found.constant_dwords == variant.n_constants
    assert found.workgroup == variant.workgroup
    assert found.shared_bytes == variant.shared_bytes
    assert variant.n_buffers <= MAX_BUFFERS
    assert variant.n_constants <= MAX_CONSTANTS
    allowed = {SHADER}.union(*(CAPABILITIES.get(need, set()) for need in variant.needs))
    assert found.capabilities <= allowed


def test_every_op_has_a_plain_variant_for_every_device() -> None:
    def plain(variant: Variant) -> bool:
        lanes = variant.workgroup[0] * variant.workgroup[1] * variant.workgroup[2]
        return not variant.needs and lanes <= PLAIN_LANES and variant.shared_bytes <= PLAIN_SHARED

    by_op: dict[str, list[bool]] = {}
    for variant in ALL:
        by_op.setdefault(variant.op, []).append(plain(variant) and variant.profile == catalog.SPIRV_1_3)
    assert all(found[0] for found in by_op.values()), "the first variant of an op is the plain one"
    for weight_format in catalog.FORMATS:
        for op in ("linear_gemv", "linear_gemm"):
            assert plain(variants()[f"{op}.{weight_format}.plain"])


def test_ids_are_file_names() -> None:
    assert all(re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", variant.id) for variant in ALL)


def test_constants_are_those_of_the_source() -> None:
    """The names and their order, read off the struct in the text."""
    for variant in ALL:
        text = (shaders.SOURCES / variant.source).read_text()
        for include in re.findall(r'#include "(\w+\.hlsli)"', text):
            text += (shaders.SOURCES / include).read_text()
        structs = re.findall(r"struct Constants \{(.*?)\};", text, re.DOTALL)
        names = [tuple(re.findall(r"(?:uint|float) (\w+);", struct)) for struct in structs]
        assert variant.constants in names, variant.id


def test_numbers_are_those_of_common_hlsli() -> None:
    text = "".join(path.read_text() for path in sorted(shaders.SOURCES.glob("*.hlsl*")))
    defines = dict(re.findall(r"#define (\w+) (\w+)", text))

    def value(name: str) -> int:
        return int(defines[name].rstrip("u"), 0)

    assert value("STATE_WORDS") == catalog.STATE_WORDS
    assert value("BLOCK_TOKENS") == catalog.BLOCK_TOKENS
    assert value("DIM_MAX") == catalog.ATTENTION_DIM_MAX
    assert value("SPLITS_MAX") == catalog.ATTENTION_SPLITS_MAX
    assert value("TILED_SPLITS_MAX") == catalog.ATTENTION_TILED_SPLITS_MAX
    assert value("MIN_SPLIT") == catalog.ATTENTION_TILED_SPLIT_KEYS
    assert value("TILED_ROWS_MAX") == catalog.ATTENTION_TILED_ROWS_MAX
    assert value("HEADS") == catalog.ATTENTION_HEADS_A_LOAD
    assert value("UNUSED_ROW") == ops.UNUSED_POSITION
    assert value("BAD_TOKEN") == ops.BAD_TOKEN
    assert value("FLAG_NOT_FINITE") == ops.FLAG_NOT_FINITE
    assert (value("FLAG_BIAS"), value("FLAG_ACCUMULATE")) == (linear.FLAG_BIAS, linear.FLAG_ACCUMULATE)
    assert {name: value(name.upper()) for name in catalog.FORMATS} == catalog.FORMATS
    assert value("PARAM_WORDS") == catalog.SAMPLE_PARAM_WORDS
    assert value("CHUNKS_MAX") == catalog.SAMPLE_CHUNKS_MAX
    assert value("CANDIDATES_MAX") == catalog.SAMPLE_CANDIDATES_MAX
    assert value("WEIGHT_BITS") == sample.WEIGHT_BITS
    options = [value(f"OPTION_{name}") for name in ("PENALTIES", "BIAS", "GREEDY", "SLOW")]
    assert options == [sample.OPTION_PENALTIES, sample.OPTION_BIAS, sample.OPTION_GREEDY, sample.OPTION_SLOW]
    for number, field in enumerate(base.STATE_FIELDS):
        assert value(f"STATE_{field.upper()}") == number


def test_a_flag_is_defined_in_one_file() -> None:
    places: dict[str, list[str]] = {}
    for path in (*shaders.SOURCES.glob("*.hlsl*"), *shaders.SOURCES.glob("*.slang")):
        for name in re.findall(r"#define (FLAG_\w+)", path.read_text()):
            places.setdefault(name, []).append(path.name)
    assert places == {
        "FLAG_BIAS": ["linear.hlsli"],
        "FLAG_ACCUMULATE": ["linear.hlsli"],
        "FLAG_NOT_FINITE": ["common.hlsli"],
    }


def test_a_row_of_state_survives_packing() -> None:
    row = ops.RowState(token=1, position=2, sequence=3, steps=4, flags=5, bad_step=6)
    assert len(row.pack()) == ops.STATE_BYTES
    assert ops.RowState.unpack(row.pack()) == row


def test_a_row_stride_holds_its_row() -> None:
    assert [ops.row_stride(n, "f16") for n in (1, 8, 9, 896)] == [16, 16, 32, 1792]
    assert ops.row_stride(5, "f32") == 32


# --- loops: lavapipe ends a lane's after 65,535 iterations in all, silently -----------------------------------------

HIDDEN, INTERMEDIATE, VOCABULARY, CONTEXT = 8192, 29_696, 152_064, 131_072  # the largest of Qwen2


@pytest.mark.parametrize("variant", ALL, ids=lambda variant: variant.id)
def test_no_lane_loops_too_long(variant: Variant) -> None:
    match variant.op:
        case "linear_gemv":
            trips = linear.gemv_trips(variant.id, columns=INTERMEDIATE)
        case "linear_gemm" if variant.source.endswith(".slang"):
            trips = packed.packed_trips(columns=INTERMEDIATE)
        case "sum_parts":
            trips = packed.MOST_PARTS
        case "pack_rows":
            trips = packed.pack_trips(variant.id, width=INTERMEDIATE)
        case "linear_gemm":
            trips = linear.gemm_trips(variant.id, columns=INTERMEDIATE)
        case "rms_norm":
            trips = elementwise.rms_norm_trips(variant.id, width=HIDDEN)
        case "argmax":
            trips = argmax.argmax_trips(n_valid=VOCABULARY)
        case "sample":
            trips = sample.sample_trips(variant.id, vocab=VOCABULARY)
        case "attention" if ".combine" in variant.id:
            trips = attention.combine_trips(head_dim=256, n_splits=catalog.ATTENTION_SPLITS_MAX)
        case "attention":
            splits = catalog.ATTENTION_SPLITS_MAX
            trips = attention.attention_trips(variant.id, head_dim=128, max_keys=CONTEXT, n_splits=splits)
        case _:
            assert "for (" not in (shaders.SOURCES / variant.source).read_text().replace("UNROLL for (", "")
            trips = 0
    assert trips < base.MAX_TRIPS


# --- what is built, and what is stale -------------------------------------------------------------------------------


@pytest.fixture
def binaries(tmp_path: Path) -> Iterator[Path]:
    """A copy of _bin."""
    shutil.copytree(shaders.BINARIES, tmp_path / "_bin")
    yield tmp_path / "_bin"
    shaders.load.cache_clear()


def test_nothing_is_stale_after_a_build() -> None:
    assert build_shaders.stale() == []
    assert build_shaders.build() == 0


def test_missing_binaries_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"shaders are missing.*run `python tools/build_shaders.py`"):
        shaders.load("add.plain", binaries=tmp_path)


def test_a_stale_or_damaged_binary_is_refused_and_rebuilt(binaries: Path) -> None:
    good = shaders.load("add.plain", binaries=binaries).spirv
    path = binaries / "add.plain.spv"
    path.write_bytes(good[:-4])
    shaders.load.cache_clear()
    with pytest.raises(DeviceError, match="not the one that was built"):
        shaders.load("add.plain", binaries=binaries)
    assert [variant.id for variant in build_shaders.stale(binaries)] == ["add.plain"]
    assert build_shaders.build(binaries) == 1
    assert path.read_bytes() == good
    path.unlink()
    with pytest.raises(DeviceError, match="is missing: run"):
        shaders.load("add.plain", binaries=binaries)


def test_a_changed_source_is_stale(binaries: Path) -> None:
    manifest = json.loads((binaries / shaders.MANIFEST).read_text())
    manifest["variants"]["add.plain"]["source"] = "of yesterday"
    (binaries / shaders.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DeviceError, match=r"'add.plain' is older than its source add.hlsl"):
        shaders.load("add.plain", binaries=binaries)
    assert [variant.id for variant in build_shaders.stale(binaries)] == ["add.plain"]


def test_hashes_follow_source_includes_and_defines(tmp_path: Path) -> None:
    for path in shaders.SOURCES.glob("*.*sl*"):
        shutil.copy(path, tmp_path)
    before = {variant.id: shaders.source_hash(variant, tmp_path) for variant in ALL}
    assert len(set(before.values())) == len(ALL)
    (tmp_path / "add.hlsl").write_text((tmp_path / "add.hlsl").read_text() + "\n")
    changed = {variant.id for variant in ALL if shaders.source_hash(variant, tmp_path) != before[variant.id]}
    assert changed == {"add.plain"}
    (tmp_path / "common.hlsli").write_text((tmp_path / "common.hlsli").read_text() + "\n")
    assert all(shaders.source_hash(variant, tmp_path) != before[variant.id] for variant in ALL)


@pytest.mark.skipif(shutil.which("spirv-val") is None, reason="spirv-val (package spirv-tools) is not installed")
def test_the_validator_accepts_every_module() -> None:
    for variant in ALL:
        if "coop_matrix" in variant.needs:
            continue  # Debian 12's validator is older than SPV_KHR_cooperative_matrix
        environment = "vulkan1.1" if variant.profile == catalog.SPIRV_1_3 else "vulkan1.3"
        path = shaders.BINARIES / f"{variant.id}.spv"
        result = subprocess.run(["spirv-val", "--target-env", environment, path], capture_output=True, text=True)
        assert result.returncode == 0, f"{variant.id}: {result.stderr}"


def test_debug_information_is_gone() -> None:
    for variant in ALL:
        code = spirv.words(shaders.load(variant.id).spirv)
        assert not any(opcode in spirv.DEBUG_OPS for opcode, _ in spirv.instructions(code))


@pytest.mark.parametrize("variant", variants().values(), ids=lambda variant: variant.id)
def test_steering_buffers_are_those_of_the_source(variant: Variant) -> None:
    """Direct3D 12 binds them by another kind of register: the root signature and the shader have to agree."""
    text = (shaders.SOURCES / variant.source).read_text(encoding="utf-8")
    found = {(name, int(slot)) for name, slot in re.findall(r"\bSTEERING\(\w+, (\w+), (\d+)\)", text)}
    assert found == {(name, variant.buffers.index(name)) for name in variant.steering}
