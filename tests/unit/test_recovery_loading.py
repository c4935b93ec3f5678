"""What is half made when loading goes wrong: it is let go, and nobody goes on without the canary that was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xinfer import recovery
from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.recovery import RecoveringModel

ERRORS: list[BaseException] = [OutOfMemoryError("none left", needed=1, free=0), KeyboardInterrupt(), RuntimeError("?")]


class Loaded:
    """A model on a device, as far as it matters here."""

    def __init__(self) -> None:
        self.closed = 0
        self.device: Any = SimpleNamespace(info=None)
        config = SimpleNamespace(vocab_size=100)
        self.model = SimpleNamespace(config=config, steps=None, token_seconds=lambda: 1.0)

    def close(self) -> None:
        self.closed += 1


class Canary:
    """One that is content, once it could be made."""

    failure: BaseException | None = None

    def __init__(self, *_: object) -> None:
        if self.failure is not None:
            raise self.failure

    def check(self) -> None:
        pass

    def release(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _canary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "Canary", Canary)
    monkeypatch.setattr(Canary, "failure", None)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_canary_that_cannot_be_made_leaves_no_model_open(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(Canary, "failure", error)
    made: list[Loaded] = []

    def load(*_: object) -> Loaded:
        made.append(Loaded())
        return made[-1]

    with pytest.raises(type(error)):
        RecoveringModel(load, canary=lambda ids: [])
    assert [loaded.closed for loaded in made] == [1]


def test_later_calls_do_not_go_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Loaded] = []

    def load(*_: object) -> Loaded:
        made.append(Loaded())
        return made[-1]

    model = RecoveringModel(load, canary=lambda ids: [])
    model._drop()  # as after a loss
    monkeypatch.setattr(Canary, "failure", ERRORS[0])
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            model.token_seconds()
    monkeypatch.setattr(Canary, "failure", None)
    assert model.token_seconds() == 1.0
    assert [loaded.closed for loaded in made] == [1, 1, 1, 0]
    model.close()
    with pytest.raises(DeviceError, match="closed"):
        model.token_seconds()
