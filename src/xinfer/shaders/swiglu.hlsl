// out = silu(gate) * up, element by element.
#include "common.hlsli"

struct Constants {
    uint width;
    uint gate_stride;
    uint gate_offset;
    uint up_stride;
    uint up_offset;
    uint out_stride;
    uint out_offset;
};

READS(float, gate, 0);
READS(float, up, 1);
WRITES(float, result, 2);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    if (at.x >= constants.width) return;
    float value = gate[constants.gate_offset + at.y * constants.gate_stride + at.x];
    float other = up[constants.up_offset + at.y * constants.up_stride + at.x];
    result[constants.out_offset + at.y * constants.out_stride + at.x] = silu(value) * other;
}
