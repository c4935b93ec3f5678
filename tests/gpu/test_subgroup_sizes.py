"""The ops where waves meet, and those with barriers, with subgroups of 4 and 16; the other tests run at the default 8.

Each size needs a process of its own: the software driver reads its vector width when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

FILES = ("test_rms_norm.py", "test_argmax.py", "test_linear.py", "test_attention.py")
CHOSEN = " or ".join(
    (
        "rms_norm",
        "argmax",
        "gemv and f16 and (wave or plain) and not l256 and not l128r2",  # 64 subgroups of 4: more than the driver takes
        "gemm and f16 and plain",
        "lengths and f16 and (plain or one_pass or prefill64)",
    )
)
PRINT_SIZE = "from xinfer import gpu; print(gpu.choose_device('vulkan').subgroup_size_default)"


@pytest.mark.parametrize("size", [4, 16])
def test_right_at_every_size(run_with_subgroups: Callable[..., str], size: int) -> None:
    assert run_with_subgroups(size, "-c", PRINT_SIZE).split() == [str(size)]
    files = [f"tests/gpu/{file}" for file in FILES]
    output = run_with_subgroups(
        *(size, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", CHOSEN), timeout_s=600
    )
    assert " passed" in output
    assert "skipped" not in output
    assert "failed" not in output
