// Activations for a matrix-core product: each row divided by a power of two, its scale, so that its largest value lies in
// 2,048 to 4,096, then as two f16 numbers whose sum is the value to 22 bits: `high`, and what rounding left. One
// workgroup a row; rows past x_rows, and columns past the width, become 0.
//
// What is packed: x (ROWS), x / sqrt(mean(x^2) + eps) * weight (NORM), or silu(x) * up (SWIGLU), which read four numbers at a
// time, as FOURS does: x, where it lies so.
#define GROUP_REDUCTIONS
#include "common.hlsli"
#include "halves.hlsli"

#define ROWS 0
#define NORM 1
#define SWIGLU 2
#define FOURS 3

struct Constants {
    uint width;
    uint x_rows;
    uint x_stride;  // of x and up
    uint x_offset;
    uint up_offset;
    uint row_loads;   // 16-byte loads of a packed row
    uint low_offset;  // in 16-byte loads, from the high halves to the low ones; 0: there are none
    float eps;
};

#if SOURCE == ROWS
READS(float, x, 0);
#else
READS(float4, x, 0);
#endif
#if SOURCE == NORM || SOURCE == SWIGLU
READS(float4, other, 1);  // the norm's weight, or up
WRITES(float, scales, 2);
WRITES(uint4, halves, 3);
#else
WRITES(float, scales, 1);  // (rows)
WRITES(uint4, halves, 2);  // (rows, row_loads), the high halves, then the low ones
#endif
CONSTANTS(Constants, constants);

#if SOURCE != ROWS
// The width is a multiple of 8, and offsets and strides are of 4.
float4 four_of_x(uint row, uint column) { return x[(constants.x_offset + row * constants.x_stride + column) / 4]; }
#if SOURCE == NORM
float4 four_of_other(uint row, uint column) { return other[column / 4]; }
#elif SOURCE == SWIGLU
float4 four_of_other(uint row, uint column) { return other[(constants.up_offset + row * constants.x_stride + column) / 4]; }
#endif
#else
float one_of_x(uint row, uint column) {
    return column < constants.width ? x[constants.x_offset + row * constants.x_stride + min(column, constants.width - 1u)] : 0.0;
}
float4 four_of_x(uint row, uint column) {
    return float4(one_of_x(row, column), one_of_x(row, column + 1), one_of_x(row, column + 2), one_of_x(row, column + 3));
}
#endif

float4 four(uint row, uint column) {
#if SOURCE == NORM
    return four_of_x(row, column) * four_of_other(row, column);
#elif SOURCE == SWIGLU
    float4 gate = four_of_x(row, column);
    return float4(silu(gate.x), silu(gate.y), silu(gate.z), silu(gate.w)) * four_of_other(row, column);
#else
    return four_of_x(row, column);
#endif
}

float largest_of(float4 values) {
    float4 size = abs(values);
    return max(max(size.x, size.y), max(size.z, size.w));
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.x, loads = (constants.width + 7u) / 8u;
    bool real = row < constants.x_rows;
    float largest = 0.0, squares = 0.0;
    if (real) {
        for (uint i = lane; i < loads; i += GROUP) {
            largest = max(largest, max(largest_of(four(row, 8 * i)), largest_of(four(row, 8 * i + 4))));
#if SOURCE == NORM
            float4 a = four_of_x(row, 8 * i), b = four_of_x(row, 8 * i + 4);
            squares += dot(a, a) + dot(b, b);
#endif
        }
    }
    largest = group_max(largest, lane);
    float factor = 1.0;
#if SOURCE == NORM
    factor = 1.0 / sqrt(group_sum(squares, lane) / float(constants.width) + constants.eps);
#endif
    float scale = real ? row_scale(largest * factor) : 1.0;
    factor /= scale;
    if (lane == 0) scales[row] = scale;
    for (uint load = lane; load < constants.row_loads; load += GROUP) {
        float4 a = float4(0.0, 0.0, 0.0, 0.0), b = a;
        if (real && load < loads) {
            a = four(row, 8 * load) * factor;
            b = four(row, 8 * load + 4) * factor;
        }
        uint2 packed[4] = { split_pair(a.x, a.y), split_pair(a.z, a.w), split_pair(b.x, b.y), split_pair(b.z, b.w) };
        uint at = row * constants.row_loads + load;
        halves[at] = uint4(packed[0].x, packed[1].x, packed[2].x, packed[3].x);
        if (constants.low_offset != 0u) {
            halves[constants.low_offset + at] = uint4(packed[0].y, packed[1].y, packed[2].y, packed[3].y);
        }
    }
}
