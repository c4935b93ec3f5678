"""How much memory is free."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes of RAM that can be filled without pushing anything out, as far as files and sysconf tell."""
    found = [_linux_available(), _cgroup_available()]
    known = [value for value in found if value is not None]
    if known:
        return min(known)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, others lack the names
        return 4 * 2**30


def _linux_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available() -> int | None:
    """What a container's limit leaves (cgroup v2), its page cache counted as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(used["anon"]))
    except (OSError, ValueError, KeyError):
        return None
