"""Speculative decoding by prompt lookup beside plain decode: tokens a pass, speed, and the same tokens.

    python benchmarks/speculation.py [MODEL] [--device vulkan] [--vram-budget 4GB] [--guesses 3,7,15] [--tokens N]
                                     [--characters N] [--turns N] [--costs 0.5b,7b]

Prompts are made of the repository's own files: code of which a part is to be written again, a text that is told twice
and is to be told once more, and, where little should be gained, a text that is only continued. Plain and speculative
answers take turns in one run, and every answer must have the plain one's tokens. With --costs no text is made: it says
how long a pass of some rows takes, beside a pass of one, on random weights in the shapes of Qwen2.5.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import h200
from xinfer import LLM, gpu
from xinfer.bench.loops import filled_device_cache
from xinfer.cli.options import byte_count
from xinfer.gpu_model import QwenModel
from xinfer.gpu_model.steps import LOAD, STEP

CONTEXT = 128  # tokens before the rows whose passes are timed
ROOT = Path(__file__).resolve().parent.parent


def prompts(characters: int) -> dict[str, str]:
    """By what they are like; at most so many characters of a file."""
    code = (ROOT / "src/xinfer/gpu_model/speculation.py").read_text(encoding="utf-8")[:characters]
    told = (ROOT / "docs/speed.md").read_text(encoding="utf-8").strip()[:characters]
    return {
        "code": f"{code}\n\n# The same file once more, with other comments:\n\n{code[:300]}",
        "summary": f"{told}\n\nIn short, once more:\n\n{told}\n\nIn short, once more:\n\n{told[:80]}",
        "continuation": told,
    }


def pass_seconds(model: QwenModel, n: int) -> float:
    """The median of passes of n rows behind a short context, each of which the host waits for."""
    cache, steps = filled_device_cache(model, CONTEXT, n), model.steps
    recording = steps.check(n, model.config.vocab_size)
    runs: list[float] = []
    until = time.perf_counter() + 1.5  # an idle GPU takes its time to run fast again
    while len(runs) < 30 or time.perf_counter() < until:
        steps.stage_check([7] * n, cache)
        began = time.perf_counter()
        steps.wait(steps.submit(recording, (LOAD, STEP)), urgent=True)
        runs.append(time.perf_counter() - began)
    return statistics.median(runs[-30:])


def print_costs(sizes: str, device_name: str) -> None:
    """A line for each size."""
    device, memory = gpu.open_device(device_name), "/dev/shm" if Path("/dev/shm").is_dir() else None
    assert device is not None
    with device:
        for size in sizes.split(","):
            with tempfile.TemporaryDirectory(dir=memory) as folder:
                h200.write_checkpoint(Path(folder), size)
                with h200.loaded(Path(folder), device, exact=False) as (model, _):
                    seconds = {n: pass_seconds(model, n) for n in (1, 2, 4, 8)}
            lines = ", ".join(f"{n} rows {1e3 * s:.2f} ms ({s / seconds[1]:.2f})" for n, s in seconds.items())
            print(f"{size}: {lines}", flush=True)


def main() -> int:
    """Print a line for each prompt and number of guesses."""
    arguments = parsed()
    if arguments.costs:
        print_costs(arguments.costs, arguments.device)
        return 0
    guesses = [int(n) for n in arguments.guesses.split(",")]
    budget = byte_count(arguments.vram_budget)
    with LLM(arguments.model, device=arguments.device, vram_budget=budget, mode=arguments.mode) as llm:
        print(f"{llm.device}; {llm.streaming or 'every layer is resident'}; greedy, {arguments.tokens} tokens")
        for name, prompt in prompts(arguments.characters).items():
            speeds: dict[int, list[float]] = {}
            rates: dict[int, tuple[float, float]] = {}
            plain: tuple[int, ...] = ()
            for turn in range(1 + arguments.turns):
                for n in (0, *guesses):
                    answer = llm.generate(
                        prompt,
                        max_tokens=arguments.tokens,
                        temperature=0,
                        repetition_penalty=1.0,
                        ignore_eos=True,
                        speculate=n,
                    )
                    plain = answer.token_ids if n == 0 else plain
                    if answer.token_ids != plain:
                        print(f"{name}: with {n} guesses the tokens are others")
                        return 1
                    stats = answer.stats
                    passes = stats.generated_tokens - stats.accepted_tokens
                    rates[n] = stats.generated_tokens / passes, stats.accepted_tokens / max(1, stats.guessed_tokens)
                    if turn:  # the first one records and compiles
                        speeds.setdefault(n, []).append(stats.decode_tokens_per_second)
            base = statistics.median(speeds[0])
            print(f"{name}: plain {base:.2f} tok/s")
            for n in guesses:
                speed, (a_pass, right) = statistics.median(speeds[n]), rates[n]
                print(
                    f"  {n:2} guesses: {speed:8.2f} tok/s, {speed / base:.2f} times; "
                    f"{a_pass:.2f} tokens a pass, {right:.0%} of the guesses right",
                    flush=True,
                )
    return 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--vram-budget")
    parser.add_argument("--guesses", default="3,7,15")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--characters", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--costs", metavar="SIZES")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
