"""Trials judge every variant of the catalog: right ones pass, and a kernel that does nothing never does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.gpu.op_bench import Bench

import build_shaders
from xinfer import ops
from xinfer.doctor.menu import SCALED_DOWN, trials_for
from xinfer.gpu.null import INFO, NullDevice
from xinfer.shaders.catalog import PACKED_COLUMNS, PACKED_ROWS, Variant, variants
from xinfer.trials.base import attempt
from xinfer.trials.bench import Bench as TrialBench
from xinfer.trials.linear import PackTrial

EVERYTHING = frozenset(name for variant in variants().values() for name in variant.needs) | {"subgroup_size_control"}


@pytest.fixture(scope="module")
def idle() -> NullDevice:
    """A device that has everything and runs nothing."""
    build_shaders.build()
    device = NullDevice()
    device.info = dataclasses.replace(INFO, features=EVERYTHING, max_shared_bytes=1 << 20)
    return device


@pytest.mark.parametrize("variant", variants().values(), ids=lambda variant: variant.id)
def test_every_variant_has_trials_that_run_it_and_fail_where_nothing_is_computed(
    idle: NullDevice, variant: Variant
) -> None:
    with ops.KernelSet(idle) as kernels:
        assert kernels.usable(variant.id)
        outcome = attempt(next(iter(trials_for(variant, SCALED_DOWN))), idle, kernels, variant.id)
    assert outcome.judgement is not None, f"{variant.id} is not what its trials run"
    assert not outcome.right


@pytest.mark.parametrize(
    "name",
    [
        *("rms_norm.wave", "rope_append.f16", "linear_gemv.bf16.t1.l64r1.norm.wave", "argmax.chunk", "argmax.pick"),
        *("attention.f16.tiled64_turn", "attention.combine", "attention.f32.plain", "pack_rows.wave", "embed.bf16"),
    ],
)
def test_right_kernels_pass(bench: Bench, name: str) -> None:
    if not bench.kernels.usable(name):
        pytest.skip(f"{bench.device.info.name} cannot run {name}")
    for trial in trials_for(variants()[name], dataclasses.replace(SCALED_DOWN, keys=100)):
        outcome = attempt(trial, bench.device, bench.kernels, name)
        assert outcome.right, f"{trial.shape}: {outcome}"


def test_rows_that_fill_their_tiles_have_no_padding_to_judge(bench: Bench) -> None:
    x = np.random.default_rng(0).standard_normal((PACKED_ROWS, PACKED_COLUMNS), np.float32)
    outcome = attempt(PackTrial(x=x), bench.device, bench.kernels, "pack_rows.plain")
    assert outcome.right, str(outcome)


def test_an_unknown_op_is_an_error() -> None:
    unknown = dataclasses.replace(variants()["add.plain"], op="rotate_everything")
    with pytest.raises(LookupError, match=r"doctor/menu\.py"):
        next(iter(trials_for(unknown, SCALED_DOWN)))


def test_what_is_written_outside_an_output_is_counted(bench: Bench) -> None:
    with TrialBench(bench.device, bench.kernels) as trial:
        out = trial.out(3, 5)
        whole = out.place.buffer
        recording = bench.device.create_recording("outside")
        recording.fill(whole[out.place.offset + 60 : out.place.offset + 64], 0)  # just behind the 15 floats
        recording.fill(whole[0:8], 0)
        recording.finish()
        bench.device.wait(bench.device.submit(recording))
        recording.release()
        assert np.isnan(out.read()).all()
        assert trial.n_outside == 3
