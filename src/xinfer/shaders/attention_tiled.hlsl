// Causal attention of T query rows over the paged cache, for few rows: one (row, KV head, split) a workgroup, up to
// HEADS query heads of which share every load of K and V. head_dim: a multiple of 8 to DIM_MAX.
//
// Online softmax over tiles of KEYS keys. A tile's keys and values are loaded at once, side by side over the lanes, and
// pass one after the other through groupshared memory. Three phases: a lane makes a key's scores for some heads;
// LANES_A_HEAD lanes make a head's weights; a lane adds up one 16-byte piece of V for a head.
//
// ONE_PASS: where a row has several splits with keys, their partial results go to `partial`, and the workgroup that is
// the last to finish, by the count in `counters`, puts them together. Counters are 0 before and after.
#include "common.hlsli"

#define HEADS 8
#define PIECES (DIM_MAX / VALUES_PER_LOAD)  // 16-byte loads of a key
#define LOADS 8                             // of a tile, a lane
#define KEYS (LOADS * GROUP / PIECES)
#define MIN_SPLIT KEYS
#include "attention.hlsli"

#define LANES_A_HEAD (GROUP / HEADS)
#define HEADS_A_LANE (HEADS * KEYS / GROUP)  // in the first phase
#define TILE_ROW (PIECES + 1)                // one load more, so that rows begin in different banks
#define WEIGHT_ROW (KEYS + 1)                // likewise
#define ITEMS (HEADS * PIECES)               // of the third phase: a piece of a head
#define SHARES (ITEMS < GROUP ? GROUP / ITEMS : 1)  // lanes that share an item's keys
#define ITEMS_A_LANE (ITEMS > GROUP ? ITEMS / GROUP : 1)
#define STEP (4 * SHARES)  // keys that the lanes of an item take at a time

READS(float, q, 0);
READS(uint4, k_cache, 1);
READS(uint4, v_cache, 2);
READS(uint, block_table, 3);
READS(uint, state, 4);
WRITES(float, result, 5);
#if ONE_PASS
SHARED_WRITES(float, partial, 6);  // (row, head, split, head_dim + 2)
WRITES(uint, counters, 7);         // (row, workgroups in y)
#define PARTIAL partial
#else
#define PARTIAL result
#endif

groupshared uint4 tile_loads[KEYS * TILE_ROW];    // (key, piece) of K, then of V
groupshared float4 queries[HEADS * DIM_MAX / 4];  // (head, dimension)
groupshared float weights[HEADS * WEIGHT_ROW];    // (head, key): scores, then weights
groupshared float maxima[GROUP];                  // (head, lane)
groupshared float corrections[HEADS];
groupshared float shared_sums[(SHARES > 1 ? GROUP - ITEMS : 1) * VALUES_PER_LOAD];
#if ONE_PASS
groupshared uint arrived;
#endif

void stage_queries(uint row, uint first_head, uint n_heads, uint lane) {
    uint first = constants.q_offset + row * constants.q_stride + first_head * constants.head_dim;
    for (uint i = lane; i < HEADS * DIM_MAX / 4; i += GROUP) {
        uint head = i / (DIM_MAX / 4), d = i % (DIM_MAX / 4) * 4;
        if (head < n_heads && d < constants.head_dim) {
            uint at = first + head * constants.head_dim + d;
            queries[i] = float4(q[at], q[at + 1], q[at + 2], q[at + 3]) * constants.scale;
        }
    }
}

void stage_tile(uint4 raw[LOADS], uint lane) {
    UNROLL for (uint u = 0; u < LOADS; u++) {
        uint i = u * GROUP + lane;
        tile_loads[i / PIECES * TILE_ROW + i % PIECES] = raw[u];
    }
}

// Phase 1: the scores of one key for HEADS_A_LANE heads; minus infinity past the tile's last key.
void score_key(uint n_keys, uint n_heads, uint lane) {
    uint key = lane % KEYS, first_head = lane / KEYS * HEADS_A_LANE;
    uint pieces = constants.head_dim / VALUES_PER_LOAD;
    float scores[HEADS_A_LANE];
    UNROLL for (uint h0 = 0; h0 < HEADS_A_LANE; h0++) scores[h0] = 0.0;
    for (uint piece = 0; piece < pieces; piece++) {
        float values[VALUES_PER_LOAD];
        unpack_load(tile_loads[key * TILE_ROW + piece], values);
        UNROLL for (uint h = 0; h < HEADS_A_LANE; h++) {
            if (first_head + h < n_heads) {
                UNROLL for (uint part = 0; part < VALUES_PER_LOAD / 4; part++) {
                    uint at = (first_head + h) * (DIM_MAX / 4) + piece * (VALUES_PER_LOAD / 4) + part;
                    float4 four = queries[at];
                    scores[h] += four.x * values[4 * part] + four.y * values[4 * part + 1] +
                                 four.z * values[4 * part + 2] + four.w * values[4 * part + 3];
                }
            }
        }
    }
    UNROLL for (uint h1 = 0; h1 < HEADS_A_LANE; h1++) {
        weights[(first_head + h1) * WEIGHT_ROW + key] = key < n_keys ? scores[h1] : MINUS_INFINITY;
    }
}

