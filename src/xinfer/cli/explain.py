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
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub name; may be left out for the demo model.")
    ] = None,
    messages: Annotated[
        str | None,
        typer.Argument(
            metavar="MESSAGES",
            help="A user message, a JSON list of messages, an object with messages and tools, a .json file that holds "
            "either, or - for stdin.",
        ),
    ] = None,
    *,
    as_json: options.Json = False,
) -> None:
    """Show what the model is really given: prompt, ids, stop ids, each sampling value and its source.

    xinfer explain "Who goes there?"

    xinfer explain Qwen/Qwen2.5-0.5B-Instruct '[{"role": "user", "content": "Who goes there?"}]'
    """
    from xinfer.hub import DEMO, is_model_name
    from xinfer.inspection import explain_messages, render_explanation

    if model is None:
        raise typer.BadParameter("the messages are missing: xinfer explain MODEL MESSAGES")
    if messages is None:
        _refuse_model(model)
        model, messages = DEMO, model
    elif is_model_name(messages) and not is_model_name(model):
        raise typer.BadParameter(f"the model comes first: xinfer explain {messages} {model!r}")
    report = explain_messages(model, *_read_messages(messages))
    print_json(report) if as_json else typer.echo(render_explanation(report))


def _refuse_model(only: str) -> None:
    """A lone argument is the messages; where it is called like a model, the messages were forgotten."""
    from xinfer.hub import is_model_name

    if is_model_name(only) and not only.endswith(".json"):
        raise typer.BadParameter(
            f"{only!r} is a model, and the messages are missing: xinfer explain {only} 'Who goes there?' "
            f"(if it is the message itself: xinfer explain demo {only})"
        )


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
