// The id of the largest logit, the lowest one on ties, in two stages: STAGE 0 leaves one candidate a chunk of the
// vocabulary, STAGE 1 picks among them and moves the row's state on. NaN or infinity anywhere wins, as BAD_TOKEN.
//
// Logits are compared as integers of the same order: exact, whatever the device does to subnormal numbers.
#include "common.hlsli"

struct Candidate {
    uint key;
    uint id;
};

groupshared uint keys[GROUP];
groupshared uint ids[GROUP];

#define NOT_FINITE_KEY 0xffffffffu  // above every finite number's key
#define NO_KEY 0u                   // below

uint order_key(float value) {
    uint bits = asuint(value);
    if (not_finite(value)) return NOT_FINITE_KEY;
    if (bits == 0x80000000u) bits = 0u;  // -0 equals 0
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

void take_larger(inout Candidate best, uint key, uint id) {
    if (key > best.key || (key == best.key && id < best.id)) {
        best.key = key;
        best.id = id;
    }
}

// The workgroup's best candidate, in lane 0.
Candidate group_best(Candidate best, uint lane) {
    keys[lane] = best.key;
    ids[lane] = best.id;
    for (uint step = GROUP / 2; step > 0; step /= 2) {
        GroupMemoryBarrierWithGroupSync();
        if (lane < step) {
            take_larger(best, keys[lane + step], ids[lane + step]);
            keys[lane] = best.key;
            ids[lane] = best.id;
        }
    }
    return best;
}

#if STAGE == 0
struct Constants {
    uint n_valid;  // ids from here on are never chosen
    uint chunk;    // logits a workgroup
    uint n_chunks;
    uint logits_stride;
    uint logits_offset;
};

READS(float, logits, 0);      // (rows, vocab)
WRITES(uint, candidates, 1);  // (rows, n_chunks, 2): key, id
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint first = constants.logits_offset + group.y * constants.logits_stride;
    uint end = min(constants.n_valid, (group.x + 1u) * constants.chunk);
    Candidate best = { NO_KEY, BAD_TOKEN };
    for (uint id = group.x * constants.chunk + lane; id < end; id += GROUP) {
        take_larger(best, order_key(logits[first + id]), id);
    }
    best = group_best(best, lane);
    if (lane == 0) {
        uint at = (group.y * constants.n_chunks + group.x) * 2u;
        candidates[at] = best.key;
        candidates[at + 1u] = best.id;
    }
}
#else
struct Constants {
    uint n_chunks;
    uint ring_size;
    uint advance;  // what is added to the row's position
};

READS(uint, candidates, 0);
WRITES(uint, state, 1);  // (rows, STATE_WORDS)
WRITES(uint, ring, 2);   // (rows, ring_size): the tokens chosen, at STATE_STEPS modulo ring_size
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.x;
    Candidate best = { NO_KEY, BAD_TOKEN };
    for (uint chunk = lane; chunk < constants.n_chunks; chunk += GROUP) {
        uint at = (row * constants.n_chunks + chunk) * 2u;
        take_larger(best, candidates[at], candidates[at + 1u]);
    }
    best = group_best(best, lane);
    uint own = row * STATE_WORDS;
    if (lane != 0 || state[own + STATE_POSITION] == UNUSED_ROW) return;
    uint steps = state[own + STATE_STEPS];
    uint aborted = state[own + STATE_ARRIVED] & ABORTED;  // it stays, so that the steps queued behind are void as well
    state[own + STATE_ARRIVED] = aborted;
    bool not_a_number = best.key == NOT_FINITE_KEY, bad = not_a_number || aborted != 0u;
    if (not_a_number && (state[own + STATE_FLAGS] & FLAG_NOT_FINITE) == 0u) {
        state[own + STATE_FLAGS] |= FLAG_NOT_FINITE;
        state[own + STATE_BAD_STEP] = steps;
    }
    if (!bad) state[own + STATE_TOKEN] = best.id;  // after a bad step the old token stays: a valid row to embed
    ring[row * constants.ring_size + steps % constants.ring_size] = bad ? BAD_TOKEN : best.id;
    state[own + STATE_STEPS] = steps + 1u;
    state[own + STATE_POSITION] += constants.advance;
}
#endif