// Phase 2: a head's scores become weights; `total` is this lane's share of their sum.
void weigh(uint lane, inout float largest, inout float total) {
    uint head = lane / LANES_A_HEAD, first = head * WEIGHT_ROW + lane % LANES_A_HEAD;
    float own = MINUS_INFINITY;
    UNROLL for (uint i = 0; i < KEYS / LANES_A_HEAD; i++) own = max(own, weights[first + i * LANES_A_HEAD]);
    maxima[lane] = own;
    GroupMemoryBarrierWithGroupSync();
    float tile_largest = largest;
    UNROLL for (uint j = 0; j < LANES_A_HEAD; j++) tile_largest = max(tile_largest, maxima[head * LANES_A_HEAD + j]);
    float correction = exp(largest - tile_largest);
    largest = tile_largest;
    total *= correction;
    UNROLL for (uint k = 0; k < KEYS / LANES_A_HEAD; k++) {
        float weight = exp(weights[first + k * LANES_A_HEAD] - largest);
        weights[first + k * LANES_A_HEAD] = weight;
        total += weight;
    }
    if (lane % LANES_A_HEAD == 0) corrections[head] = correction;
}

// Phase 3: this lane's pieces of V. Past the tile's last key weights and values are 0.
void add_values(uint n_keys, uint lane, inout float sums[ITEMS_A_LANE][VALUES_PER_LOAD]) {
    UNROLL for (uint j = 0; j < ITEMS_A_LANE; j++) {
        uint item = lane % ITEMS + j * GROUP, share = lane / ITEMS;
        uint head = item / PIECES, piece = item % PIECES;
        UNROLL for (uint i0 = 0; i0 < VALUES_PER_LOAD; i0++) sums[j][i0] *= corrections[head];
        for (uint first = share; first < n_keys; first += STEP) {
            UNROLL for (uint u = 0; u < 4; u++) {
                uint key = first + u * SHARES;
                float weight = weights[head * WEIGHT_ROW + key], values[VALUES_PER_LOAD];
                unpack_load(tile_loads[key * TILE_ROW + piece], values);
                UNROLL for (uint i = 0; i < VALUES_PER_LOAD; i++) sums[j][i] += weight * values[i];
            }
        }
    }
}

void write_zeros(uint row, uint first_head, uint n_heads, uint lane) {
    for (uint i = lane; i < n_heads * constants.head_dim; i += GROUP) {
        result[out_at(row, first_head + i / constants.head_dim) + i % constants.head_dim] = 0.0;
    }
}

#if ONE_PASS
// Whether this is the last of a row's and KV head's workgroups to get here; what the others wrote is then visible.
bool is_last(uint counter, uint n_active, uint lane) {
    AllMemoryBarrierWithGroupSync();
    if (lane == 0) {
        uint before;
        InterlockedAdd(counters[counter], 1u, before);
        arrived = before + 1u;
        if (arrived == n_active) counters[counter] = 0u;
    }
    AllMemoryBarrierWithGroupSync();
    return arrived == n_active;
}

