// What the stages of `sample` share. They work on integers, so that every device draws the same token of the same
// logits, in whatever order its lanes add: scores become keys of their order, weights fixed-point numbers.
//
// Before it a shader declares `params`, (rows, PARAM_WORDS): the values of each row's request (ops.SampleParams).
#include "choice.hlsli"

#define PARAM_WORDS 16
#define PARAM_N_VALID 0       // ids from here on are never chosen
#define PARAM_OPTIONS 1       // OPTION_*
#define PARAM_TOP_K 2         // 0: all
#define PARAM_TOP_P 3         // in units of 2^-32; 0: all
#define PARAM_MIN_LOW 4       // the least weight that is kept: min_p in units of 2^-WEIGHT_BITS
#define PARAM_MIN_HIGH 5
#define PARAM_SEED_LOW 6
#define PARAM_SEED_HIGH 7
#define PARAM_SCALE 8         // float: log2(e) / temperature, times 2^24
#define PARAM_REPETITION 9    // float: a negative score is multiplied by it where its id has been seen,
#define PARAM_REPETITION_BY 10  // float: and another one by this, its inverse
#define PARAM_PRESENCE 11     // float: subtracted where an id is in the answer
#define PARAM_FREQUENCY 12    // float: and this for each time that it is

#define OPTION_PENALTIES 1u
#define OPTION_BIAS 2u
#define OPTION_GREEDY 4u
#define OPTION_SLOW 8u  // leave everything to sample_all: for tests

#define CHUNKS_MAX 512     // of a vocabulary
#define FEW_MAX 64         // top_k up to which sample_few is sure to have all that is kept
#define CANDIDATES_MAX 256 // that sample_few looks at
#define NOBODY 0xfffffffeu // no token

// ---- 64-bit integers, as (low, high) -----------------------------------------------------------------------------------
uint mul_high(uint a, uint b) {
    uint a_low = a & 0xffffu, a_high = a >> 16, b_low = b & 0xffffu, b_high = b >> 16;
    uint first = a_high * b_low + ((a_low * b_low) >> 16);
    uint second = a_low * b_high + (first & 0xffffu);
    return a_high * b_high + (first >> 16) + (second >> 16);
}

uint2 add64(uint2 a, uint2 b) {
    uint low = a.x + b.x;
    return uint2(low, a.y + b.y + (low < a.x ? 1u : 0u));
}

uint2 sub64(uint2 a, uint2 b) { return uint2(a.x - b.x, a.y - b.y - (a.x < b.x ? 1u : 0u)); }

bool less64(uint2 a, uint2 b) { return a.y < b.y || (a.y == b.y && a.x < b.x); }

bool is_zero64(uint2 a) { return (a.x | a.y) == 0u; }

uint2 shift_right64(uint2 a, uint by) {  // by 0 to 63
    if (by >= 32u) return uint2(a.y >> (by - 32u), 0u);
    return by == 0u ? a : uint2((a.x >> by) | (a.y << (32u - by)), a.y >> by);
}

uint2 shift_left64(uint2 a, uint by) {  // by 0 to 31
    return by == 0u ? a : uint2(a.x << by, (a.y << by) | (a.x >> (32u - by)));
}

// a / b, of which is known that it is below 2^20, and what is left.
struct Division {
    uint quotient;
    uint2 rest;
};

Division divide64(uint2 a, uint2 b) {
    Division made;
    made.quotient = 0u;
    made.rest = a;
    for (uint i = 0; i < 20; i++) {
        uint bit = 19u - i;
        if (!less64(shift_right64(made.rest, bit), b)) {
            made.rest = sub64(made.rest, shift_left64(b, bit));
            made.quotient |= 1u << bit;
        }
    }
    return made;
}

// Adds VALUE to a sum in groupshared memory, whoever else adds: the sum is the same in every order.
#define ADD_SHARED64(LOW, HIGH, VALUE)                                           \
    {                                                                            \
        uint2 added64 = VALUE;                                                   \
        uint before64;                                                           \
        InterlockedAdd(LOW, added64.x, before64);                                \
        InterlockedAdd(HIGH, added64.y + (before64 + added64.x < before64 ? 1u : 0u)); \
    }

// a * fraction / 2^32, rounded down.
uint2 part_of(uint2 a, uint fraction) {
    return add64(uint2(a.y * fraction, mul_high(a.y, fraction)), uint2(mul_high(a.x, fraction), 0u));
}

// ---- what is drawn from --------------------------------------------------------------------------------------------------
#define WEIGHT_BITS 45  // behind the point: the sum of half a million weights has room
#define WEIGHT_ONE_HIGH 0x2000u
#define EXPONENT_END 771751936.0  // 46 * 2^24: from there on a weight is 0

// The score that a key stands for.
float score_of(uint key) { return asfloat((key & 0x80000000u) != 0u ? key ^ 0x80000000u : ~key); }

// exp((score - highest) / temperature), 1 for the highest, in units of 2^-WEIGHT_BITS.
//
// The difference and its product with the scale are rounded to float32; what follows is exact to 2^-30: 2^-t is
// 1 - t * (a polynomial that was fitted at Chebyshev's nodes of [0, 1]).
uint2 weight_of(uint key, uint highest, float scale) {
    float exponent = (score_of(highest) - score_of(key)) * scale;
    if (!(exponent < EXPONENT_END)) return uint2(0u, 0u);
    uint bits = uint(exponent);  // 24 of them behind the point
    uint t = (bits & 0xffffffu) << 8;
    uint sum = 0x0000bdbau;
    sum = 0x0009c23cu - mul_high(t, sum);
    sum = 0x005728f4u - mul_high(t, sum);
    sum = 0x027641ccu - mul_high(t, sum);
    sum = 0x0e35812fu - mul_high(t, sum);
    sum = 0x3d7f7bccu - mul_high(t, sum);
    sum = 0xb17217f7u - mul_high(t, sum);
    sum = mul_high(t, sum);
    return shift_right64(sub64(uint2(0u, WEIGHT_ONE_HIGH), uint2(sum << 13, sum >> 19)), bits >> 24);
}

// 24 random bits for a position, in units of 2^-32: the upper ones of Philox4x32-10's first word.
uint random_fraction(uint seed_low, uint seed_high, uint position) {
    uint4 c = uint4(position, 0u, 0u, 0u);
    uint k0 = seed_low, k1 = seed_high;
    for (uint turn = 0; turn < 10; turn++) {
        uint high0 = mul_high(0xd2511f53u, c.x), high1 = mul_high(0xcd9e8d57u, c.z);
        c = uint4(high1 ^ c.y ^ k0, 0xcd9e8d57u * c.z, high0 ^ c.w ^ k1, 0xd2511f53u * c.x);
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c.x & 0xffffff00u;
}

// ---- the scratch of a row: keys (vocab), then of each chunk the best key and its weights' sum, then VERDICT ----------
#define BEST_AT(VOCAB, CHUNK) ((VOCAB) + 3u * (CHUNK))
#define VERDICT_AT(VOCAB, N_CHUNKS) ((VOCAB) + 3u * (N_CHUNKS))
#define VERDICT_CHOSEN 1u
#define VERDICT_OPEN 0u
