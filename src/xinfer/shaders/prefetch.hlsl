// Reads weights that a later op needs, so that they wait in the device's cache: for phases that leave the memory idle.
// Nothing is made; `sink` only keeps the loads alive.
#include "common.hlsli"

#define LOADS 8

struct Constants {
    uint loads;  // 16 bytes each
};

READS(uint4, w, 0);
WRITES(uint, sink, 1);
CONSTANTS(Constants, constants);

[numthreads(GROUP, 1, 1)]
void main(uint3 group : SV_GroupID, uint lane : SV_GroupIndex) {
    uint4 seen = uint4(0, 0, 0, 0);
    UNROLL for (uint u = 0; u < LOADS; u++) {
        uint at = (group.x * LOADS + u) * GROUP + lane;
        if (at < constants.loads) seen ^= w[at];
    }
    if ((seen.x ^ seen.y ^ seen.z ^ seen.w) == 0x9e3779b9u) sink[0] = seen.x;
}
