"""Looks at the system from outside the graphics API, to tell why there is no GPU."""

from __future__ import annotations

import json
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


def driver_variables() -> list[tuple[str, str]]:
    """The environment's variables, and their values, that tell the Vulkan loader which drivers there are."""
    return [(name, value) for name in DRIVER_VARIABLES if (value := os.environ.get(name, "").strip())]


def driver_file_faults() -> list[str]:
    """What is wrong with the files that the environment names as the only Vulkan drivers, and what to do about it.

    The loader passes over such a file, or says that the host's memory is full.
    """
    return [
        f"{name}={value}: {fault}; correct it, or unset {name} to use the drivers that are installed"
        for name, value in driver_variables()
        for path in value.split(os.pathsep)
        if path and (fault := _fault_of(Path(path)))
    ]


def _fault_of(path: Path) -> str:
    """What keeps a driver's manifest from being used; "" where nothing can be seen from outside."""
    try:
        if path.is_dir():
            faults = [_fault_of(file) for file in sorted(path.glob("*.json"))]
            return "" if not all(faults) else faults[0] if faults else f"the folder {path} holds no .json file"
        library = json.loads(path.read_text(encoding="utf-8"))["ICD"]["library_path"]
    except FileNotFoundError:
        return f"there is no file {path}"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    except ValueError as error:
        return f"{path} is not the JSON of a driver ({error})"
    except (KeyError, TypeError):
        return f"{path} is not a driver's: it names no ICD with a library_path"
    if not isinstance(library, str):
        return f"{path} is not a driver's: its library_path is {library!r}"
    beside = path.parent / library  # a bare name is looked for where libraries are
    if ("/" in library or "\\" in library) and not beside.exists():
        return f"{path} names the library {library}, which does not exist"
    return ""


def platform() -> str:
    """`sys.platform`."""
    return sys.platform


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
