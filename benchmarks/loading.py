"""How fast a checkpoint gets onto a device, beside what bus, memory and disk do in the same run.

    python benchmarks/loading.py [--size 7b | --model FOLDER] [--device NAME] [--folder WHERE] [--probe] [--json FILE]

Without --model a random f16 checkpoint of one of the shapes of Qwen2.5 is made, in seconds, and removed again. It is
loaded from the page cache, and from the disk after the kernel was asked to forget it (a file system in memory cannot).
The peers: one large transfer to the device; the same file read by one thread as dd does, and by the loader's threads
into plain memory, into memory that the device copies from (when it is first touched, and again), and into such memory
that the CPU caches; the safetensors library, and transformers where it is installed, loading to the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import h200
import load_probe
import streaming
from xinfer import gpu
from xinfer.gpu.api import BufferKind, Device
from xinfer.gpu_model import QwenModel, predict
from xinfer.gpu_model.layout import Split, WeightsLayout
from xinfer.gpu_model.loading import Loader, n_readers
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.model import names
from xinfer.model.config import Qwen2Config
from xinfer.model.weights import ModelWeights

WRITERS = 8
PIECE = 32 << 20  # bytes that a thread writes or reads at a time, and by how many it reads
READ = 8 << 20
SCRATCH = 1 << 20  # bytes that stay in a core's own cache
ALONE = "the file, by the loader's threads, from the page cache"  # into memory that was there, and no further
AT_MOST = 4 << 30  # bytes of memory that the host's peers are measured on


def write_quickly(folder: Path, size: str) -> None:
    """A checkpoint of one block of small random f16 numbers, written again and again by several threads."""
    config = h200.config_json(size)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in names.expected_shapes(Qwen2Config.from_json(config)).items():
        n_bytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + n_bytes]}
        end += n_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)
    block = (0.02 * np.random.default_rng(0).standard_normal(PIECE // 2, dtype=np.float32)).astype(np.float16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.flush()
        start = file.tell()
        file.truncate(start + end)

        def put(at: int) -> None:
            os.pwrite(file.fileno(), block[: end - at], start + at)

        with ThreadPoolExecutor(WRITERS) as threads:
            list(threads.map(put, range(0, end, len(block))))
        os.fsync(file.fileno())


@contextmanager
def checkpoint(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder to load: the one given, or one made here."""
    if arguments.model:
        yield arguments.model
        return
    folder = Path(tempfile.mkdtemp(prefix="xinfer-", dir=arguments.folder))
    try:
        began = time.perf_counter()
        write_quickly(folder, arguments.size)
        say(f"made a checkpoint of {arguments.size} in {time.perf_counter() - began:.1f} s")
        yield folder
    finally:
        shutil.rmtree(folder)


def say(text: str) -> None:
    """To stderr, so that stdout has the table alone."""
    print(text, file=sys.stderr, flush=True)


def files(folder: Path) -> list[Path]:
    """The checkpoint's weights."""
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rate(n_bytes: int, work: Callable[[], object]) -> float:
    """Bytes a second."""
    began = time.perf_counter()
    work()
    return n_bytes / (time.perf_counter() - began)


def read_like_dd(folder: Path) -> None:
    """One thread, front to back, in pieces."""
    piece = memoryview(bytearray(READ))
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def read_in_parallel(folder: Path, target: memoryview, n_threads: int, *, through: bool = False) -> int:
    """Read into `target` as the loader does, as much as fits; bytes read.

    With `through`, by way of a scratch that stays in a core's cache.
    """
    spans: list[tuple[int, int, int, int]] = []  # descriptor, place in the file, place in the target, bytes
    at = 0
    with contextlib.ExitStack() as held:
        for path in files(folder):
            file = held.enter_context(path.open("rb", buffering=0))
            for start in range(0, min(path.stat().st_size, len(target) - at), PIECE):
                size = min(PIECE, path.stat().st_size - start, len(target) - at)
                spans.append((file.fileno(), start, at, size))
                at += size
        work, lock = iter(spans), threading.Lock()

        def reader(_: int) -> None:
            scratch = memoryview(bytearray(SCRATCH))
            step = SCRATCH if through else READ
            while True:
                with lock:
                    span = next(work, None)
                if span is None:
                    return
                descriptor, begin, to, size = span
                for done in range(0, size, step):
                    some = min(step, size - done)
                    place = target[to + done : to + done + some]
                    if not through:
                        os.preadv(descriptor, [place], begin + done)
                        continue
                    os.preadv(descriptor, [scratch[:some]], begin + done)
                    np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(scratch[:some], np.uint8))

        with ThreadPoolExecutor(n_threads) as threads:
            list(threads.map(reader, range(n_threads)))
    return at


