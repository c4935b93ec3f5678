"""COM objects made in Python: vtables in memory whose entries are Python functions, called as native ones are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_uint64, c_void_p
from typing import Any

from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.com import NativeCaller, word
from xinfer.gpu._d3d12.dxc import Dxc

Function = Callable[..., int]


class FakeObject:
    """An object with these methods, and with the interfaces that other objects have. Counts its references."""

    def __init__(
        self,
        kind: str,
        methods: dict[str, Function],
        *,
        interfaces: list[FakeObject] | None = None,
        shift: int = 0,
    ) -> None:
        self.kind = kind
        self.references = 1
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.interfaces = {bytes(d3d.iid(item.kind)): item for item in interfaces or []}
        known: dict[str, Function] = {
            "QueryInterface": self._query,
            "AddRef": self._add,
            "Release": self._drop,
            **methods,
        }
        assert known.keys() <= d3d.METHODS[kind].keys(), f"{kind} has no {known.keys() - d3d.METHODS[kind].keys()}"
        self._table = (c_void_p * (1 + shift + max(place for place, _ in d3d.METHODS[kind].values())))()
        self._callbacks = []
        for name, (place, n_arguments) in d3d.METHODS[kind].items():
            place += 0 if name in d3d.UNKNOWN else shift  # of destructors in between, which nobody calls
            if name in known:
                callback = ctypes.CFUNCTYPE(c_uint64, *[c_uint64] * (1 + n_arguments))(self._noted(name, known[name]))
                self._callbacks.append(callback)
                self._table[place] = ctypes.cast(callback, c_void_p).value
        self._memory = (c_void_p * 1)(ctypes.addressof(self._table))
        self.address = ctypes.addressof(self._memory)

    def called(self, name: str) -> list[tuple[int, ...]]:
        """The arguments of each call of a method."""
        return [arguments for method, arguments in self.calls if method == name]

    def _noted(self, name: str, function: Function) -> Function:
        def call(_this: int, *arguments: int) -> int:
            self.calls.append((name, arguments))
            return function(*arguments)

        return call

    def _query(self, iid: int, slot: int) -> int:
        found = self.interfaces.get(ctypes.string_at(iid, 16))
        if found is None:
            return d3d.E_NOINTERFACE
        found.references += 1
        return give(slot, found)

    def _add(self) -> int:
        self.references += 1
        return self.references

    def _drop(self) -> int:
        self.references -= 1
        assert self.references >= 0, f"{self.kind} was released too often"
        return self.references


def give(slot: int, item: FakeObject) -> int:
    """Write an object's address where a caller wants it; S_OK."""
    c_void_p.from_address(slot).value = item.address
    return d3d.S_OK


def fill(address: int, data: Any) -> int:
    """Copy a struct to where a caller wants it; S_OK."""
    ctypes.memmove(address, ctypes.addressof(data), ctypes.sizeof(data))
    return d3d.S_OK


class FakeRuntime:
    """Exported functions made in Python."""

    name = "fake"

    def __init__(self, functions: dict[str, Function], *, windows: bool = True, dxc: Dxc | None = None) -> None:
        self.caller = NativeCaller()
        self.windows = windows
        self.dxc = dxc
        self.functions = functions

    def call(self, function: str, *arguments: object) -> int:
        """Call one of them, its arguments as native code gets them."""
        return self.functions[function](*map(word, arguments))


def device(reason: int = d3d.S_OK, *interfaces: FakeObject, **methods: Function) -> FakeObject:
    """A device that was, or was not, removed."""
    return FakeObject(
        "ID3D12Device", {"GetDeviceRemovedReason": lambda: reason, **methods}, interfaces=list(interfaces)
    )
