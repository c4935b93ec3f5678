"""`xinfer generate`: continue a text."""

from __future__ import annotations

from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import load, read_stdin
from xinfer.cli.output import Form, print_answer

MAX_TOKENS = 256  # where neither the user nor the checkpoint has a say: a text that is continued need not end


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; stdin when absent or -.")
    ] = None,
    *,
    model: options.Model = "demo",
    device: options.Device = "auto",
    context: options.Context = None,
    kv_cache: options.KVCache = "f16",
    mode: options.Mode = "auto",
    vram_budget: options.VramBudget = None,
    exact: options.Exact = False,
    canary: options.Canary = False,
    tuning: options.Tuning = True,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Most tokens to generate.", show_default="the checkpoint's, else 256"),
    ] = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    speculate: options.Speculate = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", metavar="", help="Go on past the model's stop tokens.")
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, max=20, metavar="N", help="With --json: each token's log-probability and the N likeliest ones'."
        ),
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    stream: options.JsonStream = False,
) -> None:
    """Continue a text: the answer streams to stdout, statistics go to stderr.

    xinfer generate "ROMEO:" --max-tokens 80 --seed 1
    """
    if logprobs is not None and not as_json:
        raise typer.BadParameter("they are printed as JSON only; add --json", param_hint="--logprobs")
    form, values = Form.chosen(as_json, stream), options.sampling_values(ctx)
    text = read_stdin() if prompt in (None, "-") else prompt
    with load(model, device, options.model_options(ctx), canary=canary, quiet=quiet) as llm:
        if max_tokens is None and llm.checkpoint.settings().params.max_tokens is None:
            values["max_tokens"] = MAX_TOKENS
        print_answer(llm.stream(text, **values), form=form, quiet=quiet)
