"""Compute shaders assembled by hand, so that the device is tested without any shader compiler.

Each module has storage buffers of u32 at bindings 0, 1, ..., push constants of u32, and workgroups of 64 x 1 x 1.
Written from the SPIR-V specification, version 1.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from xinfer.gpu.api import HlslSource, KernelCode

WIDTH = 64
SHADER, GROUP_NON_UNIFORM = 1, 61
STORAGE_CLASS = {"input": 1, "uniform": 2, "function": 7, "push": 9, "storage": 12}


class Assembler:
    """Collects instructions by section. `invocation` is the id of the global invocation's x."""

    def __init__(self, n_buffers: int, n_constants: int) -> None:
        self.bound = 1
        self.capabilities: list[bytes] = [self.words(17, SHADER)]
        self.head: list[bytes] = []
        self.annotations: list[bytes] = []
        self.types: list[bytes] = []
        self.body: list[bytes] = []
        self.interface: list[int] = []
        self.constants: dict[int, int] = {}
        self.void, self.bool, self.uint, self.vec3 = (self.new() for _ in range(4))
        self.types += [
            self.words(19, self.void),
            self.words(20, self.bool),
            self.words(21, self.uint, 32, 0),
            self.words(23, self.vec3, self.uint, 3),
        ]
        self.element = self.pointer("storage")
        self.buffers = [self._buffer(binding) for binding in range(n_buffers)]
        self._push = self._push_block(n_constants) if n_constants else 0
        self._push_element = self.pointer("push") if n_constants else 0
        invocation_variable = self._built_in(28, self.vec3)
        self.main, function_type = self.new(), self.new()
        self.types.append(self.words(33, function_type, self.void))
        self.entry = self.new()
        self.body += [self.words(54, self.void, self.main, 0, function_type), self.words(248, self.entry)]
        vector = self.result(61, self.vec3, invocation_variable)
        self.invocation = self.result(81, self.uint, vector, 0)

    def new(self) -> int:
        """A fresh id."""
        self.bound += 1
        return self.bound - 1

    @staticmethod
    def words(opcode: int, *operands: int) -> bytes:
        """One instruction."""
        return struct.pack(f"<{1 + len(operands)}I", (1 + len(operands)) << 16 | opcode, *operands)

    @staticmethod
    def text(value: str) -> tuple[int, ...]:
        """A literal string."""
        raw = value.encode() + b"\0"
        raw += b"\0" * (-len(raw) % 4)
        return struct.unpack(f"<{len(raw) // 4}I", raw)

    def result(self, opcode: int, kind: int, *operands: int) -> int:
        """An instruction of the body that gives a value."""
        target = self.new()
        self.body.append(self.words(opcode, kind, target, *operands))
        return target

    def do(self, opcode: int, *operands: int) -> None:
        """An instruction of the body that gives none."""
        self.body.append(self.words(opcode, *operands))

    def constant(self, value: int) -> int:
        """A u32 constant."""
        if value not in self.constants:
            self.constants[value] = self.new()
            self.types.append(self.words(43, self.uint, self.constants[value], value))
        return self.constants[value]

    def pointer(self, storage: str) -> int:
        """The type of a pointer to u32."""
        target = self.new()
        self.types.append(self.words(32, target, STORAGE_CLASS[storage], self.uint))
        return target

    def push(self, index: int) -> int:
        """Load a push constant."""
        place = self.result(65, self._push_element, self._push, self.constant(index))
        return self.result(61, self.uint, place)

    def load(self, buffer: int, index: int) -> int:
        """Load a u32 of a buffer."""
        return self.result(61, self.uint, self._place(buffer, index))

    def store(self, buffer: int, index: int, value: int) -> None:
        """Store a u32 into a buffer."""
        self.do(62, self._place(buffer, index), value)

    def when(self, condition: int, then: Callable[[], None]) -> None:
        """Run `then` where `condition` holds."""
        inside, after = self.new(), self.new()
        self.do(247, after, 0)
        self.do(250, condition, inside, after)
        self.do(248, inside)
        then()
        self.do(249, after)
        self.do(248, after)

    def repeat(self, count: int, start: int, step: Callable[[int], int]) -> int:
        """`value = step(value)`, `count` times over from `start`."""
        before, header, test, inside, again, after = (self.new() for _ in range(6))
        i, next_i, value, next_value = (self.new() for _ in range(4))
        self.do(249, before)
        self.do(248, before)
        self.do(249, header)
        self.do(248, header)
        self.do(245, self.uint, i, self.constant(0), before, next_i, again)
        self.do(245, self.uint, value, start, before, next_value, again)
        self.do(246, after, again, 0)
        self.do(249, test)
        self.do(248, test)
        more = self.result(176, self.bool, i, count)
        self.do(250, more, inside, after)
        self.do(248, inside)
        stepped = step(value)
        self.do(249, again)
        self.do(248, again)
        self.do(128, self.uint, next_i, i, self.constant(1))
        self.do(128, self.uint, next_value, stepped, self.constant(0))
        self.do(249, header)
        self.do(248, after)
        return value

    def subgroup_size(self) -> int:
        """Load the built-in SubgroupSize."""
        self.capabilities.append(self.words(17, GROUP_NON_UNIFORM))
        return self.result(61, self.uint, self._built_in(36, self.uint))

    def assemble(self) -> bytes:
        """The module."""
        self.do(253)
        self.do(56)
        self.head = [
            self.words(14, 0, 1),
            self.words(15, 5, self.main, *self.text("main"), *self.interface),
            self.words(16, self.main, 17, WIDTH, 1, 1),
        ]
        start = struct.pack("<5I", 0x07230203, 0x00010300, 0, self.bound, 0)
        return start + b"".join([*self.capabilities, *self.head, *self.annotations, *self.types, *self.body])

    def _place(self, buffer: int, index: int) -> int:
        return self.result(65, self.element, self.buffers[buffer], self.constant(0), index)

    def _variable(self, kind: int, storage: str) -> int:
        pointer, variable = self.new(), self.new()
        self.types.append(self.words(32, pointer, STORAGE_CLASS[storage], kind))
        self.types.append(self.words(59, pointer, variable, STORAGE_CLASS[storage]))
        return variable

    def _buffer(self, binding: int) -> int:
        array, block = self.new(), self.new()
        self.types += [self.words(29, array, self.uint), self.words(30, block, array)]
        variable = self._variable(block, "storage")
        self.annotations += [
            self.words(71, array, 6, 4),
            self.words(71, block, 2),
            self.words(72, block, 0, 35, 0),
            self.words(71, variable, 34, 0),
            self.words(71, variable, 33, binding),
        ]
        return variable

    def _push_block(self, count: int) -> int:
        block = self.new()
        self.types.append(self.words(30, block, *[self.uint] * count))
        self.annotations.append(self.words(71, block, 2))
        self.annotations += [self.words(72, block, i, 35, 4 * i) for i in range(count)]
        return self._variable(block, "push")

    def _built_in(self, number: int, kind: int) -> int:
        variable = self._variable(kind, "input")
        self.annotations.append(self.words(71, variable, 11, number))
        self.interface.append(variable)
        return variable


