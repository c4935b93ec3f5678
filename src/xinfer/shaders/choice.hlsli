// Logits as integers of the same order: exact, whatever the device does to subnormal numbers.
#ifndef XINFER_CHOICE
#define XINFER_CHOICE

#define NOT_FINITE_KEY 0xffffffffu  // above every finite number's key
#define NO_KEY 0u                   // below

uint order_key(float value) {
    uint bits = asuint(value);
    if (not_finite(value)) return NOT_FINITE_KEY;
    if (bits == 0x80000000u) bits = 0u;  // -0 equals 0
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

#endif
