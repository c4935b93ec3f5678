// rope and kv_append in one: turns q in place, and writes the turned k, and v, into the cache. q, k and v lie in one
// buffer; head_dim is a multiple of 4. Without heads of q, only k and v are looked at.
// A lane takes 4 values of a head: two neighbouring pairs (i, i + head_dim / 2), or four neighbours of v.
#include "common.hlsli"

struct Constants {
    uint n_heads;
    uint n_kv_heads;
    uint head_dim;
    uint table_stride;  // entries of the block table a sequence
    uint stride;  // of q, k and v
    uint q_offset;
    uint k_offset;
    uint v_offset;
};

READS(uint, state, 0);
READS(float2, table, 1);  // (position, head_dim / 2): cos, sin
READS(uint, block_table, 2);
WRITES(float, qkv, 3);
WRITES(uint, k_cache, 4);
WRITES(uint, v_cache, 5);
CONSTANTS(Constants, constants);

#if FORMAT == F16
#define WRITE_PAIR(CACHE, ELEMENT, PAIR) CACHE[(ELEMENT) / 2] = pack_f16((PAIR).x, (PAIR).y)
#else
#define WRITE_PAIR(CACHE, ELEMENT, PAIR)   \
    {                                      \
        CACHE[ELEMENT] = asuint((PAIR).x); \
        CACHE[(ELEMENT) + 1] = asuint((PAIR).y); \
    }
#endif

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    uint row = at.y, half_dim = constants.head_dim / 2, lanes_a_head = constants.head_dim / 4;
    uint head = at.x / lanes_a_head, piece = at.x % lanes_a_head;
    uint position = state[row * STATE_WORDS + STATE_POSITION];
    if (head >= constants.n_heads + 2 * constants.n_kv_heads || position == UNUSED_ROW) return;
    float2 first_turn = table[position * half_dim + piece * 2], second_turn = table[position * half_dim + piece * 2 + 1];
    if (head < constants.n_heads) {
        uint low = constants.q_offset + row * constants.stride + head * constants.head_dim + piece * 2;
        float2 first = turned_pair(qkv[low], qkv[low + half_dim], first_turn);
        float2 second = turned_pair(qkv[low + 1], qkv[low + half_dim + 1], second_turn);
        qkv[low] = first.x;
        qkv[low + 1] = second.x;
        qkv[low + half_dim] = first.y;
        qkv[low + half_dim + 1] = second.y;
        return;
    }
    bool is_key = head < constants.n_heads + constants.n_kv_heads;
    uint kv_head = head - constants.n_heads - (is_key ? 0u : constants.n_kv_heads);
    uint sequence = state[row * STATE_WORDS + STATE_SEQUENCE];
    uint block = block_table[sequence * constants.table_stride + position / BLOCK_TOKENS];
    uint target = cache_element(block, kv_head, position, constants.n_kv_heads, constants.head_dim);
    if (is_key) {
        uint low = constants.k_offset + row * constants.stride + kv_head * constants.head_dim + piece * 2;
        float2 first = turned_pair(qkv[low], qkv[low + half_dim], first_turn);
        float2 second = turned_pair(qkv[low + 1], qkv[low + half_dim + 1], second_turn);
        WRITE_PAIR(k_cache, target + piece * 2, float2(first.x, second.x));
        WRITE_PAIR(k_cache, target + half_dim + piece * 2, float2(first.y, second.y));
    } else {
        uint first = constants.v_offset + row * constants.stride + kv_head * constants.head_dim + piece * 4;
        WRITE_PAIR(v_cache, target + piece * 4, float2(qkv[first], qkv[first + 1]));
        WRITE_PAIR(v_cache, target + piece * 4 + 2, float2(qkv[first + 2], qkv[first + 3]));
    }
}
