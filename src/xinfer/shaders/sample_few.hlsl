// Draws a token among few candidates: those whose scores reach the k-th best of the chunks' best ones, so that the k best
// of all are among them. A candidate finds its place in the order by looking at every other one.
//
// What is kept is always the front of that order: top_k, then top_p and min_p shorten it. Where candidates are too many,
// or what is kept goes on behind the last one, the verdict stays open, and sample_all chooses.
#include "common.hlsli"

struct Constants {
    uint vocab;
    uint chunk_shift;
    uint n_chunks;
    uint scratch_stride;
    uint ring_size;
    uint advance;
};

STEERING(uint, params, 0);
WRITES(uint, scratch, 1);
WRITES(uint, state, 2);
WRITES(uint, ring, 3);
WRITES(uint, counts, 4);
CONSTANTS(Constants, constants);
#include "sample.hlsli"
#include "move_on.hlsli"

#define UNROLLED 4

groupshared uint bests[CHUNKS_MAX];
groupshared uint listed[CHUNKS_MAX];  // chunks that have candidates
groupshared uint keys[CANDIDATES_MAX];
groupshared uint ids[CANDIDATES_MAX];
groupshared uint2 weights[CANDIDATES_MAX];
groupshared uint2 before[CANDIDATES_MAX];  // the weights of all that stand in front
groupshared uint ordered[CANDIDATES_MAX];  // which candidate stands at each place
groupshared uint n_listed;
groupshared uint n_candidates;
groupshared uint highest;  // key
groupshared uint least;    // key of a candidate
groupshared uint kth;      // key that top_k keeps
groupshared uint n_kept;
groupshared uint chosen;
groupshared uint all_low;  // sum of the weights before top_p and min_p,
groupshared uint all_high;
groupshared uint kept_low;  // and behind
groupshared uint kept_high;

void begin(uint lane, uint base) {
    for (uint i = lane; i < CHUNKS_MAX; i += GROUP) {
        uint best = scratch[base + BEST_AT(constants.vocab, min(i, constants.n_chunks - 1u))];
        bests[i] = i < constants.n_chunks ? best : NO_KEY;
    }
    if (lane == 0) {
        n_listed = n_candidates = n_kept = 0u;
        highest = NO_KEY;
        least = kth = 1u;  // all but what is forbidden
        chosen = NOBODY;
        all_low = all_high = kept_low = kept_high = 0u;
    }
}

// The best key of all, and the one at place `wanted` (from 1 on) among the chunks' best.
void find_least(uint lane, uint wanted) {
    for (uint i = lane; i < constants.n_chunks; i += GROUP) {
        uint own = bests[i], place = 0u;
        for (uint j = 0; j < constants.n_chunks; j++) {
            if (bests[j] > own || (bests[j] == own && j < i)) place++;
        }
        if (place == 0u) highest = own;
        if (place == wanted - 1u) least = max(own, 1u);
    }
}

void list_chunks(uint lane) {
    for (uint i = lane; i < constants.n_chunks; i += GROUP) {
        if (bests[i] >= least) {
            uint at;
            InterlockedAdd(n_listed, 1u, at);
            listed[at] = i;
        }
    }
}

void gather(uint lane, uint base) {
    uint size = n_listed << constants.chunk_shift;
    for (uint first = lane; first < size; first += UNROLLED * GROUP) {
        uint found[UNROLLED], places[UNROLLED];
        UNROLL for (uint u = 0; u < UNROLLED; u++) {
            uint at = min(first + u * GROUP, size - 1u), within = at & ((1u << constants.chunk_shift) - 1u);
            places[u] = (listed[at >> constants.chunk_shift] << constants.chunk_shift) + within;
            found[u] = scratch[base + min(places[u], constants.vocab - 1u)];
            if (first + u * GROUP >= size || places[u] >= constants.vocab) found[u] = NO_KEY;
        }
        UNROLL for (uint v = 0; v < UNROLLED; v++) {
            if (found[v] >= least) {
                uint slot;
                InterlockedAdd(n_candidates, 1u, slot);
                if (slot < CANDIDATES_MAX) {
                    keys[slot] = found[v];
                    ids[slot] = places[v];
                }
            }
        }
    }
}

void place_candidates(uint lane, uint n, uint top_k) {
    for (uint c = lane; c < n; c += GROUP) {
        uint key = keys[c], id = ids[c], place = 0u;
        uint2 sum = uint2(0u, 0u);
        for (uint j = 0; j < n; j++) {
            if (keys[j] > key || (keys[j] == key && ids[j] < id)) {
                place++;
                sum = add64(sum, weights[j]);
            }
        }
        before[c] = sum;
        ordered[place] = c;
        if (place + 1u == top_k) kth = key;
    }
}

