"""A whole layer in one dispatch: each phase against the reference, and the phases with barriers between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer.choice import Choice
from xinfer.gpu.api import Device
from xinfer.gpu_model import QwenModel
from xinfer.gpu_model.tuning import LayerChoice, Tuning
from xinfer.model.weights import ModelWeights
from xinfer.ops import KernelSet, proofs
from xinfer.shaders.catalog import variants
from xinfer.trials.base import attempt
from xinfer.trials.bench import DTYPES
from xinfer.trials.layer import LayerTrial, LayerValues

VARIANTS = [variant.id for variant in variants().values() if variant.op == "decode_layer"]
SMALL = "decode_layer.f16.cache_f16.dim64.heads2.l256r4u4"


def layer_trial(
    variant: str,
    *,
    hidden: int = 72,
    inner: int = 104,
    heads: tuple[int, int] = (6, 2),
    dim: int = 16,
    n_keys: int = 45,
    seed: int = 0,
    **options: Any,
) -> LayerTrial:
    """A layer of random numbers for a variant's formats."""
    rng = np.random.default_rng([seed, hidden, inner, dim])
    _, form, cache = variant.split(".")[:3]
    cache_format: Any = cache.removeprefix("cache_")
    q_size, kv_size = heads[0] * dim, heads[1] * dim

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns), np.float32) / np.sqrt(columns)).astype(DTYPES[form])

    def vector(n: int) -> Any:
        return 1 + rng.standard_normal(n, np.float32) / 4

    k, v = (rng.standard_normal((n_keys, heads[1], dim), np.float32) for _ in range(2))
    angles = rng.uniform(-3, 3, (n_keys + 1, dim // 2)).astype(np.float32)
    return LayerTrial(
        x=rng.standard_normal((1, hidden), np.float32),
        w=LayerValues(
            input_ln=vector(hidden),
            qkv=matrix(q_size + 2 * kv_size, hidden),
            qkv_b=vector(q_size + 2 * kv_size),
            o=matrix(hidden, q_size),
            post_ln=vector(hidden),
            gate=matrix(inner, hidden),
            up=matrix(inner, hidden),
            down=matrix(hidden, inner),
        ),
        inner=inner,
        k=k.astype(DTYPES[cache_format]).astype(np.float32),
        v=v.astype(DTYPES[cache_format]).astype(np.float32),
        cos=np.cos(angles),
        sin=np.sin(angles),
        eps=1e-5,
        format=form,  # type: ignore[arg-type]
        cache_format=cache_format,
        **options,
    )


def check(device: Device, kernels: KernelSet, trial: LayerTrial, variant: str) -> None:
    if not KernelSet(device, proved=proofs([variant])).usable(variant):
        pytest.skip(f"{device.info.name} lacks what {variant} needs")
    outcome = attempt(trial, device, kernels, variant, timeout_s=300)
    assert outcome.right, str(outcome)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_right(device: Device, shared_kernels: KernelSet, variant: str) -> None:
    dim = 64 if ".dim64." in variant else 128
    check(device, shared_kernels, layer_trial(variant, dim=dim, heads=(3, 1), n_keys=140, n_groups=1), variant)


@pytest.mark.soak
def test_every_variant_is_right_where_a_workgroup_may_have_512_lanes(run_with_subgroups: Callable[..., str]) -> None:
    """In waves of 16: of 8 the software driver takes 32 a workgroup at most."""
    arguments = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/gpu/test_decode_layer.py",
        "-k",
        "is_right and not where",
    )
    assert " passed" in run_with_subgroups(16, *arguments, timeout_s=1800)


@pytest.mark.parametrize(
    "options",
    [
        {"n_keys": 0},
        {"n_keys": 200, "n_splits": 2},
        {"n_keys": 200, "window": 70},
        {"hidden": 1048, "inner": 40, "dim": 8, "heads": (1, 1)},  # a row of several waves
        {"hidden": 16, "inner": 5400, "dim": 8, "heads": (2, 1)},  # blocks of rows, and x in chunks
        {"heads": (14, 2), "dim": 40},
    ],
    ids=str,
)
def test_sizes_that_fill_nothing(device: Device, shared_kernels: KernelSet, options: dict[str, Any]) -> None:
    check(device, shared_kernels, layer_trial(SMALL, n_groups=1, **options), SMALL)


def attempts(device: Device, kernels: KernelSet, trial: LayerTrial, n: int) -> str:
    """How the first try ends whose barriers were not given up: two threads need not run at the same time."""
    for _ in range(n):
        outcome = attempt(trial, device, kernels, SMALL, timeout_s=300)
        if outcome.right or outcome.what != "barriers given up":
            return str(outcome) if not outcome.right else ""
    return f"the barriers were given up {n} times"


def test_workgroups_wait_for_one_another(device: Device, shared_kernels: KernelSet) -> None:
    """Two at a time: the software driver runs as many as it has threads."""
    if not KernelSet(device, proved=proofs([SMALL])).usable(SMALL):
        pytest.skip(f"{device.info.name} lacks what {SMALL} needs")
    if device.info.kind == "cpu" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the software driver needs two cores for two workgroups")
    said = attempts(device, shared_kernels, layer_trial(SMALL, n_keys=300, n_groups=2), 30)
    assert not said, said


# --- within a model -------------------------------------------------------------------------------------------------


PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32]


