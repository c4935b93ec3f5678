"""Kernel faults planted in a copy of the package: one variant's source is patched, compiled, and put in its place.

The copy is run as a user runs xinfer, in processes of its own, so that nothing in the product knows of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_shaders
import slang
import spirv
from xinfer.shaders import MANIFEST, SOURCES
from xinfer.shaders.catalog import variants

PACKAGE = SOURCES.parent
TIMEOUT_S = 500


@dataclass(frozen=True)
class Fault:
    """One change to the source of the variant that does an op in a case: in its own file, or in an include."""

    name: str
    case: str  # of verify's report
    op: str  # where verify should say that it diverges
    old: str
    new: str
    file: str | None = None  # None: the variant's own source
    only: str = ""  # a part of the variant's id, where an op takes several
    variant: str = ""  # filled in by `on`

    def on(self, report: dict[str, Any]) -> Fault:
        """The same in the variant that a healthy report says is used."""
        (used,) = (case["variants"][self.op] for case in report["errors"]["by_case"] if case["case"] == self.case)
        (variant,) = (name for name in used if self.only in name)
        return dataclasses.replace(self, variant=variant)

    def compiled(self, folder: Path) -> bytes:
        """The faulty kernel's SPIR-V."""
        variant = variants()[self.variant]
        sources = folder / "sources"
        shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("_bin", "__pycache__"))
        path = sources / (self.file or variant.source)
        text = path.read_text()
        assert text.count(self.old) >= 1, f"{self.name}: {path.name} has no {self.old!r}"
        path.write_text(text.replace(self.old, self.new))
        code = slang.compile_spirv(
            sources / variant.source,
            defines={name: str(value) for name, value in variant.defines},
            profile=variant.profile,
            capabilities=build_shaders.CAPABILITIES,
        )
        return spirv.strip_debug(code)


def copy_with(fault: Fault | None, folder: Path) -> Path:
    """A copy of the package with the fault in it; the folder to put on PYTHONPATH."""
    target = folder / "package"
    shutil.copytree(PACKAGE, target / "xinfer", copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
    if fault is None:
        return target
    code, binaries = fault.compiled(folder), target / "xinfer" / "shaders" / "_bin"
    manifest = json.loads((binaries / MANIFEST).read_text())
    manifest["variants"][fault.variant]["spirv"] = hashlib.sha256(code).hexdigest()
    for path, content in (
        (binaries / f"{fault.variant}.spv", code),
        (binaries / MANIFEST, json.dumps(manifest).encode()),
    ):
        path.unlink()  # it is linked to the real one
        path.write_bytes(content)
    return target


def _link(source: str, target: str) -> str:
    os.link(source, target)
    return target


@dataclass(frozen=True)
class Copy:
    """A package copy that commands are run from, with a quarantine of its own."""

    path: Path
    quarantine: Path

    def run(self, *arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        """`xinfer ARGUMENTS`."""
        environment = {**os.environ, "PYTHONPATH": str(self.path), "XINFER_QUARANTINE": str(self.quarantine)}
        done = subprocess.run(
            [sys.executable, "-m", "xinfer", *arguments],
            env=environment,
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert status is None or done.returncode == status, (
            f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def report(self, *arguments: str, status: int) -> dict[str, Any]:
        """The JSON that a command prints."""
        report: dict[str, Any] = json.loads(self.run(*arguments, "--json", status=status).stdout)
        return report
