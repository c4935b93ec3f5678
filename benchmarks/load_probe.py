"""What limits a load: `python benchmarks/loading.py --probe`, a minute and a half at most for a 7B.

Four tables, each line printed when it is known: how fast pinned memory is made, by the driver and by this process for
import; how fast the device copies from each; where the time of a load goes, of its threads and of the bus by the
device's clock; and loads with other numbers of threads, sizes of chunks, and kinds of memory for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from timeline import CopyClock
from xinfer.gpu import _staging, vulkan
from xinfer.gpu._vk import memory, pinned, transfer
from xinfer.gpu.native import copy_bytes
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions
from xinfer.gpu_model import loading
from xinfer.gpu_model.layout import WeightsLayout
from xinfer.gpu_model.loading import Loader, n_readers
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.model._safetensors import SafetensorsFile
from xinfer.model.weights import ModelWeights

MIB = 1 << 20
WAYS = ("driver", "driver, cached", "imported")
A_LARGE = 512 * MIB
MOST_PINNED = 2048 * MIB


@contextmanager
def opened(index: int, way: str) -> Iterator[VulkanDevice]:
    """A device whose upload memory is made in one of the WAYS; it stages also where the host could write in place."""
    wishes = memory.WISHES["upload"]
    if way == "driver, cached":
        memory.WISHES["upload"] = ((memory.LOCAL, False), (memory.CACHED, True))
    try:
        with VulkanDevice(index, options=VulkanOptions(imports=way == "imported", direct=False)) as device:
            yield device
    finally:
        memory.WISHES["upload"] = wishes


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def allocations(index: int) -> None:
    """Making pinned memory, and copying from it."""
    for way in WAYS:
        with opened(index, way) as device:
            total = min(MOST_PINNED, device.memory().budget // 8)
            large = min(A_LARGE, total // 2)
            for size in (_staging.CHUNK, large):
                for n_threads in (1, n_readers()):
                    line = f"make {way} pinned memory, {size // MIB} MiB each, {n_threads} threads"
                    say(line, making(device, size, total // size, n_threads))
            sources = [device.create_buffer(large, "upload", "probe") for _ in range(2)]
            target = device.create_buffer(large)
            for what in ("the first time", "again", "again"):
                written = sum(fill(source.view(0, large)) for source in sources)
                say(f"write {way} pinned memory, {n_readers()} threads, {what}", 2 * large / written)
            for _ in range(2):
                began = time.perf_counter()
                for i in range(16):
                    device.transfer(sources[i % 2], target)
                device.flush_uploads()
                spent = time.perf_counter() - began
            say(f"copy from {way} pinned memory to the device", 16 * large / spent)
            for buffer in (*sources, target):
                buffer.release()


def making(device: VulkanDevice, size: int, count: int, n_threads: int) -> float:
    """Bytes a second of new upload buffers, made by several threads."""
    with ThreadPoolExecutor(n_threads) as threads:
        began = time.perf_counter()
        made = list(threads.map(lambda _: device.create_buffer(size, "upload", "probe"), range(count)))
        spent = time.perf_counter() - began
    for buffer in made:
        buffer.release()
    return count * size / spent


def fill(view: memoryview) -> float:
    """Seconds of writing it with all threads."""
    n, zeros = n_readers(), bytes(MIB)
    part = len(view) // n // MIB * MIB

    def write(i: int) -> None:
        for start in range(i * part, (i + 1) * part, MIB):
            copy_bytes(view[start : start + MIB], memoryview(zeros))

    with ThreadPoolExecutor(n) as threads:
        return seconds_of(lambda: list(threads.map(write, range(n))))


class Phases:
    """Seconds that threads spend in methods, summed over all threads, while it is entered."""

    def __init__(self, **methods: tuple[type[Any], str]) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(methods, 0.0)
        self.calls = dict.fromkeys(methods, 0)
        self._methods = methods
        self._lock = threading.Lock()
        self._held = ExitStack()

    def __enter__(self) -> Phases:
        for name, (owner, method) in self._methods.items():
            plain = getattr(owner, method)

            def timed(*arguments: Any, plain: Any = plain, name: str = name) -> Any:
                began = time.perf_counter()
                try:
                    return plain(*arguments)
                finally:
                    spent = time.perf_counter() - began
                    with self._lock:
                        self.seconds[name] += spent
                        self.calls[name] += 1

            setattr(owner, method, timed)
            self._held.callback(setattr, owner, method, plain)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


@contextmanager
def ring_kept() -> Iterator[None]:
    """Chunks are not given back when uploads have been waited for: a second load finds them there."""
    with mock.patch.object(_staging.Staging, "trim"):
        yield


def phases(device: VulkanDevice, weights: ModelWeights) -> None:
    """Where the time of a load goes."""
    loaded = DeviceWeights(device, weights, WeightsLayout(weights), load=False)
    n = n_readers()
    try:
        with ring_kept(), Loader(device, weights) as loader:
            for what in ("with a new ring of chunks", "again", "again"):
                clock = CopyClock(device, into="")
                timed = Phases(
                    waiting=(_staging.Staging, "_take"),
                    allocating=(transfer.Chunk, "_make_buffer"),
                    reading=(SafetensorsFile, "read_into"),
                    sending=(_staging.Staging, "_send"),
                )
                with clock, timed:
                    spent = seconds_of(lambda: loader.load(loaded._jobs()))
                    copies = clock.spans()
                say(f"load of the weights, {what}", weights.nbytes / spent)
                for name, seconds in timed.seconds.items():
                    print(f"    {name:<12} {seconds / n / spent:6.1%} of {n} threads' time, {timed.calls[name]} calls")
                period = device.core.adapter.limits.timestampPeriod * 1e-9
                busy = sum(span.end - span.begin for span in copies) * period
                print(f"    bus busy     {busy / spent:6.1%} of the time, by the device's clock; {len(copies)} copies")
    finally:
        loaded.release()


def variants(index: int, weights: ModelWeights) -> None:
    """Loads of the weights, twice in each case: memory on the device was made before, the ring comes with the first."""
    chunk, most, n = _staging.CHUNK, _staging.CHUNKS, n_readers()
    cases = [(way, n, chunk, most) for way in WAYS]
    cases += [("imported", n, size * MIB, 2 * n) for size in (4, 8, 16)]
    cases += [("imported", count, chunk, count + 4) for count in (max(2, n // 4), max(2, n // 2), n + n // 2)]
    cases += [("driver", n, 8 * MIB, 2 * n)]
    for way, n_threads, size, ring in cases:
        changed: dict[Any, dict[str, Any]] = {
            loading: {"n_readers": lambda n=n_threads: n, "PIECE": size, "READ": min(size, loading.READ)},
            _staging: {"CHUNK": size},
            transfer: {"CHUNK": size},
            pinned: {"LEAST": MIB},
        }
        with ExitStack() as held:
            for module, values in changed.items():
                held.enter_context(mock.patch.multiple(module, **values))
            device = held.enter_context(opened(index, way))
            device._transfers.most = ring
            loaded = DeviceWeights(device, weights, WeightsLayout(weights), load=False)
            held.callback(loaded.release)
            held.enter_context(ring_kept())
            loader = held.enter_context(Loader(device, weights))
            work = partial(loader.load, loaded._jobs())
            rates = [weights.nbytes / seconds_of(work) for _ in range(2)]
        say(f"load, {way}, {n_threads} threads, at most {ring} chunks of {size // MIB} MiB", *rates)


def say(what: str, *rates: float) -> None:
    """A line of a table: GB/s."""
    print(f"{what:<76}" + "".join(f"{rate / 1e9:8.2f}" for rate in rates) + " GB/s", flush=True)


def probe(folder: Path, index: int) -> None:
    """All four tables of a Vulkan device."""
    info = next(info for info in vulkan.list_devices() if info.index == index)
    print(f"{info.name}, {info.driver} {info.driver_version}, {n_readers()} threads", flush=True)
    allocations(index)
    with ModelWeights.open(folder) as weights:
        with opened(index, "imported") as device:
            phases(device, weights)
        variants(index, weights)
