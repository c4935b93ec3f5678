"""`xinfer explain`: what the model is really given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from xinfer.cli import options
from xinfer.cli.loading import read_stdin
from xinfer.cli.output import print_json
from xinfer.errors import RequestError


def explain(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] MESSAGES",
            help="MESSAGES: a user message, a JSON list of messages, an object with messages and tools, "
            "a .json file that holds either, or - for stdin.",
        ),
    ],
    *,
    as_json: options.Json = False,
) -> None:
    """Show what the model is really given: prompt, ids, stop ids, each sampling value and its source.

    xinfer explain demo '[{"role": "user", "content": "Who goes there?"}]'
    """
    from xinfer.inspection import explain_messages, render_explanation

    if len(arguments) > 2:
        raise typer.BadParameter(f"expected [MODEL] MESSAGES, found {len(arguments)} arguments; quote the messages")
    model, text = arguments if len(arguments) == 2 else ("demo", arguments[0])
    report = explain_messages(model, *_read_messages(text))
    print_json(report) if as_json else typer.echo(render_explanation(report))


def _read_messages(text: str) -> tuple[Any, Any]:
    """Messages and tools from an argument: a user message, JSON, a .json file, or - for stdin."""
    if text == "-":
        text = read_stdin()
    elif text.endswith(".json"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read the messages: {error}; expected a JSON file") from None
    if not text.lstrip().startswith(("[", "{")):
        return text, None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the messages are not JSON: {error}") from None
    if isinstance(value, list):
        return value, None
    unknown = set(value) - {"messages", "tools"}
    if unknown or "messages" not in value:
        raise RequestError(f"found keys {sorted(value)}; expected messages, and tools if there are any")
    return value["messages"], value.get("tools")
