// Causal attention of T query rows over the paged cache, for few rows: one (row, KV head, split) a workgroup, up to
// HEADS query heads of which share every load of K and V. head_dim: a multiple of 8 to DIM_MAX. With few keys the chain of
// what a lane does is what takes time: then few heads a workgroup, and more workgroups; the loops are unrolled for it.
//
// Online softmax over tiles of KEYS keys. A tile's keys and values pass one after the other through groupshared memory,
// the next tile's on their way meanwhile. Three phases: a lane makes a key's scores for some heads; WEIGHERS lanes make
// a head's weights; a lane adds up one 16-byte piece of V for a head and a share of the keys.
//
// Where a row has several splits with keys, their partial results go to `scratch`, and the workgroup that is the last to
// finish, by the count in front of them, puts them together. Counts are 0 before and after.
//
// TURN: `q` holds q, k and v as the projections made them, each row the newest of its sequence. q and k are turned here
// (rope), and the row's own k and v join the cache (kv_append) while their splits use them. Where rows see each other's
// keys, these have to be in the cache before (rope_append): a row's own are then written once more, with the same bits.
#include "common.hlsli"

#define PIECES (DIM_MAX / VALUES_PER_LOAD)  // 16-byte loads of a key
#define LOADS (KEYS * PIECES / GROUP)       // of a tile, a lane
#define MIN_SPLIT 128                       // keys: less is not worth another workgroup, and the putting together
#define ONE_SPLIT (DIM_MAX <= 64 ? 256 : 192)  // keys: two splits take longer to be put together than these to be read
#include "attention.hlsli"

#define HEADS_A_LANE (HEADS * KEYS > GROUP ? HEADS * KEYS / GROUP : 1)  // in the first phase
#define WEIGHERS 16
#define TILE_ROW (PIECES + 1)  // one load more, so that rows begin in different banks
#define WEIGHT_ROW (KEYS + 1)  // likewise
#define TILED_SPLITS_MAX 132
#define TILED_ROWS_MAX 16
#define ITEMS (HEADS * PIECES)  // of the third phase: a piece of a head
#define SHARES (GROUP / ITEMS)  // lanes that share an item's keys
#define FOURS (VALUES_PER_LOAD / 4)
#define HEAD_FOURS (DIM_MAX / 4)
#define COMBINE_ITEMS (HEADS * HEAD_FOURS)
#define COMBINE_SHARES (GROUP / COMBINE_ITEMS)
#define COMBINE_LOADS 8

READS(float, q, 0);
#if TURN
WRITES(uint4, k_cache, 1);
WRITES(uint4, v_cache, 2);
#else
READS(uint4, k_cache, 1);
READS(uint4, v_cache, 2);
#endif
READS(uint, block_table, 3);
STEERING(uint, state, 4);
WRITES(float, result, 5);
SHARED_WRITES(uint4, scratch, 6);  // counts; then (row, head, split): head_dim sums, largest score, sum of weights, 0, 0
#if TURN
READS(float2, table, 7);  // (position, head_dim / 2): cos, sin
#define ROW_WORDS (PIECES * 4)
groupshared uint newest[2 * ROW_WORDS];  // the row's turned k, and its v, as they go into the cache
#endif

groupshared uint4 tile_loads[KEYS * TILE_ROW];   // (key, piece) of K, then of V; in the end sums
groupshared float4 queries[HEADS * HEAD_FOURS];  // (head, dimension)
#define WEIGHTS (WEIGHT_ROW > TILED_SPLITS_MAX ? WEIGHT_ROW : TILED_SPLITS_MAX)
groupshared float weights[HEADS * WEIGHTS];      // (head, key): scores, then weights; in the end (head, split)
groupshared float maxima[HEADS * WEIGHERS];      // (head, lane)
groupshared float corrections[HEADS];
groupshared uint arrived;

// What this workgroup is about.
struct Job {
    uint row;
    uint split;
    uint kv_head;
    uint first_head;
    uint n_heads;
    uint position;
    uint table_at;  // of the sequence, in the block table
    uint counter;
    uint lane;
};

uint n_counters() { return TILED_ROWS_MAX * constants.n_heads; }

// Where a (head, split)'s partial result begins.
uint part_at(Job job, uint head, uint split) {
    uint index = (job.row * constants.n_heads + job.first_head + head) * constants.n_splits + split;
    return n_counters() + index * (constants.head_dim / 4 + 1);
}

