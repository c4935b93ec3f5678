"""`xinfer logits`: the numbers behind the text, for comparison with another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xinfer.cli import options
from xinfer.cli.loading import progress_bars, resolve, warn_of_device
from xinfer.cli.output import print_json, say
from xinfer.cli.writing import check_target, replacing
from xinfer.errors import ContextLengthError, NumericalError


def logits(
    ctx: typer.Context,
    *,
    tokens: Annotated[str, typer.Option(metavar="IDS", help="Token ids, separated by commas: 1,2,3.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write: .npy, float32, tokens x vocabulary.")],
    model: options.Model = "demo",
    device: options.Device = "auto",
    kv_cache: options.KVCache = "f16",
    mode: options.Mode = "auto",
    vram_budget: options.VramBudget = None,
    exact: options.Exact = False,
    as_json: options.Json = False,
) -> None:
    """Write the logits after every token of a sequence, for comparison with another engine. Needs no tokenizer.

    xinfer logits --model Qwen/Qwen2.5-0.5B-Instruct --tokens 9707,11,1879 --out logits.npy
    """
    import numpy as np

    from xinfer.llm import load_model

    try:
        ids = np.array([int(token) for token in tokens.split(",")], dtype=np.int64)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{tokens!r}; expected whole numbers separated by commas, such as 1,2,3", param_hint="--tokens"
        ) from None
    if out.suffix != ".npy":
        raise typer.BadParameter(f"{out}; expected a name that ends in .npy", param_hint="--out")
    check_target(out, "--out")
    chosen, folder = options.model_options(ctx), resolve(model)
    with progress_bars() as progress, load_model(folder, chosen, device=device, progress=progress) as loaded:
        warn_of_device(device, loaded.device_name, is_software=loaded.is_software, fallback=loaded.fallback)
        limit = loaded.model.config.max_context
        if len(ids) > limit:
            raise ContextLengthError(f"{len(ids):,} tokens; this model takes {limit:,} at most: give fewer")
        values = loaded.model.forward(ids)  # (T, vocab_size)
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            raise NumericalError(
                f"the logits after token {int(bad.argmax())} are not finite (NaN or infinity); the weights of {model} "
                "are damaged, or the device computed wrongly: try --device cpu"
            )
        cached = None if loaded.device is None else kv_cache
        name, fallback = loaded.device_name, loaded.fallback
    with replacing(out) as file:
        np.save(file, values)
    if as_json:
        told = {"device": name, "fallback": fallback, "kv_cache": cached}
        print_json({"file": str(out), "dtype": "float32", "shape": list(values.shape), **told})
        return
    source = f"{name}, KV cache in {cached}" if cached else name
    say(f"{out}: float32 {values.shape[0]} x {values.shape[1]}, from {source}")
