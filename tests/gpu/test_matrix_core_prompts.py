"""Prompts as devices with matrix cores read them, packed rows and all: with emulated fragments where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import CheckpointFactory
from tests.gpu import emulated
from tests.gpu.op_bench import Array

import build_shaders
from xinfer import ops, shaders
from xinfer.gpu.api import Device, KernelCode
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.model.reference import ReferenceModel
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights
from xinfer.ops import _attention, _base, _packed
from xinfer.shaders.catalog import MATRIX_CORE_NEEDS, variants
from xinfer.trials import base as trials_base
from xinfer.trials import linear as trials_linear
from xinfer.verify.run import verify

# Packed columns have padding; the down projection's sum is long enough to be divided.
SPEC = SyntheticSpec(
    hidden_size=72,
    intermediate_size=2056,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    dtype="float16",
)
N_TOKENS = 41


@pytest.fixture
def cores(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog as the device can run it."""
    build_shaders.build()
    if device.info.api != "vulkan":
        pytest.skip("matrix cores are reached through Slang, which makes SPIR-V only")
    known = dict(variants())
    if not device.info.features >= MATRIX_CORE_NEEDS:
        small = [v for v in known.values() if "coop64" in v.id and ".bf16." not in v.id]
        plain = {variant.id: emulated.emulated(variant) for variant in small}
        known |= plain
        load = shaders.load

        def load_plain(variant_id: str) -> KernelCode:
            return emulated.code(plain[variant_id]) if variant_id in plain else load(variant_id)

        monkeypatch.setattr(shaders, "load", load_plain)
        for module in (_attention, _base, _packed, trials_base, trials_linear):
            monkeypatch.setattr(module, "variants", lambda: known)


def logits(folder: Path, device: Device, ids: Any, *, exact: bool) -> tuple[Array, set[str]]:
    """All logits, and the kernels that were used."""
    with ModelWeights.open(folder) as weights, QwenModel.load(weights, device, ModelOptions(exact=exact)) as model:
        model._chunk = N_TOKENS
        found = model.forward(ids)
        return found, set(model.steps.kernels._kernels)


@pytest.mark.usefixtures("cores")
def test_prompts_agree_with_the_reference(device: Device, checkpoint: CheckpointFactory) -> None:
    folder = checkpoint(SPEC)
    ids = np.random.default_rng(7).integers(0, SPEC.vocab_size, N_TOKENS)
    with ModelWeights.open(folder) as weights:
        oracle = ReferenceModel(weights, keep=True)
        expected = oracle.forward(ids)
    errors = {}
    for exact, form in ((True, "split"), (False, "half")):
        found, used = logits(folder, device, ids, exact=exact)
        assert {f"linear_gemm.f16.coop64.{form}", f"attention.f16.coop64.{form}"} <= used
        assert f"linear_gemm.f16.coop64.{form}.swiglu" in used
        for packing in ("norm", "fours"):
            assert any(name.startswith(f"pack_rows.{packing}.") for name in used)
        errors[form] = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert errors["half"] < 2e-3, errors
    assert errors["split"] < 0.7 * errors["half"], errors  # what is left of it is the f16 cache's


@pytest.mark.usefixtures("cores")
def test_verify_judges_packed_phases(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And names the one that is wrong."""
    folder, selector = checkpoint(SPEC), f"{device.info.api}:{device.info.index}"
    report = verify(folder, device=selector, n_steps=1, longest=17)
    assert report["right"], report["first"]
    assert {"input_ln_pack", "post_ln_pack", "swiglu", "pack"} <= set(report["errors"]["ops"])
    pack_rows = _packed.pack_rows

    def louder(on: Any, x: Any, packed: Any, **options: Any) -> None:
        if options.get("norm") and options["label"].startswith("layers.1.post"):
            options["norm"] = (options["norm"][0], 0.5)  # another eps
        pack_rows(on, x, packed, **options)

    monkeypatch.setattr(ops, "pack_rows", louder)
    report = verify(folder, device=selector, n_steps=1, longest=17)
    assert (report["first"]["op"], report["first"]["layer"]) == ("post_ln_pack", 1)


@pytest.mark.usefixtures("cores")
def test_without_the_gated_product(device: Device, checkpoint: CheckpointFactory) -> None:
    """Gate and up are then two products, and silu(gate) * up is packed in one op; verify judges these, too."""
    folder = checkpoint(SPEC)
    ids = np.random.default_rng(7).integers(0, SPEC.vocab_size, N_TOKENS)
    gated = [name for name in variants() if "coop" in name and name.endswith(".swiglu")]
    found = {}
    for quarantine in ([], gated):
        with (
            ModelWeights.open(folder) as weights,
            QwenModel.load(weights, device, quarantine=quarantine) as model,
        ):
            model._chunk = N_TOKENS
            found[bool(quarantine)] = model.forward(ids)
            used = set(model.steps.kernels._kernels)
        assert any(name.startswith("pack_rows.swiglu.") for name in used) == bool(quarantine)
    assert float(np.linalg.norm(found[True] - found[False]) / np.linalg.norm(found[False])) < 1e-3
