"""SmolLM2-135M on the CPU: our float32 reference beside transformers, same threads, same run.

    python benchmarks/cpu.py [--threads N] [--repeats N] [--tokens N] [--json]

Each engine lives in a process of its own (so that its peak memory is its own) and decodes in turn with the other; what
counts is the ratio of the medians. Both decode greedily from the same prompt, and have to give the same tokens. Needs
the `compare` extra; the checkpoint is converted into .cache/ the first time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[1]
ENGINES = ("xinfer", "transformers")
PROMPT = "Once upon a time, in a small village by the sea,"
# They ask OpenBLAS for other kernels than the processor's own: a benchmark wants those that everybody gets.
BLAS_OVERRIDES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
PAUSE_SECONDS = 0.3  # idle threads of the engine that ran last spin for up to 0.2 s


# --- the two engines, each in its own process


class Engine(Protocol):
    """What a worker measures."""

    def load(self) -> None:
        """Read the checkpoint into memory."""

    def decode(self, ids: Sequence[int], n_tokens: int) -> tuple[list[int], float, float]:
        """Greedy tokens, seconds for the prompt and the first token, seconds for the others."""


class Xinfer:
    """The NumPy reference."""

    def __init__(self, folder: Path) -> None:
        from xinfer.model.reference import ReferenceModel
        from xinfer.model.weights import ModelWeights

        self.load_model: Callable[[], Any] = lambda: ReferenceModel(ModelWeights.open(folder), keep=True)

    def load(self) -> None:
        """Open, convert, keep."""
        self.model = self.load_model()

    def decode(self, ids: Sequence[int], n_tokens: int) -> tuple[list[int], float, float]:
        """One forward for the prompt, then one a token."""
        start = time.perf_counter()
        cache = self.model.make_cache(len(ids) + n_tokens)
        tokens = [int(self.model.forward(ids, cache, last_only=True)[0].argmax())]
        prefilled = time.perf_counter()
        while len(tokens) < n_tokens:
            tokens.append(int(self.model.forward(tokens[-1:], cache, last_only=True)[0].argmax()))
        return tokens, prefilled - start, time.perf_counter() - prefilled


class Transformers:
    """Qwen2ForCausalLM in float32, called as plainly as can be: no generate(), which only adds to it."""

    def __init__(self, folder: Path, n_threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(n_threads)
        transformers.logging.disable_progress_bar()
        self.torch = torch
        self.load_model: Callable[[], Any] = lambda: transformers.Qwen2ForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def load(self) -> None:
        """from_pretrained."""
        self.model = self.load_model()
        known = inspect.signature(self.model.forward).parameters
        self.keyword = "cache" if "cache" in known else "past_key_values"  # its name before transformers 5.20

    def decode(self, ids: Sequence[int], n_tokens: int) -> tuple[list[int], float, float]:
        """One forward for the prompt, then one a token."""
        with self.torch.inference_mode():
            start = time.perf_counter()
            out = self.model(self.torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
            tokens = [int(out.logits[0, -1].argmax())]
            prefilled = time.perf_counter()
            while len(tokens) < n_tokens:
                fresh = self.torch.tensor([tokens[-1:]])
                out = self.model(fresh, **{self.keyword: getattr(out, self.keyword)}, use_cache=True, logits_to_keep=1)
                tokens.append(int(out.logits[0, -1].argmax()))
            return tokens, prefilled - start, time.perf_counter() - prefilled


def peak_bytes() -> int:
    """The most memory this process has had resident, mapped files included."""
    import resource  # Unix only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def worker(name: str, folder: Path, n_threads: int) -> None:
    """Serve one request a line: load, or decode; answer with one JSON object a line."""
    start = time.perf_counter()
    engine: Engine = Xinfer(folder) if name == "xinfer" else Transformers(folder, n_threads)
    import_seconds = time.perf_counter() - start
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        if request["do"] == "load":
            engine.load()
            answer: dict[str, Any] = {"load_seconds": time.perf_counter() - start, "import_seconds": import_seconds}
        else:
            cpu = time.process_time()
            tokens, prefill, decode = engine.decode(request["ids"], request["n_tokens"])
            cpu_seconds = time.process_time() - cpu  # of all threads; far from prefill + decode where others interfere
            answer = {
                "tokens": tokens,
                "prefill_seconds": prefill,
                "decode_seconds": decode,
                "cpu_seconds": cpu_seconds,
            }
        print(json.dumps({**answer, "peak_bytes": peak_bytes(), "blas": blas_kernels()}), flush=True)


def blas_kernels() -> list[str]:
    """Which BLAS libraries and kernels are in use, where threadpoolctl is there to tell."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return []
    threadpoolctl = importlib.import_module("threadpoolctl")
    return [
        f"{pool['internal_api']} {pool.get('version')} {pool.get('architecture', '')} x{pool['num_threads']}"
        for pool in threadpoolctl.threadpool_info()
    ]


