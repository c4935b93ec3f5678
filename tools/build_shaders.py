"""Compile the shaders that are not up to date: `python tools/build_shaders.py [--force] [--check]`.

Writes `src/xinfer/shaders/_bin/<variant id>.spv` and `manifest.json`. A variant is compiled again when its sources,
defines or the compiler changed, or when its file is missing or differs from the manifest. `hatch_build.py` calls
`build()` for a wheel, the GPU tests for themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT / "src") not in sys.path:  # a build runs before anything is installed
    sys.path.insert(0, str(ROOT / "src"))

import slang  # noqa: E402
import spirv  # noqa: E402
from xinfer.shaders import BINARIES, MANIFEST, SOURCES, Manifest, source_hash  # noqa: E402
from xinfer.shaders.catalog import Variant, variants  # noqa: E402

# Without it, storage buffers are declared as SPIR-V 1.0 did.
CAPABILITIES = ("SPV_KHR_storage_buffer_storage_class",)


def compile_variant(variant: Variant) -> bytes:
    """One variant's SPIR-V, without debug information."""
    code = slang.compile_spirv(
        SOURCES / variant.source,
        defines={name: str(value) for name, value in variant.defines},
        profile=variant.profile,
        capabilities=CAPABILITIES,
    )
    return spirv.strip_debug(code)


def read_manifest(binaries: Path) -> Manifest:
    """What was built before; empty where there is nothing, or nothing readable."""
    try:
        found: Manifest = json.loads((binaries / MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {"compiler": "", "variants": {}}
    return found


def stale(binaries: Path = BINARIES, *, force: bool = False) -> list[Variant]:
    """The variants that must be compiled."""
    manifest = read_manifest(binaries)
    result = []
    for variant in variants().values():
        entry = manifest["variants"].get(variant.id)
        path = binaries / f"{variant.id}.spv"
        current = (
            not force
            and entry is not None
            and entry["source"] == source_hash(variant)
            and path.exists()
            and hashlib.sha256(path.read_bytes()).hexdigest() == entry["spirv"]
        )
        if not current:
            result.append(variant)
    return result


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: another process may be building, or loading, at the same time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def build(binaries: Path = BINARIES, *, force: bool = False) -> int:
    """Bring `binaries` up to date; returns how many shaders were compiled."""
    todo = stale(binaries, force=force)
    manifest = read_manifest(binaries)
    if not todo and manifest["variants"].keys() == variants().keys():
        return 0
    compiler = slang.version()
    if manifest["compiler"] != compiler:
        todo = list(variants().values())
    binaries.mkdir(parents=True, exist_ok=True)
    entries = {name: entry for name, entry in manifest["variants"].items() if name in variants()}
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # the compiler runs without the interpreter lock
        for variant, code in zip(todo, threads.map(compile_variant, todo), strict=True):
            _replace(binaries / f"{variant.id}.spv", code)
            entries[variant.id] = {"source": source_hash(variant), "spirv": hashlib.sha256(code).hexdigest()}
    for path in binaries.glob("*.spv"):
        if path.stem not in entries:
            path.unlink()
    text = json.dumps({"compiler": compiler, "variants": dict(sorted(entries.items()))}, indent=1)
    _replace(binaries / MANIFEST, text.encode() + b"\n")
    return len(todo)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Compile the shaders that are not up to date.")
    parser.add_argument("--force", action="store_true", help="compile all of them")
    parser.add_argument("--check", action="store_true", help="compile nothing; fail where something is stale")
    arguments = parser.parse_args()
    if arguments.check:
        names = [variant.id for variant in stale()]
        print("\n".join(names) if names else "every shader is up to date")
        return 1 if names else 0
    start = time.perf_counter()
    try:
        count = build(force=arguments.force)
    except slang.SlangError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{count} of {len(variants())} shaders compiled in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
