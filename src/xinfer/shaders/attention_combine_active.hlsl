// Puts attention_tiled's partial results together: only splits that have keys are read. One (head, row) a workgroup,
// SHARES lanes a dimension, LOADS partial results in flight a lane before the weights are known.
#include "common.hlsli"

#define MIN_SPLIT KEYS
#include "attention.hlsli"

#define SPLITS_MAX 256
#define DIM_MAX 128
#define SHARES (GROUP / DIM_MAX)
#define LOADS 8

READS(float, partial, 0);  // (row, head, split, head_dim + 2)
READS(uint, state, 1);
WRITES(float, result, 2);

groupshared float weights[SPLITS_MAX];
groupshared float totals[SPLITS_MAX];
groupshared float sums[GROUP];

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint head = group.x, row = group.y, d = lane % DIM_MAX, share = lane / DIM_MAX;
    uint position = state[row * STATE_WORDS + STATE_POSITION];
    if (position == UNUSED_ROW) {
        if (lane < constants.head_dim) result[out_at(row, head) + lane] = 0.0;
        return;
    }
    uint n_active = active_splits(position), stride = constants.head_dim + 2;
    uint first = partial_at(row, head, 0), own = min(d, constants.head_dim - 1);
    float parts[LOADS];
    UNROLL for (uint u0 = 0; u0 < LOADS; u0++) {
        parts[u0] = partial[first + min(share + u0 * SHARES, n_active - 1) * stride + own];
    }
    for (uint s0 = lane; s0 < n_active; s0 += GROUP) {
        weights[s0] = partial[first + s0 * stride + constants.head_dim];
        totals[s0] = partial[first + s0 * stride + constants.head_dim + 1];
    }
    GroupMemoryBarrierWithGroupSync();
    float largest = MINUS_INFINITY;
    for (uint s1 = 0; s1 < n_active; s1++) largest = max(largest, weights[s1]);
    GroupMemoryBarrierWithGroupSync();
    for (uint s2 = lane; s2 < n_active; s2 += GROUP) {
        weights[s2] = exp(weights[s2] - largest);
        totals[s2] *= weights[s2];
    }
    GroupMemoryBarrierWithGroupSync();
    float total = 0.0;
    for (uint s3 = 0; s3 < n_active; s3++) total += totals[s3];
    float sum = 0.0;
    for (uint s4 = share; s4 < n_active; s4 += LOADS * SHARES) {
        if (s4 != share) {
            UNROLL for (uint u1 = 0; u1 < LOADS; u1++) {
                parts[u1] = partial[first + min(s4 + u1 * SHARES, n_active - 1) * stride + own];
            }
        }
        UNROLL for (uint u2 = 0; u2 < LOADS; u2++) {
            if (s4 + u2 * SHARES < n_active) sum += weights[s4 + u2 * SHARES] * parts[u2];
        }
    }
    sums[lane] = sum;
    GroupMemoryBarrierWithGroupSync();
    if (lane < constants.head_dim) {
        UNROLL for (uint other = 1; other < SHARES; other++) sum += sums[other * DIM_MAX + lane];
        result[out_at(row, head) + lane] = sum / total;
    }
}
