"""No kernel has a barrier where D3DCompile on Windows would refuse it. Looked for in what vkd3d's D3DCompile makes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from tests.gpu.conftest import missing
from tests.gpu.dxbc_flow import Flow, instructions

from xinfer import shaders
from xinfer.errors import DeviceError
from xinfer.gpu._d3d12.compiler import Compiler
from xinfer.gpu._d3d12.runtime import load_runtime
from xinfer.gpu.api import HlslSource
from xinfer.shaders.catalog import Variant, variants

WITH_HLSL = [v for v in variants().values() if v.source.endswith(".hlsl") and not v.uses_waves]
FAULTS = {
    "by the lane": "if (lane < 3) GroupMemoryBarrierWithGroupSync();",
    "by what is groupshared": "if (shared_[0] == 0) GroupMemoryBarrierWithGroupSync();",
    "by what is bound for writing": "if (written[0] == 0) GroupMemoryBarrierWithGroupSync();",
    "by what was chosen by the lane": "uint a = 1; if (lane > 2) a = n.n; "
    "if (a == 0) GroupMemoryBarrierWithGroupSync();",
    "in a loop of the lane's length": "[loop] for (uint i = 0; i < lane; i++) GroupMemoryBarrierWithGroupSync();",
    "behind a return": "if (written[1] == 5) return; GroupMemoryBarrierWithGroupSync();",
    "behind a break": "[loop] for (uint i = 0; i < n.n; i++) { if (written[i] == lane) break; "
    "GroupMemoryBarrierWithGroupSync(); written[i] = i; }",
}
SOUND = (
    "if (read[group.x] == 0) { GroupMemoryBarrierWithGroupSync(); } "
    "[loop] for (uint i = group.y; i < n.n; i++) { shared_[lane] += i; GroupMemoryBarrierWithGroupSync(); } "
    "[loop] for (uint j = lane; j < n.n; j++) shared_[j] += j; "
    "if (shared_[lane] > 3) written[lane] = 1; GroupMemoryBarrierWithGroupSync(); "
    "if (lane == 3) return; written[3] = 4;"
)
PROGRAM = """
struct N {{ uint n; }};
RWStructuredBuffer<uint> written : register(u0);
StructuredBuffer<uint> read : register(t1);
ConstantBuffer<N> n : register(b0);
groupshared uint shared_[64];
[numthreads(64, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {{
    shared_[lane] = written[lane];
    GroupMemoryBarrierWithGroupSync();
    {body}
    written[lane] = shared_[63 - lane];
}}
"""


@pytest.fixture(scope="module")
def d3dcompile(_environment: None) -> Compiler:
    try:
        return Compiler(load_runtime())
    except DeviceError as error:
        if "d3d12" in os.environ.get("XINFER_TEST_BACKENDS", ""):
            missing(str(error))
        pytest.skip(f"no D3DCompile: {str(error).splitlines()[0]}")


def missed(d3dcompile: Compiler, source: HlslSource) -> tuple[int, int]:
    """Barriers that some lanes may miss, and all barriers."""
    flow = Flow(list(instructions(d3dcompile.compile(source, "main"))))
    found = flow.check()
    return len(found), flow.barriers


@pytest.mark.parametrize("variant", WITH_HLSL, ids=lambda variant: f"{variant.id}-d3d12")
def test_every_lane_comes_to_every_barrier(d3dcompile: Compiler, variant: Variant) -> None:
    source = shaders.hlsl(variant)
    assert source is not None
    found, barriers = missed(d3dcompile, source)
    assert found == 0
    assert barriers > 0 or not variant.shared_bytes


@pytest.mark.parametrize("name", [f"attention.f16.{form}" for form in ("plain", "decode", "prefill64", "tiled64")])
def test_steering_buffers_that_may_be_written_are_found_d3d12(d3dcompile: Compiler, name: str) -> None:
    """The catalog's `steering` is what makes the difference."""
    source = shaders.hlsl(variants()[name])
    assert source is not None
    text = source.text.replace("STEERING(uint, state", "READS(uint, state")
    assert text != source.text
    found, _ = missed(d3dcompile, replace(source, text=text))
    assert found > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_barriers_that_lanes_may_miss_are_found_d3d12(d3dcompile: Compiler, fault: str) -> None:
    source = HlslSource(name="fault.hlsl", text=PROGRAM.format(body=FAULTS[fault]))
    found, barriers = missed(d3dcompile, source)
    assert found == 1
    assert barriers >= 2


def test_barriers_that_all_come_to_are_not_d3d12(d3dcompile: Compiler) -> None:
    source = HlslSource(name="sound.hlsl", text=PROGRAM.format(body=SOUND))
    assert missed(d3dcompile, source) == (0, 4)