// One (head, dimension) a lane and turn. `weights` holds the largest scores of (head, split), then the sums of weights.
void combine(uint row, uint first_head, uint n_heads, uint n_active, uint lane) {
    uint stride = constants.head_dim + 2, pairs = n_heads * n_active;
    for (uint p = lane; p < pairs; p += GROUP) {
        uint at = partial_at(row, first_head + p / n_active, p % n_active) + constants.head_dim;
        weights[p] = partial[at];
        weights[pairs + p] = partial[at + 1];
    }
    GroupMemoryBarrierWithGroupSync();
    for (uint output = lane; output < n_heads * constants.head_dim; output += GROUP) {
        uint head = output / constants.head_dim, d = output % constants.head_dim;
        uint first = partial_at(row, first_head + head, 0) + d, of_head = head * n_active;
        float largest = MINUS_INFINITY;
        for (uint s0 = 0; s0 < n_active; s0++) largest = max(largest, weights[of_head + s0]);
        float sum = 0.0, total = 0.0;
        for (uint s1 = 0; s1 < n_active; s1 += 4) {
            float parts[4];
            UNROLL for (uint u0 = 0; u0 < 4; u0++) parts[u0] = partial[first + min(s1 + u0, n_active - 1) * stride];
            UNROLL for (uint u1 = 0; u1 < 4; u1++) {
                if (s1 + u1 < n_active) {
                    float weight = exp(weights[of_head + s1 + u1] - largest);
                    sum += weight * parts[u1];
                    total += weight * weights[pairs + of_head + s1 + u1];
                }
            }
        }
        result[out_at(row, first_head + head) + d] = sum / total;
    }
}
#endif

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint split = group.x, row = group.z;
    uint heads_a_kv_head = constants.n_heads / constants.n_kv_heads;
    uint bundles = (heads_a_kv_head + HEADS - 1) / HEADS;
    uint kv_head = group.y / bundles, bundle = group.y % bundles;
    uint first_head = kv_head * heads_a_kv_head + bundle * HEADS;
    uint n_heads = min(heads_a_kv_head - bundle * HEADS, HEADS);
    uint position = state[row * STATE_WORDS + STATE_POSITION];
    KeyRange range = split_keys(position, split);
    if (range.begin >= range.end) {
        // attention_combine_active reads no split without keys, and makes a row of padding 0 by itself.
        if (position == UNUSED_ROW && split == 0 && (ONE_PASS || constants.n_splits == 1)) {
            write_zeros(row, first_head, n_heads, lane);
        }
        return;
    }
    uint n_active = active_splits(position);
    bool whole = constants.n_splits == 1 || (ONE_PASS && n_active == 1);
    uint table_at = state[row * STATE_WORDS + STATE_SEQUENCE] * constants.table_stride;
    uint pieces = constants.head_dim / VALUES_PER_LOAD;
    stage_queries(row, first_head, n_heads, lane);

    float sums[ITEMS_A_LANE][VALUES_PER_LOAD];
    UNROLL for (uint j0 = 0; j0 < ITEMS_A_LANE; j0++) {
        UNROLL for (uint i0 = 0; i0 < VALUES_PER_LOAD; i0++) sums[j0][i0] = 0.0;
    }
    float largest = MINUS_INFINITY, total = 0.0;  // of the head that this lane weighs
    for (uint tile = range.begin; tile < range.end; tile += KEYS) {
        uint n_keys = min(range.end - tile, KEYS);
        uint at[LOADS];
        UNROLL for (uint u0 = 0; u0 < LOADS; u0++) {
            uint key = tile + min((u0 * GROUP + lane) / PIECES, n_keys - 1);
            uint block = block_table[table_at + key / BLOCK_TOKENS];
            at[u0] = cache_element(block, kv_head, key, constants.n_kv_heads, constants.head_dim) / VALUES_PER_LOAD;
        }
        uint4 keys[LOADS], values[LOADS];
        UNROLL for (uint u1 = 0; u1 < LOADS; u1++) {
            uint local = (u1 * GROUP + lane) / PIECES, piece = lane % PIECES;
            keys[u1] = uint4(0, 0, 0, 0);
            values[u1] = uint4(0, 0, 0, 0);
            if (local < n_keys && piece < pieces) {
                keys[u1] = k_cache[at[u1] + piece];
                values[u1] = v_cache[at[u1] + piece];
            }
        }
        stage_tile(keys, lane);
        GroupMemoryBarrierWithGroupSync();
        score_key(n_keys, n_heads, lane);
        GroupMemoryBarrierWithGroupSync();
        stage_tile(values, lane);
        weigh(lane, largest, total);
        GroupMemoryBarrierWithGroupSync();
        add_values(n_keys, lane, sums);
        GroupMemoryBarrierWithGroupSync();  // before the next tile, or the end, overwrites what was read
    }

    maxima[lane] = total;
    if (lane % LANES_A_HEAD == 0) corrections[lane / LANES_A_HEAD] = largest;
    if (SHARES > 1 && lane >= ITEMS) {
        UNROLL for (uint i1 = 0; i1 < VALUES_PER_LOAD; i1++) shared_sums[(lane - ITEMS) * VALUES_PER_LOAD + i1] = sums[0][i1];
    }
    GroupMemoryBarrierWithGroupSync();
    UNROLL for (uint j = 0; j < ITEMS_A_LANE; j++) {
        uint item = lane + j * GROUP, head = item / PIECES, piece = item % PIECES;
        if (item < ITEMS && head < n_heads && piece < pieces) {
            UNROLL for (uint share = 1; share < SHARES; share++) {
                UNROLL for (uint i2 = 0; i2 < VALUES_PER_LOAD; i2++) {
                    sums[j][i2] += shared_sums[((share - 1) * ITEMS + item) * VALUES_PER_LOAD + i2];
                }
            }
            float all = 0.0;
            UNROLL for (uint k = 0; k < LANES_A_HEAD; k++) all += maxima[head * LANES_A_HEAD + k];
            uint d = piece * VALUES_PER_LOAD;
            if (whole) {
                uint out_first = out_at(row, first_head + head) + d;
                UNROLL for (uint i3 = 0; i3 < VALUES_PER_LOAD; i3++) result[out_first + i3] = sums[j][i3] / all;
            } else {
                uint first = partial_at(row, first_head + head, split);
                UNROLL for (uint i4 = 0; i4 < VALUES_PER_LOAD; i4++) PARTIAL[first + d + i4] = sums[j][i4];
                if (piece == 0) {
                    PARTIAL[first + constants.head_dim] = corrections[head];
                    PARTIAL[first + constants.head_dim + 1] = all;
                }
            }
        }
    }
#if ONE_PASS
    if (whole) return;
    if (is_last(row * (constants.n_kv_heads * bundles) + group.y, n_active, lane)) {
        combine(row, first_head, n_heads, n_active, lane);
    }
#endif
}
