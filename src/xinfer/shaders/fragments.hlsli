// Matrix-core fragments of 16 x 16 f16 numbers, and sums of float32, by way of `pool`: groupshared uint4 that the kernel
// declares. Places and strides are in uint4 elements. A wave of 32 lanes works on a fragment together.
//
// EMULATE replaces them by plain code that any device runs, to test everything but the fragments.
#ifndef XINFER_FRAGMENTS
#define XINFER_FRAGMENTS

#if EMULATE
#undef UNROLL
#define UNROLL  // a software driver takes minutes for what is unrolled
// A and B are where they lie; of C, a lane holds the elements 32 * i + lane, row by row.
struct FragmentA {
    uint at;
    uint stride;
};
struct FragmentB {
    uint at;
    uint stride;
    bool by_column;  // a column's numbers lie side by side
};
struct FragmentC {
    float values[8];
};

float half_at(uint at, uint i) {
    float2 pair = unpack_f16(pool[at + i / 8][i % 8 / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
}

FragmentC no_sums() {
    FragmentC c;
    for (uint i = 0; i < 8; i++) c.values[i] = 0.0;
    return c;
}
FragmentA load_a(uint at, uint stride) {
    FragmentA a = { at, stride };
    return a;
}
FragmentB load_b_columns(uint at, uint stride) {
    FragmentB b = { at, stride, true };
    return b;
}
FragmentB load_b_rows(uint at, uint stride) {
    FragmentB b = { at, stride, false };
    return b;
}
FragmentC multiply_add(FragmentA a, FragmentB b, FragmentC c, uint lane) {
    for (uint i = 0; i < 8; i++) {
        uint row = (i * 32 + lane % 32) / 16, column = lane % 16;
        for (uint k = 0; k < 16; k++) {
            float right = b.by_column ? half_at(b.at + column * b.stride, k) : half_at(b.at + k * b.stride, column);
            c.values[i] += half_at(a.at + row * a.stride, k) * right;
        }
    }
    return c;
}
FragmentC load_c(uint at, uint stride, uint lane) {
    FragmentC c;
    for (uint i = 0; i < 8; i++) {
        uint row = (i * 32 + lane % 32) / 16, column = lane % 16;
        c.values[i] = asfloat(pool[at + row * stride + column / 4][column % 4]);
    }
    return c;
}
FragmentC times(FragmentC a, FragmentC b) {
    for (uint i = 0; i < 8; i++) a.values[i] *= b.values[i];
    return a;
}
void store_c(FragmentC c, uint at, uint stride, uint lane) {
    for (uint i = 0; i < 8; i++) {
        uint row = (i * 32 + lane % 32) / 16, column = lane % 16;
        pool[at + row * stride + column / 4][column % 4] = asuint(c.values[i]);
    }
}
#else
typealias FragmentA = linalg::CoopMat<half, MemoryScope.Subgroup, 16, 16, linalg::CoopMatMatrixUse.MatrixA>;
typealias FragmentB = linalg::CoopMat<half, MemoryScope.Subgroup, 16, 16, linalg::CoopMatMatrixUse.MatrixB>;
typealias FragmentC = linalg::CoopMat<float, MemoryScope.Subgroup, 16, 16, linalg::CoopMatMatrixUse.MatrixAccumulator>;

FragmentC no_sums() { return FragmentC(0.0f); }
FragmentA load_a(uint at, uint stride) { return FragmentA.Load<linalg::CoopMatMatrixLayout.RowMajor>(pool, at, stride); }
FragmentB load_b_columns(uint at, uint stride) {
    return FragmentB.Load<linalg::CoopMatMatrixLayout.ColumnMajor>(pool, at, stride);
}
FragmentB load_b_rows(uint at, uint stride) {
    return FragmentB.Load<linalg::CoopMatMatrixLayout.RowMajor>(pool, at, stride);
}
FragmentC multiply_add(FragmentA a, FragmentB b, FragmentC c, uint lane) {
    return linalg::coopMatMulAdd<float, false>(a, b, c);
}
FragmentC load_c(uint at, uint stride, uint lane) {
    return FragmentC.Load<linalg::CoopMatMatrixLayout.RowMajor>(pool, at, stride);
}
FragmentC times(FragmentC a, FragmentC b) { return a * b; }
void store_c(FragmentC c, uint at, uint stride, uint lane) {
    c.Store<linalg::CoopMatMatrixLayout.RowMajor>(pool, at, stride);
}
#endif

// What lanes of one wave have written to groupshared memory, its other lanes may read behind this.
void wave_barrier() {
#if EMULATE
    GroupMemoryBarrierWithGroupSync();
#else
    spirv_asm { OpControlBarrier Subgroup Workgroup AcquireRelease|WorkgroupMemory };
#endif
}

// A wave's number and a lane's in it.
uint2 wave_and_lane(uint lane) {
#if EMULATE
    return uint2(lane / 32, lane % 32);
#else
    return uint2(wave_index(lane), WaveGetLaneIndex());
#endif
}

#endif