#if TURN
// One (head, dimension)'s value of q or k, turned.
float turned(uint first, uint d, uint position) {
    uint half_dim = constants.head_dim / 2, i = d < half_dim ? d : d - half_dim;
    float2 turn = table[position * half_dim + i];
    float2 made = turned_pair(q[first + i], q[first + half_dim + i], turn);
    return d < half_dim ? made.x : made.y;
}

// One dimension of the row's own k (part 0) or v (part 1).
float newest_value(Job job, uint part, uint d) {
    uint own = job.row * constants.q_stride + job.kv_head * constants.head_dim;
    return part == 0 ? turned(constants.k_offset + own, d, job.position) : q[constants.v_offset + own + d];
}

void stage_newest(Job job) {
    for (uint i = job.lane; i < 2 * ROW_WORDS; i += GROUP) {
        uint part = i / ROW_WORDS, d = i % ROW_WORDS * (VALUES_PER_LOAD / 4);
        if (d < constants.head_dim) {
#if FORMAT == F16
            newest[i] = pack_f16(newest_value(job, part, d), newest_value(job, part, d + 1));
#else
            newest[i] = asuint(newest_value(job, part, d));
#endif
        }
    }
}

uint4 newest_load(uint part, uint piece) {
    uint first = part * ROW_WORDS + piece * 4;
    return uint4(newest[first], newest[first + 1], newest[first + 2], newest[first + 3]);
}
#endif

void stage_queries(Job job) {
    uint own = constants.q_offset + job.row * constants.q_stride + job.first_head * constants.head_dim;
    for (uint i = job.lane; i < HEADS * HEAD_FOURS; i += GROUP) {
        uint head = i / HEAD_FOURS, d = i % HEAD_FOURS * 4, first = own + head * constants.head_dim;
        float four[4] = { 0.0, 0.0, 0.0, 0.0 };
        if (head < job.n_heads && d < constants.head_dim) {
            UNROLL for (uint j = 0; j < 4; j++) {
#if TURN
                four[j] = turned(first, d + j, job.position);
#else
                four[j] = q[first + d + j];
#endif
            }
        }
        queries[i] = float4(four[0], four[1], four[2], four[3]) * constants.scale;
    }
}

// Where the lane's loads of a tile lie in the cache, in 16-byte loads; past the tile's last key, that key's.
void find_tile(Job job, uint tile, uint n_keys, out uint at[LOADS]) {
    UNROLL for (uint u = 0; u < LOADS; u++) {
        uint key = tile + min((u * GROUP + job.lane) / PIECES, n_keys - 1);
        uint block = block_table[job.table_at + key / BLOCK_TOKENS];
        uint element = cache_element(block, job.kv_head, key, constants.n_kv_heads, constants.head_dim);
        at[u] = element / VALUES_PER_LOAD + min(job.lane % PIECES, constants.head_dim / VALUES_PER_LOAD - 1);
    }
}

// Past the tile's last key and a key's last piece: zeros.
void stage_tile(Job job, uint n_keys, uint4 raw[LOADS]) {
    UNROLL for (uint u = 0; u < LOADS; u++) {
        uint i = u * GROUP + job.lane;
        bool used = i / PIECES < n_keys && i % PIECES < constants.head_dim / VALUES_PER_LOAD;
        tile_loads[i / PIECES * TILE_ROW + i % PIECES] = used ? raw[u] : uint4(0, 0, 0, 0);
    }
}

// Phase 1: the scores of one key for HEADS_A_LANE heads; minus infinity past the tile's last key. For the lanes that have
// heads: see has_heads.
void score_key(Job job, uint n_keys) {
    uint key = job.lane % KEYS, first_head = job.lane / KEYS * HEADS_A_LANE;
    float scores[HEADS_A_LANE];
    UNROLL for (uint h0 = 0; h0 < HEADS_A_LANE; h0++) scores[h0] = 0.0;
    UNROLL for (uint piece = 0; piece < PIECES; piece++) {  // past head_dim: zeros
        float values[VALUES_PER_LOAD];
        unpack_load(tile_loads[key * TILE_ROW + piece], values);
        UNROLL for (uint h = 0; h < HEADS_A_LANE; h++) {
            UNROLL for (uint part = 0; part < FOURS; part++) {
                float4 four = queries[(first_head + h) * HEAD_FOURS + piece * FOURS + part];
                scores[h] += four.x * values[4 * part] + four.y * values[4 * part + 1] +
                             four.z * values[4 * part + 2] + four.w * values[4 * part + 3];
            }
        }
    }
    UNROLL for (uint h1 = 0; h1 < HEADS_A_LANE; h1++) {
        weights[(first_head + h1) * WEIGHT_ROW + key] = key < n_keys ? scores[h1] : MINUS_INFINITY;
    }
}

