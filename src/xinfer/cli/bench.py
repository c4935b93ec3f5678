"""`xinfer bench`: how fast a model is here, and how much of the device that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars, resolve, warn_of_device
from xinfer.cli.output import print_json, say
from xinfer.cli.writing import check_target, replacing


def bench(
    ctx: typer.Context,
    model: options.ModelArgument = "demo",
    *,
    device: options.Device = "auto",
    prompt: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Lengths of prompts, in tokens.", show_default="128,512,2048; less on a CPU"),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="N,N",
            help="Tokens in the cache before decode steps.",
            show_default="128,4096; less on a CPU",
        ),
    ] = None,
    decode_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Decode steps of one run.", show_default="64; less on a CPU"),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs of each size, behind a warm-up.", show_default="5; less on a CPU"),
    ] = None,
    kv_cache: options.KVCache = "f16",
    exact: options.Exact = False,
    mode: options.Mode = "auto",
    vram_budget: options.VramBudget = None,
    tuning: options.Tuning = True,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the roofline of a GPU as .png or .svg, with matplotlib."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure prompts and decode steps on your device: medians, their spread, and the memory taken.

    Prompts are random tokens, decode steps stand behind random keys and values; every result is checked to be finite.
    On a GPU each size is warmed up first, and the device's own speeds are measured in the same run: how fast a kernel
    reads memory and multiplies matrices. The shares say how much of that was reached. Let nothing else run.

    xinfer bench Qwen/Qwen2.5-0.5B-Instruct --device vulkan:0 --plot roofline.png
    """
    from xinfer.bench.plot import FORMS, check_plot, draw
    from xinfer.bench.run import bench as run
    from xinfer.bench.text import as_text

    if plot is not None:
        if plot.suffix.lower() not in FORMS:
            raise typer.BadParameter(f"{plot}; expected a name that ends with .png or .svg", param_hint="--plot")
        check_plot()
        check_target(plot, "--plot")
    with progress_bars(quiet=as_json, first="bench") as progress:
        report = run(
            resolve(model),
            options.model_options(ctx),
            device=device,
            prompts=options.numbers(prompt, "--prompt"),
            contexts=options.numbers(contexts, "--context"),
            decode_tokens=decode_tokens,
            repeats=repeats,
            needs_gpu="" if plot is None else "--plot",
            progress=progress,
        )
    name = report["device"]
    warn_of_device(device, name, is_software="(software)" in name, fallback=report["fallback"])
    if plot is not None:
        with replacing(plot) as file:
            draw(report, file, FORMS[plot.suffix.lower()])
        say(f"{plot}: the roofline")
    print_json(report) if as_json else typer.echo(as_text(report))
