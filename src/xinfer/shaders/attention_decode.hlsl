// Causal attention of T query rows over the paged cache, for few rows: one (row, KV head, split) a workgroup, up to
// HEADS query heads of which share every load of K and V. head_dim: a multiple of 8 to DIM_MAX.
//
// Online softmax over tiles of GROUP keys, in three phases: a lane makes one key's scores for all heads; LANES_A_HEAD
// lanes make a head's weights; a lane adds up one 16-byte piece of V for every n-th key, for all heads.
#include "common.hlsli"
#include "attention.hlsli"

#define HEADS 8
#define LANES_A_HEAD (GROUP / HEADS)
#define DIM_MAX 256
#define LOADS 4

READS(float, q, 0);
READS(uint4, k_cache, 1);
READS(uint4, v_cache, 2);
READS(uint, block_table, 3);
STEERING(uint, state, 4);
WRITES(float, result, 5);  // with several splits: (row, head, split, head_dim + 2)

groupshared float4 queries[HEADS * DIM_MAX / 4];
groupshared float weights[HEADS * GROUP];  // (head, key): scores, then weights; in the end (piece of keys, dimension)
groupshared uint key_loads[GROUP];         // where each key of the tile begins in the cache, in 16-byte loads
groupshared float maxima[GROUP];           // (head, lane)
groupshared float corrections[HEADS];

void stage_queries(uint row, uint first_head, uint n_heads, uint lane) {
    uint fours = constants.head_dim / 4;
    uint first = constants.q_offset + row * constants.q_stride + first_head * constants.head_dim;
    for (uint i = lane; i < n_heads * fours; i += GROUP) {
        uint at = first + i * 4;
        queries[i] = float4(q[at], q[at + 1], q[at + 2], q[at + 3]) * constants.scale;
    }
}

// Phase 1: one key's scores.
void score_key(uint lane, uint n_heads) {
    uint loads = constants.head_dim / VALUES_PER_LOAD, fours = constants.head_dim / 4;
    float scores[HEADS];
    UNROLL for (uint h0 = 0; h0 < HEADS; h0++) scores[h0] = 0.0;
    for (uint first = 0; first < loads; first += LOADS) {
        uint4 raw[LOADS];
        UNROLL for (uint u = 0; u < LOADS; u++) {
            raw[u] = uint4(0, 0, 0, 0);
            if (first + u < loads) raw[u] = k_cache[key_loads[lane] + first + u];
        }
        UNROLL for (uint v = 0; v < LOADS; v++) {
            if (first + v < loads) {
                float values[VALUES_PER_LOAD];
                unpack_load(raw[v], values);
                UNROLL for (uint h = 0; h < HEADS; h++) {
                    if (h < n_heads) {
                        UNROLL for (uint part = 0; part < VALUES_PER_LOAD / 4; part++) {
                            float4 four = queries[h * fours + (first + v) * (VALUES_PER_LOAD / 4) + part];
                            scores[h] += four.x * values[4 * part] + four.y * values[4 * part + 1] +
                                         four.z * values[4 * part + 2] + four.w * values[4 * part + 3];
                        }
                    }
                }
            }
        }
    }
    UNROLL for (uint h1 = 0; h1 < HEADS; h1++) weights[h1 * GROUP + lane] = scores[h1];
}

// Phase 2: a head's scores become weights; `total` is this lane's share of their sum.
void weigh(uint lane, inout float largest, inout float total) {
    uint head = lane / LANES_A_HEAD, first = head * GROUP + lane % LANES_A_HEAD;
    float own = MINUS_INFINITY;
    for (uint i = 0; i < HEADS; i++) own = max(own, weights[first + i * LANES_A_HEAD]);
    maxima[lane] = own;
    GroupMemoryBarrierWithGroupSync();
    float tile_largest = largest;
    for (uint j = 0; j < LANES_A_HEAD; j++) tile_largest = max(tile_largest, maxima[head * LANES_A_HEAD + j]);
    float correction = exp(largest - tile_largest);
    largest = tile_largest;
    total *= correction;
    for (uint k = 0; k < HEADS; k++) {
        float weight = exp(weights[first + k * LANES_A_HEAD] - largest);
        weights[first + k * LANES_A_HEAD] = weight;
        total += weight;
    }
    if (lane % LANES_A_HEAD == 0) corrections[head] = correction;
}

// Phase 3: this lane's piece of V, over its share of the tile's keys.
void add_values(uint piece, uint first_key_, uint key_step, uint n_keys, uint n_heads,
                inout float sums[HEADS][VALUES_PER_LOAD]) {
    UNROLL for (uint h0 = 0; h0 < HEADS; h0++) {
        UNROLL for (uint i0 = 0; i0 < VALUES_PER_LOAD; i0++) sums[h0][i0] *= corrections[h0];
    }
    for (uint first = first_key_; first < n_keys; first += LOADS * key_step) {
        uint4 raw[LOADS];
        UNROLL for (uint u = 0; u < LOADS; u++) {
            raw[u] = uint4(0, 0, 0, 0);
            if (first + u * key_step < n_keys) raw[u] = v_cache[key_loads[first + u * key_step] + piece];
        }
        UNROLL for (uint v = 0; v < LOADS; v++) {
            uint key = first + v * key_step;
            if (key < n_keys) {
                float values[VALUES_PER_LOAD];
                unpack_load(raw[v], values);
                UNROLL for (uint h = 0; h < HEADS; h++) {
                    if (h < n_heads) {
                        float weight = weights[h * GROUP + key];
                        UNROLL for (uint i = 0; i < VALUES_PER_LOAD; i++) sums[h][i] += weight * values[i];
                    }
                }
            }
        }
    }
}

