"""`xinfer tune`: the kernels that are fastest for a model on this device."""

from __future__ import annotations

from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars, resolve
from xinfer.cli.output import print_json, say


def tune(
    ctx: typer.Context,
    model: options.ModelArgument = "demo",
    *,
    device: options.Device = "auto",
    contexts: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="N,N", help="Tokens in the cache before decode steps.", show_default="128,4096"
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="N,N", help="Tokens of prompts that are tried.", show_default="128,512,2048")
    ] = None,
    kv_cache: options.KVCache = "f16",
    exact: options.Exact = False,
    vram_budget: options.VramBudget = None,
    forget: Annotated[
        bool, typer.Option("--forget", metavar="", help="Drop what was chosen before for this model on this device.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Find the fastest kernels for a model's shapes on your device, and use them from then on.

    Tries the kernels of every op within whole steps and prompts. One takes the place of another where the logits stay
    the same but for rounding, and where it is faster beyond the noise; all together must gain 2%. What is chosen holds
    for this driver's version, and is judged by xinfer verify like all else. Sums then run in another order: greedy text
    may differ where two tokens are as good as equal.

    xinfer tune Qwen/Qwen2.5-0.5B-Instruct --device vulkan:0
    """
    from xinfer.bench.tune import as_text
    from xinfer.bench.tune import forget as drop
    from xinfer.bench.tune import tune as run

    tokens = options.numbers(contexts, "--context")
    prompts = options.numbers(prompt, "--prompt")
    folder = resolve(model)
    if forget:
        dropped = drop(folder, device=device, warn=say)
        print_json(dropped) if as_json else typer.echo(f"{dropped['forgotten']} dropped from {dropped['file']}")
        return
    with progress_bars(quiet=as_json, first="tune") as progress:
        report = run(
            folder,
            options.model_options(ctx),
            device=device,
            contexts=tokens,
            prompts=prompts,
            progress=progress,
            warn=say,
        )
    print_json(report) if as_json else typer.echo(as_text(report))
