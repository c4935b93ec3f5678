// y[t, r] = sum over k of x[t, k] * w[r, k] (+ bias[r]) (+ y[t, r]) for a few rows t of activations: reads w once.
//
// Sets of lanes walk over ROWS_PER_SET rows of w each, 16 bytes a lane and load, LOADS loads a row in flight before the
// first is used. In which order a row's products are summed depends on neither T_MAX nor LOADS: a row of activations
// gets the same bits alone and among others. Variants:
//   WAVE     a set is made of whole waves, whatever their size; else of SET_LANES lanes that meet in groupshared memory
//   VECTOR_X x is read as float4 (strides, offsets and columns are multiples of VALUES_PER_LOAD); else float by float
//   T_MAX    rows of activations at most
//   NORM     x is normalized: y = rms_norm(x, norm_weight) @ w^T; a row's scale is a factor of its sums (T_MAX <= 4)
//   SWIGLU   two matrices: y = silu(x @ w^T) * (x @ w2^T), without bias
#include "common.hlsli"
#include "linear.hlsli"

#define SETS (GROUP / SET_LANES)
#define ROWS_PER_GROUP (SETS * ROWS_PER_SET)
#if SWIGLU
#define MATRICES 2
#else
#define MATRICES 1
#endif
#if NORM
#define SUMS (MATRICES * ROWS_PER_SET + 1)  // the last one is x's sum of squares
#else
#define SUMS (MATRICES * ROWS_PER_SET)
#endif
#define AHEAD (T_MAX <= 4)  // rows of x that registers have room for while weights come
#if VECTOR_X
#define X_TYPE float4
#else
#define X_TYPE float
#endif

struct Constants {
    uint columns;
    uint rows;       // of w in this slice
    uint row_loads;  // 16-byte loads a row of w, padding included (it holds zeros)
    uint x_rows;     // T, 1 to T_MAX
    uint x_stride;
    uint x_offset;
    uint y_stride;
    uint y_offset;     // includes the slice's first row
    uint bias_offset;  // likewise
    uint flags;
    uint grid_x;  // the grid is folded into two dimensions: one holds 65,535 groups at most
    float eps;
};

READS(X_TYPE, x, 0);
READS(uint4, w, 1);
#if SWIGLU
READS(uint4, w2, 2);
#else
READS(float, bias, 2);
#endif
WRITES(float, y, 3);
#if NORM
READS(X_TYPE, norm_weight, 4);
#endif
CONSTANTS(Constants, constants);

// Partial sums of the lanes (or waves) of every set: (set, part, t, sum).
#if WAVE
#define PARTS_MAX (GROUP / 4 / SETS > 0 ? GROUP / 4 / SETS : 1)  // no wave has fewer than 4 lanes
#else
#define PARTS_MAX SET_LANES
#endif
#define SUMS_PER_PART (T_MAX * SUMS)
groupshared float parts[SETS * PARTS_MAX * SUMS_PER_PART];

// VALUES_PER_LOAD floats of a vector of activations, from float number `first` on; zero past `columns`.
#if VECTOR_X
#define READ_X(SOURCE, BASE, LOAD, VALUES)                              \
    {                                                                   \
        UNROLL for (uint q = 0; q < VALUES_PER_LOAD / 4; q++) {         \
            float4 four = SOURCE[(BASE) / 4 + (LOAD) * (VALUES_PER_LOAD / 4) + q]; \
            VALUES[4 * q] = four.x;                                     \
            VALUES[4 * q + 1] = four.y;                                 \
            VALUES[4 * q + 2] = four.z;                                 \
            VALUES[4 * q + 3] = four.w;                                 \
        }                                                               \
    }
#else
#define READ_X(SOURCE, BASE, LOAD, VALUES)                                                    \
    {                                                                                         \
        UNROLL for (uint q = 0; q < VALUES_PER_LOAD; q++) {                                   \
            uint column = (LOAD) * VALUES_PER_LOAD + q;                                       \
            float value = SOURCE[(BASE) + min(column, constants.columns - 1u)];               \
            VALUES[q] = column < constants.columns ? value : 0.0;                             \
        }                                                                                     \
    }
