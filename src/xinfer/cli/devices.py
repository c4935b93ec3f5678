"""`xinfer devices`: what there is to run on."""

from __future__ import annotations

import typer

from xinfer.cli import options
from xinfer.cli.output import print_json


def devices(*, as_json: options.Json = False) -> None:
    """List the adapters that --device can name: driver, API, memory, and the features that will be used.

    It says which one --device auto takes, and where that is the CPU, why.

    xinfer devices --json
    """
    from xinfer.inspection import list_adapters, render_adapters

    report = list_adapters()
    print_json(report) if as_json else typer.echo(render_adapters(report))