def host_peers(folder: Path, device: Device, size: int) -> dict[str, float]:
    """Bytes a second from the page cache into memory of the host."""
    found: dict[str, float] = {}
    n = n_readers()
    with contextlib.closing(mmap.mmap(-1, size)) as plain, memoryview(plain) as view:
        found[f"into new plain memory, {n} threads"] = rate(size, lambda: read_in_parallel(folder, view, n))
        for count in sorted({1, 4, n}):
            work = functools.partial(read_in_parallel, folder, view, count)
            found[f"into plain memory, {count} threads"] = rate(size, work)
    kinds: tuple[tuple[BufferKind, str], ...] = (("upload", "upload memory"), ("readback", "cached upload memory"))
    for kind, name in kinds:
        began = time.perf_counter()
        parts = [device.create_buffer(size // 4, kind, "peer") for _ in range(4)]
        found[f"allocate {name}"] = size / (time.perf_counter() - began)
        try:
            for what, through in (("the first time", False), ("again", False), ("again, through the cache", True)):
                began = time.perf_counter()
                read = 0
                for part in parts:
                    with part.view(0, part.size) as view:
                        read += read_in_parallel(folder, view, n, through=through)
                found[f"into {name}, {what}"] = read / (time.perf_counter() - began)
        finally:
            for part in parts:
                part.release()
    return found


def load_weights(weights: ModelWeights, device: Device) -> list[float]:
    """Bytes a second of the weights alone, three times, memory on the device made before."""
    loaded = DeviceWeights(device, weights, WeightsLayout(weights))
    try:
        with Loader(device, weights) as loader:
            return [rate(weights.nbytes, lambda: loader.load(loaded._jobs())) for _ in range(3)]
    finally:
        loaded.release()


def load_model(weights: ModelWeights, device: Device) -> float:
    """Bytes a second of a whole load: memory, weights, kernels."""
    parts = load_probe.Phases(
        memory=(DeviceWeights, "_allocate"), weights=(Loader, "load"), rest=(QwenModel, "__init__")
    )
    began = time.perf_counter()
    with parts, QwenModel.load(weights, device):
        spent = time.perf_counter() - began
    text = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in parts.seconds.items())
    say(f"a whole load takes {1e3 * spent:.0f} ms: {text}")
    return weights.nbytes / spent


def load_pinned(weights: ModelWeights, device: Device) -> float:
    """Bytes a second into the host's pinned memory, all layers streamed."""
    layout = WeightsLayout(weights)
    split = Split(streamed=tuple(range(len(layout.layers))), n_slots=2)
    began = time.perf_counter()
    loaded = DeviceWeights(device, weights, layout, split=split)
    loaded.load(weights)
    seconds = time.perf_counter() - began
    loaded.release()
    return weights.nbytes / seconds


def libraries(folder: Path, size: int) -> dict[str, float]:
    """Bytes a second of what else loads such files, to the CPU."""
    found = {}

    def by_safetensors() -> None:
        for path in files(folder):
            safetensors.numpy.load_file(path)

    found["safetensors, to NumPy arrays"] = rate(size, by_safetensors)
    try:
        import transformers
    except ImportError:
        return found
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM
    found["transformers, to the CPU"] = rate(size, lambda: model.from_pretrained(folder, dtype="auto"))
    return found


def measure(folder: Path, device: Device, *, cold: bool, peers: bool) -> dict[str, float]:
    """All of it, in bytes a second."""
    found: dict[str, float] = {}
    with ModelWeights.open(folder) as weights:
        size = weights.nbytes
        bus = streaming.steady_bus_speed(device)
        found["one large transfer to the device"] = bus
        say(f"{device.info.name}: the bus moves {bus / 1e9:.1f} GB/s; {size / 1e9:.2f} GB to load")
        read_like_dd(folder)  # into the page cache
        found["the file, like dd, from the page cache"] = rate(size, lambda: read_like_dd(folder))
        found[ALONE] = max(load_probe.raw_reading(weights, n_readers()) for _ in range(3))
        predicted = predict(weights, device)
        found["load, from the page cache, as predicted"] = size / predicted.load_seconds
        for n in (1, 2, 3):
            found[f"load, from the page cache, whole model, {n}"] = load_model(weights, device)
        for n, speed in enumerate(load_weights(weights, device), 1):
            found[f"load, from the page cache, weights alone, {n}"] = speed
        if size < 0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            found["load, from the page cache, all layers pinned"] = load_pinned(weights, device)
        if cold:
            forget(folder)
            found["the file, like dd, from the disk"] = rate(size, lambda: read_like_dd(folder))
            forget(folder)
            found["load, from the disk, whole model"] = load_model(weights, device)
            read_like_dd(folder)
    if peers:
        found |= host_peers(folder, device, min(AT_MOST, size) // PIECE * PIECE)
        found |= libraries(folder, size)
    return found


def table(found: dict[str, float]) -> str:
    """For people: GB/s, and the share of the bus, of reading alone or of dd's speed that a load reaches."""
    bus, disk = found["one large transfer to the device"], found.get("the file, like dd, from the disk")
    lines = []
    for name, speed in found.items():
        share = ""
        if name.startswith("load, from the page cache"):
            share = f"  {speed / bus:.0%} of the bus, {speed / found[ALONE]:.0%} of reading alone"
        elif name.startswith("load, from the disk") and disk:
            share = f"  {speed / disk:.0%} of dd"
        lines.append(f"{name:<54} {speed / 1e9:8.2f} GB/s{share}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", help="tiny, 0.5b, 1.5b, 7b or 32b")
    parser.add_argument("--model", type=Path, help="a checkpoint that is there, in place of a random one")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; the system's temporary folder")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="measure the disk, too")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="host memory, libraries")
    parser.add_argument("--probe", action="store_true", help="what limits a load, and nothing else: load_probe.py")
    parser.add_argument("--json", type=Path, help="write bytes a second by name")
    arguments = parser.parse_args()
    h200.SHAPES.update(streaming.LARGE)
    if arguments.probe:
        info = gpu.choose_device(arguments.device)
        assert info is not None
        assert info.api == "vulkan"
        with checkpoint(arguments) as folder:
            load_probe.run(folder, info.index)
        return 0
    device = gpu.open_device(arguments.device)
    assert device is not None
    with device, checkpoint(arguments) as folder:
        found = measure(folder, device, cold=arguments.cold, peers=arguments.peers)
        print(table(found), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"device": device.info.name, "bytes_per_second": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
