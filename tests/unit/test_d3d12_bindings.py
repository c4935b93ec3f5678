"""The table of Direct3D 12: every line of it compared with the C headers, and its layouts with a C compiler's.

But for dxcompiler's interfaces: no Debian package has their header, and test_dxc.py calls the real ones.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from xinfer.gpu._bindings import d3d12 as d3d

DIRECTX = Path("/usr/include/directx")  # Debian: directx-headers-dev
STUBS = Path("/usr/include/wsl/stubs")
MINGW = Path("/usr/share/mingw-w64/include")  # Debian: mingw-w64-common; it alone has DXGI
TWICE = re.compile(r"#if [^\n]*(?:_MSC_VER|_WIN32)[^\n]*\n(.*?)#else[^\n]*\n.*?#endif", re.DOTALL)


def header(*names: str) -> str:
    """The text of C headers, those for DXGI and errors from MinGW. Skips, or fails where GPUs are required."""
    found = [folder / name for name in names for folder in (DIRECTX, MINGW) if (folder / name).exists()]
    absent = [name for name in names if not any(path.name == name for path in found)]
    if absent:
        package = (
            "mingw-w64-common"
            if any("dxgi" in name or "winerror" in name for name in absent)
            else "directx-headers-dev"
        )
        if os.environ.get("XINFER_REQUIRE_GPU") == "1":
            pytest.fail(f"XINFER_REQUIRE_GPU=1, but there is no {', '.join(absent)} (Debian: {package})")
        pytest.skip(f"needs {', '.join(absent)} (Debian: {package})")
    # What the headers declare twice, once for each way in which compilers return structs, counts once.
    return "\n".join(TWICE.sub(r"\1", path.read_text(errors="replace")) for path in found)


def headers_for(name: str) -> str:
    return (
        header("dxgi.h", "dxgi1_4.h")
        if name.startswith("IDXGI")
        else header("d3d12.h", "d3d12sdklayers.h", "d3dcommon.h")
    )


def methods(text: str, interface: str) -> list[tuple[str, int]]:
    """(name, arguments beside the object) of each method in the order of the vtable, as the C declarations have it."""
    table = re.search(rf"typedef struct {interface}Vtbl\s*\{{(.*?)\}}\s*{interface}Vtbl;", text, re.DOTALL)
    assert table, interface
    declared = re.finditer(r"\(\s*STDMETHODCALLTYPE\s*\*\s*(\w+)\s*\)\s*\((.*?)\);", table[1], re.DOTALL)
    found = []
    for method in declared:
        arguments = re.sub(r"_\w+_\((?:[^()]|\([^()]*\))*\)", "", method[2])  # annotations have commas, too
        found.append((method[1], arguments.count(",")))
    return found


@pytest.mark.parametrize("interface", [name for name in d3d.METHODS if not name.startswith("IDxc")])
def test_methods_are_where_the_header_has_them(interface: str) -> None:
    declared = methods(headers_for(interface), interface)
    for name, (place, arguments) in d3d.METHODS[interface].items():
        assert declared[place] == (name, arguments), f"{interface}::{name}"


@pytest.mark.parametrize("interface", [name for name in d3d.IIDS if not name.startswith("IDxc")])
def test_interface_ids(interface: str) -> None:
    found = re.search(rf"DEFINE_GUID\(IID_{interface},\s*([^)]*)\)", headers_for(interface))
    assert found
    numbers = [int(part, 16) for part in found[1].split(",")]
    text = "{:08x}-{:04x}-{:04x}-{:02x}{:02x}-{:02x}{:02x}{:02x}{:02x}{:02x}{:02x}".format(*numbers)
    assert text == d3d.IIDS[interface]


def test_results() -> None:
    declared = dict(re.findall(r"#define\s+(\w+)\s+_HRESULT_TYPEDEF_\((0x\w+)L?\)", header("winerror.h")))
    named = d3d.REMOVED | d3d.FAILURES
    known = {name: value for name, value in named.items() if name in declared}
    assert {name: int(declared[name], 16) for name in known} == known
    assert set(named) - set(known) <= {
        "D3DDDIERR_DEVICEREMOVED",  # of the driver's own header
        "D3D12_ERROR_ADAPTER_NOT_FOUND",
        "D3D12_ERROR_DRIVER_VERSION_MISMATCH",
    }


PROBE = """
#include <stddef.h>
#include <stdio.h>
#define CINTERFACE
#include <winadapter.h>
#include <directx/d3d12.h>
#include <directx/d3d12sdklayers.h>
int main() {{
{body}
    return 0;
}}
"""
NUMBERS = [
    name
    for name in vars(d3d)
    if re.match(r"(D3D|DXGI_)", name) and name.isupper() and isinstance(getattr(d3d, name), int)
]


def test_layouts_and_numbers_are_those_of_a_c_compiler(tmp_path: Path) -> None:
    """Through the headers' own stubs for systems other than Windows, which need a C++ compiler."""
    text = header("d3d12.h", "d3d12sdklayers.h")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    declared = {name: kind for name, kind in d3d.structs().items() if re.search(rf"\b{name};", text)}
    numbers = [name for name in NUMBERS if re.search(rf"\b{name}\b", text) and not name.startswith("D3D_SHADER")]
    lines = []
    for name, kind in declared.items():
        lines.append(f'printf("{name} %zu", sizeof({name}));')
        lines += [f'printf(" %zu", offsetof({name}, {f[0]}));' for f in kind._fields_ if not f[0].startswith("_")]
        lines.append('printf("\\n");')
    lines += [f'printf("{name} %llu\\n", (unsigned long long)(unsigned int)({name}));' for name in numbers]
    source = tmp_path / "probe.cpp"
    source.write_text(PROBE.format(body="\n".join(lines)))
    includes = [f"-I{folder}" for folder in (STUBS, STUBS.parent, DIRECTX, DIRECTX.parent)]
    build = subprocess.run(
        [compiler, "-w", *includes, "-o", tmp_path / "probe", source], capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr[:3000]
    output = subprocess.run([tmp_path / "probe"], check=True, capture_output=True, text=True).stdout
    found = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in output.splitlines()}
    ours = {
        name: [ctypes.sizeof(kind), *(getattr(kind, f[0]).offset for f in kind._fields_ if not f[0].startswith("_"))]
        for name, kind in declared.items()
    }
    assert found == ours | {name: [getattr(d3d, name)] for name in numbers}
    assert len(declared) > 20
    assert len(numbers) > 25


def test_dxgis_structs() -> None:
    """By the documented members: 128 characters, 4 numbers, 3 sizes, a LUID, flags."""
    assert ctypes.sizeof(d3d.DXGI_ADAPTER_DESC1) == 312
    assert d3d.DXGI_ADAPTER_DESC1.DedicatedVideoMemory.offset == 272
    assert ctypes.sizeof(d3d.DXGI_QUERY_VIDEO_MEMORY_INFO) == 32
