"""Options as users write them."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from xinfer import llm
from xinfer.cli.app import main
from xinfer.cli.options import LARGEST_SIZE, byte_count
from xinfer.cli.status import INTERRUPTED, OK, TERMINATED, USAGE
from xinfer.errors import RequestError
from xinfer.gpu_model import ModelOptions, OptionValues


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("8GB", 8_000_000_000),
        ("8G", 8_000_000_000),
        ("7.5GiB", 15 << 29),
        ("500 mb", 500_000_000),
        ("2TiB", 2 << 40),
        ("123456789", 123456789),
        (" 1 KiB ", 1024),
        ("12B", 12),
    ],
)
def test_sizes(text: str | None, expected: int | None) -> None:
    assert byte_count(text) == expected


@pytest.mark.parametrize("text", ["8", "7.5", " 24 ", "999999"])
def test_a_number_without_its_unit_is_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"are bytes; expected a unit, as in {text.strip()}GB"):
        byte_count(text)


@pytest.mark.parametrize("text", ["0", "0GB", "0.2B"])
def test_nothing_is_no_budget(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"'{text}'; expected more than 0, such as 8GB"):
        byte_count(text)


def test_sizes_beyond_reason_are_as_good_as_no_limit() -> None:
    for text in ("9" * 400, "9" * 5000 + "TiB", "99999999999999999999GB"):
        assert byte_count(text) == LARGEST_SIZE


@pytest.mark.parametrize("text", ["", "GB", "5x", "-1GB", "1e9", "8 GB free", "1,5GB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 8GB"):
        byte_count(text)


def given_to(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> dict[str, Any]:
    """What a command hands to `llm`'s LLM or load_model."""
    given: dict[str, Any] = {}

    def refuse(_model: str, options: ModelOptions, **others: Any) -> None:
        given.update(others, options=options)
        raise RequestError("enough")

    monkeypatch.setattr(llm, name, refuse)
    monkeypatch.setattr(sys, "argv", ["xinfer", *arguments])
    with pytest.raises(SystemExit):
        main()
    return given


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "x"]])
@pytest.mark.parametrize("canary", [True, False])
def test_the_canary_reaches_the_model(monkeypatch: pytest.MonkeyPatch, command: list[str], canary: bool) -> None:
    assert given_to(monkeypatch, "LLM", *command, *(["--canary"] if canary else []))["canary"] is canary


MEMORY = ["--kv-cache", "f32", "--mode", "streaming", "--vram-budget", "8GB", "--exact"]
CHOSEN = ModelOptions(kv_cache="f32", mode="streaming", vram_budget=8_000_000_000, exact=True)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_model_options_reach_the_model(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    given = given_to(monkeypatch, "LLM", command, "x", "--context", "64", *MEMORY)
    assert given["options"] == dataclasses.replace(CHOSEN, context=64)
    assert given_to(monkeypatch, "LLM", command, "x")["options"] == ModelOptions()


@pytest.mark.parametrize(
    ("interrupt", "status", "kind"),
    [(KeyboardInterrupt(), INTERRUPTED, "Interrupted"), (SystemExit(TERMINATED), TERMINATED, "Terminated")],
)
def test_an_interrupt_before_there_is_an_answer_is_json_too(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupt: BaseException,
    status: int,
    kind: str,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise interrupt

    monkeypatch.setattr("xinfer.llm.LLM", interrupted)
    monkeypatch.setattr(sys, "argv", ["xinfer", "generate", "x", "--json", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    assert json.loads(capsys.readouterr().out)["error"]["type"] == kind


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--kv-cache", "f64", "'f64'; expected one of f16, f32"),
        ("--mode", "fast", "'fast'; expected one of auto, resident, streaming"),
        ("--vram-budget", "0", "'0'; expected more than 0, such as 8GB"),
    ],
)
def test_a_value_that_is_not_known_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str, expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["xinfer", "generate", "x", "--json", option, value])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == USAGE
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message == f"Invalid value for {option}: {expected}"


def test_model_options_reach_what_makes_logits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = ["logits", "--tokens", "1", "--out", str(tmp_path / "x.npy")]
    assert given_to(monkeypatch, "load_model", *command, *MEMORY)["options"] == CHOSEN
    assert given_to(monkeypatch, "load_model", *command)["options"] == ModelOptions()


def test_single_values_are_those_of_the_options() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(ModelOptions)}
    assert {name: value.__forward_arg__ for name, value in OptionValues.__annotations__.items()} == fields


@pytest.mark.parametrize(
    ("given", "told"),
    [((), False), (("--vram-budget", "1GB"), True), (("--mode", "streaming"), True), (("--mode", "auto"), False)],
)
def test_what_the_cpu_does_not_know_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: tuple[str, ...], told: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["xinfer", "generate", "x", "--device", "cpu", "--max-tokens", "1", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == OK
    assert ("are for GPUs" in capsys.readouterr().err) is told
