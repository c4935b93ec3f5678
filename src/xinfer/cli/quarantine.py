"""`xinfer quarantine`: which kernels are not used here, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.output import print_json, say


def quarantine(
    *,
    lift: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VARIANT", help="Use this kernel again, or all that fit a pattern. Several times if need be."
        ),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", metavar="", help="Use every kernel again.")] = False,
    as_json: options.Json = False,
) -> None:
    """List the kernels that are not used on this machine's drivers: which adapter and driver, why, and since when.

    They are put there by xinfer doctor, and where the GPU is lost again and again at one kernel. A new driver begins
    without any; xinfer doctor tries them again, and lifts what passes.

    xinfer quarantine --lift 'linear_gemv.*'
    """
    from xinfer.quarantine import Quarantine, as_text

    if clear and lift:
        raise typer.BadParameter("it lifts every kernel already; give one of the two", param_hint="--lift")
    kept = Quarantine(warn=say)
    lifted = kept.lift_matching(["*"] if clear else lift or [])
    for entry in lifted if not as_json else []:
        say(f"{entry.variant} is used again with {entry.driver.driver} {entry.driver.driver_version}")
    entries = kept.entries()
    if as_json:
        print_json(
            {
                "file": str(kept.path),
                "entries": [entry.flat() for entry in entries],
                "lifted": [entry.flat() for entry in lifted],
            }
        )
        return
    typer.echo(as_text(entries))
    if entries:
        say(f"they are kept in {kept.path}")
