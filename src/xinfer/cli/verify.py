"""`xinfer verify`: a checkpoint on this machine's device against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars, resolve
from xinfer.cli.output import print_json, say
from xinfer.cli.status import ERROR
from xinfer.cli.writing import check_target, write_report


def verify(
    model: options.ModelArgument = "demo",
    *,
    device: options.Device = "auto",
    tokens: Annotated[
        int, typer.Option(min=1, max=512, metavar="N", help="Decode steps behind each of two prompts.")
    ] = 8,
    longest: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest prompt, in tokens.",
            show_default="513; less where a software driver would take minutes",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            callback=options.checked_device,
            help="A second device or API: the same there, and whose fault a difference is.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one page, with a heat map.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check every op of every layer on your device against the reference.

    Runs the kernels that generate would run, on prompts of 1 to 513 tokens and decode steps behind them, gives the
    reference the device's own inputs to each, and names the first op that is off: by how much, by which kernel, and
    whether other kernels of that op, or another driver, get it right. A tolerance is how far rounding may take a right
    kernel from the reference at that number, by its type and the length of its sum: an error of 1 is all of it, as
    where a single rounding decides, and above 1 an op is wrong. Ends with 1 where something diverged, and where the
    weights make NaN or infinity.

    xinfer verify Qwen/Qwen2.5-0.5B-Instruct --device vulkan:0 --html report.html
    """
    from xinfer.verify.page import as_page
    from xinfer.verify.report import as_text
    from xinfer.verify.run import verify as run

    if html is not None:
        check_target(html, "--html")
    with progress_bars(first="verify") as progress:
        report = run(
            resolve(model), device=device, against=against, n_steps=tokens, longest=longest, progress=progress, warn=say
        )
    kept = html is None or write_report(html, as_page(report), "the report as a page")
    print_json(report) if as_json else typer.echo(as_text(report))
    if not (report["right"] and kept):
        raise typer.Exit(ERROR)
