// Activations for a matrix-core product: each row divided by a power of two, its scale, so that its largest value lies in
// 2,048 to 4,096, then as two f16 numbers whose sum is the value to 22 bits: `high`, and what rounding left. One
// workgroup a row; rows past x_rows, and columns past the width, become 0.
#define GROUP_REDUCTIONS
#include "common.hlsli"

struct Constants {
    uint width;
    uint x_rows;
    uint x_stride;
    uint x_offset;
    uint row_loads;   // 16-byte loads of a packed row
    uint low_offset;  // in 16-byte loads, from the high halves to the low ones
};

READS(float, x, 0);
WRITES(float, scales, 1);  // (rows)
WRITES(uint4, halves, 2);  // (rows, row_loads), the high halves, then the low ones
CONSTANTS(Constants, constants);

// The power of two that takes a row into 2,048 to 4,096.
float row_scale(float largest) {
    uint exponent = asuint(largest) >> 23;
    return exponent < 13u ? asfloat(1u << 23) : asfloat((exponent - 11u) << 23);
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.x, first = constants.x_offset + row * constants.x_stride;
    bool real = row < constants.x_rows;
    float largest = 0.0;
    if (real) {
        for (uint i = lane; i < constants.width; i += GROUP) largest = max(largest, abs(x[first + i]));
    }
    largest = group_max(largest, lane);
    float scale = real ? row_scale(largest) : 1.0, inverse = 1.0 / scale;
    if (lane == 0) scales[row] = scale;
    for (uint load = lane; load < constants.row_loads; load += GROUP) {
        uint high[4], low[4];
        UNROLL for (uint pair = 0; pair < 4; pair++) {
            uint column = load * 8 + pair * 2;
            float a = real && column < constants.width ? x[first + column] * inverse : 0.0;
            float b = real && column + 1 < constants.width ? x[first + column + 1] * inverse : 0.0;
            high[pair] = pack_f16(a, b);
            float2 kept = unpack_f16(high[pair]);
            low[pair] = pack_f16(a - kept.x, b - kept.y);
        }
        uint at = row * constants.row_loads + load;
        halves[at] = uint4(high[0], high[1], high[2], high[3]);
        halves[constants.low_offset + at] = uint4(low[0], low[1], low[2], low[3]);
    }
}
