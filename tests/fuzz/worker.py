"""Runs cases in a process of its own, so that whatever they do to it is seen from outside.

    python -m tests.fuzz.worker 123 [456 ...]      run these cases and show how they end
    python -m tests.fuzz.worker --keep DIR 123     and leave the checkpoint there

The harness starts it with `--serve`: numbers come in on stdin, a line of JSON goes out at the begin and end of each.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from tests.fuzz.files import Files, write
from tests.fuzz.mutate import Case, case, make_bases

from xinfer.errors import XinferError
from xinfer.inspection import explain_messages, inspect_model, render_explanation, render_inspection
from xinfer.llm import LLM
from xinfer.sampling import SamplingParams

MEMORY_LIMIT = 4 << 30  # bytes of address space: what asks for more fails here instead of taking the machine down
PROMPT = 'Fourteen boats: "14, 15" 你好 🙂 <|im_start|>é\n\n  def area(w):\t' + "a" * 48 + "! bcx=?"
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Count the boats."},
    {"role": "user", "content": "How many? 🙂"},
    {"role": "assistant", "content": "<think>hm</think>\nFourteen."},
    {"role": "user", "content": "Are you sure?\n" + "a" * 48 + "! bcx=?"},
]
SAMPLINGS = (
    SamplingParams(max_tokens=2, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=2, seed=7),  # the rest as the checkpoint has it
    SamplingParams(max_tokens=2, seed=7, temperature=1.0, stop=("e", "Four")),
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]

Outcome = dict[str, Any]


def use_checkpoint(folder: Path) -> None:
    """The whole path from a folder to text, on which an `XinferError` may be raised and nothing else."""
    with call("open"):
        llm = LLM(folder, device="cpu")
    with llm:
        refused: XinferError | None = None
        try:
            for tools in (None, TOOLS):
                with call("render"):
                    _printable(llm.checkpoint.render_chat(CONVERSATION, tools=tools))
            with call("encode_chat"):
                llm.checkpoint.encode_chat(CONVERSATION, tools=TOOLS)
        except XinferError as error:  # a checkpoint without a good template can still continue a text
            refused = error
        for params in SAMPLINGS:
            with call("generate"):
                _printable(llm.generate(PROMPT, params).text)
        with call("decode"):
            _printable(llm.checkpoint.tokenizer.decode(range(400)))
        with call("inspect"):
            _printable(render_inspection(inspect_model(folder)))
        if refused is not None:
            raise refused
        with call("explain"):
            _printable(render_explanation(explain_messages(folder, CONVERSATION, TOOLS)))


_costs: dict[str, float] = {}  # processor seconds of the calls of this case


@contextlib.contextmanager
def call(name: str) -> Iterator[None]:
    """Counts what one call of a user's costs: each has its own two seconds."""
    started = time.process_time()
    try:
        yield
    finally:
        _costs[name] = max(_costs.get(name, 0.0), time.process_time() - started)


def _printable(text: str) -> None:
    text.encode("utf-8")  # half a character would be an error in whoever prints it


def run(case_: Case, folder: Path, bases: dict[str, Files], use: Callable[[Path], None]) -> Outcome:
    """Write a checkpoint and use it; what came of it, and what it cost."""
    write(case_.files, folder / "model", originals=bases[case_.base], base=folder.parent / "bases" / case_.base)
    _costs.clear()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    wall, cpu = time.perf_counter(), time.process_time()
    outcome: Outcome = {"number": case_.number, "stage": case_.stage, "how": case_.how}
    try:
        use(folder / "model")
        outcome |= {"kind": "ok", "message": ""}
    except BaseException as error:
        outcome |= _judged(error)
    outcome |= {"wall": time.perf_counter() - wall, "whole": time.process_time() - cpu}
    slowest = max(_costs, key=_costs.__getitem__, default="everything")
    outcome |= {"call": slowest, "cpu": _costs.get(slowest, outcome["whole"])}
    outcome["peak"] = _memory("VmHWM") - before
    return outcome


def _judged(error: BaseException) -> Outcome:
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, XinferError):
        return {"kind": "traceback", "message": trace[-3000:]}
    message = str(error)
    fault = _message_fault(message)
    if fault is not None:
        return {"kind": "message", "message": f"{fault}: {message!r:.1000}\n{trace[-2000:]}"}
    return {"kind": "refused", "message": message, "error": type(error).__name__}


def _message_fault(message: str) -> str | None:
    """What makes an error message one that cannot be shown to a person."""
    if not message.strip():
        return "an empty message"
    if len(message) > 5000:
        return f"a message of {len(message)} characters"
    odd = next((char for char in message if not char.isprintable() and char not in "\n\t"), None)
    return None if odd is None else f"a message with the character {odd!r}"


def resident() -> int:
    """Bytes of memory that this process holds, without garbage and without what the allocator keeps for later."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return _memory("VmRSS")


def _memory(key: str) -> int:
    """Bytes, by a line of /proc/self/status: VmRSS is what is held, VmHWM the most that was."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextlib.contextmanager
def stderr_to(file: Path) -> Iterator[Callable[[], str]]:
    """Everything that is written to file descriptors 1 and 2, by native code too, goes into `file`; yields a reader."""
    saved = os.dup(1), os.dup(2)
    with file.open("w+b") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)

        def written() -> str:
            sys.stdout.flush()
            sys.stderr.flush()
            sink.seek(0)
            text = sink.read(3000).decode("utf-8", "replace")
            sink.seek(0)
            sink.truncate()
            return text

        try:
            yield written
        finally:
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            os.close(saved[0])
            os.close(saved[1])


def serve(root: Path, use: Callable[[Path], None], replies: TextIO) -> None:
    """Run the cases whose numbers come in on stdin; `usage` instead of a number asks for the memory in use."""
    bases = _bases(root)
    with stderr_to(root / "output") as written:
        for line in sys.stdin:
            command = line.strip()
            if command == "usage":
                _reply(replies, {"resident": resident(), "files": open_files()})
                continue
            _reply(replies, {"begin": int(command)})
            outcome = _run_in_new_folder(int(command), root, bases, use)
            output = written()
            if output and outcome["kind"] in ("ok", "refused"):
                outcome |= {"kind": "output", "message": output}
            _reply(replies, outcome)


def _reply(replies: TextIO, reply: Outcome) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _bases(root: Path) -> dict[str, Files]:
    shutil.rmtree(root / "bases", ignore_errors=True)
    return make_bases(root / "bases")


def _run_in_new_folder(number: int, root: Path, bases: dict[str, Files], use: Callable[[Path], None]) -> Outcome:
    folder = root / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        return run(case(number, bases), folder, bases, use)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--serve", metavar="DIR", type=Path)
    parser.add_argument("--keep", metavar="DIR", type=Path)
    parser.add_argument("--use", default="tests.fuzz.worker:use_checkpoint")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    module, _, name = arguments.use.partition(":")
    use = getattr(importlib.import_module(module), name)
    if arguments.serve:
        with os.fdopen(os.dup(1), "w", encoding="ascii") as replies:
            serve(arguments.serve, use, replies)
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        bases = _bases(root)
        for number in arguments.numbers:
            if arguments.keep:
                case_ = case(number, bases)
                write(case_.files, arguments.keep, originals={}, base=arguments.keep)
            outcome = _run_in_new_folder(number, root, bases, use)
            message = outcome.pop("message")
            print(json.dumps(outcome, indent=1, ensure_ascii=False), message, sep="\n")  # noqa: T201


if __name__ == "__main__":
    from tests.fuzz import worker  # the module that others import, so that there is one of it

    worker.main()
