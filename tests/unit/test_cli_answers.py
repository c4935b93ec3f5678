"""How `generate` and `chat` take their options and print their answers: text, JSON, JSON a line."""

import json
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.unit.cli_run import run

from xinfer import LLM
from xinfer.cli.app import COMMANDS, app, with_options
from xinfer.model.synthetic import MIN_VOCAB, PRESETS, write_checkpoint

GREEDY = ("--temperature", 0, "--max-tokens", 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "gqa", PRESETS["gqa"], seed=11)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as opened:
        yield opened


def line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


@pytest.mark.parametrize(("message", "stdin"), [("Who goes\nthere?", b""), ("-", b"Who goes\nthere?")])
def test_chat_answers_one_message_and_ends(folder: Path, llm: LLM, message: str, stdin: bytes) -> None:
    expected = llm.chat("Who goes\nthere?", temperature=0, max_tokens=12)
    result = run("chat", "--model", folder, *GREEDY, message, stdin=stdin)
    assert result.stdout == line(expected.text)
    assert "answer 12 tokens" in result.stderr
    value = json.loads(run("chat", "--model", folder, *GREEDY, message, "--json", stdin=stdin).stdout)
    assert (value["text"], tuple(value["token_ids"])) == (expected.text, expected.token_ids)
    assert set(value) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "stats"}


def test_one_message_may_look_like_a_command_and_its_failure_is_the_commands(folder: Path, llm: LLM) -> None:
    assert run("chat", "--model", folder, *GREEDY, "/reset").stdout == line(
        llm.chat("/reset", temperature=0, max_tokens=12).text
    )
    assert "context" in run("chat", "--model", folder, "--context", 30, "word " * 300, status=1).stderr


def test_chat_prints_a_json_line_an_answer(folder: Path, llm: LLM) -> None:
    lines = b"Who?\n" + b"word " * 300 + b"\n\xff\nMe\n"
    result = run("chat", "--model", folder, "--context", 200, *GREEDY, "--json", stdin=lines, status=1)
    first, too_long, not_text, last = map(json.loads, result.stdout.splitlines())
    assert first["text"] == llm.chat("Who?", temperature=0, max_tokens=12).text
    assert too_long["error"]["type"] == "ContextLengthError"
    assert not_text["error"]["message"] == "the line is not UTF-8 text"
    assert last["stats"]["cached_tokens"] > 0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_json_lines_come_a_token_each_and_then_the_whole(folder: Path, llm: LLM, command: str) -> None:
    result = run(command, "--model", folder, *GREEDY, "--json", "--stream", "Who?")
    *chunks, last = map(json.loads, result.stdout.splitlines())
    expected = (llm.generate if command == "generate" else llm.chat)("Who?", temperature=0, max_tokens=12)
    assert "".join(chunk["text"] for chunk in chunks) == last["text"] == expected.text
    assert [chunk["token_id"] for chunk in chunks] == last["token_ids"] == list(expected.token_ids)
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [expected.finish_reason]
    assert last["stats"]["generated_tokens"] == len(chunks)
    assert all(set(chunk) == {"text", "token_id", "finish_reason"} for chunk in chunks)


def test_json_lines_carry_logprobs(folder: Path) -> None:
    result = run("generate", "--model", folder, *GREEDY, "--json", "--stream", "--logprobs", 2, "Who?")
    *chunks, last = map(json.loads, result.stdout.splitlines())
    for chunk, whole in zip(chunks, last["logprobs"], strict=True):
        assert (chunk["logprob"], chunk["top"]) == (whole["logprob"], whole["top"])
        assert len(chunk["top"]) == 2


def test_quiet_leaves_the_statistics_out(folder: Path) -> None:
    assert run("generate", "--model", folder, *GREEDY, "--quiet", "Who?").stderr == ""
    assert run("chat", "--model", folder, *GREEDY, "-q", stdin=b"Who?\n").stderr == ""


def test_logprobs_without_json_are_refused(folder: Path) -> None:
    result = run("generate", "--model", folder, "--logprobs", 2, "x", status=2)
    assert "add --json" in result.stderr
    assert result.stdout == ""