bool has_heads(uint lane) { return lane / KEYS * HEADS_A_LANE < HEADS; }

// The largest of what the WEIGHERS lanes of a head bring, and of `floor_`. All lanes of the workgroup call it.
float largest_of_head(uint lane, float own, float floor_) {
    if (lane < HEADS * WEIGHERS) maxima[lane] = own;
    GroupMemoryBarrierWithGroupSync();
    float found = floor_;
    if (lane < HEADS * WEIGHERS) {
        UNROLL for (uint i = 0; i < WEIGHERS; i++) found = max(found, maxima[lane / WEIGHERS * WEIGHERS + i]);
    }
    return found;
}

float total_of_head(uint head) {
    float total = 0.0;
    UNROLL for (uint i = 0; i < WEIGHERS; i++) total += maxima[head * WEIGHERS + i];
    return total;
}

// Phase 2: a head's scores become weights; `total` is this lane's share of their sum.
void weigh(uint lane, inout float largest, inout float total) {
    uint head = lane / WEIGHERS, first = head * WEIGHT_ROW + lane % WEIGHERS;
    bool weighs = lane < HEADS * WEIGHERS;
    float own = MINUS_INFINITY;
    if (weighs) {
        UNROLL for (uint i = 0; i < KEYS / WEIGHERS; i++) own = max(own, weights[first + i * WEIGHERS]);
    }
    float tile_largest = largest_of_head(lane, own, largest);
    if (weighs) {
        float correction = exp(largest - tile_largest);
        largest = tile_largest;
        total *= correction;
        UNROLL for (uint k = 0; k < KEYS / WEIGHERS; k++) {
            float weight = exp(weights[first + k * WEIGHERS] - largest);
            weights[first + k * WEIGHERS] = weight;
            total += weight;
        }
        if (lane % WEIGHERS == 0) corrections[head] = correction;
    }
}

// Phase 3: this lane's piece of V over its share of the tile's keys.
void add_values(uint lane, inout float sums[VALUES_PER_LOAD]) {
    uint item = lane % ITEMS, head = item / PIECES, piece = item % PIECES;
    UNROLL for (uint i0 = 0; i0 < VALUES_PER_LOAD; i0++) sums[i0] *= corrections[head];
    UNROLL for (uint j = 0; j < KEYS / SHARES; j++) {  // past the tile's last key: zeros
        uint key = lane / ITEMS + j * SHARES;
        float weight = weights[head * WEIGHT_ROW + key], values[VALUES_PER_LOAD];
        unpack_load(tile_loads[key * TILE_ROW + piece], values);
        UNROLL for (uint i = 0; i < VALUES_PER_LOAD; i++) sums[i] += weight * values[i];
    }
}

// Puts the shares of every item together, in the lanes below ITEMS.
void add_shares(uint lane, inout float sums[VALUES_PER_LOAD]) {
    if (lane >= ITEMS) {
        UNROLL for (uint part = 0; part < FOURS; part++) {
            float4 four = float4(sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]);
            tile_loads[(lane - ITEMS) * FOURS + part] = asuint(four);
        }
    }
    GroupMemoryBarrierWithGroupSync();
    if (lane < ITEMS) {
        UNROLL for (uint share = 1; share < SHARES; share++) {
            UNROLL for (uint part = 0; part < FOURS; part++) {
                float4 four = asfloat(tile_loads[((share - 1) * ITEMS + lane) * FOURS + part]);
                UNROLL for (uint j = 0; j < 4; j++) sums[4 * part + j] += four[j];
            }
        }
    }
}

