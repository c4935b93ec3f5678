// Writes each row's key and value into the cache, at the row's own sequence and position. One lane a pair of dimensions.
#include "common.hlsli"

struct Constants {
    uint n_kv_heads;
    uint head_dim;
    uint table_stride;  // entries of the block table a sequence
    uint k_stride;
    uint k_offset;
    uint v_stride;
    uint v_offset;
};

READS(uint, state, 0);
READS(uint, block_table, 1);  // (sequence, position / BLOCK_TOKENS): a block's number
READS(float, k, 2);           // (T, n_kv_heads * head_dim)
READS(float, v, 3);
WRITES(uint, k_cache, 4);
WRITES(uint, v_cache, 5);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    uint half_dim = constants.head_dim / 2;
    uint row = at.y;
    uint position = state[row * STATE_WORDS + STATE_POSITION];
    if (at.x >= constants.n_kv_heads * half_dim || position == UNUSED_ROW) return;
    uint head = at.x / half_dim;
    uint element = at.x % half_dim * 2;
    uint sequence = state[row * STATE_WORDS + STATE_SEQUENCE];
    uint block = block_table[sequence * constants.table_stride + position / BLOCK_TOKENS];
    uint target = cache_element(block, head, position, constants.n_kv_heads, constants.head_dim) + element;
    uint k_at = constants.k_offset + row * constants.k_stride + at.x * 2;
    uint v_at = constants.v_offset + row * constants.v_stride + at.x * 2;
#if FORMAT == F16
    k_cache[target / 2] = pack_f16(k[k_at], k[k_at + 1]);
    v_cache[target / 2] = pack_f16(v[v_at], v[v_at + 1]);
#else
    k_cache[target] = asuint(k[k_at]);
    k_cache[target + 1] = asuint(k[k_at + 1]);
    v_cache[target] = asuint(v[v_at]);
    v_cache[target + 1] = asuint(v[v_at + 1]);
#endif
}
