// x += y, element by element.
#include "common.hlsli"

struct Constants {
    uint width;
    uint y_stride;
    uint y_offset;
    uint x_stride;
    uint x_offset;
};

READS(float, y, 0);
WRITES(float, x, 1);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    if (at.x >= constants.width) return;
    x[constants.x_offset + at.y * constants.x_stride + at.x] += y[constants.y_offset + at.y * constants.y_stride + at.x];
}
