// What every op shares: bindings, number formats, the state of a step, the cache's layout, reductions over a workgroup.
//
// The same text passes through Slang (to SPIR-V), and (define XINFER_D3D) through D3DCompile, shader model 5.1, that of
// Windows and that of vkd3d (XINFER_VKD3D), or through dxcompiler, shader model 6 (XINFER_DXC): structured buffers of
// uint, uint4, float or float4 only, no 64-bit integers, no isnan, and wave intrinsics only where WAVE is 1.
// D3DCompile evaluates both sides of && and ||, and all of a ?:, and nothing checks an index there: what has an effect
// stands in an if of its own, and an index that is not to be used is made a valid one.
#ifndef XINFER_COMMON
#define XINFER_COMMON

#ifdef XINFER_D3D
// What is only read is bound for writing, too: a buffer then has one state in all of a recording's dispatches, although
// some of its slices are written and others read. There are 8 such registers, as many as an op has buffers.
#define READS(TYPE, NAME, SLOT) RWStructuredBuffer<TYPE> NAME : register(u##SLOT)
#define WRITES(TYPE, NAME, SLOT) RWStructuredBuffer<TYPE> NAME : register(u##SLOT)
// But not what decides whether a workgroup comes to a barrier. D3DCompile refuses one (X3663, X4026) where the way there
// depends on the lane, or on memory that lanes may write: groupshared, or bound for writing. So the catalog names these
// buffers as `steering`, and no lane returns, breaks or continues by itself before the last barrier.
#define STEERING(TYPE, NAME, SLOT) StructuredBuffer<TYPE> NAME : register(t##SLOT)
#ifdef XINFER_VKD3D  // its compiler does not know the word
#define SHARED_WRITES(TYPE, NAME, SLOT) WRITES(TYPE, NAME, SLOT)
#else
#define SHARED_WRITES(TYPE, NAME, SLOT) globallycoherent WRITES(TYPE, NAME, SLOT)
#endif
#define CONSTANTS(TYPE, NAME) ConstantBuffer<TYPE> NAME : register(b0)
#define UNROLL [unroll]
#define LOOP [loop]
#else
#define READS(TYPE, NAME, SLOT) [[vk::binding(SLOT)]] StructuredBuffer<TYPE> NAME
#define STEERING(TYPE, NAME, SLOT) READS(TYPE, NAME, SLOT)
#define WRITES(TYPE, NAME, SLOT) [[vk::binding(SLOT)]] RWStructuredBuffer<TYPE> NAME
// Workgroups of one dispatch read what others wrote.
#define SHARED_WRITES(TYPE, NAME, SLOT) [[vk::binding(SLOT)]] globallycoherent RWStructuredBuffer<TYPE> NAME
#define CONSTANTS(TYPE, NAME) [[vk::push_constant]] ConstantBuffer<TYPE> NAME
#define UNROLL [ForceUnroll]
#define LOOP
#endif

#ifndef WAVE
#define WAVE 0
#endif

// ---- number formats -----------------------------------------------------------------------------------------------
#define F32 0
#define F16 1
#define BF16 2

// Two f16 out of a word; exact.
float2 unpack_f16(uint word) {
#ifdef XINFER_D3D
    return float2(f16tof32(word & 0xffffu), f16tof32(word >> 16));
#else
    return unpackHalf2x16ToFloat(word);
#endif
}

// Two bf16 out of a word; exact.
float2 unpack_bf16(uint word) { return float2(asfloat(word << 16), asfloat(word & 0xffff0000u)); }

// One f32 as f16, to the nearest, ties to even, on the bits: f32tof16 rounds as each driver likes.
uint to_f16(float value) {
    uint bits = asuint(value);
    uint sign = (bits >> 16) & 0x8000u;
    uint magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
    if (magnitude < 0x38800000u) {                        // below 2^-14: a subnormal f16, in units of 2^-24
        uint exponent = magnitude >> 23;
        if (exponent < 102u) return sign;  // below 2^-25
        uint mantissa = (magnitude & 0x7fffffu) | 0x800000u;
        uint shift = 126u - exponent;  // 14 to 24
        uint kept = mantissa >> shift;
        uint rest = mantissa & ((1u << shift) - 1u);
        uint half_way = 1u << (shift - 1u);
        return sign | (kept + ((rest > half_way || (rest == half_way && (kept & 1u) != 0u)) ? 1u : 0u));
    }
    uint rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13);
}

uint pack_f16(float low, float high) { return to_f16(low) | (to_f16(high) << 16); }

// The weights of one 16-byte load: VALUES_PER_LOAD of them, the first in the lowest bits.
#ifdef FORMAT
#if FORMAT == F32
#define VALUES_PER_LOAD 4
#else
#define VALUES_PER_LOAD 8
#endif
void unpack_load(uint4 load, out float values[VALUES_PER_LOAD]) {
#if FORMAT == F32
    values[0] = asfloat(load.x);
    values[1] = asfloat(load.y);
    values[2] = asfloat(load.z);
    values[3] = asfloat(load.w);
#else
#if FORMAT == F16
    float2 a = unpack_f16(load.x), b = unpack_f16(load.y), c = unpack_f16(load.z), d = unpack_f16(load.w);
#else
    float2 a = unpack_bf16(load.x), b = unpack_bf16(load.y), c = unpack_bf16(load.z), d = unpack_bf16(load.w);
#endif
    values[0] = a.x;
    values[1] = a.y;
    values[2] = b.x;
    values[3] = b.y;
    values[4] = c.x;
    values[5] = c.y;
    values[6] = d.x;
    values[7] = d.y;
#endif
}
#endif

