"""The commands, run as a user runs them: what lands on stdout, what on stderr, and the exit status."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.cli_run import hear_interrupts, run

from xinfer import LLM, inspection
from xinfer.cli.app import COMMANDS, main, with_options
from xinfer.cli.status import ERROR, INTERNAL, INTERRUPTED, MEANINGS, OK, TERMINATED
from xinfer.errors import RequestError
from xinfer.model.reference import ReferenceModel
from xinfer.model.synthetic import PRESETS, write_checkpoint
from xinfer.model.weights import ModelWeights


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "gqa", PRESETS["gqa"], seed=11)


GREEDY = ("--temperature", 0, "--ignore-eos", "--max-tokens", 12)


def test_generate_streams_the_text_to_stdout_and_statistics_to_stderr(folder: Path, llm: LLM) -> None:
    result = run("generate", "--model", folder, *GREEDY, "the sea")
    text = llm.generate("the sea", temperature=0, ignore_eos=True, max_tokens=12).text
    assert result.stdout == text + ("" if text.endswith("\n") else "\n")
    assert "answer 12 tokens" in result.stderr
    assert "[cpu]" in result.stderr


def test_generate_reads_stdin_and_prints_one_json_object(folder: Path, llm: LLM) -> None:
    result = run("generate", "--model", folder, *GREEDY, "--json", stdin="the séa".encode())
    value = json.loads(result.stdout)
    expected = llm.generate("the séa", temperature=0, ignore_eos=True, max_tokens=12)
    assert set(value) == {"text", "token_ids", "prompt_token_ids", "finish_reason", "stats"}
    assert value["text"] == expected.text
    assert tuple(value["token_ids"]) == expected.token_ids
    assert tuple(value["prompt_token_ids"]) == expected.prompt_token_ids
    assert value["finish_reason"] == "length"
    assert value["stats"]["generated_tokens"] == 12


def test_generate_gives_logprobs_and_honours_stop(folder: Path, llm: LLM) -> None:
    text = llm.generate("the sea", temperature=0, ignore_eos=True, max_tokens=12).text
    arguments = ("--model", folder, *GREEDY, "--json", "--logprobs", 2, "--stop", text[4:7], "the sea")
    value = json.loads(run("generate", *arguments).stdout)
    assert value["text"] == text[: text.index(text[4:7])]
    assert value["finish_reason"] == "stop"
    assert [len(entry["top"]) for entry in value["logprobs"]] == [2] * len(value["token_ids"])


@pytest.mark.parametrize(
    ("arguments", "stdin", "says"),
    [
        (("generate", "--model", "no/such/folder/here", "x"), b"", "no folder"),
        (("generate", "--model", __file__, "x"), b"", "is a file"),
        (("generate", "--device", "quantum", "x"), b"", "'quantum'"),
        (("generate",), b"\xff\xfe", "not UTF-8"),
        (("generate",), b"", "no tokens"),
        (("generate", "--context", "99999999", "x"), b"", "context"),
        (("logits", "--tokens", "999999999", "--out", "a.npy"), b"", "vocabulary"),
        (("logits", "--tokens", "1", "--out", "/no/such/folder/a.npy"), b"", "folder that exists"),
        (("explain", "{broken"), b"", "not JSON"),
        (("explain", "missing.json"), b"", "cannot read the messages"),
        (("explain", '{"mesages": []}'), b"", "mesages"),
        (("synth", "/tmp/x", "--preset", "nope"), b"", "gqa"),
        (("logits", "--tokens", ",".join(["1"] * 2049), "--out", "a.npy"), b"", "2,049 tokens"),
        (("synth", "/dev/null/x"), b"", "/dev/null"),
        (("synth", "x\udcff"), b"", "cannot be written"),
        (("synth", "x", "--k-bias-scale", "nan"), b"", "nan"),
    ],
)
def test_what_goes_wrong_is_one_message_and_exit_status_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], stdin: bytes, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] in ("generate", "logits") and "--model" not in arguments:
        arguments = (arguments[0], "--model", str(folder), "--device", "cpu", *arguments[1:])
    result = run(*arguments, stdin=stdin, status=1)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", "--temperature", "-1", "x"), "temperature"),
        (("generate", "--top-p", "nan", "x"), "top_p"),
        (("chat", "--min-p", "2", "x"), "min_p"),
        (("generate", "--stop", "\udcff", "x"), "half characters"),
        (("generate", "--stream", "x"), "--json"),
        (("chat", "--stream", "x"), "--json"),
        (("logits", "--tokens", "1,x", "--out", "a.npy"), "whole numbers"),
        (("logits", "--tokens", "1", "--out", "a.txt"), ".npy"),
        (("logits", "--tokens", "1", "--out", "."), ".npy"),
        (("generate", "--device", "", "x"), "expected auto, cpu"),
        (("generate", "--device", "vulkan:-1", "x"), "'-1' is no index"),
        (("generate", "--device", "vulkan:", "x"), "'' is no index"),
        (("generate", "--device", "d3d12:0:0", "x"), "'0:0' is no index"),
    ],
)
def test_a_value_that_cannot_be_meant_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], says: str
) -> None:
    """It is told before a model is looked for."""
    monkeypatch.chdir(tmp_path)
    result = run(*arguments, *(("--model", "no/such/folder") if "--model" not in arguments else ()), status=2)
    assert result.stdout == ""
    assert says in " ".join(result.stderr.replace("│", " ").split())  # without the frame
    assert "no/such/folder" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_forms_of_devices_and_pictures_are_wrong_usage_everywhere() -> None:
    for command in (("verify", "--against"), ("inspect", "--device"), ("doctor", "--device"), ("bench", "--device")):
        assert "no index" in run(*command, "vulkan:x", status=2).stderr
    assert ".png or .svg" in " ".join(run("bench", "--plot", "x.pdf", status=2).stderr.split())


def test_who_leaves_while_help_is_printed_is_no_error() -> None:
    for command in ((), ("generate",), ("bench",)):
        process = subprocess.Popen(
            [sys.executable, "-m", "xinfer", *command, "--help"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, b"")


def test_errors_are_json_too_where_json_was_asked_for(folder: Path) -> None:
    value = json.loads(run("generate", "--model", folder, "--json", "--device", "quantum", "x", status=1).stdout)
    assert value["error"]["type"] == "DeviceError"
    assert "quantum" in value["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--nope"),
        ("nope",),
        ("generate", "--max-tokens", "0", "x"),
        ("inspect", "--vram-budget", "8GB"),
        ("inspect", "--vram-budget", ""),
        ("inspect", "--mode", "streaming"),
        ("inspect", "--kv-cache", "f32"),
        ("doctor", "--time-limit", "inf"),
        ("doctor", "--time-limit", "nan"),
    ],
)
def test_wrong_usage_is_exit_status_2(arguments: Sequence[str]) -> None:
    run(*arguments, status=2)


def test_logits_are_the_references(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "logits.npy"
    run("logits", "--model", folder, "--tokens", "1,2,3", "--out", out)
    values = np.load(out)
    with ModelWeights.open(folder) as weights:
        expected = ReferenceModel(weights).forward([1, 2, 3])
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, expected)


def test_logits_need_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    run("logits", "--model", bare, "--tokens", "5", "--out", tmp_path / "l.npy")
    assert np.load(tmp_path / "l.npy").shape == (1, 384)


def test_inspect_counts_what_is_in_the_file(folder: Path) -> None:
    value = json.loads(run("inspect", folder, "--json", "--context", 100).stdout)
    with ModelWeights.open(folder) as weights:
        sizes = [int(np.prod(info.shape)) for info in weights.tensors.values()]
    assert value["parameters"] == sum(sizes)
    assert value["bytes"] == value["bytes_by_dtype"]["float32"] == 4 * sum(sizes)
    assert value["memory"]["ram"]["weights"] == 4 * sum(sizes)
    assert value["memory"]["ram"]["kv_cache"] == 2 * 2 * 2 * 16 * 100 * 4  # K and V, layers, KV heads, head_dim
    assert value["memory"]["vram"]["kv_cache"] == value["memory"]["ram"]["kv_cache"] // 2
    text = run("inspect", folder).stdout
    assert "4 heads, 2 KV heads of 16" in text


def test_explain_shows_prompt_ids_stops_and_sources(folder: Path, llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Who goes there?"}]
    value = json.loads(run("explain", folder, json.dumps(messages), "--json").stdout)
    assert value["prompt"] == llm.checkpoint.render_chat(messages)
    assert value["token_ids"] == llm.checkpoint.encode_chat(messages)
    assert {stop["id"] for stop in value["stop_ids"]} == llm.checkpoint.settings().stop_ids
    assert value["sampling"]["top_p"]["source"] in ("generation_config.json", "default")
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": messages}))
    for same in (("Who goes there?",), (str(file),), ("-",)):
        assert json.loads(run("explain", folder, *same, "--json", stdin=file.read_bytes()).stdout) == value
    text = run("explain", folder, "Who goes there?").stdout
    assert value["prompt"] in text


def test_chat_answers_line_by_line_and_begins_again_on_reset(folder: Path, llm: LLM) -> None:
    lines = b"Who?\n/reset\nWho?\n/nope\n\n/exit\nnever\n"
    result = run("chat", "--model", folder, "--temperature", 0, "--max-tokens", 6, stdin=lines)
    text = llm.chat("Who?", temperature=0, max_tokens=6).text
    line = text if text.endswith("\n") or not text else text + "\n"
    assert result.stdout == line * 2
    assert "a new conversation" in result.stderr
    assert "/nope is not a command" in result.stderr
    assert result.stderr.count("tok/s") == 4  # two answers, two rates each


def test_chat_says_when_the_context_is_full_and_goes_on(folder: Path) -> None:
    lines = b"word " * 300 + b"\nhi\n"
    result = run("chat", "--model", folder, "--context", 100, "--max-tokens", 2, stdin=lines, status=1)
    assert "error: the prompt has" in result.stderr
    assert "/reset" in result.stderr
    assert "answer" in result.stderr.splitlines()[-1]


def test_synth_writes_what_was_asked_for_and_the_same_again(tmp_path: Path) -> None:
    options = ("--seed", 5, "--untied", "--dtype", "bfloat16", "--kv-heads", 4, "--layers", 3)
    run("synth", tmp_path / "a", *options)
    run("synth", tmp_path / "b", *options)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    config = json.loads(run("inspect", tmp_path / "a", "--json").stdout)["config"]
    assert (config["num_key_value_heads"], config["num_hidden_layers"], config["dtype"]) == (4, 3, "bfloat16")
    assert not config["tie_word_embeddings"]
    assert "not empty" in run("synth", tmp_path / "a", status=1).stderr


def test_version() -> None:
    assert run("--version").stdout.startswith("xinfer 0.")


def test_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m xinfer generate --model {folder} --temperature 0 --ignore-eos --max-tokens 400 x"
    done = subprocess.run(["bash", "-c", f"{command} | head -c 5"], capture_output=True, timeout=120)
    assert len(done.stdout) == 5
    assert b"Traceback" not in done.stderr
    assert b"Error" not in done.stderr


class Terminal:
    """A program on a pseudo-terminal; every wait is bounded."""

    def __init__(self, *command: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=hear_interrupts
        )
        os.close(slave)
        self.seen = b""  # what came after what was last waited for

    def wait_for(self, pattern: bytes) -> None:
        """Read on until `pattern` (a regular expression) has come."""
        deadline = time.monotonic() + 100
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.master], [], [], 1.0)
            assert time.monotonic() < deadline, self.seen
            if ready:
                self.seen += os.read(self.master, 4096)
        self.seen = self.seen[match.end() :]

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*command: str) -> Terminal:
        opened.append(Terminal(*command))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.process.kill()
        each.process.wait(60)
        os.close(each.master)


def test_ctrl_c_ends_generate_with_status_130(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "xinfer",
        "generate",
        "--model",
        str(folder),
        "--ignore-eos",
        "--max-tokens",
        "2000",
        "x",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_interrupts
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert b"interrupted" in errors
    assert b"stopped" in errors  # the statistics of what there was


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, TERMINATED)])
def test_an_answer_that_a_signal_ends_is_json_all_the_same(folder: Path, number: int, status: int) -> None:
    options = ("--model", str(folder), "--ignore-eos", "--max-tokens", "2000", "--json", "--stream")
    with subprocess.Popen(
        [sys.executable, "-m", "xinfer", "generate", *options, "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    whole = json.loads(output.splitlines()[-1])
    assert whole["finish_reason"] == "stopped"
    assert whole["token_ids"][0] == first["token_id"]


def test_ctrl_c_in_chat_stops_the_answer_and_not_the_program(folder: Path, terminal: Callable[..., Terminal]) -> None:
    chat = terminal(sys.executable, "-m", "xinfer", "chat", "--model", str(folder), "--temperature", "0")
    chat.wait_for(b"> ")
    chat.type(b"Who?\n")
    chat.wait_for(rb"Who\?\r\n.{20}")  # the answer has begun; greedily it goes on to the context's end
    chat.interrupt()
    chat.wait_for(rb"tok/s.*\r\n\r\n\(stopped; Ctrl-D or /exit leaves\)\r\n> ")
    time.sleep(1)  # a signal between the prompt and the reading of the line waits for a key
    chat.interrupt()  # at the prompt: the line is given up, the program stays
    chat.wait_for(rb"\(stopped; Ctrl-D or /exit leaves\)\r\n> ")
    chat.type(b"/nope\n")
    chat.wait_for(b"not a command")
    chat.type(b"/exit\n")
    assert chat.process.wait(60) == 0


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii"])
def test_chat_tells_of_lines_that_are_not_text_and_goes_on(folder: Path, encoding: str) -> None:
    lines = b"hi\n" + b"\xff\xfe\n" + "é\n".encode()
    environment = {"PYTHONIOENCODING": encoding}
    result = run("chat", "--model", folder, "--max-tokens", 2, stdin=lines, environment=environment, status=1)
    assert result.stderr.count("not UTF-8") == 1
    assert result.stderr.count("answer") == 2


def test_chat_goes_on_after_a_template_refuses(folder: Path, tmp_path: Path) -> None:
    strict = tmp_path / "strict"
    shutil.copytree(folder, strict)
    (strict / "chat_template.jinja").write_text("{{ raise_exception('no') if messages[-1].content == 'a' else 'b' }}")
    result = run("chat", "--model", strict, "--max-tokens", 2, stdin=b"a\nb\n", status=1)
    run("chat", "--model", strict, "--max-tokens", 2, stdin=b"b\n")
    assert "error: " in result.stderr
    assert "answer" in result.stderr


@pytest.mark.parametrize("command", [command.__name__.replace("_", "-") for command in COMMANDS])
def test_no_option_is_cut_off_where_a_terminal_has_80_columns(command: str) -> None:
    shown = run(command, "--help", environment={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "--" in shown
    assert not re.findall(r"-[a-z-]+…", shown)


def test_the_readme_and_the_help_say_what_exit_statuses_mean() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = {int(status): meaning for status, meaning in re.findall(r"^\| (\d+) \| (.+) \|$", text, re.MULTILINE)}
    assert table == MEANINGS
    shown = run("--help", environment={"COLUMNS": "250", "TERMINAL_WIDTH": "250"}).stdout
    for status, meaning in MEANINGS.items():
        assert f" {status}: {meaning}" in shown


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (None, OK),
        (RequestError("no"), ERROR),
        (OSError(28, "No space left on device"), ERROR),
        (MemoryError(), ERROR),
        (BrokenPipeError(), OK),
        (ZeroDivisionError(), INTERNAL),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
)
def test_every_ending_has_its_exit_status(
    fault: BaseException | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report() -> dict[str, Any]:
        if fault is not None:
            raise fault
        return {"auto": "cpu", "devices": [], "missing": {}, "notes": []}

    monkeypatch.setattr(inspection, "list_adapters", report)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # of a reader that left: this process keeps its stdout
    monkeypatch.setattr(sys, "argv", ["xinfer", "devices"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status


def test_sigterm_has_its_exit_status(folder: Path) -> None:
    command = f"{sys.executable} -m xinfer generate --ignore-eos --max-tokens 2000 --model".split()
    with subprocess.Popen([*command, str(folder), "x"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == TERMINATED
    assert b"Traceback" not in errors


@pytest.mark.parametrize("columns", ["40", "60"])
def test_a_narrow_terminal_shows_every_option_whole(columns: str) -> None:
    shown = run("generate", "--help", environment={"COLUMNS": columns, "TERMINAL_WIDTH": columns}).stdout
    for option in with_options("generate").params:
        for name in option.opts if option.param_type_name == "option" else ():
            assert re.search(rf"(?<![\w-]){name}[ ,\n]", shown), name


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "utf-8"])
def test_json_is_json_in_every_encoding(folder: Path, encoding: str) -> None:
    command = [sys.executable, "-m", "xinfer", "explain", str(folder), "\N{GRINNING FACE} \u00e9", "--json"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, timeout=120)
    assert "\N{GRINNING FACE} \u00e9" in json.loads(done.stdout.decode(encoding))["prompt"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_fault(folder: Path, closed: str) -> None:
    command = f"{sys.executable} -m xinfer generate --model {folder} --temperature 0 --max-tokens 3 x {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == 0
    assert b"rror" not in done.stdout + done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", ["generate --max-tokens 3 x", "generate --json --max-tokens 3 x", "--help"])
def test_a_full_disk_is_said(folder: Path, arguments: str) -> None:
    model = "" if arguments == "--help" else f"--model {folder}"
    command = f"{sys.executable} -m xinfer {arguments} {model} >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert b"error: [Errno 28]" in done.stderr
    assert b"internal" not in done.stderr


def test_logits_that_are_not_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = {name: array.copy() for name, array in load_file(broken / "model.safetensors").items()}
    weights["model.norm.weight"][0] = np.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = run("logits", "--model", broken, "--tokens", "1,2", "--out", tmp_path / "l.npy", status=1)
    assert "not finite" in result.stderr
    assert not (tmp_path / "l.npy").exists()


def test_a_synth_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    command = f"ulimit -f 50; {sys.executable} -m xinfer synth {tmp_path}/big"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert done.returncode == 1
    assert b"cannot be written" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.4])
def test_ctrl_c_while_starting_shows_no_traceback(folder: Path, delay: float) -> None:
    command = [sys.executable, "-m", "xinfer", "generate", "--model", str(folder), "--max-tokens", "2000", "x"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_interrupts
    ) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    # Before our first line runs, Python itself reports the signal; from there on it is ours.
    assert b"xinfer/cli/" not in errors
    if process.returncode == 1:  # Python had not even found runpy
        assert b"KeyboardInterrupt" in errors
        assert b"xinfer" not in errors
    else:
        assert process.returncode in (130, -signal.SIGINT)


def test_control_characters_do_not_reach_a_terminal() -> None:
    from xinfer.cli.output import _visible

    assert _visible("a\x1b[31mb\x07\x9bc\td\né") == "a\ufffd[31mb\ufffd\ufffdc\td\né"
