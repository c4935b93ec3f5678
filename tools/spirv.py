"""SPIR-V as words: strip what only debuggers read, and tell a module's bindings and constants.

Written from the SPIR-V specification, section 3 (binary form). The reflection is what
`tests/unit/test_shader_catalog.py` compares `catalog.py` with; it knows the few instructions that describe an
interface and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0x07230203
HEADER_WORDS = 5

# Opcodes. The first group is debug information: without meaning for a driver, and Slang's source language number is
# refused by older validation layers.
OP_SOURCE_CONTINUED, OP_SOURCE, OP_SOURCE_EXTENSION, OP_NAME, OP_MEMBER_NAME, OP_STRING, OP_LINE = 2, 3, 4, 5, 6, 7, 8
OP_NO_LINE, OP_MODULE_PROCESSED = 317, 330
DEBUG_OPS = frozenset(
    (
        OP_SOURCE_CONTINUED,
        OP_SOURCE,
        OP_SOURCE_EXTENSION,
        OP_NAME,
        OP_MEMBER_NAME,
        OP_STRING,
        OP_LINE,
        OP_NO_LINE,
        OP_MODULE_PROCESSED,
    )
)
OP_EXTENSION, OP_ENTRY_POINT, OP_EXECUTION_MODE, OP_CAPABILITY = 10, 15, 16, 17
OP_TYPE_INT, OP_TYPE_FLOAT, OP_TYPE_VECTOR, OP_TYPE_ARRAY, OP_TYPE_STRUCT, OP_TYPE_POINTER = 21, 22, 23, 28, 30, 32
OP_CONSTANT, OP_VARIABLE, OP_DECORATE, OP_MEMBER_DECORATE = 43, 59, 71, 72
MODE_LOCAL_SIZE = 17
# SPIR-V 1.3 as Slang writes it has storage buffers in the class Uniform; later versions, in a class of their own.
STORAGE_UNIFORM, STORAGE_WORKGROUP, STORAGE_PUSH_CONSTANT, STORAGE_BUFFER = 2, 4, 9, 12
DECORATION_ARRAY_STRIDE, DECORATION_BINDING, DECORATION_DESCRIPTOR_SET, DECORATION_OFFSET = 6, 33, 34, 35


def words(module: bytes) -> tuple[int, ...]:
    """The module as 32-bit words; raises ValueError where it is no little-endian SPIR-V."""
    if len(module) % 4 or len(module) < 4 * HEADER_WORDS:
        raise ValueError(f"not a SPIR-V module: {len(module)} bytes")
    result = struct.unpack(f"<{len(module) // 4}I", module)
    if result[0] != MAGIC:
        raise ValueError(f"not a SPIR-V module: it begins with {result[0]:#x}, expected {MAGIC:#x}")
    return result


def instructions(module: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each instruction as (opcode, operand words)."""
    at = HEADER_WORDS
    while at < len(module):
        count, opcode = module[at] >> 16, module[at] & 0xFFFF
        if count == 0 or at + count > len(module):
            raise ValueError(f"broken SPIR-V: an instruction of {count} words at word {at} of {len(module)}")
        yield opcode, module[at + 1 : at + count]
        at += count


def strip_debug(module: bytes) -> bytes:
    """The module without names, source text and line numbers."""
    code = words(module)
    kept = list(code[:HEADER_WORDS])
    for opcode, operands in instructions(code):
        if opcode not in DEBUG_OPS:
            kept += [(len(operands) + 1) << 16 | opcode, *operands]
    return struct.pack(f"<{len(kept)}I", *kept)


@dataclass(frozen=True, slots=True)
class Interface:
    """What a driver must be told about a compute shader, read off its words."""

    version: tuple[int, int]
    capabilities: frozenset[int]
    extensions: frozenset[str]
    bindings: tuple[int, ...]  # of storage buffers, sorted
    sets: frozenset[int]
    constant_dwords: int
    workgroup: tuple[int, int, int]
    shared_bytes: int


class _Types:
    """Sizes in bytes of the types that constants and groupshared arrays are made of."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.constants: dict[int, int] = {}
        self.strides: dict[int, int] = {}
        self.offsets: dict[tuple[int, int], int] = {}

    def size(self, type_id: int) -> int:
        opcode, operands = self.made[type_id]
        if opcode in (OP_TYPE_INT, OP_TYPE_FLOAT):
            return operands[0] // 8
        if opcode == OP_TYPE_VECTOR:
            return self.size(operands[0]) * operands[1]
        if opcode == OP_TYPE_ARRAY:
            stride = self.strides.get(type_id, self.size(operands[0]))
            return stride * self.constants[operands[1]]
        if opcode == OP_TYPE_STRUCT:
            ends = [0]
            for index, member in enumerate(operands):
                ends.append(self.offsets.get((type_id, index), ends[-1]) + self.size(member))
            return max(ends)
        raise ValueError(f"SPIR-V type {type_id} (opcode {opcode}) has no size known here")


def interface(module: bytes) -> Interface:
    """Bindings, constants, workgroup, capabilities and groupshared bytes of a compute shader."""
    code = words(module)
    types = _Types()
    decorated: dict[tuple[int, int], int] = {}
    variables: list[tuple[int, int, int]] = []  # type, id, storage class
    capabilities: set[int] = set()
    extensions: set[str] = set()
    workgroup = (0, 0, 0)
    for opcode, operands in instructions(code):
        if opcode == OP_CAPABILITY:
            capabilities.add(operands[0])
        elif opcode == OP_EXTENSION:
            extensions.add(struct.pack(f"<{len(operands)}I", *operands).split(b"\0", 1)[0].decode())
        elif opcode == OP_EXECUTION_MODE and operands[1] == MODE_LOCAL_SIZE:
            workgroup = (operands[2], operands[3], operands[4])
        elif OP_TYPE_INT <= opcode <= OP_TYPE_POINTER:
            types.made[operands[0]] = (opcode, operands[1:])
        elif opcode == OP_CONSTANT:
            types.constants[operands[1]] = operands[2]
        elif opcode == OP_VARIABLE:
            variables.append((operands[0], operands[1], operands[2]))
        elif opcode == OP_MEMBER_DECORATE and operands[2] == DECORATION_OFFSET:
            types.offsets[operands[0], operands[1]] = operands[3]
        elif opcode == OP_DECORATE and len(operands) > 2:
            decorated[operands[0], operands[1]] = operands[2]
            if operands[1] == DECORATION_ARRAY_STRIDE:
                types.strides[operands[0]] = operands[2]
    buffers = [name for _, name, storage in variables if storage in (STORAGE_UNIFORM, STORAGE_BUFFER)]

    def total_bytes(wanted: int) -> int:
        return sum(types.size(types.made[pointer][1][1]) for pointer, _, storage in variables if storage == wanted)

    return Interface(
        version=(code[1] >> 16 & 0xFF, code[1] >> 8 & 0xFF),
        capabilities=frozenset(capabilities),
        extensions=frozenset(extensions),
        bindings=tuple(sorted(decorated[name, DECORATION_BINDING] for name in buffers)),
        sets=frozenset(decorated[name, DECORATION_DESCRIPTOR_SET] for name in buffers),
        constant_dwords=total_bytes(STORAGE_PUSH_CONSTANT) // 4,
        workgroup=workgroup,
        shared_bytes=total_bytes(STORAGE_WORKGROUP),
    )