def test_every_sampling_option_reaches_the_sampler(folder: Path, llm: LLM) -> None:
    """Each changes the greedy text, and to what the same value does in Python."""
    plain = llm.generate("the sea", temperature=0, ignore_eos=True, max_tokens=12)
    first, third = plain.token_ids[0], plain.token_ids[2]
    other = (first + 1) % 256
    cases: list[tuple[Sequence[object], dict[str, Any]]] = [
        (
            ("--logit-bias", f"{first}=-inf", "--logit-bias", f"{other}=2.5"),
            {"logit_bias": {first: float("-inf"), other: 2.5}},
        ),
        (("--stop-token-id", third, "--stop-token-id", 1), {"stop_token_ids": [third, 1]}),
        (("--presence-penalty", 2), {"presence_penalty": 2}),
        (("--frequency-penalty", 2), {"frequency_penalty": 2}),
        (("--repetition-penalty", 3), {"repetition_penalty": 3}),
    ]
    for options, values in cases:
        expected = llm.generate("the sea", temperature=0, ignore_eos=True, max_tokens=12, **values)
        assert expected.token_ids != plain.token_ids, options
        command = ("generate", "--model", folder, *GREEDY, "--ignore-eos", "--json", *options, "the sea")
        assert tuple(json.loads(run(*command).stdout)["token_ids"]) == expected.token_ids, options


@pytest.mark.parametrize("bias", ["3", "x=1", "3=", "=1", "1.5=2"])
def test_a_bias_that_is_none_is_wrong_usage(bias: str) -> None:
    assert "ID=VALUE" in run("generate", "--logit-bias", bias, "x", status=2).stderr


def test_a_bias_given_twice_is_wrong_usage() -> None:
    assert "twice" in run("generate", "--logit-bias", "3=1", "--logit-bias", "3=2", "x", status=2).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--nope", "--json", "x"),
        ("generate", "--json", "--max-tokens", "0", "x"),
        ("generate", "x", "--json", "--seed"),
        ("generate", "--json", "x", "y"),
        ("inspect", "--context", "x", "--json"),
        ("explain", "--json"),
        ("nope", "--json"),
        ("--nope", "--json"),
        ("--json", "devices"),
        ("generate", "--quiet=3", "--json", "x"),
        ("generate", "--json=1", "x"),
        ("verify", "--json", "--longest", "0"),
        ("doctor", "--deep=2", "--json"),
        ("logits", "--json", "--tokens", "1"),
        ("synth", "--json"),
    ],
)
def test_wrong_usage_is_json_where_json_was_asked_for(arguments: Sequence[str]) -> None:
    result = run(*arguments, status=2)
    value = json.loads(result.stdout)
    assert value["error"]["type"] == "UsageError"
    assert value["error"]["message"]
    assert "Error" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("generate", "--model", "no/such/folder/here", "--", "--json"), 1),
        (("generate", "--model", "no/such/folder/here", "--stop", "--json", "x"), 1),
        (("generate", "--nope", "--", "--json"), 2),
        (("generate", "--max-tokens", "0", "--stop", "--json", "x"), 2),
        (("nope", "--", "--json"), 2),
        (("logits", "--tokens", "--json"), 2),
        (("synth", "--nope", "--", "--json"), 2),
    ],
)
def test_what_is_only_spelled_like_the_option_does_not_ask_for_json(arguments: Sequence[str], status: int) -> None:
    assert run(*arguments, status=status).stdout == ""


def test_an_error_ends_a_stream_of_lines_on_a_line_of_its_own(folder: Path) -> None:
    command = ("generate", "--model", folder, "--json", "--stream", "--logit-bias", "99999=1", "x")
    (only,) = run(*command, status=1).stdout.splitlines()
    assert json.loads(only)["error"]["type"] == "RequestError"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("demo",), "'demo' is a model, and the messages are missing"),
        (("Qwen/Qwen2.5-0.5B-Instruct",), "is a model"),
        (("Who goes there?", "demo"), "the model comes first"),
        ((), "the messages are missing"),
    ],
)
def test_explain_does_not_take_a_model_for_a_message(arguments: Sequence[str], says: str) -> None:
    message = json.loads(run("explain", *arguments, "--json", status=2).stdout)["error"]["message"]
    assert says in message


def test_a_file_in_a_folder_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "first.json").write_text('[{"role": "user", "content": "Who goes there?"}]')
    monkeypatch.chdir(tmp_path)
    assert "Who goes there?" in run("explain", "talks/first.json").stdout


