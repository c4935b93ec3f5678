"""`xinfer generate`: continue a text."""

from __future__ import annotations

from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import load, read_stdin
from xinfer.cli.output import completion_json, print_json, print_stream


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; stdin when absent or -.")] = None,
    *,
    model: options.Model = "demo",
    device: options.Device = "auto",
    context: options.Context = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's stop tokens.")] = False,
    logprobs: Annotated[int | None, typer.Option(min=0, max=20, help="With --json: log-probabilities.")] = None,
    as_json: options.Json = False,
) -> None:
    """Continue a text: the answer streams to stdout, statistics go to stderr.

    xinfer generate "ROMEO:" --max-tokens 80 --seed 1
    """
    text = read_stdin() if prompt in (None, "-") else prompt
    with load(model, device, context) as llm:
        stream = llm.stream(text, **options.sampling_values(ctx))
        if as_json:
            for _ in stream:
                pass
            print_json(completion_json(stream.completion))
        else:
            print_stream(stream)