// An item's sums become results, or one split's part of them.
void write_item(Job job, bool whole, float sums[VALUES_PER_LOAD]) {
    uint head = job.lane / PIECES, piece = job.lane % PIECES, d = piece * VALUES_PER_LOAD;
    if (job.lane < ITEMS && head < job.n_heads && d < constants.head_dim) {
        float total = total_of_head(head), scale = 1.0 / total;
        if (whole) {
            uint first = out_at(job.row, job.first_head + head) + d;
            UNROLL for (uint i = 0; i < VALUES_PER_LOAD; i++) result[first + i] = sums[i] * scale;
        } else {
            uint at = part_at(job, head, job.split);
            UNROLL for (uint part = 0; part < FOURS; part++) {
                float4 four = float4(sums[4 * part], sums[4 * part + 1], sums[4 * part + 2], sums[4 * part + 3]);
                scratch[at + piece * FOURS + part] = asuint(four);
            }
            if (piece == 0) scratch[at + constants.head_dim / 4] = asuint(float4(corrections[head], total, 0.0, 0.0));
        }
    }
}

// Whether this is the last of a row's and KV head's workgroups to get here; what the others wrote is then visible.
bool is_last(Job job, uint n_active) {
    AllMemoryBarrierWithGroupSync();
    if (job.lane == 0) {
        uint before;
        InterlockedAdd(scratch[job.counter].x, 1u, before);
        arrived = before + 1u;
        if (arrived == n_active) scratch[job.counter].x = 0u;
    }
    AllMemoryBarrierWithGroupSync();
    return arrived == n_active;
}

// `weights` becomes those of the splits, (head, split), and `maxima` the shares of each head's total.
void weigh_splits(Job job, uint n_active) {
    for (uint pair = job.lane; pair < job.n_heads * n_active; pair += GROUP) {
        tile_loads[pair] = scratch[part_at(job, pair / n_active, pair % n_active) + constants.head_dim / 4];
    }
    GroupMemoryBarrierWithGroupSync();
    uint head = job.lane / WEIGHERS, first = head * n_active;
    bool weighs = job.lane < HEADS * WEIGHERS && head < job.n_heads;
    float own = MINUS_INFINITY, total = 0.0;
    if (weighs) {
        for (uint s0 = job.lane % WEIGHERS; s0 < n_active; s0 += WEIGHERS) {
            own = max(own, asfloat(tile_loads[first + s0].x));
        }
    }
    float largest = largest_of_head(job.lane, own, MINUS_INFINITY);
    GroupMemoryBarrierWithGroupSync();
    if (weighs) {
        for (uint s1 = job.lane % WEIGHERS; s1 < n_active; s1 += WEIGHERS) {
            float2 found = asfloat(tile_loads[first + s1].xy);
            float factor = exp(found.x - largest);
            total += factor * found.y;
            weights[first + s1] = factor;
        }
        maxima[job.lane] = total;
    }
    GroupMemoryBarrierWithGroupSync();
}

// Four dimensions of a head a lane, over a share of the splits. With no splits nothing is written.
void combine(Job job, uint n_active) {
    weigh_splits(job, n_active);
    uint item = job.lane % COMBINE_ITEMS, share = job.lane / COMBINE_ITEMS;
    uint head = item / HEAD_FOURS, four_ = item % HEAD_FOURS;
    bool used = head < job.n_heads && four_ * 4 < constants.head_dim && n_active > 0;
    float4 sum = float4(0, 0, 0, 0);
    if (used) {
        uint stride = constants.head_dim / 4 + 1, first = part_at(job, head, 0) + four_;
        for (uint s = share; s < n_active; s += COMBINE_LOADS * COMBINE_SHARES) {
            float4 parts[COMBINE_LOADS];
            UNROLL for (uint u0 = 0; u0 < COMBINE_LOADS; u0++) {
                parts[u0] = asfloat(scratch[first + min(s + u0 * COMBINE_SHARES, n_active - 1) * stride]);
            }
            UNROLL for (uint u1 = 0; u1 < COMBINE_LOADS; u1++) {
                uint split = s + u1 * COMBINE_SHARES;
                if (split < n_active) sum += weights[head * n_active + split] * parts[u1];
            }
        }
    }
    if (share > 0) tile_loads[(share - 1) * COMBINE_ITEMS + item] = asuint(sum);
    GroupMemoryBarrierWithGroupSync();
    if (share > 0 || !used) return;
    UNROLL for (uint other = 1; other < COMBINE_SHARES; other++) {
        sum += asfloat(tile_loads[(other - 1) * COMBINE_ITEMS + item]);
    }
    sum *= 1.0 / total_of_head(head);
    uint at = out_at(job.row, job.first_head + head) + four_ * 4;
    UNROLL for (uint j = 0; j < 4; j++) result[at + j] = sum[j];
}

