"""`xinfer doctor`: what is on this machine, and which kernels its drivers run right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars
from xinfer.cli.output import print_json, say
from xinfer.cli.status import ERROR
from xinfer.cli.writing import check_target, write_report


def doctor(
    *,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            callback=options.checked_device,
            help="One adapter: vulkan:1, or part of its name.",
            show_default="every GPU",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", metavar="", help="Longer contexts; whole shapes on software drivers too.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Kernel variants by pattern, such as 'linear_gemv.*'.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=86_400,
            metavar="SECONDS",
            help="For each kernel's process.",
            show_default="60; a software driver's 300; with --deep, five times that",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one JSON file to attach to a bug report.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find out which kernels this machine's drivers run right.

    Tries every kernel variant at the shapes of real models, each in a process of its own with a time limit: right,
    wrong, hung, lost, crashed. What fails goes into quarantine and is not used on this driver any more; run it again
    after a driver update, and what passes is lifted. The report names no user, host or folder. Ends with 1 where a
    kernel failed.

    xinfer doctor --output report.json
    """
    from xinfer.doctor.clinic import examine
    from xinfer.doctor.report import anonymous, as_text
    from xinfer.quarantine import Quarantine

    if output is not None:
        check_target(output, "--output")
    quarantine = Quarantine(warn=say)
    with progress_bars(first="doctor") as progress:
        report = anonymous(
            examine(device=device, deep=deep, only=only, limit_s=time_limit, quarantine=quarantine, progress=progress)
        )
    kept = output is None or write_report(
        output, json.dumps(report, indent=1) + "\n", "the report, without user, host or folders"
    )
    print_json(report) if as_json else typer.echo(as_text(report))
    if any(adapter["quarantined"] for adapter in report["adapters"]):
        say(f"the quarantine is kept in {quarantine.path}")
    if not (report["right"] and kept):
        raise typer.Exit(ERROR)
