"""Sizes as users write them."""

from __future__ import annotations

import pytest
import typer

from xinfer.cli.options import byte_count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("8GB", 8_000_000_000),
        ("8G", 8_000_000_000),
        ("7.5GiB", 15 << 29),
        ("500 mb", 500_000_000),
        ("2TiB", 2 << 40),
        ("123456", 123456),
        (" 1 KiB ", 1024),
        ("12B", 12),
    ],
)
def test_sizes(text: str | None, expected: int | None) -> None:
    assert byte_count(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "5x", "-1GB", "1e9", "8 GB free", "1,5GB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 8GB"):
        byte_count(text)
