// The first stages of drawing a token, each by a workgroup for every chunk of the vocabulary. STAGE 0 puts bias and
// penalties on the logits, and leaves keys of the scores' order and each chunk's best one; STAGE 1 leaves the sum of each
// chunk's weights, where sample_few needs it. sample_few and sample_all choose.
#include "common.hlsli"

STEERING(uint, params, 0);
#include "sample.hlsli"

#if STAGE == 0
struct Constants {
    uint vocab;
    uint chunk_shift;  // a chunk has 2^chunk_shift ids
    uint scratch_stride;
    uint logits_stride;
    uint logits_offset;
};

READS(float, logits, 1);    // (rows, vocab)
READS(uint, counts, 2);     // (rows, vocab): 2^31 where an id is in the prompt, and how often it is in the answer
READS(float, bias, 3);      // (rows, vocab)
WRITES(uint, scratch, 4);
CONSTANTS(Constants, constants);

#define LARGEST 3.4028234e38
groupshared uint best;

float clamped(float score) { return min(max(score, -LARGEST), LARGEST); }

uint key_of(uint row, uint id) {
    uint own = row * PARAM_WORDS;
    float score = logits[constants.logits_offset + row * constants.logits_stride + id];
    if (not_finite(score)) return NOT_FINITE_KEY;
    if ((params[own + PARAM_OPTIONS] & OPTION_BIAS) != 0u) {
        float added = bias[row * constants.vocab + id];
        if (asuint(added) == 0xff800000u) return NO_KEY;  // forbidden
        score = clamped(score + added);
    }
    if ((params[own + PARAM_OPTIONS] & OPTION_PENALTIES) != 0u) {
        uint seen = counts[row * constants.vocab + id];
        float repeated = score * asfloat(params[own + (score < 0.0 ? PARAM_REPETITION : PARAM_REPETITION_BY)]);
        if (seen != 0u) score = clamped(repeated);
        precise float taken = asfloat(params[own + PARAM_FREQUENCY]) * float(seen & 0x7fffffffu);
        taken = taken + asfloat(params[own + PARAM_PRESENCE]);
        if ((seen & 0x7fffffffu) != 0u) score = clamped(score - taken);
    }
    return order_key(score);
}

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.y, base = row * constants.scratch_stride;
    uint n_valid = min(params[row * PARAM_WORDS + PARAM_N_VALID], constants.vocab);
    uint first = group.x << constants.chunk_shift;
    uint end = min(constants.vocab, first + (1u << constants.chunk_shift));
    if (lane == 0) best = NO_KEY;
    GroupMemoryBarrierWithGroupSync();
    uint largest = NO_KEY;
    for (uint id = first + lane; id < end; id += GROUP) {
        uint key = NO_KEY;
        if (id < n_valid) key = key_of(row, id);
        scratch[base + id] = key;
        largest = max(largest, key);
    }
    InterlockedMax(best, largest);
    GroupMemoryBarrierWithGroupSync();
    if (lane == 0) scratch[base + BEST_AT(constants.vocab, group.x)] = best;
}
#else
struct Constants {
    uint vocab;
    uint chunk_shift;
    uint n_chunks;
    uint scratch_stride;
};

WRITES(uint, scratch, 1);
CONSTANTS(Constants, constants);

groupshared uint highest;
groupshared uint total_low;
groupshared uint total_high;

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.y, base = row * constants.scratch_stride;
    uint top_k = params[row * PARAM_WORDS + PARAM_TOP_K];
    if (top_k > 0u) return;  // nobody asks for the sum of all
    if (lane == 0) {
        highest = NO_KEY;
        total_low = total_high = 0u;
    }
    GroupMemoryBarrierWithGroupSync();
    uint largest = NO_KEY;
    for (uint chunk = lane; chunk < constants.n_chunks; chunk += GROUP) {
        largest = max(largest, scratch[base + BEST_AT(constants.vocab, chunk)]);
    }
    InterlockedMax(highest, largest);
    GroupMemoryBarrierWithGroupSync();
    float scale = asfloat(params[row * PARAM_WORDS + PARAM_SCALE]);
    uint first = group.x << constants.chunk_shift;
    uint end = min(constants.vocab, first + (1u << constants.chunk_shift));
    uint2 sum = uint2(0u, 0u);
    for (uint id = first + lane; id < end; id += GROUP) {
        uint key = scratch[base + id];
        if (key != NO_KEY) sum = add64(sum, weight_of(key, highest, scale));
    }
    ADD_SHARED64(total_low, total_high, sum)
    GroupMemoryBarrierWithGroupSync();
    if (lane == 0) {
        uint at = base + BEST_AT(constants.vocab, group.x);
        scratch[at + 1u] = total_low;
        scratch[at + 2u] = total_high;
    }
}
#endif
