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
// (rope), and the row's own k and v join the cache (kv_append) while their splits use them.
#include "common.hlsli"

#define PIECES (DIM_MAX / VALUES_PER_LOAD)  // 16-byte loads of a key
#define LOADS (KEYS * PIECES / GROUP)       // of a tile, a lane
#define MIN_SPLIT 128                       // keys: less is not worth another workgroup, and the putting together
#include "attention.hlsli"

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
#endif
#include "attention_tiles.hlsli"

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    Job job = job_of(group.x, group.y, group.z, lane);
    KeyRange range = split_keys(job.position, job.split);
    if (range.begin < range.end) {
        uint at[LOADS];
        uint4 keys[LOADS], values[LOADS];
        load_first(job, range, at, keys, values);
        attend(job, range, at, keys, values);
    } else if (job.position == UNUSED_ROW && job.split == 0) {
        write_zeros(job);
    }
}
