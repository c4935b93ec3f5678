"""Times choosing a token on the device, beside argmax in the same run: what sampling costs a decode step.

    python benchmarks/sampling.py [--device vulkan] [--vocab 151936]

One recording a request holds many draws with a barrier after each; the figure is the device's own time for one, the
median of repeats that follow each other for a while: an idle GPU takes its time to run fast again. The logits are
normal with the given spread, as a flat and a peaked model's are; every token of the last run is compared with the same
integers in NumPy (`xinfer.trials.draws`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np

from xinfer import gpu, ops
from xinfer.gpu.api import Recording
from xinfer.ops import Recorder, Rows, RowState, SampleParams
from xinfer.trials import draws
from xinfer.trials.bench import Bench

DRAWS, REPEATS, RING = 64, 7, 64
WARM_S = 0.7
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy with penalties": {"temperature": 0.0, "repetition": 1.05, "penalties": True},
    "Qwen2.5's own": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition": 1.05, "penalties": True},
    "top_k 64": {"temperature": 1.0, "top_k": 64},
    "top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "no limits": {"temperature": 1.0},
    "top_k 1000": {"temperature": 1.0, "top_k": 1000},
    "no limits, the slow stage": {"temperature": 1.0, "slow": True},
}


def main() -> int:
    """Print a line for each request."""
    arguments = parsed()
    device = gpu.open_device(arguments.device)
    assert device is not None
    vocab, rng = arguments.vocab, np.random.default_rng(0)
    with device, ops.KernelSet(device) as kernels:
        print(f"{device.info.name}; {vocab:,} logits; us a token, the median of {REPEATS} runs of {DRAWS}")
        for spread in (1.5, 4.0):
            logits = np.float32(spread) * rng.standard_normal((1, vocab), np.float32)
            print(f"spread {spread}: argmax {argmax_us(Bench(device, kernels), logits):.1f}")
            for name, values in REQUESTS.items():
                with Bench(device, kernels) as bench:
                    us, right = draw_us(bench, logits, SampleParams(n_valid=vocab, seed=11, **values))
                print(f"  {name:28} {us:8.1f}   {right} of {DRAWS} tokens right", flush=True)
                if right != DRAWS:
                    return 1
    return 0


def argmax_us(bench: Bench, logits: Any) -> float:
    """One argmax."""
    vocab = logits.shape[1]
    state, ring = fresh(bench), bench.out(1, RING, dtype=np.uint32)
    scratch = bench.out(ops.argmax_scratch_bytes(1, vocab) // 4, dtype=np.uint32)
    rows = bench.put_rows(logits)
    with bench:
        us, _ = timed(
            bench,
            lambda on: ops.argmax(
                *(on, rows, state.place, ring.place),
                n_valid=vocab,
                ring_size=RING,
                advance=True,
                scratch=scratch.place,
            ),
        )
        return us


def draw_us(bench: Bench, logits: Any, params: SampleParams) -> tuple[float, int]:
    """One draw, and how many tokens of the last run are those that NumPy makes."""
    vocab = logits.shape[1]
    state, ring = fresh(bench), bench.out(1, RING, dtype=np.uint32)
    counts = bench.out(1, vocab, dtype=np.uint32, fill=np.zeros(vocab, np.uint32))
    scratch = bench.out(ops.sample_scratch_bytes(1, vocab) // 4, dtype=np.uint32)
    packed, bias = bench.put(np.frombuffer(params.pack(), np.uint32)), bench.put(np.zeros(vocab, np.float32))
    rows: Rows = bench.put_rows(logits)
    us, runs = timed(
        bench,
        lambda on: ops.sample(
            *(on, rows, state.place, ring.place),
            params=packed,
            counts=counts.place,
            bias=bias,
            ring_size=RING,
            advance=True,
            scratch=scratch.place,
        ),
    )
    tokens, counted, zero = ring.read()[0], np.zeros(vocab, np.uint32), np.zeros(vocab, np.float32)
    right, first = 0, DRAWS * (runs - 1)  # of the last run
    if params.penalties:  # what was drawn before decides
        counted += counts.read()[0]
        np.subtract.at(counted, tokens, 1)
    for n in range(first, first + DRAWS):
        token = draws.drawn(logits[0], params, counted, zero, n + 1)
        counted[token] += 1
        right += int(tokens[n % RING] == token)
    return us, right


def fresh(bench: Bench) -> Any:
    """A row at position 0."""
    words = np.frombuffer(RowState(token=0, position=0).pack(), np.uint32).reshape(1, -1)
    return bench.out(*words.shape, dtype=np.uint32, fill=words)


def timed(bench: Bench, record: Any) -> tuple[float, int]:
    """Microseconds of one of many, by the device's clock, and how often the many were run."""
    recording: Recording = bench.device.create_recording("draws")
    try:
        recording.timestamp("begin")
        for _ in range(DRAWS):
            record(Recorder(recording, bench.kernels))
            recording.barrier()
        recording.timestamp("end")
        recording.finish()
        taken: list[float] = []
        until = time.perf_counter() + WARM_S
        while len(taken) < REPEATS or time.perf_counter() < until:
            bench.device.wait(bench.device.submit(recording), 600)
            (_, begin), (_, end) = bench.device.timestamps(recording)
            taken.append((end - begin) / DRAWS * 1e6)
    finally:
        recording.release()
    return statistics.median(taken[-REPEATS:]), len(taken)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--vocab", type=int, default=151_936)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
