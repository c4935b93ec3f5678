// Causal attention of many query rows over the paged cache: QUERIES rows of one head a workgroup, KEYS keys at a time.
// head_dim: a multiple of 8 to DIM_MAX.
//
// Lanes lie in a grid of QUERIES / 4 by 16. A lane makes the scores of 4 queries for KEYS / 16 keys; then ROW_LANES lanes
// weigh each row; then a lane adds up 4 queries' sums in DIM_MAX / 64 pieces of 4 dimensions. Rows of a tile may belong to
// several sequences: they are passed one after the other, and a row's weights are 0 in the others' passes.
#include "common.hlsli"
#include "attention.hlsli"

#define QUERIES 32
#define GROUP 128
#define COLUMNS 16
#define KEYS_A_LANE (KEYS / COLUMNS)
#define PIECES (DIM_MAX / 4 / COLUMNS)
#define ROW_LANES (GROUP / QUERIES)

READS(float, q, 0);
READS(uint4, k_cache, 1);
READS(uint4, v_cache, 2);
READS(uint, block_table, 3);
STEERING(uint, state, 4);
WRITES(float, result, 5);

// Groupshared arrays have one dimension, and no index picks a vector's component: vkd3d's compiler and D3DCompile want it.
#define TILE_ROW (DIM_MAX / 4 + 1)  // one more, so that rows begin in different banks
groupshared float4 q_tile[QUERIES * TILE_ROW];
groupshared float4 kv_tile[KEYS * TILE_ROW];
// (key, query): scores, then weights.
#ifdef XINFER_D3D
groupshared float weights[KEYS * QUERIES];
#define WEIGHT(KEY, QUERY) weights[(KEY) * QUERIES + (QUERY)]
float4 four_weights(uint key, uint four) {
    uint at = key * QUERIES + 4 * four;
    return float4(weights[at], weights[at + 1], weights[at + 2], weights[at + 3]);
}
void put_four_weights(uint key, uint four, float4 values) {
    UNROLL for (uint i = 0; i < 4; i++) weights[key * QUERIES + 4 * four + i] = values[i];
}
#else
groupshared float4 weights[KEYS * QUERIES / 4];
#define WEIGHT(KEY, QUERY) weights[(KEY) * (QUERIES / 4) + (QUERY) / 4][(QUERY) % 4]
float4 four_weights(uint key, uint four) { return weights[key * (QUERIES / 4) + four]; }
void put_four_weights(uint key, uint four, float4 values) { weights[key * (QUERIES / 4) + four] = values; }
#endif
groupshared uint positions[QUERIES];
groupshared uint sequences[QUERIES];
groupshared float row_parts[QUERIES * ROW_LANES];
groupshared float corrections[QUERIES];

void stage_rows(uint first_row, uint head, uint lane) {
    if (lane < QUERIES) {
        bool real = first_row + lane < constants.n_rows;
        uint at = (real ? first_row + lane : 0u) * STATE_WORDS;
        positions[lane] = real ? state[at + STATE_POSITION] : UNUSED_ROW;
        sequences[lane] = real ? state[at + STATE_SEQUENCE] : 0u;
    }
    uint fours = constants.head_dim / 4;
    for (uint i = lane; i < QUERIES * fours; i += GROUP) {
        uint row = first_row + i / fours;
        float4 four = float4(0.0, 0.0, 0.0, 0.0);
        if (row < constants.n_rows) {
            uint at = constants.q_offset + row * constants.q_stride + head * constants.head_dim + i % fours * 4;
            four = float4(q[at], q[at + 1], q[at + 2], q[at + 3]) * constants.scale;
        }
        q_tile[i / fours * TILE_ROW + i % fours] = four;
    }
}

#define STAGE(CACHE)                                                                                             \
    {                                                                                                            \
        uint loads = constants.head_dim / VALUES_PER_LOAD;                                                       \
        for (uint i = lane; i < KEYS * loads; i += GROUP) {                                                      \
            uint key = tile + i / loads;                                                                         \
            uint4 raw = uint4(0, 0, 0, 0);                                                                       \
            if (key < range.end) {                                                                               \
                uint block = block_table[table_at + key / BLOCK_TOKENS];                                         \
                uint element = cache_element(block, kv_head, key, constants.n_kv_heads, constants.head_dim);     \
                raw = CACHE[element / VALUES_PER_LOAD + i % loads];                                              \
            }                                                                                                    \
            float values[VALUES_PER_LOAD];                                                                       \
            unpack_load(raw, values);                                                                            \
            UNROLL for (uint j = 0; j < VALUES_PER_LOAD / 4; j++) {                                              \
                kv_tile[i / loads * TILE_ROW + i % loads * (VALUES_PER_LOAD / 4) + j] =                          \
                    float4(values[4 * j], values[4 * j + 1], values[4 * j + 2], values[4 * j + 3]);              \
            }                                                                                                    \
        }                                                                                                        \
    }