@pytest.fixture
def model(device: Device, checkpoint: CheckpointFactory) -> Iterator[QwenModel]:
    """A tiny one whose decode steps can run a layer in one dispatch."""
    if not KernelSet(device, proved=proofs([SMALL])).usable(SMALL):
        pytest.skip(f"{device.info.name} lacks what {SMALL} needs")
    build_shaders.build()
    with ModelWeights.open(checkpoint("f16")) as weights, QwenModel.load(weights, device) as loaded:
        yield loaded


def continuation(model: QwenModel, n: int, prompt: list[int] = PROMPT, **choice: Any) -> list[int]:
    return answered(model, n, prompt, **choice)[0]


def answered(model: QwenModel, n: int, prompt: list[int], **choice: Any) -> tuple[list[int], bytes]:
    """The tokens, and the bits of the logits behind them."""
    cache = model.make_cache(100)
    model.extend(prompt[:-1], cache)
    how = Choice(n_valid=model.config.vocab_size, **choice)
    found = list(model.choose(prompt[-1], cache, how, limit=n))
    assert bool(how.tally.guessed) == bool(how.speculate)
    return found, model.forward([7], cache, last_only=True).tobytes()


def last_logits(model: QwenModel) -> Any:
    cache = model.make_cache(100)
    model.extend(PROMPT[:-1], cache)
    return model.forward(PROMPT[-1:], cache, last_only=True)


def test_a_model_whose_layers_are_one_dispatch_each_answers_as_before(model: QwenModel) -> None:
    expected, logits = continuation(model, 20), last_logits(model)
    assert model.steps.network().layer_plan is None, "nobody has proved it, and the GPU is on no list"
    model.tune(Tuning(layer=LayerChoice(SMALL, 1)))
    assert model.steps.network().layer_plan is not None
    found = last_logits(model)
    assert np.linalg.norm(found - logits) < 1e-5 * np.linalg.norm(logits)
    assert not np.array_equal(found, logits), "the same kernels ran"
    assert continuation(model, 20) == expected
    twice = answered(model, 20, PROMPT * 2)  # what follows has stood there before, and is guessed
    assert answered(model, 20, PROMPT * 2, speculate=3) == twice
    assert model.given_up == []


def test_a_step_whose_barriers_are_given_up_is_run_again_without(
    model: QwenModel, caplog: pytest.LogCaptureFixture
) -> None:
    """More workgroups than there are threads: they wait for those that cannot start. Steps are queued behind, too."""
    if model.device.info.kind != "cpu":
        pytest.skip("only a software driver runs fewer workgroups than these at a time")
    expected, logits = continuation(model, 12), last_logits(model)
    many = Tuning(layer=LayerChoice(SMALL, 4 * (os.cpu_count() or 1)))
    model.tune(many)
    assert continuation(model, 12) == expected
    assert model.given_up == [SMALL]
    assert len([record for record in caplog.records if "did not all run" in record.message]) == 1
    model.steps.kernels.quarantine = frozenset()  # once more, by the other way to a token
    model.tune(many)
    assert np.array_equal(last_logits(model), logits)
    assert model.given_up == [SMALL, SMALL]
    assert continuation(model, 12) == expected
