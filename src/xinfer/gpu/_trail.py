"""How far a device came: what recordings do, noted by number, and the marker words that the device writes as it goes.

A marker is three words in a buffer that the host reads: the recording's number, the segment's, and how many of its ops
have ended. One at the start of each segment costs next to nothing; with `each_op` there is one behind every op too,
each behind a barrier of its own, so that the op that did not end is known.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xinfer.errors import Loss, LostOp
from xinfer.gpu.api import BufferSlice, DebugMessage, DeviceInfo, Groups, KernelCode, RemovedReason

MARKER = struct.Struct("<3I")
MESSAGES_SHOWN = 3
HUNG = RemovedReason("TIMEOUT", 0)  # the reason of a loss that no driver told of: work has not ended in its time


@dataclass(frozen=True, slots=True)
class Noted:
    """One command: a dispatch, or a copy or fill, which has no kernel."""

    label: str
    code: KernelCode | None = None
    groups: Groups = (1, 1, 1)
    constants: bytes = b""
    parts: tuple[tuple[str, int], ...] = ()  # label and bytes of what is bound

    def named(self) -> LostOp:
        """As an error names it."""
        bound = ", ".join(f"{label!r} {size} bytes" for label, size in self.parts)
        if self.code is None:
            return LostOp(label=self.label, shape=bound)
        words = struct.unpack(f"<{len(self.constants) // 4}I", self.constants)
        names = self.code.constant_names or tuple(f"c{i}" for i in range(len(words)))
        constants = " ".join(f"{name}={word}" for name, word in zip(names, words, strict=False))
        groups = " x ".join(map(str, self.groups))
        shape = "; ".join(part for part in (f"{groups} workgroups", constants, bound) if part)
        return LostOp(label=self.label, variant=self.code.id, shape=shape)


@dataclass(eq=False)
class Notes:
    """What one recording does, by segment. It is found by its number for as long as the recording lives."""

    label: str
    number: int
    segments: list[tuple[str, list[Noted]]] = field(default_factory=list)

    def begin(self, segment: str) -> bytes:
        """A segment begins: the marker to write at its start."""
        self.segments.append((segment, []))
        return self.marker()

    def add(self, label: str, parts: Sequence[BufferSlice], **details: object) -> None:
        """A command of the segment."""
        bound = tuple((part.buffer.label, part.size) for part in parts)
        self.segments[-1][1].append(Noted(label, parts=bound, **details))  # type: ignore[arg-type]

    def marker(self) -> bytes:
        """The marker that says that everything so far has ended."""
        return MARKER.pack(self.number, len(self.segments) - 1, len(self.segments[-1][1]))


class Trail:
    """The notes of a device's recordings, and where the device writes its markers."""

    def __init__(self) -> None:
        self.each_op = False
        self.read: Callable[[], bytes] | None = None  # the marker words, as they are now
        self._notes: weakref.WeakValueDictionary[int, Notes] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    def notes(self, label: str) -> Notes:
        """Notes for a new recording."""
        notes = Notes(label, next(self._numbers))
        self._notes[notes.number] = notes
        return notes

    def loss(
        self,
        info: DeviceInfo,
        *,
        call: str,
        reason: str,
        code: int = 0,
        details: Sequence[str] = (),
        messages: Sequence[DebugMessage] = (),
    ) -> Loss:
        """What can be told about a loss that has just been noticed."""
        work, finished, suspects = self._where()
        return Loss(
            call=call,
            reason=reason,
            code=code,
            details=tuple(details),
            messages=tuple(str(message) for message in messages[-MESSAGES_SHOWN:]),
            adapter=f"{info.api}:{info.index} {info.name}",
            driver=f"{info.driver} {info.driver_version}",
            work=work,
            finished=finished,
            suspects=suspects,
        )

    def _where(self) -> tuple[str, str, tuple[LostOp, ...]]:
        """What ran last, the last op of it that has ended, and those of which one may have been running."""
        number, index, ended = MARKER.unpack_from(self.read()) if self.read else (0, 0, 0)
        notes = self._notes.get(number)
        if notes is None or index >= len(notes.segments):
            return "", "", ()
        name, ops = notes.segments[index]
        work = f"{notes.label!r}, segment {name!r}" if name else repr(notes.label)
        before = ops[:ended] or (notes.segments[index - 1][1] if index else [])
        finished = before[-1].label if before else ""
        running = ops[ended : ended + 1] if self.each_op else ops
        return work, finished, tuple(op.named() for op in running)
