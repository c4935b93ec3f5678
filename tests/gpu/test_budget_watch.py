"""The system takes memory back while a model runs: layers are moved out, and the answer is the same to the last bit."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer import kv_cache
from xinfer.errors import OutOfMemoryError
from xinfer.gpu.api import Buffer, BufferKind, Device, MemoryStatus
from xinfer.gpu_model import ModelOptions, QwenModel, watch
from xinfer.gpu_model import model as model_module
from xinfer.gpu_model import weights as weights_module
from xinfer.gpu_model.layout import RESIDENT, Split
from xinfer.gpu_model.watch import BudgetWatch, layers_to_move, layers_to_return
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights

SPEC = SyntheticSpec(num_hidden_layers=6, hidden_size=64, dtype="float16")
IDS = [int(i) for i in np.random.default_rng(8).integers(0, 384, 12)]
TAKEN_AT = 5  # tokens before the budget shrinks


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked at every step; prompts go in one piece, however slow it is."""
    build_shaders.build()
    monkeypatch.setattr(model_module, "FIRST_CHUNK", 64)
    monkeypatch.setattr(model_module, "CHUNK_SECONDS", 1e6)
    monkeypatch.setattr(watch, "EVERY_S", 0.0)


@pytest.fixture
def exceed(device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on this many bytes are in use beyond the budget, less what is given back; a negative number are free."""
    # On software devices what goes to the host is the device's, too: its own buffers alone are counted here.
    meter = device.allocator.meter  # type: ignore[attr-defined]

    def by(excess: int) -> None:
        device.collect()  # type: ignore[attr-defined]
        budget = meter.used - excess

        def memory() -> MemoryStatus:
            device.collect()  # type: ignore[attr-defined]
            return MemoryStatus(budget=budget, used=meter.used, ours=meter.used)

        monkeypatch.setattr(device, "memory", memory)

    return by


@pytest.mark.parametrize(("more", "moved"), [(1, 3), (2, 4), (100, 6)])
@pytest.mark.parametrize("before", [RESIDENT, Split(streamed=(2,), n_slots=1)])
def test_the_answer_goes_on_with_fewer_layers_resident(
    device: Device,
    checkpoint: CheckpointFactory,
    exceed: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    before: Split,
    more: int,
    moved: int,
) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=before) as model:
            cache = model.make_cache(60)
            model.extend(IDS[:-1], cache)
            expected = list(model.greedy(IDS[-1], cache, limit=30))
            logits = model.forward(IDS, last_only=True)
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=before) as model:
            layer = model.plan.layout.slot_bytes
            cache = model.make_cache(60)
            model.extend(IDS[:-1], cache)
            tokens = model.greedy(IDS[-1], cache, limit=30)
            found = [next(tokens) for _ in range(TAKEN_AT)]
            exceed(more * layer - 100)
            with caplog.at_level(logging.WARNING, "xinfer"):
                found += list(tokens)
            again = model.forward(IDS, last_only=True)
            assert len(model.plan.split.streamed) == moved
            assert model.plan.split.n_slots == 2
    assert found == expected
    assert np.array_equal(again, logits)
    said = [record.getMessage() for record in caplog.records]
    assert "layers were moved to the host's memory" in said[0]
    assert len(said) == (1 if more < 100 else 2), said
    assert more < 100 or "no layer can be moved out" in said[1]


@pytest.mark.parametrize(
    ("before", "more"),
    [
        (RESIDENT, 1),
        (RESIDENT, 100),
        (Split(streamed=(2,), n_slots=1), 2),
        (Split(streamed=(1, 4), n_slots=2, pinned=False), 2),
    ],
)
def test_layers_return_when_memory_is_free_again(
    device: Device,
    checkpoint: CheckpointFactory,
    exceed: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: Split,
    more: int,
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    with ModelWeights.open(checkpoint(SPEC)) as weights:
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=before) as model:
            cache = model.make_cache(60)
            model.extend(IDS[:-1], cache)
            expected = list(model.greedy(IDS[-1], cache, limit=30))
        with QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=before) as model:
            layer, meter = model.plan.layout.slot_bytes, device.allocator.meter  # type: ignore[attr-defined]
            cache = model.make_cache(60)
            model.extend(IDS[:-1], cache)
            tokens = model.greedy(IDS[-1], cache, limit=30)
            found = [next(tokens) for _ in range(TAKEN_AT)]
            device.collect()  # type: ignore[attr-defined]
            at_first = meter.used
            for _ in range(2):
                exceed(more * layer - 100)
                found += [next(tokens) for _ in range(3)]
                assert len(model.plan.split.streamed) > len(before.streamed)
                assert device.memory().used < at_first
                exceed(-10 * layer)
                with caplog.at_level(logging.WARNING, "xinfer"):
                    caplog.clear()
                    found += [next(tokens) for _ in range(3)]
                assert model.plan.split == before
                assert device.memory().used == at_first
                assert sorted(model._weights._pinned) == (list(before.streamed) if before.pinned else [])
            found += list(tokens)
    assert found == expected
    (said,) = [record.getMessage() for record in caplog.records]
    assert "layers came back from the host's memory" in said


def test_layers_return_as_far_as_there_is_room(
    device: Device, checkpoint: CheckpointFactory, exceed: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    monkeypatch.setattr(watch, "RESERVE", 0.0)
    with ModelWeights.open(checkpoint(SPEC)) as weights, QwenModel.load(weights, device) as model:
        expected = model.forward(IDS, last_only=True)
        layer = model.plan.layout.slot_bytes
        exceed(100 * layer)
        assert np.array_equal(model.forward(IDS, last_only=True), expected)
        assert len(model.plan.split.streamed) == 6
        exceed(-2 * layer)
        assert np.array_equal(model.forward(IDS, last_only=True), expected)
        assert len(model.plan.split.streamed) == 4
        assert np.array_equal(model.forward(IDS, last_only=True), expected)
        assert len(model.plan.split.streamed) == 4


@pytest.mark.parametrize("how", ["extend", "greedy"])
def test_a_cache_grows_into_the_memory_of_layers(
    device: Device,
    checkpoint: CheckpointFactory,
    exceed: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(kv_cache, "FIRST_TOKENS", 32)
    fed, limit = (IDS * 4, 3) if how == "extend" else (IDS, 30)

    def answer(model: QwenModel, disturb: Callable[[], None]) -> list[int]:
        cache = model.make_cache(len(fed) + limit)
        model.extend(fed[:10], cache)
        disturb()
        model.extend(fed[10:-1], cache)
        return list(model.greedy(fed[-1], cache, limit=limit))

    with ModelWeights.open(checkpoint(SPEC)) as weights:
        with QwenModel.load(weights, device) as model:
            expected = answer(model, lambda: None)
        with QwenModel.load(weights, device) as model, caplog.at_level(logging.WARNING, "xinfer"):
            assert answer(model, lambda: exceed(-1000)) == expected
            assert model.plan.split.streamed
            assert "layers were moved to the host's memory" in caplog.records[0].getMessage()


def test_a_cache_takes_no_memory_of_layers_that_are_to_be_resident(
    device: Device, checkpoint: CheckpointFactory, exceed: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "FIRST_TOKENS", 32)
    with (
        ModelWeights.open(checkpoint(SPEC)) as weights,
        QwenModel.load(weights, device, ModelOptions(mode="resident")) as model,
    ):
        cache = model.make_cache(100)
        model.extend(IDS, cache)
        exceed(-1000)
        with pytest.raises(OutOfMemoryError, match=r"use a shorter context .* let layers be streamed: --mode auto"):
            model.extend(IDS * 4, cache)
        assert model.plan.split == RESIDENT
        assert cache.length == len(IDS)
        model.extend(IDS, cache)


def test_layers_that_are_read_from_the_disk_are_not_copied_out(
    device: Device, checkpoint: CheckpointFactory, exceed: Callable[[int], None]
) -> None:
    split = Split(streamed=(0, 3), n_slots=2, pinned=False)
    with ModelWeights.open(checkpoint(SPEC)) as weights, QwenModel.load(weights, device, split=split) as model:
        expected = model.forward(IDS, last_only=True)
        exceed(2 * model.plan.layout.slot_bytes)
        assert np.array_equal(model.forward(IDS, last_only=True), expected)
        assert len(model.plan.split.streamed) == 4
        assert not model._weights._pinned


def test_a_host_without_room_for_all_of_them_gets_none(
    device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither do copies of the first of them pile up, an attempt after the other; the answer is the same."""
    with ModelWeights.open(checkpoint(SPEC)) as weights, QwenModel.load(weights, device) as model:
        expected = model.forward(IDS, last_only=True)
        excess = 2 * model.plan.layout.slot_bytes
        monkeypatch.setattr(device, "memory", lambda: MemoryStatus(budget=1000, used=1000 + excess, ours=1000))
        create, left, copies = device.create_buffer, [2], list[Buffer]()

        def scarce(size: int, kind: BufferKind = "device", label: str = "") -> Buffer:
            if kind != "upload":
                return create(size, kind, label)
            left[0] -= 1
            if left[0] < 0:
                left[0] = 2
                raise OutOfMemoryError("the host has no more", needed=size, free=0)
            copies.append(create(size, kind, label))
            return copies[-1]

        monkeypatch.setattr(device, "create_buffer", scarce)
        for _ in range(4):
            assert np.array_equal(model.forward(IDS, last_only=True), expected)
        assert len(copies) >= 8
        assert all(buffer.released for buffer in copies)  # type: ignore[attr-defined]
        assert model.plan.split == RESIDENT


def test_no_layer_moves_to_a_host_that_has_no_memory_left(
    device: Device, checkpoint: CheckpointFactory, exceed: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights, QwenModel.load(weights, device) as model:
        monkeypatch.setattr(weights_module, "available_memory", lambda: 3 * model.plan.layout.slot_bytes - 1)
        exceed(model.plan.layout.slot_bytes)
        model.forward(IDS, last_only=True)
        assert model.plan.split == RESIDENT
        monkeypatch.setattr(weights_module, "available_memory", lambda: 3 * model.plan.layout.slot_bytes)
        model.forward(IDS, last_only=True)
        assert len(model.plan.split.streamed) == 3


def test_a_budget_that_suffices_moves_nothing(
    device: Device, checkpoint: CheckpointFactory, exceed: Callable[[int], None]
) -> None:
    with ModelWeights.open(checkpoint(SPEC)) as weights, QwenModel.load(weights, device) as model:
        exceed(0)
        model.forward(IDS, last_only=True)
        assert model.plan.split == RESIDENT


def test_the_driver_is_asked_now_and_then(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY_S", 0.25)
    now, asked = [0.0], []

    def memory() -> MemoryStatus:
        asked.append(now[0])
        return MemoryStatus(budget=10, used=12, ours=12)

    monkeypatch.setattr(device, "memory", memory)
    budget = BudgetWatch(device, clock=lambda: now[0])
    found = []
    for tick in range(1000):
        now[0] = tick / 1000
        found.append(budget.excess())
    assert len(asked) == 3
    assert sum(found) == 6


def test_layers_return_after_a_while_and_later_where_that_was_rash(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Budgets of 1000 with so much used, a question a second: when there is room for 100."""
    monkeypatch.setattr(watch, "RESERVE", 0.1)
    now, used = [0.0], [0]
    monkeypatch.setattr(device, "memory", lambda: MemoryStatus(budget=1000, used=used[0], ours=used[0]))
    budget = BudgetWatch(device, clock=lambda: now[0])

    def seconds_until_room(most: int = 1000) -> tuple[int, int]:
        for second in range(most):
            now[0] += 1
            assert budget.excess() == 0
            if room := budget.room(100):
                return second, room
        return most, 0

    used[0] = 801  # 199 are free, 99 beyond the reserve
    assert seconds_until_room() == (1000, 0)
    used[0] = 800
    assert seconds_until_room(8) == (8, 0)
    used[0] = 850  # for a moment
    assert seconds_until_room(1) == (1, 0)
    used[0] = 700
    assert seconds_until_room() == (10, 200)
    for patience in (20, 40):
        budget.tell_returned(2, 0)
        budget.tell(2, 200, 150)  # at once the memory was needed again
        assert seconds_until_room() == (patience, 200)
    budget.tell_returned(2, 0)
    now[0] += 1000
    budget.tell(2, 200, 150)
    assert seconds_until_room() == (40, 200)


def test_which_layers_return() -> None:
    """Worked by hand: the last moved come first, and those left take the slots where there are no others."""
    even, all_moved = [10] * 8, Split(streamed=(0, 2, 4, 6), n_slots=2)
    assert layers_to_return(all_moved, even, [0, 2, 4, 6], 9) == []
    assert layers_to_return(all_moved, even, [0, 2, 4, 6], 10) == [6]
    assert layers_to_return(all_moved, even, [0, 2, 4, 6], 20) == [0, 2, 4, 6]
    assert layers_to_return(all_moved, even, [4, 6], 100) == [4, 6]
    assert layers_to_return(all_moved, even, [2, 4, 6], 20) == [4, 6]


def test_which_layers_are_moved() -> None:
    """Worked by hand: slots come first and free nothing; far from what is streamed already."""
    even = [10] * 8
    assert layers_to_move(RESIDENT, even, 10) == [0, 2, 4]  # 0 and 4 become slots
    assert layers_to_move(Split(streamed=(0, 4), n_slots=2), even, 11) == [2, 6]
    assert layers_to_move(RESIDENT, [10, 10], 5) == []
    assert layers_to_move(RESIDENT, [9, 10, 9, 10, 9, 9], 9) == [1, 3, 5]
    assert layers_to_move(Split(streamed=tuple(range(8)), n_slots=2), even, 5) == []
