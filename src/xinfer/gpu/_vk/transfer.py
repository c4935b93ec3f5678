"""Uploads and downloads: through a ring of staging chunks, or in place where the host reaches device memory.

Uploads run on a transfer queue of their own where there is one. Order is kept by what was submitted: an upload waits
for the submitted work that uses its target, and later work that uses the target waits for the upload.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref

from xinfer.errors import DeviceHungError
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._checks import check_transfer
from xinfer.gpu._trail import HUNG
from xinfer.gpu._vk.memory import BufferOwner, VulkanBuffer, buffer_of
from xinfer.gpu._vk.queue import Queue
from xinfer.gpu._vk.recording import Segment
from xinfer.gpu.api import BufferSlice, Bytes
from xinfer.gpu.native import copy_bytes

CHUNK = 16 << 20
CHUNKS = 4
SMALL = 256 << 10  # smaller uploads share a chunk and one submission
TIMEOUT_S = 60.0


class Chunk:
    """A staging buffer with a command buffer to copy out of it or into it."""

    def __init__(self, owner: BufferOwner, queue: Queue, label: str, *, readback: bool = False) -> None:
        core = owner.core
        self.buffer = VulkanBuffer(owner, CHUNK, "readback" if readback else "upload", label)
        flags = vk.VK_COMMAND_POOL_CREATE_TRANSIENT_BIT | vk.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT
        self.family = queue.family
        self.pool = core.command_pool(queue.family, label, flags)
        self.commands = core.command_buffers(self.pool, 1)
        self.value = 0  # with which its last submission ends
        self.used = 0
        self.targets: list[BufferSlice] = []

    def copy(self, owner: BufferOwner, offset: int, target: BufferSlice, *, source: VulkanBuffer | None = None) -> None:
        """Record a copy from `offset` in the chunk, or in `source`, into `target`."""
        buffer, start = buffer_of(target), target.offset
        if any(
            t.buffer is buffer and t.offset < start + target.size and start < t.offset + t.size for t in self.targets
        ):
            owner.core.barrier(self.commands[0], self.family)
        region = vk.VkBufferCopy(srcOffset=offset, dstOffset=start, size=target.size)
        native = (source or self.buffer).native
        owner.core.vk.vkCmdCopyBuffer(self.commands[0], native, buffer.native, 1, byref(region))
        self.targets.append(target)

    def release(self, owner: BufferOwner) -> None:
        """Give its objects back."""
        self.buffer.release()
        owner.retire(self.pool)


class Transfers:
    """Moves bytes between the host and device memory."""

    def __init__(self, owner: BufferOwner, compute: Queue, queue: Queue) -> None:
        self.owner = owner
        self.core = owner.core
        self.compute = compute
        self.queue = queue  # the compute queue itself where there is no other
        self._lock = threading.RLock()  # guards what follows
        self._room = threading.Condition(self._lock)
        self._chunks = 0
        self._idle: deque[Chunk] = deque()  # the longest idle first; the last submissions may still be in flight
        self._open: Chunk | None = None  # gathers small uploads
        self._back: Chunk | None = None
        self._pending: dict[VulkanBuffer, int] = {}  # uploads in flight on the transfer queue

    def upload(self, target: BufferSlice, data: Bytes) -> None:
        """Write `data` into `target`."""
        buffer_of(target).ensure_alive()
        source = memoryview(data).cast("B")
        if len(source) != target.size:
            raise ValueError(f"cannot upload {len(source)} bytes into {target.size} of {target.buffer.label!r}")
        if target.size <= SMALL and not self._direct(target):
            self._upload_small(target, source)
            return
        done = 0

        def fill(piece: memoryview) -> None:
            nonlocal done
            copy_bytes(piece, source[done : done + len(piece)])
            done += len(piece)

        self.upload_from(target, fill)

    def upload_from(self, target: BufferSlice, fill: Callable[[memoryview], None]) -> None:
        """Let `fill` write the pieces of `target`, front to back."""
        buffer_of(target).ensure_alive()
        if self._direct(target):
            self._wait_for(self.compute, self._last_use(buffer_of(target)), "the work that uses it")
            with buffer_of(target).view(target.offset, target.size) as view:
                fill(view)
            return
        self.kick()
        for start in range(0, target.size, CHUNK):
            piece = target[start : min(start + CHUNK, target.size)]
            with self._taken_chunk() as chunk:
                with chunk.buffer.view(0, piece.size) as view:
                    fill(view)
                with self._lock:
                    self._begin(chunk)
                    chunk.copy(self.owner, 0, piece)
                    self._submit(chunk)

    def transfer(self, source: BufferSlice, target: BufferSlice) -> None:
        """Copy `source`, mapped memory that stays as it is, into `target`."""
        for part in (source, target):
            buffer_of(part).ensure_alive()
        check_transfer(source, target)
        self.kick()
        with self._taken_chunk() as chunk, self._lock:
            self._begin(chunk)
            chunk.copy(self.owner, source.offset, target, source=buffer_of(source))
            self._submit(chunk)

    def kick(self) -> None:
        """Submit the small uploads gathered so far."""
        if self._open is None:
            return
        with self._lock:
            chunk, self._open = self._open, None
            if chunk:
                try:
                    self._submit(chunk)
                finally:
                    self._give(chunk)

    def waits_for(self, segments: Iterable[Segment]) -> list[tuple[Queue, int]]:
        """The uploads that must have arrived before these segments run."""
        if not self._pending:
            return []
        with self._lock:
            done = self.queue.completed()
            self._pending = {buffer: value for buffer, value in self._pending.items() if value > done}
            values = [v for buffer, v in self._pending.items() if any(buffer in s.buffers for s in segments)]
        return [(self.queue, max(values))] if values else []

    def flush(self, timeout_s: float) -> None:
        """Block until every upload has arrived."""
        self.kick()
        self._wait_for(self.queue, self.queue.submitted, "the uploads", timeout_s)

    def download(self, source: BufferSlice, timeout_s: float) -> bytes:
        """Read `source` after everything submitted before."""
        buffer = buffer_of(source)
        buffer.ensure_alive()
        self.flush(timeout_s)
        self._wait_for(self.compute, self.compute.submitted, "the work submitted before", timeout_s)
        if buffer.mapped is not None and buffer.cached:
            with buffer.view(source.offset, source.size) as view:
                return bytes(view)
        pieces = []
        with self._lock:
            if self._back is None:
                self._back = Chunk(self.owner, self.compute, "readback staging", readback=True)
            for start in range(0, source.size, CHUNK):
                piece = source[start : min(start + CHUNK, source.size)]
                pieces.append(self._read_back(self._back, piece, timeout_s))
        return b"".join(pieces)

    def release(self) -> None:
        """Give the staging memory back."""
        with self._lock:
            for chunk in (*self._idle, self._open, self._back):
                if chunk:
                    chunk.release(self.owner)
            self._idle.clear()
            self._open = self._back = None

    def _direct(self, target: BufferSlice) -> bool:
        return buffer_of(target).mapped is not None

    def _last_use(self, buffer: VulkanBuffer) -> int:
        return max((segment.last_value for segment in buffer.users()), default=0)

    def _upload_small(self, target: BufferSlice, source: memoryview) -> None:
        with self._lock:
            if self._open and self._open.used + len(source) > CHUNK:
                self.kick()
            chunk = self._open or self._open_chunk()
            with chunk.buffer.view(chunk.used, len(source)) as view:
                view[:] = source
            chunk.copy(self.owner, chunk.used, target)
            chunk.used += -(-len(source) // 16) * 16

    def _open_chunk(self) -> Chunk:
        chunk = self._take()
        try:
            self._begin(chunk)
        except BaseException:
            self._give(chunk)
            raise
        self._open = chunk
        return chunk

    def _begin(self, chunk: Chunk) -> None:
        chunk.targets.clear()
        chunk.used = 0
        self._restart(chunk.commands[0])
        self.core.barrier(chunk.commands[0], chunk.family)

    def _restart(self, commands: int | None) -> None:
        # Reset first: an interrupt may have left it half recorded.
        self.core.check(self.core.vk.vkResetCommandBuffer(commands, 0), "vkResetCommandBuffer")
        self.core.begin(commands, vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)

    def _submit(self, chunk: Chunk) -> None:
        """Send a chunk's copies off, behind the submitted compute work that uses their targets."""
        commands = chunk.commands[0]
        self.core.barrier(commands, chunk.family)
        self.core.check(self.core.vk.vkEndCommandBuffer(commands), "vkEndCommandBuffer")
        apart = self.queue is not self.compute
        last = max((self._last_use(buffer_of(t)) for t in chunk.targets), default=0)
        waits = [(self.compute, last)] if apart and last > self.compute.completed() else []
        try:
            self.queue.submit(chunk.commands, waits)
        finally:
            chunk.value = self.queue.submitted
            if apart:
                self._pending.update((buffer_of(t), chunk.value) for t in chunk.targets)
            chunk.targets.clear()

    @contextmanager
    def _taken_chunk(self) -> Iterator[Chunk]:
        chunk = self._take()
        try:
            yield chunk
        finally:
            self._give(chunk)

    def _take(self) -> Chunk:
        """A chunk that no work in flight uses; waits for one."""
        with self._room:
            while not self._idle:
                if self._chunks < CHUNKS:
                    chunk = Chunk(self.owner, self.queue, f"staging {self._chunks}")
                    self._chunks += 1
                    return chunk
                self.kick()
                if not self._idle and not self._room.wait(TIMEOUT_S):
                    raise DeviceHungError(
                        f"all staging chunks were in use for {TIMEOUT_S:.0f} s; is an upload stuck?",
                        self.core.loss("an upload", HUNG.name),
                    )
            chunk = self._idle.popleft()
        try:
            self._wait_for(self.queue, chunk.value, "the uploads before")
        except BaseException:
            self._give(chunk)
            raise
        return chunk

    def _give(self, chunk: Chunk) -> None:
        with self._room:
            self._idle.append(chunk)
            self._room.notify()

    def _read_back(self, chunk: Chunk, piece: BufferSlice, timeout_s: float) -> bytes:
        commands = chunk.commands[0]
        self._wait_for(self.compute, chunk.value, "the read before", timeout_s)
        self._restart(commands)
        region = vk.VkBufferCopy(srcOffset=piece.offset, dstOffset=0, size=piece.size)
        native = buffer_of(piece).native
        self.core.vk.vkCmdCopyBuffer(commands, native, chunk.buffer.native, 1, byref(region))
        self.core.barrier(commands, chunk.family, host=True)
        self.core.check(self.core.vk.vkEndCommandBuffer(commands), "vkEndCommandBuffer")
        try:
            self.compute.submit(chunk.commands)
        finally:
            chunk.value = self.compute.submitted
        self._wait_for(self.compute, chunk.value, "the copy", timeout_s)
        return chunk.buffer.read(0, piece.size)

    def _wait_for(self, queue: Queue, value: int, what: str, timeout_s: float = TIMEOUT_S) -> None:
        if value > queue.completed() and not queue.wait(value, timeout_s):
            raise DeviceHungError(
                f"a transfer waited {timeout_s:.0f} s for {what}, which has not ended; is the device hung?",
                self.core.loss("a transfer", HUNG.name),
            )
