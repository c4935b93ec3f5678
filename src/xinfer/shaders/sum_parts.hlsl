// y[t, r] = the sum of n_parts parts (+ bias[r]) (+ y[t, r]): a product whose sum over k was shared among workgroups.
#include "common.hlsli"
#include "linear.hlsli"

struct Constants {
    uint width;
    uint n_parts;
    uint part_stride;  // from one part's results to the next one's
    uint y_stride;
    uint y_offset;
    uint flags;
};

READS(float, parts, 0);  // (n_parts, T, width)
READS(float, bias, 1);
WRITES(float, y, 2);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    if (at.x >= constants.width) return;
    uint place = constants.y_offset + at.y * constants.y_stride + at.x;
    float sum = 0.0;
    if ((constants.flags & FLAG_BIAS) != 0u) sum = bias[at.x];
    if ((constants.flags & FLAG_ACCUMULATE) != 0u) sum += y[place];
    float product = 0.0;
    for (uint part = 0; part < constants.n_parts; part++) {
        product += parts[part * constants.part_stride + at.y * constants.width + at.x];
    }
    y[place] = sum + product;
}