def test_explain_takes_a_folder_for_the_model_it_is(folder: Path) -> None:
    assert "is a model" in json.loads(run("explain", folder, "--json", status=2).stdout)["error"]["message"]
    explained = json.loads(run("explain", "demo", "demo", "--json").stdout)
    assert "demo" in explained["prompt"]
    assert explained["model"].endswith("demo_model")


def test_help_says_what_each_option_is() -> None:
    group: Any = typer.main.get_command(app)
    for name, listed in group.commands.items():
        command = with_options(name)
        assert command.help == listed.help != "", name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"


@pytest.mark.parametrize("name", [command.__name__ for command in COMMANDS])
def test_every_command_has_json_and_an_example_in_its_help(name: str) -> None:
    command = with_options(name)
    assert any(parameter.name == "as_json" for parameter in command.params)
    assert re.search(rf"^xinfer {name}( |$)", command.help, re.MULTILINE)


def test_logits_and_synth_say_in_json_what_they_wrote(tmp_path: Path) -> None:
    made = json.loads(run("synth", tmp_path / "m", "--layers", 1, "--seed", 3, "--json").stdout)
    assert (made["folder"], made["preset"], made["seed"]) == (str(tmp_path / "m"), "gqa", 3)
    assert made["spec"]["num_hidden_layers"] == 1
    command = ("logits", "--model", tmp_path / "m", "--tokens", "1,2", "--out", tmp_path / "l.npy", "--device", "cpu")
    told = json.loads(run(*command, "--json").stdout)
    assert told["shape"] == list(np.load(tmp_path / "l.npy").shape) == [2, made["spec"]["vocab_size"]]
    assert (told["file"], told["device"], told["kv_cache"]) == (str(tmp_path / "l.npy"), "cpu", None)
    error = run("logits", "--tokens", "x", "--out", tmp_path / "l.npy", "--json", status=2)
    assert "--tokens: 'x'" in json.loads(error.stdout)["error"]["message"]


@pytest.mark.parametrize("name", [command.__name__ for command in COMMANDS])
def test_help_is_whole_at_80_columns(name: str) -> None:
    """Sentences end where the terminal does, not where the source does, and no bracket is taken for markup."""
    shown = run(name, "--help", environment={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    lines = [line.strip() for line in shown.splitlines()]
    command = with_options(name)
    for paragraph in cleandoc(command.callback.__doc__ or "").split("\n\n"):
        wrapped = textwrap.wrap(" ".join(paragraph.split()), 78)
        begin = lines.index(wrapped[0])
        assert lines[begin : begin + len(wrapped)] == wrapped
    wide = run(name, "--help", environment={"COLUMNS": "250", "TERMINAL_WIDTH": "250"}).stdout
    for parameter in command.params:
        assert parameter.help in wide


def test_synth_says_its_smallest_vocabulary_once(tmp_path: Path) -> None:
    text = run("synth", "--help", environment={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    assert text.count(str(MIN_VOCAB)) == 1
    assert "288" in run("synth", tmp_path / "m", "--vocab", MIN_VOCAB - 1, status=2).stderr
    run("synth", tmp_path / "m", "--vocab", MIN_VOCAB)


@pytest.mark.parametrize("command", ["generate", "inspect", "explain"])
def test_help_shows_defaults_and_no_brackets_of_brackets(command: str) -> None:
    text = run(command, "--help", environment={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    assert "[[" not in text
    assert "bool" not in text
    assert ("[default: (the checkpoint's)]" in text) == (command == "generate")
    assert ("[default: (the model's)]" in text) == (command != "explain")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_synth_writes_follows_the_umask(tmp_path: Path, umask: int, mode: int, shards: int) -> None:
    before = os.umask(umask)
    try:
        run("synth", tmp_path / "m", "--shards", shards)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "m").iterdir()} == {mode}


def test_inspect_shows_parts_that_add_up(folder: Path) -> None:
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    rows = [row for row in run("inspect", folder).stdout.splitlines() if row.startswith(("RAM", "VRAM"))]
    assert len(rows) == 2
    for row in rows:
        found = re.findall(r"([\d.]+) (B|kB|MB|GB)", row.split(" (")[0])
        total, *parts = [float(number) * units[unit] for number, unit in found]
        assert abs(total - sum(parts)) <= sum(0.05 * units[unit] for _, unit in found)  # each is rounded to a tenth