#endif

uint4 read_w(uint which, uint at) {
#if SWIGLU
    return which == 0 ? w[at] : w2[at];
#else
    return w[at];
#endif
}

void add_products(float values[VALUES_PER_LOAD], float weights[MATRICES * ROWS_PER_SET][VALUES_PER_LOAD],
                  inout float sums[SUMS]) {
    UNROLL for (uint s = 0; s < MATRICES * ROWS_PER_SET; s++) {
        UNROLL for (uint k = 0; k < VALUES_PER_LOAD; k++) sums[s] += values[k] * weights[s][k];
    }
}

#if NORM
// Multiplies with the norm's weights; the squares join the last sum.
void scale_by(float scales[VALUES_PER_LOAD], inout float values[VALUES_PER_LOAD], inout float sums[SUMS]) {
    UNROLL for (uint j = 0; j < VALUES_PER_LOAD; j++) {
        sums[SUMS - 1] += values[j] * values[j];
        values[j] *= scales[j];
    }
}
#endif

// The sums of one lane over its share of the columns, for the ROWS_PER_SET rows from first_row on.
void lane_sums(uint first_row, uint lane, uint lanes, inout float sums[T_MAX][SUMS]) {
    uint loads = (constants.columns + VALUES_PER_LOAD - 1) / VALUES_PER_LOAD;
    uint row_at[ROWS_PER_SET];
    UNROLL for (uint i = 0; i < ROWS_PER_SET; i++) {
        row_at[i] = min(first_row + i, constants.rows - 1) * constants.row_loads;
    }
    for (uint base = lane; base < loads; base += LOADS * lanes) {
        uint4 raw[LOADS][MATRICES][ROWS_PER_SET];
        UNROLL for (uint u = 0; u < LOADS; u++) {
            uint load = base + u * lanes;
            UNROLL for (uint m = 0; m < MATRICES; m++) {
                UNROLL for (uint r = 0; r < ROWS_PER_SET; r++) {
                    raw[u][m][r] = uint4(0, 0, 0, 0);
                    if (load < loads) raw[u][m][r] = read_w(m, row_at[r] + load);
                }
            }
        }
#if AHEAD  // x is on its way together with the weights
        float ahead[LOADS][T_MAX][VALUES_PER_LOAD];
#if NORM
        float scales[LOADS][VALUES_PER_LOAD];
#endif
        UNROLL for (uint a = 0; a < LOADS; a++) {
            if (base + a * lanes < loads) {
                UNROLL for (uint b = 0; b < T_MAX; b++) {
                    if (b == 0 || b < constants.x_rows) {
                        READ_X(x, constants.x_offset + b * constants.x_stride, base + a * lanes, ahead[a][b]);
                    }
                }
#if NORM
                READ_X(norm_weight, 0, base + a * lanes, scales[a]);
#endif
            }
        }
#endif
        UNROLL for (uint v = 0; v < LOADS; v++) {
            uint at = base + v * lanes;
            if (at < loads) {
                float weights[MATRICES * ROWS_PER_SET][VALUES_PER_LOAD];
                UNROLL for (uint n = 0; n < MATRICES * ROWS_PER_SET; n++) {
                    unpack_load(raw[v][n / ROWS_PER_SET][n % ROWS_PER_SET], weights[n]);
                }
                UNROLL for (uint t = 0; t < T_MAX; t++) {
                    if (t == 0 || t < constants.x_rows) {
#if AHEAD
                        float values[VALUES_PER_LOAD] = ahead[v][t];
#else
                        float values[VALUES_PER_LOAD];
                        READ_X(x, constants.x_offset + t * constants.x_stride, at, values);
#endif
#if NORM
                        scale_by(scales[v], values, sums[t]);
#endif
                        add_products(values, weights, sums[t]);
                    }
                }
            }
        }
    }
}

void clear(out float sums[T_MAX][SUMS]) {
    UNROLL for (uint t = 0; t < T_MAX; t++) {
        UNROLL for (uint s = 0; s < SUMS; s++) sums[t][s] = 0.0;
    }
}