def hlsl(name: str, buffers: str, constants: str, body: str) -> HlslSource:
    """The same as HLSL, for Direct3D 12: `i` is the invocation."""
    declared = "".join(f"RWStructuredBuffer<uint> {n} : register(u{i});\n" for i, n in enumerate(buffers.split()))
    members = "".join(f"uint {constant}; " for constant in constants.split())
    text = (
        f"struct Constants {{ {members}}};\nConstantBuffer<Constants> c : register(b0);\n{declared}"
        f"[numthreads({WIDTH}, 1, 1)]\nvoid main(uint3 id : SV_DispatchThreadID) {{ uint i = id.x; {body} }}\n"
    )
    return HlslSource(name=f"{name}.hlsl", text=text)


def axpy() -> KernelCode:
    """y[i] += a * x[i] for i < n. Buffers x, y; constants n, a."""
    asm = Assembler(2, 2)
    i = asm.invocation

    def body() -> None:
        product = asm.result(132, asm.uint, asm.push(1), asm.load(0, i))
        asm.store(1, i, asm.result(128, asm.uint, product, asm.load(1, i)))

    asm.when(asm.result(176, asm.bool, i, asm.push(0)), body)
    source = hlsl("axpy", "x y", "n a", "if (i < c.n) y[i] += c.a * x[i];")
    return KernelCode(
        id="test.axpy", spirv=asm.assemble(), hlsl=source, n_buffers=2, n_constants=2, workgroup=(WIDTH, 1, 1)
    )


def spin() -> KernelCode:
    """y[i] = the n-th step of a linear congruential generator from i: work that takes as long as wanted.

    Buffer y; constant n, which stays below what a software driver cuts loops off at.
    """
    asm = Assembler(1, 1)

    def step(value: int) -> int:
        product = asm.result(132, asm.uint, value, asm.constant(1664525))
        return asm.result(128, asm.uint, product, asm.constant(1013904223))

    asm.store(0, asm.invocation, asm.repeat(asm.push(0), asm.invocation, step))
    body = "uint v = i; for (uint k = 0; k < c.n; k++) v = v * 1664525u + 1013904223u; y[i] = v;"
    return KernelCode(
        id="test.spin",
        spirv=asm.assemble(),
        hlsl=hlsl("spin", "y", "n", body),
        n_buffers=1,
        n_constants=1,
        workgroup=(WIDTH, 1, 1),
    )


def subgroup_size(required: int | None = None) -> KernelCode:
    """y[i] = the size of the subgroup. Buffer y."""
    asm = Assembler(1, 0)
    asm.store(0, asm.invocation, asm.subgroup_size())
    return KernelCode(
        id="test.subgroup_size",
        spirv=asm.assemble(),
        n_buffers=1,
        n_constants=0,
        workgroup=(WIDTH, 1, 1),
        subgroup_size=required,
        needs=frozenset({"subgroup_basic"}),
    )
