"""What can go wrong while layers are streamed from the disk: a clear error, memory given back, and no signal."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import CheckpointFactory

import build_shaders
from xinfer.errors import WeightsError
from xinfer.gpu.api import Device
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.gpu_model.layout import Split
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.model import _safetensors
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights

SPEC = SyntheticSpec(num_hidden_layers=4, hidden_size=64, dtype="float16")
FROM_DISK = Split(streamed=(0, 2, 3), n_slots=2, pinned=False)
IDS = [5, 9, 2, 77, 31]


@pytest.fixture
def folder(checkpoint: CheckpointFactory, tmp_path: Path) -> Path:
    build_shaders.build()
    return Path(shutil.copytree(checkpoint(SPEC), tmp_path / "model"))


@pytest.fixture
def model(device: Device, folder: Path) -> Iterator[QwenModel]:
    """The original is closed; all memory comes back in the end, whatever happened."""
    device.flush_uploads()
    device.collect()  # type: ignore[attr-defined]
    before = device.memory().ours
    with ModelWeights.open(folder) as weights:
        loaded = QwenModel.load(weights, device, ModelOptions(kv_cache="f32"), split=FROM_DISK)
    with loaded:
        yield loaded
    device.flush_uploads()
    device.collect()  # type: ignore[attr-defined]
    assert device.memory().ours <= before + (96 << 20)  # staging, which stays
    assert not [t for t in threading.enumerate() if t.name.startswith("xinfer-load")]


def rest_of_an_answer(model: QwenModel, disturb: Callable[[], None]) -> list[int]:
    cache = model.make_cache(40)
    model.extend(IDS[:-1], cache)
    tokens = model.greedy(IDS[-1], cache, limit=20)
    first = [next(tokens) for _ in range(3)]
    disturb()
    return first + list(tokens)


def answer(model: QwenModel) -> list[int]:
    return rest_of_an_answer(model, lambda: None)


def test_a_file_that_becomes_shorter(model: QwenModel, folder: Path) -> None:
    with pytest.raises(WeightsError, match=r"became shorter after it was opened|was changed while it was in use"):
        rest_of_an_answer(model, lambda: os.truncate(folder / "model.safetensors", 5000))


def test_a_file_that_is_written_to(model: QwenModel, folder: Path) -> None:
    def write() -> None:
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))

    with pytest.raises(WeightsError, match="was changed while it was in use"):
        rest_of_an_answer(model, write)


def test_a_file_that_is_replaced_stays_what_it_was(model: QwenModel, folder: Path) -> None:
    expected = answer(model)

    def replace() -> None:
        other = folder / "other"
        other.write_bytes(bytes((folder / "model.safetensors").stat().st_size))
        other.replace(folder / "model.safetensors")

    assert rest_of_an_answer(model, replace) == expected


def test_a_file_that_is_replaced_before_it_is_opened_again(device: Device, folder: Path) -> None:
    with ModelWeights.open(folder) as weights:
        same = folder / "same"
        shutil.copyfile(folder / "model.safetensors", same)
        same.replace(folder / "model.safetensors")
        before = device.memory().ours
        with pytest.raises(WeightsError, match="were replaced while they were in use"):
            QwenModel.load(weights, device, split=FROM_DISK)
        device.collect()  # type: ignore[attr-defined]
        assert device.memory().ours == before


@pytest.mark.parametrize("after", [0, 7, 40])
def test_a_disk_that_fails(model: QwenModel, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """And works again: the next answer is right."""
    expected, real = answer(model), _safetensors._preadv
    assert real is not None
    left = [after]

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with pytest.raises(WeightsError, match=r"cannot be read at byte .* Input/output error"):
        rest_of_an_answer(model, lambda: monkeypatch.setattr(_safetensors, "_preadv", preadv))
    monkeypatch.undo()
    assert answer(model) == expected


@pytest.mark.parametrize("at", [at if at in (0, 3, 7) else pytest.param(at, marks=pytest.mark.soak) for at in range(8)])
def test_ctrl_c_between_any_two_layers(model: QwenModel, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    expected, send, calls = answer(model), DeviceWeights.send, [0]
    logits = model.forward(IDS)

    def interrupted(weights: DeviceWeights, i: int) -> None:
        calls[0] += 1
        if calls[0] > at // 2:
            if at % 2:
                send(weights, i)
            raise KeyboardInterrupt
        send(weights, i)

    with pytest.raises(KeyboardInterrupt):
        rest_of_an_answer(model, lambda: monkeypatch.setattr(DeviceWeights, "send", interrupted))
    monkeypatch.undo()
    assert np.array_equal(model.forward(IDS), logits)
    assert answer(model) == expected


def test_ctrl_c_while_reading_ends_the_threads(model: QwenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, real = answer(model), _safetensors._preadv
    assert real is not None
    began = threading.Event()

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        began.set()
        time.sleep(0.2)
        return real(descriptor, buffers, offset)

    def press() -> None:
        began.wait(10)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)  # the impatient press it twice

    presser = threading.Thread(target=press)

    def disturb() -> None:
        monkeypatch.setattr(_safetensors, "_preadv", slow)
        presser.start()

    with pytest.raises(KeyboardInterrupt):
        rest_of_an_answer(model, disturb)
    presser.join()
    monkeypatch.undo()
    assert answer(model) == expected
