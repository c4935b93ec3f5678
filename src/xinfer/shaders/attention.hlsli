// What the attention kernels share: constants, and how a query row's keys are divided among splits.
#ifndef XINFER_ATTENTION
#define XINFER_ATTENTION

struct Constants {
    uint n_heads;
    uint n_kv_heads;
    uint head_dim;
    uint q_stride;
    uint q_offset;
    uint out_stride;
    uint out_offset;
    uint table_stride;  // entries of the block table a sequence
    uint window;        // keys that a query sees, itself included; NO_WINDOW: all before it
    uint n_splits;      // 1: results go to out; else partial sums, for attention_combine
    uint n_rows;        // T
    float scale;
    uint k_offset;  // of k and v in the rows that hold q, for kernels that turn q and k themselves
    uint v_offset;
};

CONSTANTS(Constants, constants);

// Workgroups a KV head, where one takes so many of its query heads.
uint bundles(uint heads) { return (constants.n_heads / constants.n_kv_heads + heads - 1u) / heads; }

struct KeyRange {
    uint begin;
    uint end;
};

#ifndef MIN_SPLIT
#define MIN_SPLIT BLOCK_TOKENS  // keys that a split is worth making for
#endif
#ifndef ONE_SPLIT
#define ONE_SPLIT MIN_SPLIT  // keys up to which there is one split
#endif

// Keys of each split of a query that sees so many: whole blocks.
uint split_size(uint n_keys) {
    uint keys = max((n_keys + constants.n_splits - 1u) / constants.n_splits, uint(MIN_SPLIT));
    if (n_keys <= ONE_SPLIT) keys = max(keys, n_keys);
    return (keys + BLOCK_TOKENS - 1u) / BLOCK_TOKENS * BLOCK_TOKENS;
}

// The keys of one split. The grid is fixed and the length is data: splits past the end are empty (begin >= end).
KeyRange split_keys(uint position, uint split) {
    KeyRange range = { 0u, 0u };
    if (position == UNUSED_ROW) return range;
    uint first = first_key(position, constants.window);
    uint a_split = split_size(position + 1u - first);
    range.begin = first + split * a_split;
    range.end = min(range.begin + a_split, position + 1u);
    return range;
}

// How many splits have keys.
uint active_splits(uint position) {
    uint n_keys = position + 1u - first_key(position, constants.window), a_split = split_size(n_keys);
    return (n_keys + a_split - 1u) / a_split;
}

// Where a (row, head, split)'s partial result begins: head_dim sums, then the largest score, then the sum of weights.
uint partial_at(uint row, uint head, uint split) {
    return ((row * constants.n_heads + head) * constants.n_splits + split) * (constants.head_dim + 2u);
}

uint out_at(uint row, uint head) {
    return constants.out_offset + row * constants.out_stride + head * constants.head_dim;
}

#endif
