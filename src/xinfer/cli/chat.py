"""`xinfer chat`: talk with a model."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xinfer.cli import options
from xinfer.cli.loading import load, read_stdin
from xinfer.cli.output import Form, print_answer, print_error, say
from xinfer.cli.status import ERROR
from xinfer.errors import ContextLengthError, XinferError

if TYPE_CHECKING:
    from xinfer.llm import Conversation


def chat(
    ctx: typer.Context,
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGE",
            help="Answer this and end; - takes all of stdin. Absent: a message a line, until it ends.",
        ),
    ] = None,
    *,
    model: options.Model = "demo",
    device: options.Device = "auto",
    context: options.Context = None,
    kv_cache: options.KVCache = "f16",
    mode: options.Mode = "auto",
    vram_budget: options.VramBudget = None,
    exact: options.Exact = False,
    canary: options.Canary = False,
    tuning: options.Tuning = True,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of the conversation.", show_default=False)
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most tokens an answer.", show_default="no limit")
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    speculate: options.Speculate = 0,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    stream: options.JsonStream = False,
) -> None:
    """Talk with a model, or ask it one question.

    xinfer chat "Who goes there?"

    In a conversation /reset begins again, /exit or Ctrl-D leaves; Ctrl-C stops an answer, not the program. Lines that
    come from a pipe or a file are answered one by one; the exit status is 1 where one of them could not be.
    """
    form, values = Form.chosen(as_json, stream), options.sampling_values(ctx)
    question = read_stdin() if message == "-" else message
    with load(model, device, options.model_options(ctx), canary=canary, quiet=quiet) as llm:
        talk = _Talk(llm.conversation(system=system), values, form, quiet)
        if question is None:
            talk.converse()
            if talk.failed and not sys.stdin.isatty():
                raise typer.Exit(ERROR)
        else:
            talk.answer(question)


@dataclass
class _Talk:
    """A conversation, and how its answers are printed."""

    conversation: Conversation
    values: dict[str, Any]  # of SamplingParams
    form: Form
    quiet: bool
    failed: bool = False  # a line was not answered

    def converse(self) -> None:
        """Turns until the end of input. Ctrl-C gives up the line or the answer; the program stays."""
        interactive = sys.stdin.isatty()
        if not interactive:  # whatever the locale; bad bytes are told of, line by line
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
        if interactive:
            _edit_lines()
            say("/reset begins again, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
        if self.form is Form.OBJECT:
            self.form = Form.LINE
        while True:
            try:
                line = _read_line("> " if interactive and self.form is Form.TEXT else "")
                if line is None or line == "/exit":
                    return
                self._turn(line)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                say("\n(stopped; Ctrl-D or /exit leaves)")

    def answer(self, message: str) -> None:
        """One more turn."""
        print_answer(self.conversation.send(message, **self.values), form=self.form, quiet=self.quiet)

    def _turn(self, line: str) -> None:
        if line == "/reset":
            self.conversation.reset()
            say("(a new conversation)")
        elif line.startswith("/"):
            say(f"{line.split()[0]} is not a command; there are /reset and /exit")
        elif any("\ud800" <= char <= "\udfff" for char in line):
            self._tell("RequestError", "the line is not UTF-8 text")
        elif line:
            try:
                self.answer(line)
            except ContextLengthError as error:
                self._tell(type(error).__name__, f"{error}; or /reset")
            except XinferError as error:
                self._tell(type(error).__name__, str(error))

    def _tell(self, kind: str, message: str) -> None:
        self.failed = True
        if self.form is not Form.TEXT:
            print_error(kind, message)
        say(f"error: {message}")


def _read_line(prompt: str) -> str | None:
    """The next line without the spaces around it, or None at the end of input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _edit_lines() -> None:
    with suppress(ImportError):  # Windows has none: its console edits lines itself
        import readline  # noqa: F401  # input() uses it from here on: arrow keys and history
