"""`xinfer inspect`: what a checkpoint is, and the memory that it needs."""

from __future__ import annotations

import typer

from xinfer.cli import options
from xinfer.cli.loading import resolve
from xinfer.cli.output import print_json


def inspect(
    model: options.ModelArgument = "demo",
    *,
    context: options.Context = None,
    as_json: options.Json = False,
) -> None:
    """Show a checkpoint's configuration, its parameters and bytes, and the memory that it will need.

    xinfer inspect Qwen/Qwen2.5-0.5B-Instruct --context 4096
    """
    from xinfer.inspection import inspect_model, render_inspection

    report = inspect_model(resolve(model), context=context)
    print_json(report) if as_json else typer.echo(render_inspection(report))
