// out[t, :] = table[token of row t, :], for the rows whose token lies in this slice of the table. One lane a 16-byte load.
#include "common.hlsli"

struct Constants {
    uint width;        // columns
    uint row_loads;    // 16-byte loads a table row, padding included
    uint first_row;    // the slice's first row
    uint n_rows;       // the slice's rows
    uint out_stride;   // floats between rows of out
    uint out_offset;   // floats before its first
};

READS(uint, state, 0);
READS(uint4, table, 1);
WRITES(float, result, 2);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 at : SV_DispatchThreadID) {
    uint row = at.y;
    uint column = at.x * VALUES_PER_LOAD;
    uint token = state[row * STATE_WORDS + STATE_TOKEN];
    if (column >= constants.width || token < constants.first_row || token - constants.first_row >= constants.n_rows) return;
    float values[VALUES_PER_LOAD];
    unpack_load(table[(token - constants.first_row) * constants.row_loads + at.x], values);
    uint first = constants.out_offset + row * constants.out_stride + column;
    UNROLL for (uint i = 0; i < VALUES_PER_LOAD; i++) {
        if (column + i < constants.width) result[first + i] = values[i];
    }
}
