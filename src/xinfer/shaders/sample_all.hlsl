// Draws a token where sample_few has left it open, by one workgroup over the whole vocabulary: slow, and always right.
//
// A place in the order of scores is found a byte of the key at a time: the counts, or the weights, of the keys with each
// next byte are summed up, and the byte is chosen in which the place lies. Of equal keys the lower ids come first.
#include "common.hlsli"

struct Constants {
    uint vocab;
    uint n_chunks;
    uint scratch_stride;
    uint ring_size;
    uint advance;
};

STEERING(uint, params, 0);
STEERING(uint, scratch, 1);
WRITES(uint, state, 2);
WRITES(uint, ring, 3);
WRITES(uint, counts, 4);
CONSTANTS(Constants, constants);
#include "sample.hlsli"
#include "move_on.hlsli"

#define DIGITS 256

struct Place {
    uint key;
    uint2 rest;  // how far into those of the same key
};

groupshared uint sums_low[DIGITS];
groupshared uint sums_high[DIGITS];
groupshared uint matches[GROUP];
groupshared uint digit;
groupshared uint2 rest;
groupshared uint highest;
groupshared uint total_low;
groupshared uint total_high;
groupshared uint chosen;

// Where the place lies, `target` measures into the order of keys from `least` on: of weights, or of 1 each.
Place find(uint base, uint lane, uint2 target, uint least, bool by_weight, float scale) {
    Place place;
    place.key = 0u;
    place.rest = target;
    for (uint level = 0; level < 4; level++) {
        uint shift = 24u - 8u * level;
        for (uint d = lane; d < DIGITS; d += GROUP) sums_low[d] = sums_high[d] = 0u;
        GroupMemoryBarrierWithGroupSync();
        for (uint id = lane; id < constants.vocab; id += GROUP) {
            uint key = scratch[base + id];
            if (key >= least && (key >> shift) >> 8 == place.key) {
                uint own = (key >> shift) & 0xffu;
                uint2 measure = uint2(1u, 0u);
                if (by_weight) measure = weight_of(key, highest, scale);
                ADD_SHARED64(sums_low[own], sums_high[own], measure)
            }
        }
        GroupMemoryBarrierWithGroupSync();
        if (lane == 0) {
            uint2 left = place.rest;
            uint at = DIGITS - 1;
            while (at > 0u && !less64(left, uint2(sums_low[at], sums_high[at]))) {
                left = sub64(left, uint2(sums_low[at], sums_high[at]));
                at--;
            }
            digit = at;
            rest = left;
        }
        GroupMemoryBarrierWithGroupSync();
        place.key = (place.key << 8) | digit;
        place.rest = rest;
    }
    return place;
}

// Which of equal keys it is, and how far into its weight.
Division tie_of(Place place, float scale) { return divide64(place.rest, weight_of(place.key, highest, scale)); }

// The sum of the weights from a key, and from a weight on.
uint2 sum_of(uint base, uint lane, uint least, uint2 min_weight, float scale) {
    if (lane == 0) total_low = total_high = 0u;
    GroupMemoryBarrierWithGroupSync();
    uint2 own = uint2(0u, 0u);
    for (uint id = lane; id < constants.vocab; id += GROUP) {
        uint key = scratch[base + id];
        uint2 weight = weight_of(key, highest, scale);
        if (key >= least && !less64(weight, min_weight)) own = add64(own, weight);
    }
    ADD_SHARED64(total_low, total_high, own)
    GroupMemoryBarrierWithGroupSync();
    uint2 total = uint2(total_low, total_high);
    GroupMemoryBarrierWithGroupSync();  // the next call may write again
    return total;
}

// The id at place `tie` (from 0 on) among those of one key.
void find_id(uint base, uint lane, uint wanted, uint tie) {
    uint share = (constants.vocab + GROUP - 1u) / GROUP;
    uint begin = min(lane * share, constants.vocab), end = min(begin + share, constants.vocab);
    uint n = 0u;
    for (uint i = begin; i < end; i++) {
        if (scratch[base + i] == wanted) n++;
    }
    matches[lane] = n;
    GroupMemoryBarrierWithGroupSync();
    uint before = 0u;
    for (uint other = 0; other < lane; other++) before += matches[other];
    uint place = before;
    for (uint j = begin; j < end; j++) {
        if (scratch[base + j] == wanted) {
            if (place == tie) chosen = j;
            place++;
        }
    }
}

// The token's place, given what the request keeps.
Place draw(uint row, uint base, uint lane, float scale) {
    uint own = row * PARAM_WORDS;
    uint top_k = params[own + PARAM_TOP_K], top_p = params[own + PARAM_TOP_P];
    uint2 min_weight = uint2(params[own + PARAM_MIN_LOW], params[own + PARAM_MIN_HIGH]);
    uint least = 1u;
    if (top_k > 0u) least = max(1u, find(base, lane, uint2(top_k - 1u, 0u), 1u, false, scale).key);
    uint2 kept = sum_of(base, lane, least, uint2(0u, 0u), scale);
    uint2 most = part_of(kept, top_p);
    if (top_p != 0u) {  // what is kept ends behind the token in which most - 1 lies
        uint2 last = is_zero64(most) ? most : sub64(most, uint2(1u, 0u));
        Place place = find(base, lane, last, least, true, scale);
        kept = add64(sub64(last, tie_of(place, scale).rest), weight_of(place.key, highest, scale));
    }
    if (!is_zero64(min_weight)) {
        uint2 enough = sum_of(base, lane, least, min_weight, scale);
        if (less64(enough, kept)) kept = enough;
    }
    uint position = state[row * STATE_WORDS + STATE_POSITION] + 1u;
    uint fraction = random_fraction(params[own + PARAM_SEED_LOW], params[own + PARAM_SEED_HIGH], position);
    if ((params[own + PARAM_OPTIONS] & OPTION_GREEDY) != 0u) fraction = 0u;
    return find(base, lane, part_of(kept, fraction), least, true, scale);
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.x, base = row * constants.scratch_stride, own = row * PARAM_WORDS;
    if (scratch[base + VERDICT_AT(constants.vocab, constants.n_chunks)] == VERDICT_CHOSEN) return;
    float scale = asfloat(params[own + PARAM_SCALE]);
    if (lane == 0) highest = NO_KEY;
    GroupMemoryBarrierWithGroupSync();
    uint largest = NO_KEY;
    for (uint c = lane; c < constants.n_chunks; c += GROUP) {
        largest = max(largest, scratch[base + BEST_AT(constants.vocab, c)]);
    }
    InterlockedMax(highest, largest);
    GroupMemoryBarrierWithGroupSync();
    Place place = draw(row, base, lane, scale);
    find_id(base, lane, place.key, tie_of(place, scale).quotient);
    GroupMemoryBarrierWithGroupSync();
    if (lane == 0) {
        bool moved = move_on(row, false, chosen);
        if (moved && (params[own + PARAM_OPTIONS] & OPTION_PENALTIES) != 0u) {
            counts[row * constants.vocab + chosen] += 1u;
        }
    }
}