// The set's sum number `which` of row t, once the parts are there.
float total_of(uint set, uint n_parts, uint t, uint which) {
    float total = 0.0;
    for (uint part = 0; part < n_parts; part++) {
        total += parts[(set * PARTS_MAX + part) * SUMS_PER_PART + t * SUMS + which];
    }
    return total;
}

// Bias and residual of an output: read before the sums are there, so that nobody waits for them in the end.
float addend(uint row, uint t) {
    float value = 0.0;
    if (row < constants.rows && t < constants.x_rows) {
#if !SWIGLU
        if ((constants.flags & FLAG_BIAS) != 0u) value += bias[constants.bias_offset + row];
#endif
        if ((constants.flags & FLAG_ACCUMULATE) != 0u) value += y[constants.y_offset + t * constants.y_stride + row];
    }
    return value;
}

void finish(uint first_row, uint set, uint n_parts, uint t, uint r, float added) {
    uint row = first_row + r;
    if (row >= constants.rows || t >= constants.x_rows) return;
    float value = total_of(set, n_parts, t, r);
#if NORM
    float scale = 1.0 / sqrt(total_of(set, n_parts, t, SUMS - 1) / float(constants.columns) + constants.eps);
    value *= scale;
#endif
#if SWIGLU
    float up = total_of(set, n_parts, t, ROWS_PER_SET + r);
#if NORM
    up *= scale;
#endif
    value = silu(value) * up;
#endif
    y[constants.y_offset + t * constants.y_stride + row] = value + added;
}

void make_rows(uint group_row, uint lane) {
    float added = addend(group_row + lane % ROWS_PER_GROUP, lane / ROWS_PER_GROUP);
    float sums[T_MAX][SUMS];
#if WAVE
    // A set has waves_a_set waves; where there are fewer waves than sets, a wave takes one set after the other.
    uint waves = wave_count(), wave = wave_index(lane);
    uint waves_a_set = max(waves / SETS, 1u);
    uint n_parts = waves_a_set;
    uint part = wave % waves_a_set;
    for (uint set = wave / waves_a_set; set < SETS; set += max(waves / waves_a_set, 1u)) {
        clear(sums);
        lane_sums(group_row + set * ROWS_PER_SET, part * WaveGetLaneCount() + WaveGetLaneIndex(),
                  waves_a_set * WaveGetLaneCount(), sums);
        UNROLL for (uint t = 0; t < T_MAX; t++) {
            UNROLL for (uint s = 0; s < SUMS; s++) {
                float sum = WaveActiveSum(sums[t][s]);
                if (WaveIsFirstLane()) parts[(set * PARTS_MAX + part) * SUMS_PER_PART + t * SUMS + s] = sum;
            }
        }
    }
#else
    uint n_parts = 1;
    uint set = lane / SET_LANES, part = lane % SET_LANES;
    clear(sums);
    lane_sums(group_row + set * ROWS_PER_SET, part, SET_LANES, sums);
    uint own = (set * PARTS_MAX + part) * SUMS_PER_PART;
    UNROLL for (uint t = 0; t < T_MAX; t++) {
        UNROLL for (uint s = 0; s < SUMS; s++) parts[own + t * SUMS + s] = sums[t][s];
    }
    for (uint step = SET_LANES / 2; step > 0; step /= 2) {
        GroupMemoryBarrierWithGroupSync();
        if (part < step) {
            for (uint i = 0; i < SUMS_PER_PART; i++) parts[own + i] += parts[own + step * SUMS_PER_PART + i];
        }
    }
#endif
    GroupMemoryBarrierWithGroupSync();
    for (uint output = lane; output < T_MAX * ROWS_PER_GROUP; output += GROUP) {
        uint of_group = output % ROWS_PER_GROUP, of_set = of_group / ROWS_PER_SET, t = output / ROWS_PER_GROUP;
        if (output != lane) added = addend(group_row + of_group, t);
        finish(group_row + of_set * ROWS_PER_SET, of_set, n_parts, t, output % ROWS_PER_SET, added);
    }
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint group_row = (group.y * constants.grid_x + group.x) * ROWS_PER_GROUP;
    if (group_row < constants.rows) make_rows(group_row, lane);  // else in the folded grid's last line
}
