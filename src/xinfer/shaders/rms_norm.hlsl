// out[t, :] = x[t, :] / sqrt(mean(x[t, :]^2) + eps) * weight. One workgroup a row.
#define GROUP_REDUCTIONS
#include "common.hlsli"

struct Constants {
    uint width;
    uint x_stride;
    uint x_offset;
    uint out_stride;
    uint out_offset;
    float eps;
};

READS(float, x, 0);
READS(float, weight, 1);
WRITES(float, result, 2);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint first = constants.x_offset + group.x * constants.x_stride;
    float squares = 0.0;
    for (uint i = lane; i < constants.width; i += GROUP) squares += x[first + i] * x[first + i];
    float scale = 1.0 / sqrt(group_sum(squares, lane) / float(constants.width) + constants.eps);
    uint out_first = constants.out_offset + group.x * constants.out_stride;
    for (uint j = lane; j < constants.width; j += GROUP) result[out_first + j] = x[first + j] * scale * weight[j];
}
