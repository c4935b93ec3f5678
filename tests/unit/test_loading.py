"""How a checkpoint's files are cut for the threads that load them: on a device without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

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
        self._sent = device.sent

    def send(self, parts: Sequence[tuple[int, Bindable]]) -> None:
        self._sent.append((len(self.view), [at for at, _ in parts]))
        super().send(parts)


class Device(NullDevice):
    """Notes what is uploaded in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, list[int]]] = []  # sizes, and where parts begin

    def stage(self, size: int, *, wait: bool = True) -> Sent:
        del wait
        return Sent(self, size)


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
        load = loading._Load(device, weights, jobs)
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
