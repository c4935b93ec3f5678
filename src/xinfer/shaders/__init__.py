"""The compute shaders: one op a source file, `catalog.py` lists their variants, `load` gives a compiled one.

`_bin/` holds `<variant id>.spv` and `manifest.json`. It is made by the build (`tools/build_shaders.py`, which the
wheel's build hook runs) and is in no repository. The HLSL itself is in the wheel, too: Direct3D 12 compiles it when it
runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import TypedDict

from xinfer.errors import DeviceError
from xinfer.gpu.api import HlslSource, KernelCode
from xinfer.shaders.catalog import Variant, variants

SOURCES = Path(__file__).parent
BINARIES = SOURCES / "_bin"
MANIFEST = "manifest.json"
HLSL_DEFINE = "XINFER_D3D"  # tells common.hlsli that the compiler is not Slang
INCLUDE = re.compile(r'\s*#include\s+"([\w.]+)"\s*')
BUILD_COMMAND = "python tools/build_shaders.py"


class ManifestEntry(TypedDict):
    """What is known about one compiled variant."""

    source: str  # source_hash when it was compiled
    spirv: str  # SHA-256 of the .spv


class Manifest(TypedDict):
    """`_bin/manifest.json`."""

    compiler: str
    variants: dict[str, ManifestEntry]


def source_hash(variant: Variant, sources: Path = SOURCES) -> str:
    """SHA-256 of all that a variant is compiled from: its source, every include, its defines and its target."""
    digest = hashlib.sha256()
    for path in (sources / variant.source, *sorted(sources.glob("*.hlsli"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    digest.update(repr((variant.defines, variant.profile)).encode())
    return digest.hexdigest()


def hlsl(variant: Variant, sources: Path = SOURCES) -> HlslSource | None:
    """A variant as HLSL for what compiles at run time; None where it is written in Slang."""
    if not variant.source.endswith(".hlsl"):
        return None
    text = _expanded(sources / variant.source)
    return HlslSource(name=variant.source, text=text, defines=(*variant.defines, (HLSL_DEFINE, 1)), views=variant.views)


@functools.cache
def _expanded(path: Path) -> str:
    """A source with its includes put in; #line keeps the compiler's messages true."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        included = INCLUDE.fullmatch(line)
        if included:
            lines += [f'#line 1 "{included[1]}"', _expanded(path.parent / included[1])]
            lines.append(f'#line {number + 1} "{path.name}"')
        else:
            lines.append(line)
    return "\n".join(lines)


@functools.cache
def _manifest(path: Path) -> Manifest:
    try:
        manifest: Manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise DeviceError(
            f"the compiled shaders are missing: no {path}. In a checkout run `{BUILD_COMMAND}` "
            "(it needs `pip install slangpy==0.43.1`); an installed package brings them, so reinstall xinfer-llm"
        ) from None
    return manifest


@functools.cache
def load(variant_id: str, *, binaries: Path = BINARIES) -> KernelCode:
    """A compiled variant.

    Raises:
        DeviceError: `_bin` is missing, older than the sources, or damaged; the message says how to build it.
    """
    variant = variants()[variant_id]
    entry = _manifest(binaries / MANIFEST)["variants"].get(variant_id)
    rebuild = f"run `{BUILD_COMMAND}` in a checkout, or reinstall xinfer-llm"
    if entry is None or entry["source"] != source_hash(variant):
        raise DeviceError(f"the compiled shader {variant_id!r} is older than its source {variant.source}: {rebuild}")
    path = binaries / f"{variant_id}.spv"
    try:
        spirv = path.read_bytes()
    except FileNotFoundError:
        raise DeviceError(f"the compiled shader {path} is missing: {rebuild}") from None
    if hashlib.sha256(spirv).hexdigest() != entry["spirv"]:
        raise DeviceError(f"the compiled shader {path} is not the one that was built: {rebuild}")
    return KernelCode(
        id=variant.id,
        spirv=spirv,
        hlsl=hlsl(variant),
        n_buffers=variant.n_buffers,
        n_constants=variant.n_constants,
        constant_names=variant.constants,
        workgroup=variant.workgroup,
        subgroup_size=variant.subgroup_size,
        needs=variant.needs,
    )
