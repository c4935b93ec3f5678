"""Options as users write them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import typer

from xinfer import llm
from xinfer.cli.app import main
from xinfer.cli.options import LARGEST_SIZE, byte_count
from xinfer.errors import RequestError


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


def test_sizes_beyond_reason_are_as_good_as_no_limit() -> None:
    for text in ("9" * 400, "9" * 5000 + "TiB", "99999999999999999999GB"):
        assert byte_count(text) == LARGEST_SIZE


@pytest.mark.parametrize("text", ["", "GB", "5x", "-1GB", "1e9", "8 GB free", "1,5GB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 8GB"):
        byte_count(text)


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "x"]])
@pytest.mark.parametrize("canary", [True, False])
def test_the_canary_reaches_the_model(monkeypatch: pytest.MonkeyPatch, command: list[str], canary: bool) -> None:
    given: dict[str, Any] = {}

    def refuse(_model: str, **options: Any) -> None:
        given.update(options)
        raise RequestError("enough")

    monkeypatch.setattr(llm, "LLM", refuse)
    monkeypatch.setattr(sys, "argv", ["xinfer", *command, *(["--canary"] if canary else [])])
    with pytest.raises(SystemExit):
        main()
    assert given["canary"] is canary
