"""dxcompiler: HLSL to DXIL, for shader model 6, where the user has it. Nothing of it comes with xinfer.

XINFER_DXC names the library or its folder, or is 0 for none. Without it the system's own search path counts and, on
Windows, the Windows SDK. Before version 1.8.2502 dxcompiler.dll signs what it makes by dxil.dll, which lies beside it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from ctypes import Structure, c_size_t, c_uint32, c_uint64, c_void_p, create_string_buffer, create_unicode_buffer
from pathlib import Path
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu import native
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.com import Interface, NativeCaller, failed, hresult_name
from xinfer.gpu._d3d12.seal import DIGEST, sealed
from xinfer.gpu.api import HlslSource

VARIABLE = "XINFER_DXC"
PROFILE = "cs_6_0"
# -Gis: NaN and infinity are what they are, as the reductions rely on. -HV 2018: && and ?: as D3DCompile has them.
ARGUMENTS = ("-T", PROFILE, "-O3", "-Gis", "-HV", "2018")
LIBRARIES = {"win32": ("dxcompiler.dll",)}
OTHER_LIBRARIES = ("libdxcompiler.so", "libdxcompiler.so.3.7")
SDK = "Windows Kits/10/bin/*/x64/dxcompiler.dll"
UTF8 = 65_001
OUT_OBJECT, OUT_ERRORS = 1, 2
DESTRUCTORS = 2  # places of the vtable that they take, behind IUnknown's, in builds before 2023 that are not Windows'


class DxcBuffer(Structure):
    """Text, and how it is encoded."""

    _fields_ = [("Ptr", c_void_p), ("Size", c_size_t), ("Encoding", c_uint32)]


class Dxc:
    """A loaded dxcompiler, whose objects have the calling convention of the system itself."""

    def __init__(self, create: int, *, windows: bool) -> None:
        self.caller = NativeCaller()
        self.windows = windows
        self._create = create  # DxcCreateInstance
        self._shift = 0
        self.version = self._ask_version()

    def compile(self, source: HlslSource, entry: str) -> bytes:
        """The DXIL of a shader. Raises DeviceError with what the compiler said."""
        compiler = self._instance("IDxcCompiler3")
        try:
            result = self._compile(compiler, source, entry)
        finally:
            compiler.release()
        try:
            status = c_uint32()
            result.call("GetStatus", status)
            said = self._output(result, OUT_ERRORS).decode(errors="replace").rstrip("\0").strip()
            code = self._output(result, OUT_OBJECT)
        finally:
            result.release()
        if failed(status.value) or not code:
            raise DeviceError(
                f"dxcompiler {self.version} cannot compile {source.name}:\n{said}\n"
                f"use another variant, Vulkan (--device vulkan), or D3DCompile ({VARIABLE}=0)"
            )
        if any(code[DIGEST]):
            return code
        if self.windows:
            raise DeviceError(
                f"dxcompiler {self.version} did not sign {source.name}, and Windows takes no such kernel: "
                f"put the dxil.dll of the same version beside it, or set {VARIABLE}=0"
            )
        return sealed(code)

    def _compile(self, compiler: Interface, source: HlslSource, entry: str) -> Interface:
        text = create_string_buffer(source.text.encode())
        size = ctypes.sizeof(text) - 1
        defines = [word for name, value in source.defines for word in ("-D", f"{name}={value}")]
        # The name comes first: messages have it, and #line corrects them.
        words = [create_unicode_buffer(word) for word in (source.name, "-E", entry, *ARGUMENTS, *defines)]
        arguments = (c_void_p * len(words))(*map(ctypes.addressof, words))
        buffer, slot = DxcBuffer(ctypes.addressof(text), size, UTF8), c_void_p()
        answer = compiler.call("Compile", buffer, arguments, len(words), None, d3d.iid("IDxcResult"), slot)
        if failed(answer) or not slot.value:
            raise DeviceError(f"IDxcCompiler3::Compile failed for {source.name}: {hresult_name(answer)}")
        return Interface(self.caller, "IDxcResult", slot.value, self._shift)

    def _output(self, result: Interface, kind: int) -> bytes:
        slot = c_void_p()
        if failed(result.call("GetOutput", kind, d3d.iid("IDxcBlob"), slot, None)) or not slot.value:
            return b""
        blob = Interface(self.caller, "IDxcBlob", slot.value, self._shift)
        try:
            return ctypes.string_at(blob.call("GetBufferPointer"), blob.call("GetBufferSize"))
        finally:
            blob.release()

    def _instance(self, kind: str) -> Interface:
        slot = c_void_p()
        answer = self.caller(self._create, d3d.clsid("DxcCompiler"), d3d.iid(kind), slot)
        if failed(answer) or not slot.value:
            raise DeviceError(f"DxcCreateInstance failed for {kind}: {hresult_name(answer)}; a newer dxcompiler has it")
        return Interface(self.caller, kind, slot.value, self._shift)

    def _ask_version(self) -> str:
        """The version; and where methods lie, since older builds have destructors between IUnknown's and the others.

        Place 5 is GetCommitInfo(count, hash), or with destructors GetVersion(major, minor). Both write two numbers, of
        which the second is a pointer or a small number.
        """
        info = self._instance("IDxcVersionInfo2")
        try:
            first, second = c_uint64(), c_uint64()
            info.call("GetCommitInfo", first, second)
            if not self.windows and second.value < 1 << 16:
                self._shift = info.shift = DESTRUCTORS
                info.call("GetCommitInfo", first, second)
            commit = ctypes.string_at(second.value)[:9].decode(errors="replace") if second.value else "unknown"
            major, minor = c_uint32(), c_uint32()
            info.call("GetVersion", major, minor)
            return f"{major.value}.{minor.value}.{first.value & 0xFFFF_FFFF}-{commit}"
        finally:
            info.release()


def load_dxc() -> Dxc | None:
    """The user's dxcompiler; None where there is none, or XINFER_DXC is 0.

    Raises DeviceError where XINFER_DXC names one that cannot be used.
    """
    named = os.environ.get(VARIABLE, "")
    if named == "0":
        return None
    for path in _candidates(named):
        try:
            _load_signer(path)
            library = native.load_library((str(path),))
            create: Any = library.DxcCreateInstance
            address = ctypes.cast(create, c_void_p).value
            assert address
            return Dxc(address, windows=sys.platform == "win32")
        except (AttributeError, DeviceError) as error:
            if named:
                raise DeviceError(
                    f"{VARIABLE} is {named!r}, and there is no dxcompiler that can be used ({error}): "
                    "name the library or its folder, or set it to 0"
                ) from error
    return None


def _candidates(named: str) -> Iterator[Path]:
    names = LIBRARIES.get(sys.platform, OTHER_LIBRARIES)
    if named:
        path = Path(named)
        yield next((path / name for name in names if (path / name).is_file()), path)
        return
    yield from map(Path, names)
    if sys.platform == "win32":
        kits = os.environ.get("PROGRAMFILES(X86)")
        yield from sorted(Path(kits).glob(SDK), key=_sdk_version, reverse=True) if kits else ()


def _sdk_version(path: Path) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in path.parts[-3].split(".")]


def _load_signer(path: Path) -> None:
    """Dxcompiler looks for dxil.dll where Windows looks for libraries, which need not be its own folder."""
    signer = path.parent / "dxil.dll"
    if sys.platform == "win32" and signer.is_file():
        native.load_library((str(signer),))
