"""Matrix-core kernels with plain code in place of their fragments, for devices that have no matrix cores.

It is the same source: staging, the walk over tiles and fragments, scales and edges are tested everywhere, the fragments
on the devices that have them.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
from tests.gpu.op_bench import Bench

import build_shaders
from xinfer.gpu.api import KernelCode
from xinfer.ops import _attention, _base, _packed
from xinfer.shaders.catalog import Variant, variants

# What software drivers have room for in groupshared memory; the queries are there, too.
SHARED_BYTES = 32 << 10
SMALL_ATTENTION = {64: {"WAVES": 2, "KEYS": 32}, 128: {"WAVES": 1, "KEYS": 32}}


def emulated(variant: Variant) -> Variant:
    """The variant with plain code for fragments, in smaller tiles where that is needed."""
    defines = dict(variant.defines) | {"EMULATE": 1, "WAVE": 0}
    lanes = variant.workgroup[0]
    if variant.op == "attention":
        defines |= SMALL_ATTENTION[defines["DIM_MAX"]]
        lanes = 32 * defines["WAVES"]
    elif variant.op == "linear_gemm" and variant.shared_bytes > SHARED_BYTES:
        defines["TILE_LOADS"] = 4
    return dataclasses.replace(
        variant,
        defines=tuple(defines.items()),
        workgroup=(lanes, 1, 1),
        needs=frozenset(),
        shared_bytes=0,
        subgroup_size=None,
    )


@functools.cache
def code(variant: Variant) -> KernelCode:
    return KernelCode(
        id=variant.id,
        spirv=build_shaders.compile_variant(variant),
        n_buffers=variant.n_buffers,
        n_constants=variant.n_constants,
        workgroup=variant.workgroup,
    )


def emulate(bench: Bench, variant: Variant, patch: pytest.MonkeyPatch) -> Variant:
    """Have the bench run the emulated form under the variant's id; `patch` lets ops know its shape."""
    if bench.device.info.api != "vulkan":
        pytest.skip("matrix cores are reached through Slang, which makes SPIR-V only")
    plain = emulated(variant)
    known = {**variants(), variant.id: plain}
    for module in (_attention, _base, _packed):
        patch.setattr(module, "variants", lambda: known)
    if variant.id not in bench.kernels._kernels:  # compiled once, and given back with the others
        bench.kernels._kernels[variant.id] = bench.device.create_kernel(code(plain))
    return plain
