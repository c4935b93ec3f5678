"""Looks at the system from outside the graphics API, to tell why there is no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DRI = Path("/dev/dri")
DRIVER_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")


def render_nodes() -> list[tuple[str, bool]]:
    """(path, whether this user may open it) of the Linux render nodes."""
    try:
        paths = sorted(str(path) for path in DRI.glob("renderD*"))
    except OSError:
        return []
    return [(path, os.access(path, os.R_OK | os.W_OK)) for path in paths]


def is_wsl() -> bool:
    """Whether this is Linux under Windows."""
    return "microsoft" in _read("/proc/version").lower()


def has_nvidia_kernel_driver() -> bool:
    """Whether NVIDIA's kernel module is loaded, which says nothing of its Vulkan part."""
    return bool(_read("/proc/driver/nvidia/version"))


def missing_driver_files() -> list[str]:
    """Files that the environment names as the only Vulkan drivers, but that are not there."""
    named = [(variable, os.environ.get(variable, "")) for variable in DRIVER_VARIABLES]
    return [
        f"{variable} names {path}, which does not exist"
        for variable, value in named
        for path in value.split(os.pathsep)
        if path and not Path(path).exists()
    ]


def platform() -> str:
    """`sys.platform`."""
    return sys.platform


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