// A row's position and sequence as the workgroup's way depends on them: see STEERING.
#ifdef XINFER_D3D
uint state_at(uint row) { return min(row, constants.n_rows - 1u) * STATE_WORDS; }
uint position_of(uint first_row, uint row) {
    uint position = state[state_at(first_row + row) + STATE_POSITION];
    return first_row + row < constants.n_rows ? position : UNUSED_ROW;
}
uint sequence_of(uint first_row, uint row) { return state[state_at(first_row + row) + STATE_SEQUENCE]; }
#else
uint position_of(uint first_row, uint row) { return positions[row]; }
uint sequence_of(uint first_row, uint row) { return sequences[row]; }
#endif

// Whether a row is the first of its sequence.
bool is_first(uint first_row, uint row) {
    bool first = position_of(first_row, row) != UNUSED_ROW;
    LOOP for (uint earlier = 0; earlier < row && first; earlier++) {
        bool real = position_of(first_row, earlier) != UNUSED_ROW;
        first = !(real && sequence_of(first_row, earlier) == sequence_of(first_row, row));
    }
    return first;
}

// The keys of this split that any row of the sequence sees.
KeyRange tile_keys(uint first_row, uint sequence, uint split) {
    uint first = UNUSED_ROW, end = 0;
    LOOP for (uint row = 0; row < QUERIES; row++) {
        uint position = position_of(first_row, row);
        if (position != UNUSED_ROW && sequence_of(first_row, row) == sequence) {
            first = min(first, first_key(position, constants.window));
            end = max(end, position + 1u);
        }
    }
    uint a_split = split_size(end - first);
    KeyRange range = { first + split * a_split, min(first + (split + 1u) * a_split, end) };
    return range;
}

void score_tile(uint tile, uint sequence, uint lane) {
    uint first_query = lane / COLUMNS * 4, fours = constants.head_dim / 4;
    float scores[4][KEYS_A_LANE];
    UNROLL for (uint i0 = 0; i0 < 4; i0++) {
        UNROLL for (uint j0 = 0; j0 < KEYS_A_LANE; j0++) scores[i0][j0] = 0.0;
    }
    for (uint d = 0; d < fours; d++) {
        float4 keys[KEYS_A_LANE];
        UNROLL for (uint j1 = 0; j1 < KEYS_A_LANE; j1++) keys[j1] = kv_tile[(lane % COLUMNS + j1 * COLUMNS) * TILE_ROW + d];
        UNROLL for (uint i1 = 0; i1 < 4; i1++) {
            float4 query = q_tile[(first_query + i1) * TILE_ROW + d];
            UNROLL for (uint j2 = 0; j2 < KEYS_A_LANE; j2++) scores[i1][j2] += dot(query, keys[j2]);
        }
    }
    UNROLL for (uint i = 0; i < 4; i++) {
        uint position = positions[first_query + i];
        bool own = position != UNUSED_ROW && sequences[first_query + i] == sequence;
        UNROLL for (uint j = 0; j < KEYS_A_LANE; j++) {
            uint key = tile + lane % COLUMNS + j * COLUMNS;
            bool seen = own && key <= position && key >= first_key(position, constants.window);
            if (!seen) scores[i][j] = MINUS_INFINITY;
        }
    }
    UNROLL for (uint j3 = 0; j3 < KEYS_A_LANE; j3++) {
        float4 four = float4(scores[0][j3], scores[1][j3], scores[2][j3], scores[3][j3]);
        put_four_weights(lane % COLUMNS + j3 * COLUMNS, lane / COLUMNS, four);
    }
}

