"""The digest that a shader container carries: MD5 of all behind it, but for how the last block is filled.

vkd3d refuses a container without it, and on Linux no dxcompiler writes one. On Windows the compiler's validator does.
"""

from __future__ import annotations

import math
import struct

START = (0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476)
SINES = tuple(int(abs(math.sin(i + 1)) * 2**32) for i in range(64))
TURNS = ((7, 12, 17, 22), (5, 9, 14, 20), (4, 11, 16, 23), (6, 10, 15, 21))  # by round, and step modulo 4
MASK = 0xFFFF_FFFF
BLOCK = 64
DIGEST = slice(4, 20)


def sealed(container: bytes) -> bytes:
    """The container with its digest."""
    return container[: DIGEST.start] + digest(container) + container[DIGEST.stop :]


def digest(container: bytes) -> bytes:
    """The 16 bytes that belong behind a container's first four."""
    data = container[DIGEST.stop :]
    whole = len(data) // BLOCK * BLOCK
    rest, bits = data[whole:] + b"\x80", 8 * len(data)
    first, last = struct.pack("<I", bits & MASK), struct.pack("<I", (bits >> 2 | 1) & MASK)
    if len(rest) > BLOCK - len(first) - len(last):
        tail = rest.ljust(BLOCK, b"\0") + first.ljust(BLOCK - len(last), b"\0") + last
    else:
        tail = (first + rest).ljust(BLOCK - len(last), b"\0") + last
    state: tuple[int, ...] = START
    for place in range(0, whole, BLOCK):
        state = _add_block(state, data[place : place + BLOCK])
    for place in range(0, len(tail), BLOCK):
        state = _add_block(state, tail[place : place + BLOCK])
    return struct.pack("<4I", *state)


def _add_block(state: tuple[int, ...], block: bytes) -> tuple[int, ...]:
    words = struct.unpack("<16I", block)
    a, b, c, d = state
    for i in range(64):
        kind = i // 16
        if kind == 0:
            mixed, word = b & c | ~b & d, i
        elif kind == 1:
            mixed, word = d & b | ~d & c, 5 * i + 1
        elif kind == 2:
            mixed, word = b ^ c ^ d, 3 * i + 5
        else:
            mixed, word = c ^ (b | ~d & MASK), 7 * i
        total = (a + (mixed & MASK) + SINES[i] + words[word % 16]) & MASK
        turn = TURNS[kind][i % 4]
        a, b, c, d = d, (b + (total << turn | total >> 32 - turn)) & MASK, b, c
    return tuple((old + new) & MASK for old, new in zip(state, (a, b, c, d), strict=True))
