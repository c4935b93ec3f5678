"""Calling COM methods and the functions that make COM objects, from any convention that the other side may use.

Every argument travels as one 64-bit word, which is right on 64-bit systems for integers and pointers alike: nothing
that xinfer calls takes a float, a struct by value, or answers with a struct.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import addressof, c_size_t, c_uint16, c_uint64, c_void_p
from typing import Any, Protocol

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import d3d12 as d3d

FFI_GNUW64 = 4  # libffi's number for the Microsoft convention on x86-64 that is not Windows
FFI_CIF_BYTES = 64  # more than any libffi's ffi_cif
WORD = 1 << 64
Argument = Any  # None, an int, or a ctypes object, which is passed by its address


class Caller(Protocol):
    """Calls native code."""

    def __call__(self, address: int, *arguments: Argument) -> int:
        """Call the function at `address`; its answer as an unsigned 64-bit word."""


def word(argument: Argument) -> int:
    """An argument as an unsigned 64-bit word."""
    if argument is None:
        return 0
    return argument % WORD if isinstance(argument, int) else addressof(argument)


class NativeCaller:
    """By the convention of the system itself: Windows' own Direct3D 12, and made-up objects in tests."""

    def __init__(self) -> None:
        self._kind = getattr(ctypes, "WINFUNCTYPE", ctypes.CFUNCTYPE)
        self._functions: dict[tuple[int, int], Any] = {}

    def __call__(self, address: int, *arguments: Argument) -> int:
        """See `Caller`."""
        key = address, len(arguments)
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = self._kind(c_uint64, *[c_uint64] * len(arguments))(address)
        return int(function(*map(word, arguments)))


class FfiType(ctypes.Structure):
    """libffi's `ffi_type`."""

    _fields_ = [("size", c_size_t), ("alignment", c_uint16), ("type", c_uint16), ("elements", c_void_p)]


class FfiCaller:
    """By the Microsoft convention, on x86-64 Linux: what vkd3d's functions and methods have. Uses libffi."""

    def __init__(self, libffi: ctypes.CDLL) -> None:
        self._prepare = libffi.ffi_prep_cif
        self._call = libffi.ffi_call
        self._call.restype = None
        self._call.argtypes = [c_void_p] * 4
        self._word = ctypes.pointer(FfiType.in_dll(libffi, "ffi_type_uint64"))
        self._prepared: dict[int, tuple[Any, Any]] = {}  # by number of arguments: the call's shape, and its types
        self._lock = threading.Lock()

    def __call__(self, address: int, *arguments: Argument) -> int:
        """See `Caller`."""
        n = len(arguments)
        shape = self._prepared.get(n)
        if shape is None:
            shape = self._prepare_shape(n)
        words = (c_uint64 * n)(*map(word, arguments))
        first = addressof(words)
        pointers = (c_void_p * n)(*range(first, first + 8 * n, 8))
        result = c_uint64()
        self._call(shape[0], address, addressof(result), pointers)
        return result.value

    def _prepare_shape(self, n: int) -> tuple[Any, Any]:
        with self._lock:
            types = (ctypes.POINTER(FfiType) * n)(*[self._word] * n)
            shape = ctypes.create_string_buffer(FFI_CIF_BYTES)
            status = self._prepare(shape, FFI_GNUW64, n, self._word, types)
            if status:
                raise DeviceError(f"libffi has no Microsoft calling convention here (ffi_prep_cif: {status})")
            self._prepared[n] = shape, types
            return self._prepared[n]


class Interface:
    """One COM object, its methods called by name: `device.call("CreateFence", 0, 0, iid, slot)`."""

    __slots__ = ("_addresses", "address", "caller", "kind", "shift")

    def __init__(self, caller: Caller, kind: str, address: int, shift: int = 0) -> None:
        self.caller = caller
        self.kind = kind
        self.address = address
        self.shift = shift  # places between IUnknown's methods and the others
        self._addresses: dict[tuple[str, int], int] = {}

    def call(self, method: str, *arguments: Argument) -> int:
        """Call a method; its answer as an unsigned 64-bit word."""
        address = self._addresses.get((method, self.shift))
        if address is None:
            address = self._find(method, len(arguments))
        return self.caller(address, self.address, *arguments)

    def query(self, kind: str) -> Interface | None:
        """Another interface of the same object, which is to be released too; None where it has none such."""
        slot = c_void_p()
        result = self.call("QueryInterface", d3d.iid(kind), slot)
        if failed(result) or not slot.value:
            return None
        return Interface(self.caller, kind, slot.value)

    def release(self) -> None:
        """Give the reference back."""
        self.call("Release")

    def _find(self, method: str, n_arguments: int) -> int:
        place, expected = d3d.METHODS[self.kind][method]
        assert n_arguments == expected, f"{self.kind}::{method} takes {expected} arguments, not {n_arguments}"
        if method not in d3d.UNKNOWN:
            place += self.shift
        table = c_void_p.from_address(self.address).value
        assert table
        address = c_void_p.from_address(table + place * ctypes.sizeof(c_void_p)).value
        assert address
        self._addresses[method, self.shift] = address
        return address


def failed(result: int) -> bool:
    """Whether an HRESULT is one of failure."""
    return bool(result & 0x8000_0000)


def hresult_name(result: int) -> str:
    """An HRESULT by its name, or as a number."""
    code = result & 0xFFFF_FFFF
    for name, value in (*d3d.REMOVED.items(), *d3d.FAILURES.items()):
        if value == code:
            return name
    return "S_OK" if code == 0 else f"HRESULT {code:#010x}"


def wide(text: str) -> Any:
    """A zero-terminated string of wchar_t in memory: 16 bits on Windows, 32 with vkd3d."""
    return ctypes.create_unicode_buffer(text)


def read_wide(address: int | None) -> str:
    """The zero-terminated string of wchar_t at an address; "" at none."""
    return ctypes.wstring_at(address) if address else ""
