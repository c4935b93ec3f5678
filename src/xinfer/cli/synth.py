"""`xinfer synth`: a tiny checkpoint to try things on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xinfer.cli.output import say
from xinfer.errors import RequestError


def synth(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    *,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    preset: Annotated[str, typer.Option(help="Start from a named structure; a wrong name lists them all.")] = "gqa",
    tie_word_embeddings: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Share embedding and head.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    hidden_size: Annotated[int | None, typer.Option("--hidden", min=1)] = None,
    intermediate_size: Annotated[int | None, typer.Option("--intermediate", min=1)] = None,
    num_hidden_layers: Annotated[int | None, typer.Option("--layers", min=1)] = None,
    num_attention_heads: Annotated[int | None, typer.Option("--heads", min=1)] = None,
    num_key_value_heads: Annotated[int | None, typer.Option("--kv-heads", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=2, help="Need not be hidden / heads.")] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab", min=1)] = None,
    max_position_embeddings: Annotated[int | None, typer.Option("--positions", min=1)] = None,
    shards: Annotated[int | None, typer.Option(min=1, help="Files to spread the weights over.")] = None,
    yarn_factor: Annotated[float | None, typer.Option("--yarn", help="YaRN factor.")] = None,
    sliding_window: Annotated[int | None, typer.Option(min=1, help="Window of the sliding layers, in tokens.")] = None,
    max_window_layers: Annotated[int | None, typer.Option(min=0, help="Layers from this one on slide.")] = None,
    k_bias_scale: Annotated[float | None, typer.Option(help="Size of the key biases; trained ones are large.")] = None,
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
    write_checkpoint(out, spec, seed=seed)
    say(f"{out}: {preset}, seed {seed}; try: xinfer generate --model {out} hello")
