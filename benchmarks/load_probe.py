"""What limits a load: `python benchmarks/loading.py --probe`, 75 s at most for a 7B.

Each line is printed when it is known: how fast pinned memory is made; what the machine could do (the loader's threads
reading without copying, copying without reading, both at once without waiting for each other); where the time of a load
goes, of its threads, of the processor and of the bus by the device's clock; loads with other sizes and numbers of
chunks, threads, and ways to make them; and whether the device can read the page cache itself.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from timeline import CopyClock
from xinfer.gpu import _staging, vulkan
from xinfer.gpu._vk import pinned, transfer
from xinfer.gpu.vulkan import VulkanDevice, VulkanOptions
from xinfer.gpu_model import loading
from xinfer.gpu_model.layout import WeightsLayout
from xinfer.gpu_model.loading import Loader, n_readers
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.model.weights import ModelWeights

MIB = 1 << 20
MOST_S = 60.0  # behind which no other part begins
MOST_PINNED = 1024 * MIB
SAMPLES = 6  # pieces of weights that are compared after each load
SAMPLE = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a load is done; None is the product's own way."""

    what: str = "as it is"
    chunk: int | None = None  # MiB
    most: int | None = None  # chunks
    threads: int | None = None
    imports: bool = True
    switch: float | None = None  # seconds after which a thread has to let the interpreter go


CASES = (
    Case(),
    Case(what="chunks of 4 MiB, 32 of them", chunk=4, most=32),
    Case(what="chunks of 4 MiB, 24 of them", chunk=4, most=24),
    Case(what="12 chunks", most=12),
    Case(what="14 chunks", most=14),
    Case(what="20 chunks", most=20),
    Case(what="32 chunks", most=32),
    Case(what="chunks of 16 MiB, 16 of them", chunk=16, most=16),
    Case(what="chunks of 32 MiB, 20 of them", chunk=32, most=20),
    Case(what="6 threads", threads=6),
    Case(what="8 threads", threads=8),
    Case(what="10 threads", threads=10),
    Case(what="14 threads", threads=14),
    Case(what="16 threads, 20 chunks", threads=16, most=20),
    Case(what="chunks that the driver makes", imports=False),
    Case(what="the interpreter passed on after 50 us", switch=5e-5),
    Case(),
)


