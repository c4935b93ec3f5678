"""What a device is on every graphics API: how it moves bytes, waits, gives back, and closes. See `api.Device`."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections import deque
from types import TracebackType
from typing import Any, Self

from xinfer.errors import DeviceHungError, DeviceLostError
from xinfer.gpu.api import Bindable, BufferSlice, Bytes, DeviceInfo, MemoryStatus, Stage, Ticket

CLOSE_TIMEOUT_S = 10.0


class NativeDevice:
    """A device of a graphics API, which adds how it is opened and how work is handed to it."""

    info: DeviceInfo
    core: Any  # the backend's own, all five
    allocator: Any
    _queue: Any
    _transfer_queue: Any  # `_queue` itself where there is no other
    _transfers: Any

    def __init__(self) -> None:
        self._trash: deque[tuple[int, int, tuple[Any, ...]]] = deque()  # values of both queues, and what then goes
        self._trash_lock = threading.Lock()

    def _slice(self, item: Bindable) -> BufferSlice:
        """A whole buffer as a slice; a slice as it is. Raises TypeError for another backend's."""
        raise NotImplementedError

    def _progress(self, ticket: Ticket) -> str:
        """How far a submission has come, for a message; "" where that cannot be told."""
        del ticket
        return ""

    def _save(self) -> None:
        """The device is about to close, and in good health."""

    def _closed(self) -> None:
        """The device is closed."""

    def _abandoned(self) -> None:
        """The device hangs, and keeps what it holds."""

    def wait(self, ticket: Ticket, timeout_s: float = 60.0, *, spin_s: float = 0.0) -> None:
        """Block until `ticket` has ended; see `api.Device.wait`."""
        self.core.ensure_usable()
        if self._queue.spin(ticket.value, min(spin_s, timeout_s)) or self._queue.wait(ticket.value, timeout_s):
            return
        raise DeviceHungError(
            f"{ticket.label!r} has not ended after {timeout_s:.1f} s{self._progress(ticket)}; "
            "the device may be hung, or the work too much for it",
            self.core.hung(repr(ticket.label)),
        )

    def poll(self, ticket: Ticket) -> bool:
        """Whether `ticket` has ended."""
        self.core.ensure_usable()
        ended: bool = self._queue.completed() >= ticket.value
        return ended

    def upload(self, target: Bindable, data: Bytes) -> None:
        """Write `data` (as long as `target`) into device memory; `data` may be reused on return."""
        self.core.ensure_usable()
        self._transfers.upload(self._slice(target), data)

    @property
    def stage_bytes(self) -> int:
        """The size of the largest stage."""
        size: int = self._transfers.chunk
        return size

    def stage(self, size: int, *, wait: bool = True) -> Stage | None:
        """`size` bytes that are filled by whoever can, and then sent; see `api.Device.stage`."""
        self.core.ensure_usable()
        stage: Stage | None = self._transfers.stage(size, wait=wait)
        return stage

    def mapped(self, target: Bindable) -> memoryview:
        """The bytes themselves of a buffer that is `in_place`, behind the submitted work that uses it."""
        self.core.ensure_usable()
        view: memoryview = self._transfers.mapped(self._slice(target))
        return view

    def transfer(self, source: Bindable, target: Bindable) -> None:
        """Copy from an upload buffer into device memory, in order as an upload."""
        self.core.ensure_usable()
        self._transfers.transfer(self._slice(source), self._slice(target))

    def flush_uploads(self, timeout_s: float = 60.0) -> None:
        """Block until every upload has arrived."""
        self.core.ensure_usable()
        self._transfers.flush(timeout_s)

    def download(self, source: Bindable, timeout_s: float = 60.0) -> bytes:
        """Read device memory after everything submitted before."""
        self.core.ensure_usable()
        read: bytes = self._transfers.download(self._slice(source), timeout_s)
        return read

    def memory(self) -> MemoryStatus:
        """How full the device memory is."""
        self.core.ensure_usable()
        status: MemoryStatus = self.allocator.status()
        return status

    def limit_memory(self, n_bytes: int | None) -> None:
        """Let device buffers take so much at most; the peak begins anew."""
        self.allocator.meter.set_limit(n_bytes)

    def retire(self, *handles: Any) -> None:
        """Destroy these once the work in flight has ended."""
        if self.core.closed or self.core.forked:
            return
        if self.core.lost is None:
            self._transfers.kick()  # uploads not yet on their way may be into what goes
        with self._trash_lock:
            self._trash.append((self._queue.submitted, self._transfer_queue.submitted, handles))
        self.collect()

    def collect(self) -> None:
        """Destroy what was released and is no longer in use."""
        if not self._trash or self.core.lost is not None:
            return
        with self._trash_lock:
            try:
                compute, transfer = self._queue.completed(), self._transfer_queue.completed()
            except DeviceLostError:
                return
            while self._trash and self._trash[0][0] <= compute and self._trash[0][1] <= transfer:
                for handle in self._trash[0][2]:
                    self.core.destroy(handle)
                self._trash.popleft()

    def close(self) -> None:
        """Wait (bounded) for the work in flight and give everything back; may be called twice."""
        if self.core.closed:
            return
        if self.core.forked:
            self.core.abandon()
            return
        self._transfers.drain(CLOSE_TIMEOUT_S)
        if not self._idle():
            self.core.abandon()
            self._abandoned()
            warnings.warn(
                f"{self.info.name} is still busy {CLOSE_TIMEOUT_S:.0f} s after it was to be closed; "
                "what it holds comes back when the process ends",
                ResourceWarning,
                stacklevel=2,
            )
            return
        if self.core.lost is None:
            self._save()
        self._transfers.release()
        self.collect()
        self.core.trail.read = None
        self.core.close()
        self._closed()

    def _idle(self) -> bool:
        if self.core.lost is not None:
            return True
        end = time.monotonic() + CLOSE_TIMEOUT_S  # for both queues together
        try:
            return all(
                queue.wait(queue.submitted, max(0.0, end - time.monotonic()))
                for queue in (self._queue, self._transfer_queue)
                if queue.submitted
            )
        except DeviceLostError:
            return True

    def __del__(self) -> None:
        core = getattr(self, "core", None)
        if core is not None and not sys.is_finalizing() and not core.closed and not core.forked:
            warnings.warn(f"{core.adapter.info.name} was never closed", ResourceWarning, source=self, stacklevel=1)
            self.close()

    def __enter__(self) -> Self:
        """The device itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()