# --- the run


class Worker:
    """The other end of `worker`."""

    def __init__(self, name: str, folder: Path, n_threads: int) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in BLAS_OVERRIDES}
        for key in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[key] = str(n_threads)
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), environment.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--worker", name, "--folder", str(folder), "--threads", str(n_threads)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def measure(folder: Path, ids: Sequence[int], *, n_threads: int, n_tokens: int, repeats: int) -> dict[str, Any]:
    """Both engines loaded, warmed up, and run in turn; every answer of theirs, by engine."""
    (folder / "model.safetensors").read_bytes()  # the page cache is warm for both
    workers = {name: Worker(name, folder, n_threads) for name in ENGINES}
    try:
        loads = {name: worker.ask(do="load") for name, worker in workers.items()}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ENGINES}
        for repeat in range(repeats + 1):  # the first one warms up
            order = ENGINES if repeat % 2 else ENGINES[::-1]
            for name in order:
                time.sleep(PAUSE_SECONDS)
                answer = workers[name].ask(do="decode", ids=list(ids), n_tokens=n_tokens)
                if repeat:
                    runs[name].append(answer)
    finally:
        for each in workers.values():
            each.close()
    tokens = {tuple(run["tokens"]) for name in ENGINES for run in runs[name]}
    if len(tokens) != 1:
        raise SystemExit("the engines gave different tokens: the times are worth nothing")
    return {name: {**loads[name], "runs": runs[name], "peak_bytes": runs[name][-1]["peak_bytes"]} for name in ENGINES}


def summarize(measured: dict[str, Any], n_tokens: int) -> dict[str, Any]:
    """Medians with their spread, and the ratio of each pair of neighbouring runs."""
    rates = {name: [(n_tokens - 1) / run["decode_seconds"] for run in measured[name]["runs"]] for name in ENGINES}
    pairs = [ours / theirs for ours, theirs in zip(rates["xinfer"], rates["transformers"], strict=True)]
    return {
        "ratio": statistics.median(rates["xinfer"]) / statistics.median(rates["transformers"]),
        "ratio_of_pairs": {"median": statistics.median(pairs), "low": min(pairs), "high": max(pairs)},
        "tokens_equal": True,
        "engines": {
            name: {
                "tokens_per_second": {
                    "median": statistics.median(rates[name]),
                    "low": min(rates[name]),
                    "high": max(rates[name]),
                },
                **{
                    key: statistics.median(run[key] for run in measured[name]["runs"])
                    for key in ("prefill_seconds", "cpu_seconds")
                },
                **{key: measured[name][key] for key in ("import_seconds", "load_seconds", "peak_bytes", "blas")},
            }
            for name in ENGINES
        },
    }


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    heads = {"tokens/s": 10, "low": 8, "high": 8, "prompt s": 10, "cpu s": 7, "load s": 8, "import s": 10, "peak MB": 9}
    print(" " * 14 + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for name, engine in result["engines"].items():
        rate = engine["tokens_per_second"]
        print(
            f"{name:14}{rate['median']:10.1f}{rate['low']:8.1f}{rate['high']:8.1f}{engine['prefill_seconds']:10.2f}"
            f"{engine['cpu_seconds']:7.2f}"
            f"{engine['load_seconds']:8.2f}{engine['import_seconds']:10.2f}{engine['peak_bytes'] / 1e6:9.0f}"
        )
    pairs = result["ratio_of_pairs"]
    print(f"ratio {result['ratio']:.2f} (run by run {pairs['low']:.2f} to {pairs['high']:.2f}), same tokens")
    for name, engine in result["engines"].items():
        print(f"{name} runs on: {', '.join(engine['blas']) or 'unknown (pip install threadpoolctl)'}")


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="of each engine")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each engine, in turn")
    parser.add_argument("--tokens", type=int, default=48, help="decoded in a run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--folder", type=Path, help="another float32 checkpoint than the converted SmolLM2")
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.folder, args.threads)
        return
    sys.path.insert(0, str(ROOT / "tools"))
    from tokenizers import Tokenizer

    import smollm2_to_qwen2

    folder = args.folder or smollm2_to_qwen2.cached()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    measured = measure(folder, ids, n_threads=args.threads, n_tokens=args.tokens, repeats=args.repeats)
    result = {"threads": args.threads, "prompt_tokens": len(ids), **summarize(measured, args.tokens)}
    print(json.dumps(result)) if args.json else show(result)


if __name__ == "__main__":
    main()
