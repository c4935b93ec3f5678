// Causal attention of T query rows over the paged cache: any even head_dim to 256, one (row, head, split) a workgroup.
//
// Online softmax over tiles of GROUP keys: a lane makes one key's score, then owns some of the result's dimensions.
#include "common.hlsli"
#include "attention.hlsli"

#define PAIRS_MAX 2  // pairs of dimensions a lane: 256 / 2 / GROUP

READS(float, q, 0);
READS(uint, k_cache, 1);
READS(uint, v_cache, 2);
READS(uint, block_table, 3);
STEERING(uint, state, 4);
WRITES(float, result, 5);

groupshared float scores[GROUP];
groupshared uint elements[GROUP];  // where each key of the tile begins in the cache

#if FORMAT == F16
#define READ_PAIR(CACHE, ELEMENT) unpack_f16(CACHE[(ELEMENT) / 2])
#else
#define READ_PAIR(CACHE, ELEMENT) float2(asfloat(CACHE[ELEMENT]), asfloat(CACHE[(ELEMENT) + 1]))
#endif

float score_of(uint q_at, uint element) {
    float sum = 0.0;
    for (uint d = 0; d < constants.head_dim; d += 2) {
        float2 pair = READ_PAIR(k_cache, element + d);
        sum += q[q_at + d] * pair.x + q[q_at + d + 1] * pair.y;
    }
    return sum * constants.scale;
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint split = group.x, head = group.y, row = group.z;
    uint kv_head = head / (constants.n_heads / constants.n_kv_heads);
    uint q_at = constants.q_offset + row * constants.q_stride + head * constants.head_dim;
    uint table_at = state[row * STATE_WORDS + STATE_SEQUENCE] * constants.table_stride;
    KeyRange range = split_keys(state[row * STATE_WORDS + STATE_POSITION], split);

    float2 sums[PAIRS_MAX];
    UNROLL for (uint p0 = 0; p0 < PAIRS_MAX; p0++) sums[p0] = float2(0.0, 0.0);
    float largest = MINUS_INFINITY, total = 0.0;
    for (uint tile = range.begin; tile < range.end; tile += GROUP) {
        uint key = tile + lane;
        uint n_keys = min(range.end - tile, GROUP);
        if (lane < n_keys) {
            uint block = block_table[table_at + key / BLOCK_TOKENS];
            elements[lane] = cache_element(block, kv_head, key, constants.n_kv_heads, constants.head_dim);
            scores[lane] = score_of(q_at, elements[lane]);
        }
        GroupMemoryBarrierWithGroupSync();
        float tile_largest = largest;
        for (uint i = 0; i < n_keys; i++) tile_largest = max(tile_largest, scores[i]);
        float correction = exp(largest - tile_largest);
        largest = tile_largest;
        total *= correction;
        UNROLL for (uint p1 = 0; p1 < PAIRS_MAX; p1++) sums[p1] *= correction;
        for (uint j = 0; j < n_keys; j++) {
            float weight = exp(scores[j] - largest);
            total += weight;
            UNROLL for (uint p2 = 0; p2 < PAIRS_MAX; p2++) {
                uint d = (p2 * GROUP + lane) * 2;
                if (d < constants.head_dim) sums[p2] += weight * READ_PAIR(v_cache, elements[j] + d);
            }
        }
        GroupMemoryBarrierWithGroupSync();  // before the next tile overwrites the scores
    }

    bool whole = constants.n_splits == 1;
    uint at = whole ? out_at(row, head) : partial_at(row, head, split);
    float scale = !whole ? 1.0 : asuint(total) == 0u ? 0.0 : 1.0 / total;  // a row of padding has no key at all
    UNROLL for (uint p = 0; p < PAIRS_MAX; p++) {
        uint d = (p * GROUP + lane) * 2;
        if (d < constants.head_dim) {
            result[at + d] = sums[p].x * scale;
            result[at + d + 1] = sums[p].y * scale;
        }
    }
    if (!whole && lane == 0) {
        result[at + constants.head_dim] = largest;
        result[at + constants.head_dim + 1] = total;
    }
}
