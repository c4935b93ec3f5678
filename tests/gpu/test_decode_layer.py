"""A whole layer in one dispatch: each phase against the reference, and the phases with barriers between them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from xinfer.gpu.api import Device
from xinfer.ops import KernelSet
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
    if not KernelSet(device, proved=[variant]).usable(variant):
        pytest.skip(f"{device.info.name} lacks what {variant} needs")
    outcome = attempt(trial, device, kernels, variant, timeout_s=300)
    assert outcome.right, str(outcome)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_right(device: Device, shared_kernels: KernelSet, variant: str) -> None:
    dim = 64 if ".dim64." in variant else 128
    check(device, shared_kernels, layer_trial(variant, dim=dim, heads=(3, 1), n_keys=140, n_groups=1), variant)


@pytest.mark.parametrize(
    "options",
    [
        {"n_keys": 0},
        {"n_keys": 200, "n_splits": 2},
        {"n_keys": 200, "window": 70},
        {"hidden": 1048, "inner": 40, "dim": 8, "heads": (1, 1)},  # a row of several waves
        {"hidden": 16, "inner": 5400, "dim": 8, "heads": (2, 1)},  # blocks of rows, and x in chunks
        {"heads": (14, 2), "dim": 40},
        {"ahead": False},
    ],
    ids=str,
)
def test_sizes_that_fill_nothing(device: Device, shared_kernels: KernelSet, options: dict[str, Any]) -> None:
    check(device, shared_kernels, layer_trial(SMALL, n_groups=1, **options), SMALL)


def attempts(device: Device, kernels: KernelSet, trial: LayerTrial, n: int) -> str:
    """How the first of `n` tries ends whose barriers were not given up: the driver's two threads may not run at once."""
    for _ in range(n):
        outcome = attempt(trial, device, kernels, SMALL, timeout_s=300)
        if outcome.right or outcome.what != "barriers given up":
            return str(outcome) if not outcome.right else ""
    return f"the barriers were given up {n} times"


def test_workgroups_wait_for_one_another(device: Device, shared_kernels: KernelSet) -> None:
    """Two at a time: the software driver runs as many as it has threads."""
    if device.info.kind == "cpu" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("the software driver needs two cores for two workgroups")
    for ahead in (True, False):
        said = attempts(device, shared_kernels, layer_trial(SMALL, n_keys=300, n_groups=2, ahead=ahead), 30)
        assert not said, said
