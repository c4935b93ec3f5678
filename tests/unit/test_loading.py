"""How a checkpoint's files are cut for the threads that load them: on a device without a GPU."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

from xinfer.errors import WeightsError
from xinfer.gpu.api import Bindable, Buffer
from xinfer.gpu.null import NullBuffer, NullDevice, NullStage
from xinfer.gpu_model import loading
from xinfer.gpu_model.layout import WeightsLayout
from xinfer.gpu_model.loading import Job, Loader
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights

SPEC = SyntheticSpec(num_hidden_layers=3, hidden_size=64, intermediate_size=160, vocab_size=500, dtype="float16")


class Sent(NullStage):
    """Notes what is sent in one go."""

    def __init__(self, device: Device, size: int) -> None:
        super().__init__(device, size)
        self._notes = device

    def send(self, parts: Sequence[tuple[int, Bindable]]) -> None:
        self._notes.sent.append((len(self.view), [at for at, _ in parts]))
        self._notes.senders.add(threading.get_ident())
        super().send(parts)

    def release(self) -> None:
        super().release()
        self._notes.out.discard(self)


class Device(NullDevice):
    """Notes what is uploaded in one go, and has so many stages."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.most = most
        self.sent: list[tuple[int, list[int]]] = []  # sizes, and where parts begin
        self.senders: set[int] = set()  # threads
        self.out: set[Sent] = set()

    def stage(self, size: int, *, wait: bool = True) -> Sent | None:  # type: ignore[override]
        del wait
        if len(self.out) == self.most:
            return None
        stage = Sent(self, size)
        self.out.add(stage)
        return stage


def jobs_of(weights: ModelWeights, device: Device) -> list[Job]:
    """All tensors, each allocation in memory of its own."""
    layout = WeightsLayout(weights)
    jobs: list[Job] = []
    for part in (layout.table, *([layout.head] if layout.head else []), *layout.layers):
        buffer = device.create_buffer(part.size)
        jobs += [(place, buffer) for place in part.places]
    return jobs


def check(weights: ModelWeights, jobs: Sequence[Job]) -> None:
    """Every matrix has arrived, to the bit."""
    for place, buffer in jobs:
        stored = weights.read(place.name)
        if place.rows > 1:
            assert isinstance(buffer, NullBuffer)
            assert buffer.bytes[place.offset : place.end] == np.ascontiguousarray(stored).tobytes(), place.name


@pytest.fixture(autouse=True)
def _readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "n_readers", lambda: 1)


def test_tensors_that_lie_together_come_together(checkpoint: CheckpointFactory) -> None:
    device = Device()
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        jobs = jobs_of(weights, device)
        loader.load(jobs)
        check(weights, jobs)
    ((_, parts),) = device.sent
    assert len(parts) == sum(place.rows > 1 for place, _ in jobs)


def test_pieces_begin_at_pages(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as small as it takes for all threads to have some."""
    monkeypatch.setattr(loading, "n_readers", lambda: 4)
    monkeypatch.setattr(loading, "SMALLEST", 2 * loading.PAGE)
    device, done = Device(), list[int]()
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        jobs = jobs_of(weights, device)
        load = loading._Load(device, weights, jobs, SimpleQueue())
        spans = [task for task in load.tasks() if isinstance(task, loading._Span)]
        assert all(span.begin % loading.PAGE == 0 for span in spans)
        assert all(before.begin + before.size == after.begin for before, after in pairwise(spans))
        assert len({span.size for span in spans[:-1]}) == 1
        assert 2 * 4 <= len(spans) <= 2 * 4 + 2
        with Loader(device, weights) as loader:
            loader.load(jobs, progress=lambda n, total: done.append(total - n))
        check(weights, jobs)
    assert done == sorted(done, reverse=True)
    assert done[-1] == 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads, and much for each to do."""
    monkeypatch.setattr(loading, "n_readers", lambda: 4)
    monkeypatch.setattr(loading, "SMALLEST", loading.PAGE)
    monkeypatch.setattr(Device, "stage_bytes", loading.PAGE)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_threads_read_and_one_sends(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Whether stages are more than threads or fewer."""
    device, readers, read_span = Device(most), set[int](), ModelWeights.read_span

    def noted(*arguments: Any) -> None:
        readers.add(threading.get_ident())
        read_span(*arguments)

    monkeypatch.setattr(ModelWeights, "read_span", noted)
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        jobs = jobs_of(weights, device)
        loader.load(jobs)
        check(weights, jobs)
    assert device.senders == {threading.get_ident()}
    assert not readers & device.senders
    assert len(device.sent) > 20
    assert not device.out


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("after", [0, 1, 7])
def test_an_error_of_a_thread_ends_the_load(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """What was asked for is given back, and the loader can be used again."""
    device, read_span, calls = Device(), ModelWeights.read_span, itertools.count()

    def failing(*arguments: Any) -> None:
        if next(calls) == after:
            raise WeightsError("the disk is gone")
        read_span(*arguments)

    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        jobs = jobs_of(weights, device)
        with monkeypatch.context() as patch:
            patch.setattr(ModelWeights, "read_span", failing)
            with pytest.raises(WeightsError, match="the disk is gone"):
                loader.load(jobs)
        assert not device.out
        assert next(calls) < 30, "threads went on"
        loader.load(jobs)
        check(weights, jobs)


@pytest.mark.usefixtures("small_pieces")
def test_an_interrupt_waits_for_what_is_being_read(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that threads write is not given back before they have ended."""
    device, entered, left = Device(), threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        entered.set()
        time.sleep(0.2)
        left.set()

    def interrupt(done: int, total: int) -> None:
        if entered.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr(ModelWeights, "read_span", slow)
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        with pytest.raises(KeyboardInterrupt):
            loader.load(jobs_of(weights, device), progress=interrupt)
        assert left.is_set()
        assert not device.out


def test_an_interrupt_while_threads_start_is_an_interrupt(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's threads may make another error of it, as within the wait for a thread that has been started."""

    def interrupted(thread: threading.Thread) -> None:
        lock = threading.Lock()
        with lock:
            try:
                raise KeyboardInterrupt
            finally:
                lock.release()

    device = Device()
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        jobs = jobs_of(weights, device)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loader.load(jobs)
        loader.load(jobs)
        check(weights, jobs)


def test_bytes_that_go_to_several_places_come_once_for_each(checkpoint: CheckpointFactory) -> None:
    """A round of all that is there, in the file's order, and then another: not each tensor by itself."""
    device = Device()
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        first, second = jobs_of(weights, device), jobs_of(weights, device)
        loader.load([job for pair in zip(first, second, strict=True) for job in pair])
        check(weights, first)
        check(weights, second)
    assert len(device.sent) == 2


def test_far_tensors_are_not_read_across(checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "GAP", 100)
    device = Device()
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        jobs = [job for job in jobs_of(weights, device) if "down_proj" in job[0].name]
        loader.load(jobs)
        check(weights, jobs)
    assert len(device.sent) == len(jobs) == 3


def test_tensors_for_the_hosts_memory_are_read_there(checkpoint: CheckpointFactory) -> None:
    device = Device()
    with ModelWeights.open(checkpoint(SPEC)) as weights, Loader(device, weights) as loader:
        layout = WeightsLayout(weights)
        buffers: list[Buffer] = [device.create_buffer(part.size, "upload") for part in layout.layers]
        jobs = [(place, buffer) for part, buffer in zip(layout.layers, buffers, strict=True) for place in part.places]
        loader.load(jobs)
        check(weights, jobs)
    assert not device.sent
