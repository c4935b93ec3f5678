"""transformers on a GPU, random weights in a given shape: decode eager and compiled, prefill. For `h200.py --peers`.

Prints a JSON object of tokens a second after each measurement; the last one is whole.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache


def synchronized(run: Callable[[], Any]) -> float:
    """Seconds that `run` and the work it queues take."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def copy() -> float:
    """GB read and written a second by a copy within device memory."""
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = min(synchronized(lambda: target.copy_(source)) for _ in range(5))
    return float(2 * source.nbytes / seconds / 1e9)


def random_model(config: Qwen2Config) -> Qwen2ForCausalLM:
    """f16 on the GPU."""
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def eager(model: Qwen2ForCausalLM, n: int = 32) -> float:
    """Decode with the default cache."""
    ids = torch.randint(0, model.config.vocab_size, (1, 128), device="cuda")

    def run(count: int) -> None:
        out = model(ids, use_cache=True, logits_to_keep=1)
        for _ in range(count):
            token = out.logits[:, -1:].argmax(-1)
            out = model(token, past_key_values=out.past_key_values, use_cache=True)

    run(4)
    short, long = synchronized(lambda: run(2)), synchronized(lambda: run(2 + n))
    return n / (long - short)


def compiled(model: Qwen2ForCausalLM, n: int = 128) -> float:
    """Decode with a static cache and CUDA graphs by torch.compile."""
    cache = StaticCache(config=model.config, max_cache_len=512)
    ids = torch.randint(0, model.config.vocab_size, (1, 128), device="cuda")
    model(ids, past_key_values=cache, cache_position=torch.arange(128, device="cuda"), use_cache=True, logits_to_keep=1)
    step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    token = torch.zeros((1, 1), dtype=torch.long, device="cuda")
    at = torch.full((1,), 128, dtype=torch.long, device="cuda")

    def run(count: int) -> None:
        for _ in range(count):
            out = step(token, past_key_values=cache, cache_position=at, position_ids=at[None], use_cache=True)
            token.copy_(out.logits[:, -1:].argmax(-1))

    run(4)
    return n / synchronized(lambda: run(n))


def prefill(model: Qwen2ForCausalLM, n: int) -> float:
    """A prompt, its last logits included."""
    ids = torch.randint(0, model.config.vocab_size, (1, n), device="cuda")
    synchronized(lambda: model(ids, logits_to_keep=1))
    return n / min(synchronized(lambda: model(ids, logits_to_keep=1)) for _ in range(3))


def main() -> None:
    """Measure one shape."""
    found = {"copy GB/s": copy()}
    print(json.dumps(found), flush=True)
    model = random_model(Qwen2Config(**json.loads(sys.argv[1])))
    parts: tuple[tuple[str, Callable[[], float]], ...] = (
        ("eager decode tok/s", lambda: eager(model)),
        ("prefill 512 tok/s", lambda: prefill(model, 512)),
        ("prefill 4096 tok/s", lambda: prefill(model, 4096)),
        ("compiled decode tok/s", lambda: compiled(model)),
    )
    with torch.inference_mode():
        for name, measure in parts:
            try:
                found[name] = measure()
            except Exception as error:  # a peer's failure must not end the run
                print(f"{name}: {error}", file=sys.stderr)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
