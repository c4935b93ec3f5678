// Puts the splits' partial results of attention together. One (head, row) a workgroup.
#include "common.hlsli"
#include "attention.hlsli"

#define SPLITS_MAX 256

READS(float, partial, 0);  // (row, head, split, head_dim + 2)
WRITES(float, result, 1);

groupshared float weights[SPLITS_MAX];

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint head = group.x, row = group.y;
    uint first = partial_at(row, head, 0), stride = constants.head_dim + 2;
    for (uint s0 = lane; s0 < constants.n_splits; s0 += GROUP) weights[s0] = partial[first + s0 * stride + constants.head_dim];
    GroupMemoryBarrierWithGroupSync();
    float largest = MINUS_INFINITY;
    for (uint s1 = 0; s1 < constants.n_splits; s1++) largest = max(largest, weights[s1]);
    GroupMemoryBarrierWithGroupSync();
    for (uint s2 = lane; s2 < constants.n_splits; s2 += GROUP) {
        // A split without keys has no sum of weights; nor has any of a row of padding. NaN is one, and goes on.
        bool empty = asuint(partial[first + s2 * stride + constants.head_dim + 1]) == 0u;
        weights[s2] = empty ? 0.0 : exp(weights[s2] - largest);
    }
    GroupMemoryBarrierWithGroupSync();
    float total = 0.0;
    for (uint s3 = 0; s3 < constants.n_splits; s3++) {
        total += weights[s3] * partial[first + s3 * stride + constants.head_dim + 1];
    }
    float scale = asuint(total) == 0u ? 0.0 : 1.0 / total;
    for (uint d = lane; d < constants.head_dim; d += GROUP) {
        float sum = 0.0;
        for (uint s4 = 0; s4 < constants.n_splits; s4++) {
            if (weights[s4] != 0.0) sum += weights[s4] * partial[first + s4 * stride + d];
        }
        result[out_at(row, head) + d] = sum * scale;
    }
}