class Probe:
    """A device and a checkpoint's place on it, used by all parts."""

    def __init__(self, device: VulkanDevice, weights: ModelWeights) -> None:
        self.device = device
        self.weights = weights
        self.loaded = DeviceWeights(device, weights, WeightsLayout(weights))
        self.jobs = self.loaded._jobs()
        self._random = np.random.default_rng(0)

    @property
    def staging(self) -> Any:
        """The ring."""
        return self.device._transfers

    @contextmanager
    def done(self, case: Case) -> Iterator[None]:
        """Loads are done in this way, and begin with no ring."""
        staging, chosen, switch = self.staging, dict(self.device.pinning._chosen), sys.getswitchinterval()
        before = staging.chunk, staging.most
        with ExitStack() as held:
            n = case.threads or n_readers()
            held.enter_context(mock.patch.object(loading, "n_readers", return_value=n))
            self.forget_ring()
            staging.chunk, staging.most = MIB * case.chunk if case.chunk else staging.chunk, case.most or staging.most
            pinning = self.device.pinning
            if chosen[False] is not False:
                pinning._chosen[False] = None if case.imports else False
                pinning._speeds[False].clear()
            sys.setswitchinterval(case.switch or switch)
            try:
                yield
            finally:
                sys.setswitchinterval(switch)
                self.device.flush_uploads()
                self.forget_ring()
                staging.chunk, staging.most = before
                self.device.pinning._chosen.update(chosen)

    def forget_ring(self) -> None:
        """Give the chunks back."""
        self.staging.release()
        self.device.collect()

    def load(self) -> float:
        """Bytes a second of the weights."""
        with Loader(self.device, self.weights) as loader:
            return self.weights.nbytes / seconds_of(lambda: loader.load(self.jobs))

    def checked(self) -> float:
        """As `load`; afterwards some pieces are compared with the file, which were overwritten before."""
        straight = [(place, buffer) for place, buffer in self.jobs if place.rows > 1]
        chosen = []
        for i in self._random.integers(0, len(straight), SAMPLES):
            place, buffer = straight[i]
            size = self.weights.tensors[place.name].nbytes
            at = int(self._random.integers(0, max(1, size - SAMPLE)))
            chosen.append((place, buffer[place.offset + at : place.offset + min(size, at + SAMPLE)], at))
            self.device.upload(chosen[-1][1], bytes(chosen[-1][1].size))
        self.device.flush_uploads()
        rate = self.load()
        for place, part, at in chosen:
            expected = bytearray(part.size)
            self.weights.read_into(place.name, memoryview(expected), offset=at)
            if self.device.download(part) != expected:
                raise ValueError(f"{place.name} is wrong on the device behind byte {at}")
        return rate


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def making(probe: Probe) -> None:
    """Pinned memory, made in several ways."""
    device = probe.device
    total = min(MOST_PINNED, device.memory().budget // 8)
    cases: list[tuple[bool, int, int, int]] = [(False, 32, 1, 4)]  # import, MiB, callers, MiB that a thread makes
    cases += [(True, size, n_readers(), a_thread) for size in (4, 32) for a_thread in {4, size}]
    cases += [(True, 512, 1, a_thread) for a_thread in (4, 32)]
    chosen = dict(device.pinning._chosen)
    for imports, size, callers, a_thread in cases:
        if size * MIB > total:
            continue
        rates = []
        for _ in range(2):
            device.pinning._chosen.update({False: imports, True: imports})
            with mock.patch.object(pinned, "A_THREAD", a_thread * MIB), ThreadPoolExecutor(callers) as threads:
                count = total // (size * MIB)
                began = time.perf_counter()
                made = list(
                    threads.map(lambda _, size=size: device.create_buffer(size * MIB, "upload", "probe"), range(count))
                )
                rates.append(count * size * MIB / (time.perf_counter() - began))
            for buffer in made:
                buffer.release()
            device.collect()
        way = f"imported, by {min(16, max(1, size // a_thread))} threads each" if imports else "by the driver"
        say(f"make pinned memory, {size} MiB each, {callers} at a time, {way}", *rates)
    device.pinning._chosen.update(chosen)


def _nothing(*_: object) -> None:
    """In place of reading."""


def ceilings(probe: Probe) -> None:
    """What reading and copying do without each other, and side by side."""
    device, weights = probe.device, probe.weights
    for threads in (n_readers() // 2, n_readers()):
        with probe.done(Case(threads=threads)):
            with mock.patch.object(_staging.Stage, "copy", lambda stage, _: stage.release()):
                rates = [probe.load() for _ in range(3)]
                say(f"the loader, reading without copying, {threads} threads", *rates)
            with mock.patch.object(ModelWeights, "read_span", new=_nothing):
                say(f"the loader, copying without reading, {threads} threads", *[probe.load() for _ in range(2)])
    size = min(512 * MIB, device.memory().free // 8)
    sources = [device.create_buffer(size, "upload", "probe") for _ in range(2)]
    target = device.create_buffer(size)
    stop, moved = threading.Event(), 0

    def copy() -> None:
        nonlocal moved
        while not stop.is_set():
            for source in sources:
                device.transfer(source, target)
            device.flush_uploads()
            moved += 2 * size

    with ThreadPoolExecutor(1) as one:
        copying = one.submit(copy)
        time.sleep(0.3)
        began, before = time.perf_counter(), moved
        reading = [raw_reading(weights, n_readers()) for _ in range(3)]
        rate = (moved - before) / (time.perf_counter() - began)
        stop.set()
        copying.result()
    say("preadv alone into memory that was there, while the bus is busy", *reading)
    say("and copies of other memory meanwhile", rate)
    for buffer in (*sources, target):
        buffer.release()
    say("preadv alone into memory that was there", *[raw_reading(weights, n_readers()) for _ in range(3)])


def raw_reading(weights: ModelWeights, n_threads: int) -> float:
    """Bytes a second of threads that read the files piece by piece, each into a chunk of its own."""
    files = sorted({info.file for info in weights.tensors.values()})
    size = min(_staging.CHUNK, *(file.stat().st_size for file in files))
    spans = [(file, at) for file in files for at in range(0, file.stat().st_size - size + 1, size)]
    pages = pinned.HostPages(n_threads * size)
    work, lock = iter(spans), threading.Lock()

    def reader(i: int) -> None:
        with pages.view[i * size : (i + 1) * size] as view:
            while True:
                with lock:
                    span = next(work, None)
                if span is None:
                    return
                weights.read_span(*span, view)

    with ThreadPoolExecutor(n_threads) as threads:
        return len(spans) * size / seconds_of(lambda: list(threads.map(reader, range(n_threads))))


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

            def timed(*arguments: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
                began = time.perf_counter()
                try:
                    return plain(*arguments, **named)
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


def phases(probe: Probe) -> None:
    """Where the time of a load goes."""
    n = n_readers()
    with probe.done(Case()):
        for what in ("with a new ring of chunks", "again", "again"):
            clock = CopyClock(probe.device, into="")
            readers = Phases(
                making=(transfer.Chunk, "_make_buffer"),
                reading=(ModelWeights, "read_span"),
                converting=(loading._Load, "_convert"),
            )
            sender = Phases(waiting=(_staging.Staging, "_take"), sending=(_staging.Stage, "send"))
            with clock, readers, sender:
                used = os.times()
                spent = seconds_of(probe.load)
                now = os.times()
                copies = clock.spans()
            say(f"load of the weights, {what}", probe.weights.nbytes / spent)
            for timed, count in ((readers, n), (sender, 1)):
                for name, seconds in timed.seconds.items():
                    of = f"{count} threads' time" if count > 1 else "the sender's"
                    print(f"    {name:<12} {seconds / count / spent:6.1%} of {of}, {timed.calls[name]} calls")
            period = probe.device.core.adapter.limits.timestampPeriod * 1e-9
            busy = sum(span.end - span.begin for span in copies) * period
            print(f"    bus busy     {busy / spent:6.1%} of the time, by the device's clock; {len(copies)} copies")
            cores = (now.user - used.user) / spent, (now.system - used.system) / spent
            print(f"    processor    {cores[0]:.1f} cores in the program, {cores[1]:.1f} in the kernel", flush=True)


def variants(probe: Probe, until: float) -> None:
    """Loads of the weights in each case: the ring comes with the first, and is there for the others."""
    for case in CASES:
        if time.perf_counter() > until:
            print("the time is up: no more cases")
            return
        try:
            with probe.done(case):
                say(f"load, {case.what}", probe.checked(), probe.load(), probe.load())
        except Exception as error:  # one that does not work must not end the others
            print(f"load, {case.what}: {type(error).__name__}: {error}", flush=True)


def page_cache(probe: Probe) -> None:
    """Importing the file's own pages, for the device to read: not all file systems and drivers allow it."""
    device = probe.device
    path = next(iter(probe.weights.tensors.values())).file
    size = min(512 * MIB, path.stat().st_size // (2 * MIB) * MIB)
    with path.open("r+b") as file, ExitStack() as held:
        mapping = mmap.mmap(file.fileno(), size)  # unmapped when nobody refers to it any more
        view = memoryview(mapping)
        pages = SimpleNamespace(size=size, address=np.frombuffer(view, np.uint8).ctypes.data, view=view)
        given = mock.MagicMock()
        given.return_value.__enter__.return_value = pages
        given.return_value.__exit__.return_value = False
        target = device.create_buffer(size)
        held.callback(target.release)
        began = time.perf_counter()
        with (
            mock.patch.object(pinned.Pinning, "pages", given),
            mock.patch.object(pinned.Pinning, "give_up", side_effect=OSError("the driver does not take them")),
        ):
            source = device.create_buffer(size, "upload", "the page cache")
        held.callback(source.release)
        say("import of the file's own pages", size / (time.perf_counter() - began))
        for _ in range(2):
            began = time.perf_counter()
            device.transfer(source, target)
            device.flush_uploads()
            spent = time.perf_counter() - began
        right = device.download(target[size - MIB : size]) == view[size - MIB :]
        say(f"copy from them to the device, {'right' if right else 'WRONG'}", size / spent)


def say(what: str, *rates: float) -> None:
    """A line of a table: GB/s."""
    print(f"{what:<84}" + "".join(f"{rate / 1e9:8.2f}" for rate in rates) + " GB/s", flush=True)


def run(folder: Path, index: int) -> None:
    """All parts, on a Vulkan device."""
    began = time.perf_counter()
    info = next(info for info in vulkan.list_devices() if info.index == index)
    print(f"{info.name}, {info.driver} {info.driver_version}, {n_readers()} threads", flush=True)
    with (
        VulkanDevice(index, options=VulkanOptions(direct=False)) as device,
        ModelWeights.open(folder) as weights,
    ):
        probe = Probe(device, weights)
        try:
            probe.load()  # warms up
            for part in (making, ceilings, phases):
                try:
                    part(probe)
                except Exception as error:
                    print(f"{part.__name__}: {type(error).__name__}: {error}", flush=True)
            variants(probe, began + MOST_S)
            try:
                page_cache(probe)
            except Exception as error:
                print(f"the page cache for the device to read: {type(error).__name__}: {error}", flush=True)
        finally:
            probe.loaded.release()
