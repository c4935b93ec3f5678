"""`xinfer chat`: talk with a model."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xinfer.cli import options
from xinfer.cli.loading import load
from xinfer.cli.output import print_stream, say
from xinfer.errors import ContextLengthError, XinferError

if TYPE_CHECKING:
    from xinfer.llm import Conversation


def chat(
    ctx: typer.Context,
    *,
    model: options.Model = "demo",
    device: options.Device = "auto",
    context: options.Context = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens an answer. [default: no limit]")] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
) -> None:
    """Talk with a model. /reset begins again, /exit or Ctrl-D leaves; Ctrl-C stops an answer, not the program."""
    with load(model, device, context) as llm:
        _converse(llm.conversation(system=system), options.sampling_values(ctx))


def _converse(conversation: Conversation, values: dict[str, Any]) -> None:
    """Turns until the end of input. Ctrl-C gives up the line or the answer, wherever it strikes; the program stays."""
    interactive = sys.stdin.isatty()
    if not interactive:  # whatever the locale; bad bytes are told of, line by line
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    if interactive:
        _edit_lines()
        say("/reset begins again, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    while True:
        try:
            line = _read_line("> " if interactive else "")
            if line is None or line == "/exit":
                return
            _turn(conversation, line, values)
        except KeyboardInterrupt:
            if not interactive:
                raise
            say("\n(stopped; Ctrl-D or /exit leaves)")


def _read_line(prompt: str) -> str | None:
    """The next line without the spaces around it, or None at the end of input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _edit_lines() -> None:
    with suppress(ImportError):  # Windows has none: its console edits lines itself
        import readline  # noqa: F401  # input() uses it from here on: arrow keys and history


def _turn(conversation: Conversation, line: str, values: dict[str, Any]) -> None:
    if line == "/reset":
        conversation.reset()
        say("(a new conversation)")
    elif line.startswith("/"):
        say(f"{line.split()[0]} is not a command; there are /reset and /exit")
    elif any("\ud800" <= char <= "\udfff" for char in line):
        say("error: the line is not UTF-8 text")
    elif line:
        try:
            print_stream(conversation.send(line, **values))
        except ContextLengthError as error:
            say(f"error: {error}; or /reset")
        except XinferError as error:
            say(f"error: {error}")