void write_zeros(Job job) {
    for (uint i = job.lane; i < job.n_heads * constants.head_dim; i += GROUP) {
        result[out_at(job.row, job.first_head + i / constants.head_dim) + i % constants.head_dim] = 0.0;
    }
}

Job job_of(uint3 group, uint lane) {
    Job job;
    uint heads_a_kv_head = constants.n_heads / constants.n_kv_heads, bundle = group.y % bundles(HEADS);
    job.split = group.x;
    job.row = group.z;
    job.kv_head = group.y / bundles(HEADS);
    job.first_head = job.kv_head * heads_a_kv_head + bundle * HEADS;
    job.n_heads = min(heads_a_kv_head - bundle * HEADS, HEADS);
    job.position = state[job.row * STATE_WORDS + STATE_POSITION];
    job.table_at = state[job.row * STATE_WORDS + STATE_SEQUENCE] * constants.table_stride;
    job.counter = job.row * (constants.n_kv_heads * bundles(HEADS)) + group.y;
    job.lane = lane;
    return job;
}

void attend(Job job, uint3 group, KeyRange range) {
    uint lane = job.lane;
    uint at[LOADS];
    uint4 keys[LOADS], values[LOADS];
    uint n_keys = min(range.end - range.begin, KEYS);
    find_tile(job, range.begin, n_keys, at);
    UNROLL for (uint u0 = 0; u0 < LOADS; u0++) {
        keys[u0] = k_cache[at[u0]];
        values[u0] = v_cache[at[u0]];
    }
    stage_queries(job);
#if TURN
    stage_newest(job);
    GroupMemoryBarrierWithGroupSync();
#endif
    float sums[VALUES_PER_LOAD];
    UNROLL for (uint i0 = 0; i0 < VALUES_PER_LOAD; i0++) sums[i0] = 0.0;
    float largest = MINUS_INFINITY, total = 0.0;  // of the head that this lane weighs
    for (uint tile = range.begin; tile < range.end; tile += KEYS) {
#if TURN
        UNROLL for (uint u1 = 0; u1 < LOADS; u1++) {
            uint key = (u1 * GROUP + lane) / PIECES, piece = lane % PIECES;
            bool own = key < n_keys && tile + key == job.position;
            if (own && piece < constants.head_dim / VALUES_PER_LOAD) {
                keys[u1] = newest_load(0, piece);
                values[u1] = newest_load(1, piece);
                if (group.y % bundles(HEADS) == 0) {
                    k_cache[at[u1]] = keys[u1];
                    v_cache[at[u1]] = values[u1];
                }
            }
        }
#endif
        stage_tile(job, n_keys, keys);
        GroupMemoryBarrierWithGroupSync();
        uint next = tile + KEYS;
        uint n_next = next < range.end ? min(range.end - next, KEYS) : 0;
        if (n_next > 0) {
            find_tile(job, next, n_next, at);
            UNROLL for (uint u2 = 0; u2 < LOADS; u2++) keys[u2] = k_cache[at[u2]];
        }
        if (has_heads(lane)) score_key(job, n_keys);
        GroupMemoryBarrierWithGroupSync();
        stage_tile(job, n_keys, values);
        if (n_next > 0) {
            UNROLL for (uint u3 = 0; u3 < LOADS; u3++) values[u3] = v_cache[at[u3]];
        }
        weigh(lane, largest, total);
        GroupMemoryBarrierWithGroupSync();
        add_values(lane, sums);
        GroupMemoryBarrierWithGroupSync();  // before the next tile, or the end, overwrites what was read
        n_keys = n_next;
    }

    if (lane < HEADS * WEIGHERS) maxima[lane] = total;
    if (lane < HEADS * WEIGHERS && lane % WEIGHERS == 0) corrections[lane / WEIGHERS] = largest;
    uint n_active = active_splits(job.position);
    add_shares(lane, sums);
    write_item(job, n_active == 1, sums);
    if (n_active > 1) {  // not one condition: D3DCompile would count in either case
#ifdef XINFER_D3D
        combine(job, is_last(job, n_active) ? n_active : 0u);  // all come to its barriers: see STEERING
#else
        if (is_last(job, n_active)) combine(job, n_active);
#endif
    }
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    Job job = job_of(group, lane);
    KeyRange range = split_keys(job.position, job.split);
    if (range.begin < range.end) {
        attend(job, group, range);
    } else if (job.position == UNUSED_ROW && job.split == 0) {
        write_zeros(job);
    }
}
