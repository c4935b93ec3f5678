"""Which barriers of a shader model 5 program stand where not all lanes may come: what D3DCompile on Windows refuses.

Works on the bytecode, by the rules that its errors X3663 and X4026 tell: lanes' ids differ, and so may what is read
from memory that lanes may write (groupshared, or bound for writing); constants, group ids and read-only buffers at one
address are the same for all. What is computed or chosen from what differs differs, and a lane that returns, breaks or
continues by itself makes the rest differ, of the program or of the loop. Stricter than D3DCompile, which lets a barrier
behind a read of writable memory vouch for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

BREAK, BREAKC, CONTINUE, CONTINUEC, ELSE, ENDIF, ENDLOOP, IF, LOOP, RET, RETC = 2, 3, 7, 8, 18, 21, 22, 31, 48, 62, 63
CUSTOM_DATA, SYNC, SYNC_THREADS = 53, 190, 1 << 11
DECLARATIONS = {*range(88, 107), *range(143, 163)}
TWO_RESULTS = {38, 77, 78, 81, 132, 133, 142}  # imul, sincos, udiv, umul, uaddc, usubb, swapc
SWITCHES = {6, 10, 23, 76}
TEMP, INDEXABLE, RESOURCE, UAV, SHARED = 0, 3, 7, 30, 31
IMMEDIATES = {4: 1, 5: 2}  # dwords a component
OF_A_LANE = {32, 34, 36}  # ids of a thread
Place = tuple[int, int, int]  # kind, register, component; of an indexable array all are one


@dataclass
class Operand:
    """One operand: what it is, the components that it names, and what its indices depend on."""

    kind: int
    register: int
    components: tuple[int, ...]
    inner: list[Operand] = field(default_factory=list)

    def places(self) -> Iterator[Place]:
        if self.kind == INDEXABLE:
            yield (INDEXABLE, self.register, 0)
        elif self.kind == TEMP:
            yield from ((TEMP, self.register, component) for component in self.components)


@dataclass
class Instruction:
    opcode: int
    token: int
    operands: list[Operand]


def _operand(words: tuple[int, ...], at: int) -> tuple[Operand, int]:
    token = words[at]
    at += 1
    if token >> 31:
        at += 1  # a modifier
    count, mode, kind = token & 3, token >> 2 & 3, token >> 12 & 0xFF
    if kind in IMMEDIATES:
        return Operand(kind, 0, ()), at + IMMEDIATES[kind] * (4 if count == 2 else 1)
    components: tuple[int, ...] = (0,)
    if count == 2:
        bits = token >> 4 & 0xFF
        if mode == 0:
            components = tuple(i for i in range(4) if bits >> i & 1)
        else:
            components = tuple(bits >> 2 * i & 3 for i in range(4 if mode == 1 else 1))
    register, inner = 0, []
    for i in range(token >> 20 & 3):
        how = token >> 22 + 3 * i & 7
        if how in (0, 3):
            register = words[at] if i == 0 else register
            at += 1
        if how in (2, 3):
            relative, at = _operand(words, at)
            inner.append(relative)
        assert how in (0, 2, 3), "an index of 64 bits"
    return Operand(kind, register, components, inner), at


def instructions(container: bytes) -> Iterator[Instruction]:
    """The instructions of a container's program, declarations left out."""
    count = struct.unpack_from("<I", container, 28)[0]
    for offset in struct.unpack_from(f"<{count}I", container, 32):
        tag, size = container[offset : offset + 4], struct.unpack_from("<I", container, offset + 4)[0]
        if tag in (b"SHEX", b"SHDR"):
            words = struct.unpack_from(f"<{size // 4}I", container, offset + 8)
            break
    else:
        raise ValueError("no program in the container")
    at = 2
    while at < words[1]:
        token, opcode = words[at], words[at] & 0x7FF
        length = words[at + 1] if opcode == CUSTOM_DATA else token >> 24 & 0x7F
        if opcode != CUSTOM_DATA and opcode not in DECLARATIONS:
            place, operands = at + 1, []
            extended = token
            while extended >> 31:
                extended = words[place]
                place += 1
            while place < at + length:
                operand, place = _operand(words, place)
                operands.append(operand)
            yield Instruction(opcode, token, operands)
        at += length


class Flow:
    """Walks a program, with the places that may differ from lane to lane."""

    def __init__(self, program: list[Instruction]) -> None:
        self.program = program
        self.differs: set[Place] = set()
        self.barriers = 0
        self.found: set[int] = set()  # barriers that some lanes may miss, by their place in the program
        self.left = False  # some lanes may have returned

    def check(self) -> list[int]:
        """The barriers that some lanes may miss."""
        self._block(0, apart=False, loop=[])
        self.barriers = sum(_is_barrier(item) for item in self.program)
        return sorted(self.found)

    def _block(self, at: int, *, apart: bool, loop: list[bool]) -> int:
        """To the end of a block; where that is. `apart`: some lanes may not be here; `loop[0]`: some left the loop."""
        while at < len(self.program):
            item = self.program[at]
            here = apart or self.left or (bool(loop) and loop[0])
            assert item.opcode not in SWITCHES, "a switch, which this cannot follow"
            if item.opcode in (ELSE, ENDIF, ENDLOOP):
                return at
            if item.opcode == IF:
                at = self._branch(at, here, loop)
            elif item.opcode == LOOP:
                at = self._loop(at, here)
            else:
                self._plain(at, item, here, loop)
            at += 1
        return at

    def _plain(self, at: int, item: Instruction, here: bool, loop: list[bool]) -> None:
        if item.opcode in (BREAK, CONTINUE, BREAKC, CONTINUEC):
            loop[0] = loop[0] or here or any(map(self._may_differ, item.operands))
        elif item.opcode in (RET, RETC):
            self.left = self.left or here or any(map(self._may_differ, item.operands))
        elif _is_barrier(item):
            if here:
                self.found.add(at)
        elif item.opcode != SYNC:
            self._compute(item, here)

    def _branch(self, at: int, here: bool, loop: list[bool]) -> int:
        apart = here or self._may_differ(self.program[at].operands[0])
        before = set(self.differs)
        at = self._block(at + 1, apart=apart, loop=loop)
        after = self.differs
        if self.program[at].opcode == ELSE:
            self.differs = before
            at = self._block(at + 1, apart=apart, loop=loop)
            after = after | self.differs
        else:
            after = after | before
        self.differs = after
        return at

    def _loop(self, at: int, here: bool) -> int:
        apart = [False]
        while True:
            before, flag = set(self.differs), apart[0]
            end = self._block(at + 1, apart=here, loop=apart)
            self.differs |= before
            if self.differs == before and apart[0] == flag:
                return end

    def _compute(self, item: Instruction, here: bool) -> None:
        results = item.operands[: 2 if item.opcode in TWO_RESULTS else 1]
        sources = item.operands[len(results) :]
        differs = here or any(map(self._may_differ, sources))
        for result in results:
            for place in result.places():
                if differs or any(map(self._may_differ, result.inner)):
                    self.differs.add(place)
                elif place[0] == TEMP:
                    self.differs.discard(place)

    def _may_differ(self, operand: Operand) -> bool:
        if operand.kind in OF_A_LANE or operand.kind in (UAV, SHARED):
            return True
        return any(place in self.differs for place in operand.places()) or any(map(self._may_differ, operand.inner))


def _is_barrier(item: Instruction) -> bool:
    return item.opcode == SYNC and bool(item.token & SYNC_THREADS)
