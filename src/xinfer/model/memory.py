"""How much memory is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_UNKNOWN_BYTES = 4 * 2**30  # where the platform does not tell: enough for a 0.5B model


def available_memory(*, root: Path = Path("/")) -> int:
    """Bytes of RAM that can be filled without pushing anything out, as far as files and sysconf tell.

    `root` is where /proc and /sys are.
    """
    try:
        known = list(_linux_available(root))
        if known:
            return min(known)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf; others may lack a name
        return _UNKNOWN_BYTES


def _linux_available(root: Path) -> Iterator[int]:
    """What the machine has left, and what each limit around this process leaves."""
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
    top = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":  # version 2; a container's limit is on its own group or on one around it
            group = top / path.strip("/")
            yield from (left for place in (group, *group.parents) if (left := _group_left(place)) is not None)


def _group_left(group: Path) -> int | None:
    """What a control group's limit leaves, page cache counted as free; None without a limit."""
    limit = "".join(_lines(group / "memory.max")).strip()
    if not limit.isdigit():  # "max", or no such group
        return None
    used = dict(line.split() for line in _lines(group / "memory.stat"))
    return max(0, int(limit) - int(used.get("anon", 0)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
