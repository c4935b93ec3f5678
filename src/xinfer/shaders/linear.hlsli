// What the ops that end a matrix product share: the bits of `flags` (ops._linear mirrors them).
#ifndef XINFER_LINEAR
#define XINFER_LINEAR

#define FLAG_BIAS 1u        // bias[r] is added
#define FLAG_ACCUMULATE 2u  // what y held is added

#endif
