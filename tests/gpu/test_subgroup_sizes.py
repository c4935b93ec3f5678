"""The ops where waves meet, and those with barriers, with subgroups of 4 and 16; the other tests run at the default 8.

Each size needs a process of its own: the software driver reads its vector width when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

TESTS = {
    "test_rms_norm.py": "",
    "test_argmax.py": "",
    "test_linear.py": "gemv.f16 and (wave or plain) or gemm.f16.plain",
    "test_attention.py": "f16 and lengths",
}


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("file", TESTS)
def test_right_at_every_size(run_with_subgroups: Callable[..., str], size: int, file: str) -> None:
    code = "from xinfer import gpu; print(gpu.choose_device('vulkan').subgroup_size_default)"
    assert run_with_subgroups(size, "-c", code).split() == [str(size)]
    chosen = ["-k", TESTS[file]] if TESTS[file] else []
    output = run_with_subgroups(size, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{file}", *chosen)
    assert " passed" in output
    assert "skipped" not in output
    assert "failed" not in output
