"""Faults for the tests of recovery: Vulkan devices that die, hang or lose their memory where a plan says so.

The seam is `gpu.open_device`; nothing in the product knows of it. A fault poisons every buffer of the device, unless it
hangs: then nothing ends any more. What a lost device says is made by the product's own code from a VkResult; how far it
came is written where a real one writes it.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import pytest

from xinfer import gpu
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._trail import MARKER
from xinfer.gpu._vk.memory import VulkanBuffer
from xinfer.gpu._vk.recording import VulkanRecording
from xinfer.gpu.api import Bindable, BufferKind, Bytes, Device, KernelCode, Recording, Stage, Ticket
from xinfer.gpu.vulkan import VulkanDevice

T = TypeVar("T")
Kind = Literal["lost", "hung", "garbage"]


@dataclass
class Fault:
    """What goes wrong, and where: at the n-th call of the device, or whenever an op of this label is submitted."""

    kind: Kind
    event: int | None = None
    op: str | None = None
    skip: int = 0  # submissions of the op that go well before
    times: int = 1

    def __str__(self) -> str:
        return f"{self.kind} at {self.op or f'call {self.event}'}"


@dataclass
class Plan:
    """One fault, and what the devices did: shared by all that are opened in a test."""

    fault: Fault | None = None
    events: list[str] = field(default_factory=list)
    struck: int = 0
    never_loads: bool = False
    devices: list[FaultyDevice] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # weights are loaded by several threads

    def open(self, selector: str, *, debug: bool = False, mark_ops: bool = False) -> Device:
        """In place of `gpu.open_device`."""
        info = gpu.choose_device(selector)
        assert info is not None
        device = FaultyDevice(self, info.index, debug=debug, mark_ops=mark_ops)
        self.devices.append(device)
        return device

    def strikes(self, event: str) -> bool:
        """Count a call; whether the fault is now."""
        fault = self.fault
        with self.lock:
            self.events.append(event)
            if self.never_loads and event == "flush":
                self.struck += 1
                return True
            if fault is None or self.struck >= fault.times or fault.event != len(self.events) - 1:
                return False
            self.struck += 1
            return True

    def strikes_op(self, labels: Sequence[str]) -> bool:
        """Whether the fault is at one of these ops, now."""
        fault = self.fault
        if fault is None or self.struck >= fault.times or fault.op not in labels:
            return False
        fault.skip -= 1
        if fault.skip >= 0:
            return False
        self.struck += 1
        return True


class FaultyDevice(VulkanDevice):
    """A Vulkan device that follows a plan."""

    def __init__(self, plan: Plan, index: int, *, debug: bool = False, mark_ops: bool = False) -> None:
        self.plan = plan
        self.buffers: weakref.WeakSet[VulkanBuffer] = weakref.WeakSet()
        self.dying = False
        super().__init__(index, debug=debug, mark_ops=mark_ops)

    def create_buffer(self, size: int, kind: BufferKind = "device", label: str = "") -> VulkanBuffer:
        self._event(f"create {label}")
        buffer = super().create_buffer(size, kind, label)
        self.buffers.add(buffer)
        return buffer

    def create_kernel(self, code: KernelCode) -> Any:
        self._event(f"kernel {code.id}")
        return super().create_kernel(code)

    def create_recording(self, label: str) -> VulkanRecording:
        self._event(f"record {label}")
        return super().create_recording(label)

    def submit(self, recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
        self._event(f"submit {recording.label}")
        assert isinstance(recording, VulkanRecording)
        chosen = [part.name for part in recording.choose(segments)]
        for index, (name, ops) in enumerate(recording._notes.segments):
            labels = [op.label for op in ops]
            if name in chosen and self.plan.strikes_op(labels):
                assert self.plan.fault is not None
                assert self.plan.fault.op is not None
                return self._die_in(recording, segments, index, labels.index(self.plan.fault.op))
        return super().submit(recording, segments)

    def wait(self, ticket: Ticket, timeout_s: float = 60.0, *, spin_s: float = 0.0) -> None:
        self._event(f"wait {ticket.label}")
        super().wait(ticket, timeout_s, spin_s=spin_s)

    def upload(self, target: Bindable, data: Bytes) -> None:
        self._event(f"upload {_label(target)}")
        super().upload(target, data)

    def stage(self, size: int, *, wait: bool = True) -> Stage | None:
        self._event(f"stage {size}")
        return super().stage(size, wait=wait)

    def mapped(self, target: Bindable) -> memoryview:
        self._event(f"upload {_label(target)}")
        return super().mapped(target)

    def flush_uploads(self, timeout_s: float = 60.0) -> None:
        self._event("flush")
        super().flush_uploads(timeout_s)

    def download(self, source: Bindable, timeout_s: float = 60.0) -> bytes:
        self._event(f"download {_label(source)}")
        return super().download(source, timeout_s)

    def reap(self) -> None:
        """What the product had to leave because the device was busy for ever: given back here, so that all is."""
        for name in ("wait", "spin", "completed"):
            vars(self._queue).pop(name, None)
        self.core.closed = False
        super().close()

    def _event(self, name: str) -> None:
        if self.plan.strikes(name):
            self._strike()
        if self.dying and self.core.lost is None:
            self.core.check(vk.VK_ERROR_DEVICE_LOST, "vkWaitSemaphores")

    def _die_in(self, recording: VulkanRecording, segments: Sequence[str] | None, index: int, op: int) -> Ticket:
        """Run it, and then leave everything as if the device had stopped at one op."""
        ticket = super().submit(recording, segments)
        super().wait(ticket)
        self._strike()
        assert self.markers is not None
        ended = op if self.core.trail.each_op else 0
        self.markers.write(MARKER.pack(recording._notes.number, index, ended))
        return ticket

    def _strike(self) -> None:
        assert self.plan.fault is not None
        if self._queue.submitted:
            self._queue.wait(self._queue.submitted, 60)
        if self.plan.fault.kind != "hung":
            self._poison()
        if self.plan.fault.kind == "lost":
            self.dying = True
        elif self.plan.fault.kind == "hung":
            seen = self._queue.submitted - 1
            patched: dict[str, Any] = {"wait": _never, "spin": _never, "completed": lambda: seen}
            vars(self._queue).update(patched)

    def _poison(self) -> None:
        """Garbage in every buffer, the host's too."""
        noise = np.random.default_rng(self.plan.struck)
        for buffer in self.buffers:
            if buffer.released:
                continue
            # A garbage position would have attention loop over billions of keys: a test of patience.
            most = 64 if buffer.label.endswith(("state", "rows")) else 1 << 32
            garbage = noise.integers(0, most, -(-buffer.size // 4), np.uint32).tobytes()[: buffer.size]
            if buffer.mapped is not None:
                with buffer.view(0, buffer.size) as view:
                    view[:] = garbage
            else:
                super().upload(buffer[:], garbage)


def _never(*_: float) -> bool:
    return False


def _label(item: Bindable) -> str:
    return item.buffer.label if hasattr(item, "buffer") else item.label


@contextmanager
def planned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """Devices that follow a plan, until the block ends. Nothing of any of them may be left then."""
    plan = Plan()
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "open_device", plan.open)
        yield plan
    for device in plan.devices:
        assert device.core.closed, "the product has not closed a device"
        if device.live_objects():
            assert plan.fault is not None
            assert plan.fault.kind == "hung", device.live_objects()
            device.reap()
        assert device.live_objects() == {}


def spread(cases: Sequence[T], count: int, seed: int) -> list[T]:
    """`count` of the cases, drawn evenly."""
    return random.Random(seed).sample(cases, count)
