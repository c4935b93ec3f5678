// y[t, r] = sum over k of x[t, k] * w[r, k] (+ bias[r]) (+ y[t, r]) for any number of rows, in float32 throughout.
//
// A workgroup makes a tile of TILE_M rows of x by TILE_N rows of w, walking over the columns TILE_K at a time through
// groupshared memory; a lane holds LANE_M x LANE_N of the results. Edges are guarded, so every shape is allowed.
#include "common.hlsli"
#include "linear.hlsli"

#define LANES_M (TILE_M / LANE_M)
#define LANES_N (TILE_N / LANE_N)
#if GROUP != LANES_M * LANES_N
#error GROUP is the number of a tile's lanes
#endif

struct Constants {
    uint columns;
    uint rows;       // of w in this slice
    uint row_loads;  // 16-byte loads a row of w, padding included (it holds zeros)
    uint x_rows;     // T
    uint x_stride;
    uint x_offset;
    uint y_stride;
    uint y_offset;     // includes the slice's first row
    uint bias_offset;  // likewise
    uint flags;
};

READS(float, x, 0);
READS(uint4, w, 1);
READS(float, bias, 2);
WRITES(float, y, 3);
CONSTANTS(Constants, constants);

// Columns first, so that a lane's rows lie side by side; one float of padding keeps the writes off a single bank.
groupshared float x_tile[TILE_K * (TILE_M + 1)];  // [k][m]
groupshared float w_tile[TILE_K * (TILE_N + 1)];  // [k][n]

void stage_x(uint first_row, uint first_column, uint lane) {
    for (uint i = lane; i < TILE_M * TILE_K; i += GROUP) {
        uint row = first_row + i / TILE_K, column = first_column + i % TILE_K;
        bool inside = row < constants.x_rows && column < constants.columns;
        uint at = inside ? constants.x_offset + row * constants.x_stride + column : 0u;
        x_tile[i % TILE_K * (TILE_M + 1) + i / TILE_K] = inside ? x[at] : 0.0;
    }
}

void stage_w(uint first_row, uint first_column, uint lane) {
    const uint loads = TILE_K / VALUES_PER_LOAD;
    for (uint i = lane; i < TILE_N * loads; i += GROUP) {
        uint row = first_row + i / loads, load = first_column / VALUES_PER_LOAD + i % loads;
        bool inside = row < constants.rows && load < constants.row_loads;
        uint4 raw = w[inside ? row * constants.row_loads + load : 0u];
        if (!inside) raw = uint4(0, 0, 0, 0);
        float values[VALUES_PER_LOAD];
        unpack_load(raw, values);
        UNROLL for (uint j = 0; j < VALUES_PER_LOAD; j++) w_tile[(i % loads * VALUES_PER_LOAD + j) * (TILE_N + 1) + i / loads] = values[j];
    }
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint lane_m = lane / LANES_N, lane_n = lane % LANES_N;
    uint first_m = group.y * TILE_M, first_n = group.x * TILE_N;
    float sums[LANE_M][LANE_N];
    UNROLL for (uint m0 = 0; m0 < LANE_M; m0++) {
        UNROLL for (uint n0 = 0; n0 < LANE_N; n0++) sums[m0][n0] = 0.0;
    }
    for (uint column = 0; column < constants.columns; column += TILE_K) {
        GroupMemoryBarrierWithGroupSync();  // the last tile has been read
        stage_x(first_m, column, lane);
        stage_w(first_n, column, lane);
        GroupMemoryBarrierWithGroupSync();
        LOOP for (uint k = 0; k < TILE_K; k++) {
            float a[LANE_M], b[LANE_N];
            UNROLL for (uint m1 = 0; m1 < LANE_M; m1++) a[m1] = x_tile[k * (TILE_M + 1) + lane_m * LANE_M + m1];
            UNROLL for (uint n1 = 0; n1 < LANE_N; n1++) b[n1] = w_tile[k * (TILE_N + 1) + lane_n + n1 * LANES_N];
            UNROLL for (uint m2 = 0; m2 < LANE_M; m2++) {
                UNROLL for (uint n2 = 0; n2 < LANE_N; n2++) sums[m2][n2] += a[m2] * b[n2];
            }
        }
    }
    UNROLL for (uint m = 0; m < LANE_M; m++) {
        UNROLL for (uint n = 0; n < LANE_N; n++) {
            uint t = first_m + lane_m * LANE_M + m, row = first_n + lane_n + n * LANES_N;
            if (t < constants.x_rows && row < constants.rows) {
                float value = sums[m][n];
                if ((constants.flags & FLAG_BIAS) != 0u) value += bias[constants.bias_offset + row];
                uint at = constants.y_offset + t * constants.y_stride + row;
                if ((constants.flags & FLAG_ACCUMULATE) != 0u) value += y[at];
                y[at] = value;
            }
        }
    }
}
