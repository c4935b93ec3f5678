"""Which variants a device may run, by its limits alone."""

from __future__ import annotations

import dataclasses

import pytest

from xinfer.errors import DeviceError
from xinfer.gpu.null import INFO, NullDevice
from xinfer.ops import KernelSet
from xinfer.shaders.catalog import variants

WAVE = next(variant for variant in variants().values() if variant.uses_waves and variant.workgroup == (256, 1, 1))
PLAIN = next(variant for variant in variants().values() if not variant.uses_waves and not variant.needs)


def kernels(**limits: int | None) -> KernelSet:
    features = frozenset({"subgroup_size_control"}).union(*(variant.needs for variant in variants().values()))
    return KernelSet(NullDevice(dataclasses.replace(INFO, features=features, **limits)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "size", "usable"),
    [(8, 32, True), (7, 32, False), (32, 8, True), (31, 8, False), (32, 4, False), (64, 4, True), (None, 4, True)],
)
def test_a_workgroup_has_no_more_waves_than_the_driver_takes(most: int | None, size: int, usable: bool) -> None:
    limits = {"subgroup_size_default": size, "subgroup_size_min": size, "subgroup_size_max": size}
    found = kernels(max_workgroup_subgroups=most, **limits)
    assert found.usable(WAVE.id) == usable
    assert found.usable(PLAIN.id)


def test_a_size_that_a_variant_names_counts() -> None:
    variant = next(variant for variant in variants().values() if variant.subgroup_size == 32)
    lanes = variant.workgroup[0] * variant.workgroup[1] * variant.workgroup[2]
    limits = {
        "subgroup_size_default": 64,
        "subgroup_size_min": 32,
        "subgroup_size_max": 64,
        "max_shared_bytes": 1 << 20,
    }
    assert kernels(max_workgroup_subgroups=lanes // 32, **limits).usable(variant.id)
    assert not kernels(max_workgroup_subgroups=lanes // 32 - 1, **limits).usable(variant.id)


def test_what_makes_kernels_says_how_many_are_missing() -> None:
    told: list[tuple[int, int]] = []
    first, second, third = [variant for variant in variants().values() if not variant.needs][:3]
    made = KernelSet(NullDevice(), on_make=lambda *at: told.append(at))
    made.make([first, second])
    made.make([second, third])
    made.make([third])
    assert told == [(0, 2), (1, 2), (2, 2), (0, 1), (1, 1)]
    assert made.kernel(first) is made.kernel(first)


def test_an_op_that_has_no_kernel_left_is_named_with_the_reasons() -> None:
    """And what to do."""
    candidates = ["attention.f16.coop64.split", "attention.f16.plain"]
    none = NullDevice(dataclasses.replace(INFO, features=frozenset()))
    with pytest.raises(DeviceError) as caught:
        KernelSet(none, quarantine=candidates[1:]).first_usable(candidates)
    said = str(caught.value)
    assert "has no kernel left for attention: it cannot run attention.f16.coop64.split; " in said
    assert "in quarantine are attention.f16.plain, and xinfer doctor tries them again; " in said
    assert said.endswith("--device cpu (device='cpu') goes without")
    assert said.count("attention.f16.plain") == 1
    with pytest.raises(DeviceError) as caught:
        KernelSet(none).first_usable(candidates[:1])
    assert "quarantine" not in str(caught.value)