// Whether a candidate is kept; none is behind one that is not. The first of all is kept whatever top_p is.
bool is_kept(uint c, uint2 min_weight, uint top_p, uint2 most) {
    bool within = top_p == 0u || less64(before[c], most) || is_zero64(before[c]);
    return keys[c] >= kth && !less64(weights[c], min_weight) && within;
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.x, base = row * constants.scratch_stride, own = row * PARAM_WORDS;
    uint top_k = params[own + PARAM_TOP_K], top_p = params[own + PARAM_TOP_P], options = params[own + PARAM_OPTIONS];
    uint2 min_weight = uint2(params[own + PARAM_MIN_LOW], params[own + PARAM_MIN_HIGH]);
    float scale = asfloat(params[own + PARAM_SCALE]);
    bool few = top_k >= 1u && top_k <= FEW_MAX;
    begin(lane, base);
    GroupMemoryBarrierWithGroupSync();
    find_least(lane, few ? top_k : FEW_MAX);
    GroupMemoryBarrierWithGroupSync();
    list_chunks(lane);
    GroupMemoryBarrierWithGroupSync();
    gather(lane, base);
    GroupMemoryBarrierWithGroupSync();
    uint n = min(n_candidates, CANDIDATES_MAX);
    for (uint i = lane; i < n; i += GROUP) weights[i] = weight_of(keys[i], highest, scale);
    GroupMemoryBarrierWithGroupSync();
    place_candidates(lane, n, few ? top_k : 0u);
    GroupMemoryBarrierWithGroupSync();
    if (few) {
        for (uint p = lane; p < n; p += GROUP) {
            uint c = ordered[p];
            if (keys[c] >= kth && (p + 1u == n || keys[ordered[p + 1u]] < kth)) {
                uint2 up_to = add64(before[c], weights[c]);
                all_low = up_to.x;
                all_high = up_to.y;
            }
        }
    } else {
        for (uint e = lane; e < constants.n_chunks; e += GROUP) {
            uint at = base + BEST_AT(constants.vocab, e);
            ADD_SHARED64(all_low, all_high, uint2(scratch[at + 1u], scratch[at + 2u]))
        }
    }
    GroupMemoryBarrierWithGroupSync();
    uint2 all = uint2(all_low, all_high), most = part_of(all, top_p);
    for (uint q = lane; q < n; q += GROUP) {
        uint d = ordered[q];
        if (!is_kept(d, min_weight, top_p, most)) continue;
        if (q + 1u == n || !is_kept(ordered[q + 1u], min_weight, top_p, most)) {
            uint2 up_to = add64(before[d], weights[d]);
            n_kept = q + 1u;
            kept_low = up_to.x;
            kept_high = up_to.y;
        }
    }
    GroupMemoryBarrierWithGroupSync();
    // Whether nothing is kept but candidates; where nothing shortens the order, the sum of all serves as well.
    bool whole = few || n_kept < n || least == 1u;
    bool able = n_candidates <= CANDIDATES_MAX && top_k <= FEW_MAX && (options & OPTION_SLOW) == 0u;
    if (!whole && (top_p != 0u || !is_zero64(min_weight))) able = false;
    uint2 sum = whole ? uint2(kept_low, kept_high) : all;
    uint position = state[row * STATE_WORDS + STATE_POSITION] + 1u;
    uint fraction = random_fraction(params[own + PARAM_SEED_LOW], params[own + PARAM_SEED_HIGH], position);
    uint2 target = part_of(sum, (options & OPTION_GREEDY) != 0u ? 0u : fraction);
    for (uint g = lane; g < n; g += GROUP) {
        if (!less64(target, before[g]) && less64(target, add64(before[g], weights[g]))) chosen = ids[g];
    }
    GroupMemoryBarrierWithGroupSync();
    if (lane == 0) {
        bool bad = highest == NOT_FINITE_KEY || highest == NO_KEY;
        bool done = bad || (able && chosen != NOBODY);
        scratch[base + VERDICT_AT(constants.vocab, constants.n_chunks)] = done ? VERDICT_CHOSEN : VERDICT_OPEN;
        if (done) {
            bool moved = move_on(row, bad, chosen);
            if (moved && !bad && (options & OPTION_PENALTIES) != 0u) counts[row * constants.vocab + chosen] += 1u;
        }
    }
}
