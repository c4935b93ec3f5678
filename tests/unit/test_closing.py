"""How long closing a device waits for what is under way, on queues that are made up."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from xinfer.gpu._device import CLOSE_TIMEOUT_S, NativeDevice


class Queue:
    """Its work takes so many seconds of a clock that only it moves."""

    submitted = 1

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self.allowed = 0.0

    def wait(self, _value: int, timeout_s: float) -> bool:
        self.allowed = timeout_s
        self.clock[0] += min(self.seconds, timeout_s)
        return self.seconds <= timeout_s


@pytest.mark.parametrize(("share", "idle"), [(0.4, True), (0.9, False)])
def test_both_queues_share_the_time_that_closing_waits(
    monkeypatch: pytest.MonkeyPatch, share: float, idle: bool
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    device = NativeDevice()
    device.core = SimpleNamespace(lost=None, closed=True, forked=False)
    device._queue, device._transfer_queue = queues = [Queue(clock, share * CLOSE_TIMEOUT_S) for _ in range(2)]
    assert device._idle() == idle
    assert queues[0].allowed == pytest.approx(CLOSE_TIMEOUT_S)
    assert queues[1].allowed == pytest.approx((1 - share) * CLOSE_TIMEOUT_S)