// What a workgroup without keys leaves: zeros, or a split that counts for nothing.
void write_empty(uint row, uint first_head, uint n_heads, uint split, uint lane) {
    for (uint i = lane; i < n_heads * constants.head_dim; i += GROUP) {
        uint head = first_head + i / constants.head_dim, d = i % constants.head_dim;
        if (constants.n_splits == 1) {
            result[out_at(row, head) + d] = 0.0;
        } else if (d == 0) {
            result[partial_at(row, head, split) + constants.head_dim] = MINUS_INFINITY;
            result[partial_at(row, head, split) + constants.head_dim + 1] = 0.0;
        }
    }
}

void attend(uint row, uint split, KeyRange range, uint kv_head, uint first_head, uint n_heads, uint lane) {
    uint table_at = state[row * STATE_WORDS + STATE_SEQUENCE] * constants.table_stride;
    stage_queries(row, first_head, n_heads, lane);

    uint pieces = constants.head_dim / VALUES_PER_LOAD;
    uint key_step = GROUP / pieces;
    uint piece = lane % pieces, key_share = lane / pieces;  // lanes past pieces * key_step have nothing to add up
    float sums[HEADS][VALUES_PER_LOAD];
    UNROLL for (uint h0 = 0; h0 < HEADS; h0++) {
        UNROLL for (uint i0 = 0; i0 < VALUES_PER_LOAD; i0++) sums[h0][i0] = 0.0;
    }
    float largest = MINUS_INFINITY, total = 0.0;  // of the head that this lane weighs
    for (uint tile = range.begin; tile < range.end; tile += GROUP) {
        uint key = tile + lane;
        uint n_keys = min(range.end - tile, GROUP);
        if (lane < n_keys) {
            uint block = block_table[table_at + key / BLOCK_TOKENS];
            key_loads[lane] =
                cache_element(block, kv_head, key, constants.n_kv_heads, constants.head_dim) / VALUES_PER_LOAD;
        }
        GroupMemoryBarrierWithGroupSync();
        if (lane < n_keys) {
            score_key(lane, n_heads);
        } else {
            UNROLL for (uint h1 = 0; h1 < HEADS; h1++) weights[h1 * GROUP + lane] = MINUS_INFINITY;
        }
        GroupMemoryBarrierWithGroupSync();
        weigh(lane, largest, total);
        GroupMemoryBarrierWithGroupSync();
        if (key_share < key_step) add_values(piece, key_share, key_step, n_keys, n_heads, sums);
        GroupMemoryBarrierWithGroupSync();  // before the next tile, or the end, overwrites weights and key_loads
    }

    // The lanes of a head hold shares of its sum of weights; the lanes of a piece, shares of its sums.
    maxima[lane] = total;
    if (lane % LANES_A_HEAD == 0) corrections[lane / LANES_A_HEAD] = largest;
    UNROLL for (uint h = 0; h < HEADS; h++) {
        if (h < n_heads) {
            if (key_share < key_step) {
                UNROLL for (uint i = 0; i < VALUES_PER_LOAD; i++) {
                    weights[key_share * constants.head_dim + piece * VALUES_PER_LOAD + i] = sums[h][i];
                }
            }
            GroupMemoryBarrierWithGroupSync();
            float all = 0.0;
            for (uint j = 0; j < LANES_A_HEAD; j++) all += maxima[h * LANES_A_HEAD + j];
            bool whole = constants.n_splits == 1;
            uint at = whole ? out_at(row, first_head + h) : partial_at(row, first_head + h, split);
            for (uint d = lane; d < constants.head_dim; d += GROUP) {
                float sum = 0.0;
                for (uint share = 0; share < key_step; share++) sum += weights[share * constants.head_dim + d];
                result[at + d] = whole ? sum / all : sum;
            }
            if (!whole && lane == 0) {
                result[at + constants.head_dim] = corrections[h];
                result[at + constants.head_dim + 1] = all;
            }
            GroupMemoryBarrierWithGroupSync();
        }
    }
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint split = group.x, row = group.z;
    uint heads_a_kv_head = constants.n_heads / constants.n_kv_heads;
    uint kv_head = group.y / bundles(HEADS), bundle = group.y % bundles(HEADS);
    uint first_head = kv_head * heads_a_kv_head + bundle * HEADS;
    uint n_heads = min(heads_a_kv_head - bundle * HEADS, HEADS);
    KeyRange range = split_keys(state[row * STATE_WORDS + STATE_POSITION], split);
    if (range.begin < range.end) {
        attend(row, split, range, kv_head, first_head, n_heads, lane);
    } else {
        write_empty(row, first_head, n_heads, split, lane);
    }
}
