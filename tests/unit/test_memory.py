"""Free memory, from files such as Linux has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from xinfer.model.memory import available_memory


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {
    "proc/meminfo": "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\nBuffers: 3 kB\n"
}
GROUP = {**MEMINFO, "proc/self/cgroup": "0::/box/inner\n"}


def test_what_linux_calls_available(tmp_path: Path) -> None:
    assert available_memory(root=put(tmp_path, MEMINFO)) == 8000 * 1024


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({}, 8000 * 1024),
        ({"box/inner/memory.max": "max\n"}, 8000 * 1024),
        ({"box/inner/memory.max": "5000000\n", "box/inner/memory.stat": "anon 1000000\nfile 3900000\n"}, 4_000_000),
        ({"box/memory.max": "5000000\n", "box/memory.stat": "anon 4000000\n"}, 1_000_000),
        ({"memory.max": "5000000\n", "memory.stat": "anon 6000000\n"}, 0),
        ({"box/memory.max": "900000000\n", "box/memory.stat": "anon 0\n"}, 8000 * 1024),
    ],
)
def test_a_containers_limit_counts(limits: dict[str, str], left: int, tmp_path: Path) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    assert available_memory(root=put(tmp_path, {**GROUP, **files})) == left


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="Windows has no sysconf")
def test_without_such_files_half_of_all_memory(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory(root=tmp_path) == total // 2


def test_without_anything_a_cautious_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert available_memory(root=tmp_path) == 4 * 2**30
    assert available_memory(root=put(tmp_path, {"proc/meminfo": "MemAvailable: lots\n"})) == 4 * 2**30


def test_this_machine_has_some() -> None:
    assert 0 < available_memory() < 2**50
