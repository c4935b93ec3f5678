"""What a recording is on every graphics API: its segments, what they use, and whether it may run. See `api.Recording`.

Each API adds how commands are written down.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from xinfer.errors import DeviceError
from xinfer.gpu._kernel import NativeKernel
from xinfer.gpu.api import BufferSlice

UNFINISHED = "it is not finished"
RELEASED = "it is released"


class NativeSegment:
    """One segment of a recording, and what has to be known about it to keep order."""

    def __init__(self, recording: Any, name: str) -> None:
        self.recording = recording
        self.name = name
        self.buffers: set[Any] = set()
        self.last_value = 0  # of the compute queue, when it was last submitted

    def break_off(self, reason: str) -> None:
        """A buffer went: the recording must not be submitted again."""
        self.recording.broken = reason


S = TypeVar("S", bound=NativeSegment)


class NativeRecording(ABC, Generic[S]):
    """Ordered segments of commands. Segments end with a barrier, so that one sees what those before it wrote."""

    def __init__(self, owner: Any, label: str) -> None:
        self.owner = owner
        self.core = owner.core
        self.label = label
        self.parts: list[S] = []
        self.broken: str | None = UNFINISHED
        self._finished = False
        self._kernels: set[NativeKernel] = set()
        self._notes = owner.core.trail.notes(label)

    @abstractmethod
    def _open(self, name: str) -> None:
        """Append a segment to `parts`."""

    @abstractmethod
    def _close(self) -> None:
        """The last command has been recorded; there is a segment."""

    @abstractmethod
    def _give_back(self) -> None:
        """Retire the native objects."""

    @property
    def segments(self) -> tuple[str, ...]:
        """Names of the segments, in order."""
        return tuple(part.name for part in self.parts)

    def segment(self, name: str) -> None:
        """Open the next segment; commands before the first call go to one with the name ""."""
        self._ensure_open()
        if name in self.segments:
            raise ValueError(f"recording {self.label!r} has a segment {name!r} already")
        self._open(name)

    def finish(self) -> None:
        """Close it. Only a finished recording is submitted."""
        self._part()
        self._close()
        self._finished = True
        if self.broken == UNFINISHED:
            self.broken = None

    def release(self) -> None:
        """Give it back, after the work in flight that uses it; may be called twice."""
        if self.broken == RELEASED:
            return
        self.broken = RELEASED
        self._finished = True
        for part in self.parts:
            for buffer in part.buffers:
                buffer.drop_user(part)
        self._give_back()
        for kernel in self._kernels:
            kernel.drop()
        self._kernels.clear()

    def choose(self, names: Sequence[str] | None) -> list[S]:
        """Segments by name, in the order of recording. Raises where it cannot be submitted."""
        if self.broken is not None:
            raise DeviceError(f"recording {self.label!r} cannot be submitted: {self.broken}")
        if names is None:
            return self.parts
        unknown = sorted(set(names) - set(self.segments))
        if unknown:
            raise ValueError(f"recording {self.label!r} has no segments {unknown}, only {list(self.segments)}")
        return [part for part in self.parts if part.name in names]

    def _ensure_open(self) -> None:
        if self._finished:
            raise DeviceError(f"recording {self.label!r} is finished: make a new one")
        self.core.ensure_usable()

    def _part(self) -> S:
        """The segment that commands go to."""
        self._ensure_open()
        if not self.parts:
            self.segment("")
        return self.parts[-1]

    def _use(self, slices: Sequence[BufferSlice]) -> None:
        """A command of the last segment touches these."""
        part = self.parts[-1]
        for item in slices:
            buffer: Any = item.buffer
            if buffer not in part.buffers:
                part.buffers.add(buffer)
                buffer.add_user(part)

    def _keep(self, kernel: NativeKernel) -> None:
        """A command runs this kernel."""
        if kernel not in self._kernels:
            kernel.retain()
            self._kernels.add(kernel)
