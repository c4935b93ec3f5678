"""Options that several commands share, and how a command reads them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="Folder or hub name; 'demo' is the bundled model.")]
ModelArgument = Annotated[str, typer.Argument(metavar="[MODEL]", help="Folder or hub name; the demo model by default.")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, vulkan, vulkan:1, or part of an adapter's name; see xinfer devices.")
]
Context = Annotated[int | None, typer.Option(min=2, help="Most tokens, prompt and answer. [default: the model's]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. [default: the checkpoint's]")]
TopK = Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all. [default: the checkpoint's]")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest up to this mass. [default: the checkpoint's]")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: less of what the text already has.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text. [default: drawn, and reported]")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]


def sampling_values(ctx: typer.Context) -> dict[str, Any]:
    """The sampling options of a command, under `SamplingParams`' names."""
    from xinfer.sampling import SamplingParams

    return {name: value for name, value in ctx.params.items() if name in SamplingParams.__dataclass_fields__}
