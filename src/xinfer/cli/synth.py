"""`xinfer synth`: a tiny checkpoint to try things on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars
from xinfer.cli.output import print_json, say
from xinfer.errors import RequestError


def _of_preset(*names: str, help: str, min: int | None = None, metavar: str = "N") -> Any:  # noqa: A002
    """An option that the preset has a value for."""
    return typer.Option(*names, min=min, metavar=metavar, help=help, show_default="the preset's")


def synth(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; new or empty.")],
    *,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Same seed, same bytes.")] = 0,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Structure to start from; a wrong name lists them all.")
    ] = "gqa",
    tie_word_embeddings: Annotated[
        bool | None, _of_preset("--tied/--untied", metavar="", help="One matrix for embedding and head, or two.")
    ] = None,
    dtype: Annotated[str | None, _of_preset(metavar="TYPE", help="float32, float16 or bfloat16.")] = None,
    hidden_size: Annotated[int | None, _of_preset("--hidden", min=1, help="Width of a token between layers.")] = None,
    intermediate_size: Annotated[
        int | None, _of_preset("--intermediate", min=1, help="Width inside the feed-forward part of a layer.")
    ] = None,
    num_hidden_layers: Annotated[int | None, _of_preset("--layers", min=1, help="Layers.")] = None,
    num_attention_heads: Annotated[
        int | None, _of_preset("--heads", min=1, help="Attention heads of the queries.")
    ] = None,
    num_key_value_heads: Annotated[
        int | None, _of_preset("--kv-heads", min=1, help="Heads of keys and values; they divide the heads.")
    ] = None,
    head_dim: Annotated[
        int | None, _of_preset(min=2, help="Width of a head, even; need not be hidden / heads.")
    ] = None,
    vocab_size: Annotated[
        int | None, _of_preset("--vocab", min=288, help="Rows of the embedding: at least one for each byte.")
    ] = None,
    max_position_embeddings: Annotated[
        int | None, _of_preset("--positions", min=1, help="Longest context, in tokens.")
    ] = None,
    shards: Annotated[int | None, _of_preset(min=1, help="Files to spread the weights over.")] = None,
    yarn_factor: Annotated[
        float | None, _of_preset("--yarn", metavar="X", help="YaRN: how much longer the context is than trained.")
    ] = None,
    sliding_window: Annotated[int | None, _of_preset(min=1, help="Window of the sliding layers, in tokens.")] = None,
    max_window_layers: Annotated[int | None, _of_preset(min=0, help="Layers from this one on slide.")] = None,
    k_bias_scale: Annotated[
        float | None, _of_preset(metavar="X", help="Size of the key biases; trained ones are large.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a tiny checkpoint with random weights and a real tokenizer, to try things on.

    xinfer synth /tmp/tiny --untied --dtype bfloat16 --yarn 4
    """
    import dataclasses

    from xinfer.model.synthetic import PRESETS, SyntheticSpec, write_checkpoint

    if preset not in PRESETS:
        raise RequestError(f"--preset {preset!r} is not known; expected one of: {', '.join(PRESETS)}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise RequestError(f"--dtype {dtype!r}; expected float32, float16 or bfloat16")
    chosen = {name: value for name, value in ctx.params.items() if name in SyntheticSpec.__dataclass_fields__}
    spec = dataclasses.replace(PRESETS[preset], **{name: value for name, value in chosen.items() if value is not None})
    with progress_bars() as progress:
        told = None if progress is None else functools.partial(progress, "synth")
        write_checkpoint(out, spec, seed=seed, progress=told)
    if as_json:
        print_json({"folder": str(out), "preset": preset, "seed": seed, "spec": dataclasses.asdict(spec)})
        return
    say(f"{out}: {preset}, seed {seed}; try: xinfer generate --model {out} hello")
