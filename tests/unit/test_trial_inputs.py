"""Matrices whose rows repeat: what is expected of them, and what the device gets."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from xinfer.gpu import null
from xinfer.ops import KernelSet
from xinfer.shaders.catalog import variants
from xinfer.trials import expected
from xinfer.trials.bench import Bench
from xinfer.trials.expected import Weights
from xinfer.trials.linear import LinearTrial

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("rows", [3, 7, 8, 100])
def test_repeated_rows_are_expected_as_if_each_were_multiplied(rows: int) -> None:
    x, w, norm = (RNG.standard_normal(shape, np.float32) for shape in ((4, 24), (7, 24), (24,)))
    bias, before = RNG.standard_normal(rows, np.float32), RNG.standard_normal((4, rows), np.float32)
    whole, repeated = Weights(np.resize(w, (rows, 24))), Weights(w, rows)
    for found, wanted in (
        (expected.linear(x, w_, bias=bias, before=before) for w_ in (repeated, whole)),
        (expected.norm_linear(x, norm, w_, eps=1e-6, bias=bias) for w_ in (repeated, whole)),
        (expected.gate_up(x, w_, w_, norm=(norm, 1e-6)) for w_ in (repeated, whole)),
    ):
        assert found.values.shape == (4, rows)
        np.testing.assert_allclose(found.values, wanted.values, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.broadcast_to(found.tolerance, (4, rows)), wanted.tolerance, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("columns", "most"), [(24, 1 << 27), (37, 4096)])
def test_the_device_gets_every_row(columns: int, most: int) -> None:
    """In slices, too, that begin amid the repeated rows."""
    device = null.NullDevice(dataclasses.replace(null.INFO, max_storage_range=most))
    w = RNG.standard_normal((7, columns)).astype(np.float16)
    with KernelSet(device) as kernels, Bench(device, kernels) as bench:
        matrix = bench.put_matrix(w, "f16", rows=100)
        assert (len(matrix.slices) > 1) == (most == 4096)
        stored = []
        for part in matrix.slices:
            words = np.frombuffer(device.download(part.place), np.float16)
            stored.append(words[: part.n_rows * matrix.row_stride // 2].reshape(part.n_rows, -1)[:, :columns])
            assert np.isnan(words[-16:].view(np.float32)).all()
    np.testing.assert_array_equal(np.concatenate(stored), np.resize(w, (100, columns)))


def test_a_trial_is_as_large_as_it_says() -> None:
    w = RNG.standard_normal((7, 24)).astype(np.float16)
    trial = LinearTrial(x=RNG.standard_normal((1, 24), np.float32), w=w, format="f16", rows=100)
    assert trial.shape == "1 x 24 by 100 f16"
    assert trial.fits(variants()["linear_gemv.f16.plain"])
    assert trial.expected().values.shape == (1, 100)