// NaN or infinity, on the bits: no compiler optimizes this away.
bool not_finite(float value) { return (asuint(value) & 0x7f800000u) == 0x7f800000u; }

#define MINUS_INFINITY asfloat(0xff800000u)

float silu(float x) { return x / (1.0 + exp(-x)); }

// ---- the state of a step: STATE_WORDS words a row (ops.StepState mirrors this) -----------------------------------------
#define STATE_WORDS 8
#define STATE_TOKEN 0     // the token to embed
#define STATE_POSITION 1  // its position, that is, how many tokens the cache holds before it; UNUSED_ROW: padding
#define STATE_SEQUENCE 2  // which row of the block table is its own
#define STATE_STEPS 3     // tokens chosen so far
#define STATE_FLAGS 4     // FLAG_NOT_FINITE
#define STATE_BAD_STEP 5  // the value of STATE_STEPS when the flag was first raised
#define UNUSED_ROW 0xffffffffu
#define FLAG_NOT_FINITE 1u
#define BAD_TOKEN 0xffffffffu

// ---- the cache: blocks of BLOCK_TOKENS tokens; in a block (kv_head, token, head_dim) --------------------------------------
#define BLOCK_TOKENS 32
#define NO_WINDOW 0u

// Element index of a token's first dimension, given its block's number.
uint cache_element(uint block, uint kv_head, uint token, uint n_kv_heads, uint head_dim) {
    return ((block * n_kv_heads + kv_head) * BLOCK_TOKENS + token % BLOCK_TOKENS) * head_dim;
}

// The two halves of a rotary pair, turned by (cos, sin). Whichever op does it, and whatever its compiler would contract,
// the bits are the same: a key is, by whom it is put into the cache.
float2 turned_pair(float low, float high, float2 turn) {
    precise float2 made = float2(low * turn.x - high * turn.y, high * turn.x + low * turn.y);
    return made;
}

// The first key that a query at `position` sees.
uint first_key(uint position, uint window) { return window != NO_WINDOW && position >= window ? position + 1u - window : 0u; }

// ---- reductions over a workgroup of GROUP lanes ------------------------------------------------------------------------
#if WAVE
// The waves' partial results meet in groupshared memory, at the wave's own number: right at every subgroup size. On
// Vulkan it is the driver's, whichever lanes make up a wave; HLSL has none, and waves are taken for lanes side by side.
#ifdef XINFER_DXC
uint wave_index(uint lane) { return lane / WaveGetLaneCount(); }
uint wave_count() { return (GROUP + WaveGetLaneCount() - 1) / WaveGetLaneCount(); }
#else
uint wave_index(uint lane) { return spirv_asm { OpLoad $$uint result builtin(SubgroupId:uint) }; }
uint wave_count() { return spirv_asm { OpLoad $$uint result builtin(NumSubgroups:uint) }; }
#endif
#endif

#ifdef GROUP_REDUCTIONS
groupshared float reduction[GROUP];

// Puts every lane's value together with OPERATOR, in every lane. All lanes of the workgroup call it.
#if WAVE
#define REDUCE(NAME, WAVE_OPERATION, OPERATOR)                                              \
    float NAME(float value, uint lane) {                                                    \
        value = WAVE_OPERATION(value);                                                      \
        if (WaveIsFirstLane()) reduction[wave_index(lane)] = value;                         \
        GroupMemoryBarrierWithGroupSync();                                                  \
        float total = reduction[0];                                                         \
        for (uint wave = 1; wave < wave_count(); wave++) total = OPERATOR(total, reduction[wave]); \
        GroupMemoryBarrierWithGroupSync(); /* the next call may write again */              \
        return total;                                                                       \
    }
#else
#define REDUCE(NAME, WAVE_OPERATION, OPERATOR)                                              \
    float NAME(float value, uint lane) {                                                    \
        reduction[lane] = value;                                                            \
        for (uint step = GROUP / 2; step > 0; step /= 2) {                                  \
            GroupMemoryBarrierWithGroupSync();                                              \
            if (lane < step) reduction[lane] = OPERATOR(reduction[lane], reduction[lane + step]); \
        }                                                                                   \
        GroupMemoryBarrierWithGroupSync();                                                  \
        float total = reduction[0];                                                         \
        GroupMemoryBarrierWithGroupSync(); /* the next call may write again */              \
        return total;                                                                       \
    }
#endif
#define PLUS(A, B) ((A) + (B))
REDUCE(group_sum, WaveActiveSum, PLUS)
REDUCE(group_max, WaveActiveMax, max)
#endif

#endif
