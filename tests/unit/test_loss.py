"""What an error about a lost device says, how far a device came, and when a model is given up."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from xinfer.choice import Choice
from xinfer.errors import DeviceError, DeviceHungError, DeviceLostError, Loss, LostOp, NumericalError
from xinfer.gpu._trail import Trail
from xinfer.gpu.api import DebugMessage, KernelCode
from xinfer.gpu.null import INFO, NullDevice
from xinfer.kv_cache import BlockPool, CacheShape
from xinfer.quarantine import PATH_VARIABLE, Quarantine
from xinfer.recovery import IN_ALL, MEMORY_S, LossLog, RecoveringModel

CODE = KernelCode(
    id="axpy.plain", spirv=b"", n_buffers=1, n_constants=2, constant_names=("width", "stride"), workgroup=(64, 1, 1)
)


CHOICE = Choice(n_valid=1000, presence_penalty=0.5)


def loss(*labels: str, variant: str = "axpy.plain", **values: Any) -> Loss:
    suspects = tuple(LostOp(label=label, variant=variant) for label in labels)
    return Loss(call="vkX", reason="VK_ERROR_DEVICE_LOST", suspects=suspects, **values)


# --- the error --------------------------------------------------------------------------------------------------------


def test_an_error_without_a_loss_is_what_it_says() -> None:
    error = DeviceLostError("it went away")
    assert str(error) == "it went away"
    assert isinstance(error, DeviceError)
    assert issubclass(DeviceHungError, DeviceLostError)


def test_the_message_has_every_field() -> None:
    known = Loss(
        call="vkQueueSubmit",
        reason="VK_ERROR_DEVICE_LOST",
        code=-4,
        details=("MMU fault",),
        messages=("error VUID-1: bad",),
        adapter="vulkan:0 card",
        driver="drv 1.2",
        work="'decode 9', segment 'step'",
        finished="layers.0.o",
        suspects=(LostOp(label="layers.0.down", variant="v", shape="2 x 1 x 1 workgroups"),),
    )
    assert str(DeviceLostError(loss=known)) == (
        "vkQueueSubmit failed: VK_ERROR_DEVICE_LOST (MMU fault); open the device again. "
        "It is vulkan:0 card, driver drv 1.2. It was at 'decode 9', segment 'step', behind layers.0.o. "
        "The op that did not end is layers.0.down (v, 2 x 1 x 1 workgroups). "
        "The debug layers said last: error VUID-1: bad"
    )
    assert "0x887a0006" in str(dataclasses.replace(known, code=0x887A0006))


# --- how far the device came ------------------------------------------------------------------------------------------


def trail_of(*ops: str, each_op: bool) -> tuple[Trail, Any, list[bytes]]:
    """A trail with a recording of two segments, its notes, and each marker as it was after each op."""
    trail = Trail()
    trail.each_op = each_op
    with NullDevice() as device:
        buffer = device.create_buffer(512, label="x")
        notes = trail.notes("decode 9")
        notes.begin("load")
        notes.add("copy", [buffer[:4], buffer[4:8]])
        markers = [notes.begin("step")]
        for op in ops:
            notes.add(op, [buffer[:256]], code=CODE, groups=(2, 1, 1), constants=bytes([32, 0, 0, 0, 64, 0, 0, 0]))
            markers.append(notes.marker())
    return trail, notes, markers


def found(trail: Trail, marker: bytes) -> Loss:
    trail.read = lambda: marker
    messages = [DebugMessage("error", str(n), "text") for n in range(5)]
    return trail.loss(INFO, call="vkX", reason="R", messages=messages)


def test_the_op_behind_the_last_marker_is_the_suspect() -> None:
    trail, notes, markers = trail_of("embed", "qkv", "down", each_op=True)
    told = found(trail, markers[1])
    assert (told.work, told.finished) == ("'decode 9', segment 'step'", "embed")
    assert told.suspects == (
        LostOp(label="qkv", variant="axpy.plain", shape="2 x 1 x 1 workgroups; width=32 stride=64; 'x' 256 bytes"),
    )
    assert found(trail, markers[0]).finished == "copy"  # of the segment before
    assert found(trail, markers[3]).suspects == ()
    assert told.messages == ("error 2: text", "error 3: text", "error 4: text")
    assert (told.adapter, told.driver) == ("null:0 null", "none 0")
    assert notes.label == "decode 9"


def test_without_op_markers_the_whole_segment_is_suspected() -> None:
    trail, _notes, markers = trail_of("embed", "qkv", "down", each_op=False)
    told = found(trail, markers[0])
    assert [op.label for op in told.suspects] == ["embed", "qkv", "down"]
    assert "Which of its 3 ops did not end is not known" in told.where


def test_markers_of_recordings_that_are_gone_say_nothing() -> None:
    trail, notes, markers = trail_of("embed", each_op=True)
    del notes
    gc.collect()
    assert found(trail, markers[0]).work == ""
    assert found(trail, b"\xff" * 12).work == ""
    trail.read = None
    assert trail.loss(INFO, call="vkX", reason="R").work == ""


# --- when it is enough ------------------------------------------------------------------------------------------------


def test_the_third_loss_at_an_op_is_one_too_many() -> None:
    log = LossLog()
    assert log.add(loss("a", "b", "c"), "a step") is None  # the op is not known: it counts for each
    assert log.add(loss("b"), "a step") is None
    assert log.add(loss("a"), "a step") is None
    assert log.add(loss("b"), "a step") == "it was lost 3 times at b"


def test_losses_without_an_op_count_for_what_was_done() -> None:
    log = LossLog()
    assert [log.add(loss(), "loading the model") is None for _ in range(3)] == [True, True, False]


def test_old_losses_are_forgotten() -> None:
    now = 0.0
    log = LossLog(lambda: now)
    for _ in range(20):
        assert log.add(loss("a"), "a step") is None
        now += MEMORY_S / 2 + 1
    assert len(log) == 2


def test_too_many_in_all() -> None:
    log = LossLog()
    verdicts = [log.add(loss(f"op {n}"), "a step") for n in range(IN_ALL)]
    assert verdicts[:-1] == [None] * (IN_ALL - 1)
    assert verdicts[-1] == f"it was lost {IN_ALL} times in 60 minutes"


# --- which passes made a cache ----------------------------------------------------------------------------------------


def test_a_cache_knows_the_passes_that_made_it() -> None:
    with NullDevice() as device:
        shape = CacheShape(n_layers=1, token_bytes=64, block_tokens=16)
        pool = BlockPool(device, shape, context=512)
        cache = pool.make_cache(200)
        cache.append(list(range(30)), rows=32)
        cache.append([1, 2], rows=2)
        cache.append([3], rows=1)
        for length, passes in (
            (33, [(30, 32), (2, 2), (1, 1)]),
            (31, [(30, 32), (1, 2)]),
            (30, [(30, 32)]),
            (12, [(12, 32)]),
            (0, []),
        ):
            cache.truncate(length)
            assert (cache.length, cache.passes) == (length, passes)
        pool.release()


# --- the model, on made-up devices ------------------------------------------------------------------------------------


class FakeCache:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def truncate(self, length: int) -> None:
        del self.ids[length:]


class FakeModel:
    """The next token is the sum of those before; the plan says which call raises what."""

    def __init__(self, plan: list[Exception | None]) -> None:
        self.plan = plan
        self.closed = False

    def make_cache(self, capacity: int) -> FakeCache:
        return FakeCache(capacity)

    def replay(self, lost: FakeCache, cache: FakeCache) -> None:
        self._call()
        cache.ids += lost.ids

    def tokens_at_once(self) -> int:
        return 1

    def extend(self, tokens: list[int], cache: FakeCache, *, progress: Any = None) -> None:
        cache.ids += tokens
        self._call()

    def forward(self, tokens: list[int], cache: FakeCache, *, last_only: bool = False) -> int:
        self.extend(tokens, cache)
        return sum(cache.ids)

    def choose(self, token: int, cache: FakeCache, choice: Choice, *, limit: int) -> Any:
        self.answered = choice.answer_ids
        for _ in range(min(limit, cache.capacity - cache.length)):
            self._call()
            cache.ids.append(token)
            token = sum(cache.ids) % 1000
            yield token

    def _call(self) -> None:
        assert not self.closed
        if self.plan and (error := self.plan.pop(0)) is not None:
            raise error


def recovering(*plan: Exception | None) -> tuple[Any, list[SimpleNamespace]]:
    """A model whose calls go as planned, and each thing that was loaded."""
    calls, made = list(plan), []

    def load(before: Any, mark_ops: bool) -> Any:
        model = FakeModel(calls)
        loaded = SimpleNamespace(model=model, device=SimpleNamespace(info=INFO), marked=mark_ops, before=before)
        loaded.close = lambda: setattr(model, "closed", True)
        made.append(loaded)
        return loaded

    return RecoveringModel(load), made


def test_a_step_is_done_again_on_a_new_device(caplog: pytest.LogCaptureFixture) -> None:
    model, made = recovering(None, DeviceLostError("gone"))
    cache = model.make_cache(10)
    model.extend([1, 2], cache)
    assert model.forward([3], cache) == 6
    assert cache.length == 3
    assert [loaded.model.closed for loaded in made] == [True, False]
    assert [loaded.before for loaded in made] == [None, INFO]
    assert len(caplog.records) == 1


def test_a_loss_while_the_cache_is_rebuilt() -> None:
    gone = DeviceLostError(loss=loss("a"))
    model, made = recovering(None, gone, DeviceLostError(loss=loss("b")))
    cache = model.make_cache(10)
    model.extend([1, 2], cache)
    assert model.forward([3], cache) == 6
    assert [loaded.marked for loaded in made] == [False, False, True]


@pytest.mark.parametrize("at", range(5))
def test_chosen_tokens_go_on(at: int) -> None:
    calm, _ = recovering()
    cache = calm.make_cache(10)
    expected = list(calm.choose(7, cache, CHOICE, limit=5))
    model, made = recovering(*[None] * at, DeviceLostError("gone"))
    again = model.make_cache(10)
    assert list(model.choose(7, again, CHOICE, limit=5)) == expected
    assert again.length == cache.length
    assert len(made) == 2
    assert made[1].model.answered == tuple(expected[:at]), "penalties must know what was chosen before"


def test_an_answer_ends_where_the_cache_does() -> None:
    model, made = recovering(None, DeviceLostError("gone"))
    assert len(list(model.choose(7, model.make_cache(3), CHOICE, limit=5))) == 3
    assert len(made) == 2


@pytest.mark.parametrize("at", range(4))
def test_a_token_that_the_canary_disowns_is_computed_again(at: int) -> None:
    calm, _ = recovering()
    expected = list(calm.choose(7, calm.make_cache(10), CHOICE, limit=4))
    model, made = recovering()
    heard = 0

    def check() -> None:
        nonlocal heard
        heard += 1
        if heard == at + 2:  # the first time is before the first token
            raise DeviceLostError("garbage")

    model._canary = SimpleNamespace(check=check, release=lambda: None)
    cache = model.make_cache(10)
    assert list(model.choose(7, cache, CHOICE, limit=4)) == expected
    assert cache.length == 4
    assert len(made) == 2


def test_another_calls_loss_does_not_stop_an_answer() -> None:
    calm, _ = recovering()
    expected = list(calm.choose(7, calm.make_cache(10), CHOICE, limit=4))
    model, made = recovering(None, None, DeviceLostError("gone"))
    tokens = model.choose(7, model.make_cache(10), CHOICE, limit=4)
    first = [next(tokens), next(tokens)]
    assert model.forward([1, 1], model.make_cache(5)) == 2
    assert first + list(tokens) == expected
    assert len(made) == 2


def test_it_ends_at_the_third_loss_and_begins_anew_with_the_next_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "quarantine.json"))
    errors = [DeviceHungError("stuck", loss("layers.0.down", adapter="a card", driver="a driver")) for _ in range(3)]
    model, made = recovering(*errors)
    with pytest.raises(DeviceHungError, match=r"lost 3 times at layers\.0\.down.* axpy\.plain is in quarantine now"):
        model.forward([1], model.make_cache(4))
    assert [(e.variant, e.outcome) for e in Quarantine().entries_for(INFO)] == [("axpy.plain", "hung")]
    assert all(loaded.model.closed for loaded in made)
    assert len(caplog.records) == 2
    assert model.device is None
    assert model.forward([1], model.make_cache(4)) == 1
    assert [loaded.marked for loaded in made] == [False, False, True, False]


def test_an_unwritable_quarantine_is_told_with_the_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "file" / "quarantine.json"))
    model, _ = recovering(*[DeviceLostError(loss=loss("a")) for _ in range(3)])
    with pytest.raises(DeviceLostError, match=r"lost 3 times at a.*cannot be written"):
        model.forward([1], model.make_cache(4))


def test_other_errors_are_passed_on() -> None:
    model, made = recovering(NumericalError("NaN"))
    with pytest.raises(NumericalError):
        model.forward([1], model.make_cache(4))
    assert len(made) == 1


def test_a_closed_model_is_not_opened_again() -> None:
    model, made = recovering()
    model.close()
    model.close()
    with pytest.raises(DeviceError, match="closed"):
        model.forward([1], model.make_cache(4))
    assert len(made) == 1
