// Rotary position embedding of T rows of heads, in place; rotate_half pairs i with i + head_dim / 2. One lane a pair.
#include "common.hlsli"

struct Constants {
    uint n_heads;
    uint head_dim;
    uint x_stride;
    uint x_offset;
};

READS(uint, state, 0);
READS(float2, table, 1);  // (position, head_dim / 2): cos, sin
WRITES(float, x, 2);      // (T, n_heads * head_dim)
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    uint half_dim = constants.head_dim / 2;
    uint row = at.y;
    uint position = state[row * STATE_WORDS + STATE_POSITION];
    if (at.x >= constants.n_heads * half_dim || position == UNUSED_ROW) return;
    uint pair = at.x % half_dim;
    uint low = constants.x_offset + row * constants.x_stride + at.x / half_dim * constants.head_dim + pair;
    uint high = low + half_dim;
    float2 turn = table[position * half_dim + pair];
    float2 made = turned_pair(x[low], x[high], turn);
    x[low] = made.x;
    x[high] = made.y;
}
