// The id of the largest logit, the lowest one on ties, in two stages: STAGE 0 leaves one candidate a chunk of the
// vocabulary, STAGE 1 picks among them and moves the row's state on. NaN or infinity anywhere wins, as BAD_TOKEN.
#include "common.hlsli"
#include "choice.hlsli"

struct Candidate {
    uint key;
    uint id;
};

groupshared uint keys[GROUP];
groupshared uint ids[GROUP];

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
#include "move_on.hlsli"

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint row = group.x;
    Candidate best = { NO_KEY, BAD_TOKEN };
    for (uint chunk = lane; chunk < constants.n_chunks; chunk += GROUP) {
        uint at = (row * constants.n_chunks + chunk) * 2u;
        take_larger(best, candidates[at], candidates[at + 1u]);
    }
    best = group_best(best, lane);
    if (lane == 0) move_on(row, best.key == NOT_FINITE_KEY, best.id);
}
#endif