// A row's scores become weights; `total` is this lane's share of their sum. Before a row's first key its largest score is
// minus infinity, which is no number to subtract. NaN goes on into the sum, whatever max makes of it.
void weigh_row(uint lane, uint n_keys, inout float largest, inout float total) {
    uint row = lane / ROW_LANES, part = lane % ROW_LANES;
    float own = MINUS_INFINITY;
    for (uint i = part; i < n_keys; i += ROW_LANES) own = max(own, WEIGHT(i, row));
    row_parts[row * ROW_LANES + part] = own;
    GroupMemoryBarrierWithGroupSync();
    float tile_largest = largest;
    UNROLL for (uint j = 0; j < ROW_LANES; j++) tile_largest = max(tile_largest, row_parts[row * ROW_LANES + j]);
    bool none = tile_largest == MINUS_INFINITY;
    float correction = none ? 1.0 : exp(largest - tile_largest);
    largest = tile_largest;
    total *= correction;
    for (uint k = part; k < n_keys; k += ROW_LANES) {
        float score = WEIGHT(k, row);
        float weight = none && asuint(score) == 0xff800000u ? 0.0 : exp(score - largest);
        WEIGHT(k, row) = weight;
        total += weight;
    }
    if (part == 0) corrections[row] = correction;
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint split = group.x, head = group.y, first_row = group.z * QUERIES;
    uint kv_head = head / (constants.n_heads / constants.n_kv_heads);
    uint own_queries = lane / COLUMNS, column = lane % COLUMNS, fours = constants.head_dim / 4;
    stage_rows(first_row, head, lane);
    GroupMemoryBarrierWithGroupSync();

    float4 sums[4][PIECES];
    UNROLL for (uint i0 = 0; i0 < 4; i0++) {
        UNROLL for (uint p0 = 0; p0 < PIECES; p0++) sums[i0][p0] = float4(0.0, 0.0, 0.0, 0.0);
    }
    float largest = MINUS_INFINITY, total = 0.0;  // of row lane / ROW_LANES
    LOOP for (uint row = 0; row < QUERIES; row++) {
        if (is_first(first_row, row)) {
            uint sequence = sequence_of(first_row, row);
            uint table_at = sequence * constants.table_stride;
            KeyRange range = tile_keys(first_row, sequence, split);
            for (uint tile = range.begin; tile < range.end; tile += KEYS) {
                uint n_keys = min(range.end - tile, KEYS);
                STAGE(k_cache);
                GroupMemoryBarrierWithGroupSync();
                score_tile(tile, sequence, lane);
                GroupMemoryBarrierWithGroupSync();
                STAGE(v_cache);
                weigh_row(lane, n_keys, largest, total);
                GroupMemoryBarrierWithGroupSync();
                UNROLL for (uint i1 = 0; i1 < 4; i1++) {
                    UNROLL for (uint p1 = 0; p1 < PIECES; p1++) sums[i1][p1] *= corrections[own_queries * 4 + i1];
                }
                for (uint key = 0; key < n_keys; key++) {
                    float4 weight = four_weights(key, own_queries);
                    UNROLL for (uint p2 = 0; p2 < PIECES; p2++) {
                        float4 value = kv_tile[key * TILE_ROW + column + p2 * COLUMNS];
                        UNROLL for (uint i2 = 0; i2 < 4; i2++) sums[i2][p2] += weight[i2] * value;
                    }
                }
                GroupMemoryBarrierWithGroupSync();  // before the next tile overwrites keys, values and weights
            }
        }
    }

    row_parts[lane] = total;
    if (lane % ROW_LANES == 0) corrections[lane / ROW_LANES] = largest;
    GroupMemoryBarrierWithGroupSync();
    bool whole = constants.n_splits == 1;
    UNROLL for (uint i = 0; i < 4; i++) {
        uint local = own_queries * 4 + i;
        if (first_row + local < constants.n_rows) {
            float all = 0.0;
            UNROLL for (uint j = 0; j < ROW_LANES; j++) all += row_parts[local * ROW_LANES + j];
            uint at = whole ? out_at(first_row + local, head) : partial_at(first_row + local, head, split);
            float scale = !whole ? 1.0 : asuint(all) == 0u ? 0.0 : 1.0 / all;  // a row of padding has no key at all
            UNROLL for (uint p = 0; p < PIECES; p++) {
                uint four = column + p * COLUMNS;
                if (four < fours) {
                    UNROLL for (uint e = 0; e < 4; e++) result[at + four * 4 + e] = sums[i][p][e] * scale;
                }
            }
            if (!whole && column == 0) {
                result[at + constants.head_dim] = corrections[local];
                result[at + constants.head_dim + 1] = all;
            }
        }
    }
}
