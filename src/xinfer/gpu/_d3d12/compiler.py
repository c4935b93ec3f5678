"""HLSL to bytecode, with what was compiled kept on disk.

By the user's dxcompiler to shader model 6, where there is one and the device takes that; else by D3DCompile to 5.1.
"""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import Structure, c_char_p, c_void_p, create_string_buffer
from dataclasses import dataclass, replace
from pathlib import Path

from xinfer import cache_files
from xinfer.errors import DeviceError
from xinfer.gpu._d3d12.com import Interface, failed, hresult_name
from xinfer.gpu._d3d12.dxc import ARGUMENTS as DXC_ARGUMENTS
from xinfer.gpu._d3d12.dxc import Dxc
from xinfer.gpu._d3d12.runtime import Runtime
from xinfer.gpu.api import HlslSource

PROFILE = b"cs_5_1"
D3DCOMPILE_IEEE_STRICTNESS = 1 << 13  # NaN and infinity are what they are, as the reductions rely on
D3DCOMPILE_OPTIMIZATION_LEVEL3 = 1 << 15
FLAGS = D3DCOMPILE_IEEE_STRICTNESS | D3DCOMPILE_OPTIMIZATION_LEVEL3
MAGIC = b"xinfer bytecode 1\n"
LARGEST = 16 << 20
LINES_SHOWN = 12


class D3D_SHADER_MACRO(Structure):  # noqa: N801
    """A define; a list of them ends with an empty one."""

    _fields_ = [("Name", c_char_p), ("Definition", c_char_p)]


@dataclass(frozen=True)
class Compiler:
    """What makes a device's kernels out of HLSL."""

    runtime: Runtime
    dxc: Dxc | None = None  # None: D3DCompile

    @property
    def name(self) -> str:
        """As it stands in reports."""
        if self.dxc:
            return f"shader model 6.0 by dxcompiler {self.dxc.version}"
        return "shader model 5.1 by D3DCompile"

    def compile(self, source: HlslSource, entry: str) -> bytes:
        """The bytecode of a shader, from disk where it was compiled before.

        Raises DeviceError with what the compiler said.
        """
        source = replace(source, defines=(*source.defines, *self._defines()))
        path = self._path(source, entry)
        known = cache_files.read(path, MAGIC, LARGEST)
        if known is not None:
            return known
        code = self.dxc.compile(source, entry) if self.dxc else _d3d_compile(self.runtime, source, entry)
        cache_files.write(path, MAGIC, code)
        return code

    def _defines(self) -> tuple[tuple[str, int], ...]:
        """What the sources have to know of the compiler; see common.hlsli."""
        if self.dxc:
            return (("XINFER_DXC", 1),)
        return () if self.runtime.windows else (("XINFER_VKD3D", 1),)

    def _path(self, source: HlslSource, entry: str) -> Path | None:
        """Its file, named after all that it is compiled from; None where there is no home to put it in."""
        how = (self.dxc.version, DXC_ARGUMENTS) if self.dxc else (self.runtime.name, PROFILE, FLAGS)
        digest = hashlib.sha256(repr((how, source.defines, entry)).encode())
        digest.update(source.text.encode())
        folder = cache_files.cache_folder("bytecode")
        return folder / f"{digest.hexdigest()}.bin" if folder else None


def _d3d_compile(runtime: Runtime, source: HlslSource, entry: str) -> bytes:
    text = source.text.encode()
    named = [D3D_SHADER_MACRO(name.encode(), str(value).encode()) for name, value in source.defines]
    macros = (D3D_SHADER_MACRO * (len(named) + 1))(*named)
    code, errors = c_void_p(), c_void_p()
    result = runtime.call(
        "D3DCompile",
        create_string_buffer(text),
        len(text),
        create_string_buffer(source.name.encode()),
        macros,
        None,
        create_string_buffer(entry.encode()),
        create_string_buffer(PROFILE),
        FLAGS,
        0,
        code,
        errors,
    )
    said = take_blob(runtime, errors).decode(errors="replace").rstrip("\0").strip()
    compiled = take_blob(runtime, code)
    if failed(result) or not compiled:
        shown = "\n".join(said.splitlines()[:LINES_SHOWN])
        raise DeviceError(
            f"{runtime.name} cannot compile {source.name}: {hresult_name(result)}\n{shown}\n"
            "use another variant, or Vulkan (--device vulkan)"
        )
    return compiled


def take_blob(runtime: Runtime, slot: c_void_p) -> bytes:
    """The content of a blob, which is released; empty where there is none."""
    if not slot.value:
        return b""
    blob = Interface(runtime.caller, "ID3D10Blob", slot.value)
    try:
        return ctypes.string_at(blob.call("GetBufferPointer"), blob.call("GetBufferSize"))
    finally:
        blob.release()
