// How a row goes on once its token is chosen. For kernels with the buffers `state` (rows, STATE_WORDS) and `ring`
// (rows, ring_size), and the constants ring_size and advance; one lane calls it. Whether the row is one at all.
bool move_on(uint row, bool bad, uint id) {
    uint own = row * STATE_WORDS;
    if (state[own + STATE_POSITION] == UNUSED_ROW) return false;
    uint steps = state[own + STATE_STEPS];
    if (bad && (state[own + STATE_FLAGS] & FLAG_NOT_FINITE) == 0u) {
        state[own + STATE_FLAGS] |= FLAG_NOT_FINITE;
        state[own + STATE_BAD_STEP] = steps;
    }
    if (!bad) state[own + STATE_TOKEN] = id;  // after a bad step the old token stays: a valid row to embed
    ring[row * constants.ring_size + steps % constants.ring_size] = bad ? BAD_TOKEN : id;
    state[own + STATE_STEPS] = steps + 1u;
    state[own + STATE_POSITION] += constants.advance;
    return true;
}
