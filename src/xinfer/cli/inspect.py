"""`xinfer inspect`: what a checkpoint is, the memory that it needs, and what it will do on a device."""

from __future__ import annotations

from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars, resolve
from xinfer.cli.output import print_json


def inspect(
    ctx: typer.Context,
    model: options.ModelArgument = "demo",
    *,
    context: options.Context = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            callback=options.checked_device,
            help="Predict memory, load time and speed on this GPU (auto, vulkan, ...) from measurements made now.",
            show_default="no prediction",
        ),
    ] = None,
    kv_cache: options.KVCache = "f16",
    mode: options.Mode = "auto",
    vram_budget: options.VramBudget = None,
    as_json: options.Json = False,
) -> None:
    """Show a checkpoint's configuration, its parameters and bytes, and the memory that it will need.

    With --device, how much of it will stay on that GPU, how long loading takes, and how fast it will answer.

    xinfer inspect Qwen/Qwen2.5-0.5B-Instruct --context 4096 --device vulkan --vram-budget 4GB
    """
    from xinfer.inspection import inspect_model, predict_model, render_inspection, render_prediction

    if device is None:
        budget_given = vram_budget is not None
        for name, given in (("mode", mode != "auto"), ("kv-cache", kv_cache != "f16"), ("vram-budget", budget_given)):
            if given:
                raise typer.BadParameter("it is for a prediction; add --device", param_hint=f"--{name}")
    chosen, folder = options.model_options(ctx), resolve(model)
    report = inspect_model(folder, context=context)
    if device is not None:
        with progress_bars(quiet=as_json, first="measure") as progress:
            report["prediction"] = predict_model(
                folder,
                device,
                chosen,
                progress=progress and (lambda done, of: progress("measure", done, of)),
            )
    if as_json:
        print_json(report)
        return
    typer.echo(render_inspection(report))
    if device is not None:
        typer.echo("\n" + render_prediction(report["prediction"]))
