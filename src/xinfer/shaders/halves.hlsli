// Numbers as f16 halves, for matrix cores: a row is divided by a power of two, its scale, and each number becomes one f16, or
// two whose sum it is to 22 bits of the row's largest value.
#ifndef XINFER_HALVES
#define XINFER_HALVES

// The power of two that takes a row into 2,048 to 4,096.
float row_scale(float largest) {
    uint exponent = asuint(largest) >> 23;
    return exponent < 13u ? asfloat(1u << 23) : asfloat((exponent - 11u) << 23);
}

// Two numbers as f16, and what rounding left of them. Rounded on the bits: of packing and unpacking by the GPU's own
// instructions NVIDIA's compiler makes nothing at all, and nothing would be left.
uint2 split_pair(float a, float b) {
    uint high = pack_f16(a, b);
    float2 kept = unpack_f16(high);
    return uint2(high, pack_f16(a - kept.x, b - kept.y));
}

#endif
