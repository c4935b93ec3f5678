"""The KV cache on a device: one pool of blocks for every sequence, each behind its row of a block table.

A block holds the keys, or the values, of `block_tokens` tokens of one layer. The pool starts small and grows in steps:
new memory, a copy, and recordings that must be made again (`BlockPool.generation` tells). A sequence alone gets blocks
0, 1, 2, ...; what a sequence gives back, the next one gets.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from xinfer.errors import ContextLengthError, OutOfMemoryError, RequestError
from xinfer.gpu.api import Buffer, BufferSlice, Device

FIRST_TOKENS = 512  # what the pool holds at first
GROWTH = 4
FIRST_SEQUENCES = 16  # rows of the block table at first
AHEAD = 8  # blocks that a sequence takes at a time, so that the table is seldom written
ALIGNMENT = 256  # of every binding's offset, enough for every device


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one token takes in the cache."""

    n_layers: int
    token_bytes: int  # of its keys, or its values, in one layer
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of keys, or of values."""
        return self.token_bytes * self.block_tokens

    def half_bytes(self, n_blocks: int) -> int:
        """Bytes of the keys, or of the values, of one layer."""
        return round_up(self.block_bytes * n_blocks, ALIGNMENT)

    def total_bytes(self, n_blocks: int) -> int:
        """Bytes of everything."""
        return 2 * self.n_layers * self.half_bytes(n_blocks)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that hold n_tokens."""
        return -(-n_tokens // self.block_tokens)


@dataclass(slots=True)
class Lease:
    """What a sequence holds of the pool: a row of the block table and the blocks in it."""

    row: int | None = None
    blocks: list[int] = field(default_factory=list)


class BlockPool:
    """The blocks of all layers. Threads may take and give back at once; only one may run what uses them.

    Args:
        context: the most tokens of one sequence; the pool is not made larger than that before it has to be.
    """

    def __init__(self, device: Device, shape: CacheShape, *, context: int) -> None:
        self.shape = shape
        self.generation = 0  # changes whenever the buffers do
        self.n_blocks = 0
        self.n_rows = FIRST_SEQUENCES
        self.dropped: deque[Lease] = deque()  # leases of caches that are gone, to be taken back
        self._device = device
        self._lock = threading.RLock()  # guards what follows
        self._most_blocks = shape.blocks_for(context)
        self._layers: list[Buffer] = []
        self._table: Buffer | None = None
        self._entries = np.zeros((0, 0), np.uint32)  # (rows, blocks): what the table on the device holds
        self._free_blocks: list[int] = []  # heaps: the lowest numbers first
        self._free_rows: list[int] = []
        try:
            self._grow(min(shape.blocks_for(FIRST_TOKENS), self._most_blocks))
        except BaseException:
            self.release()
            raise

    @property
    def n_tokens(self) -> int:
        """Tokens that the pool holds in all."""
        return self.n_blocks * self.shape.block_tokens

    @property
    def table(self) -> BufferSlice:
        """The block table, u32 (rows, table_stride)."""
        assert self._table is not None
        return self._table[:]

    @property
    def table_stride(self) -> int:
        """Entries of a row of the block table."""
        return self._entries.shape[1]

    def keys(self, layer: int) -> BufferSlice:
        """The blocks of keys of a layer."""
        return self._layers[layer][: self.shape.half_bytes(self.n_blocks)]

    def values(self, layer: int) -> BufferSlice:
        """The blocks of values of a layer."""
        half = self._layers[layer].size // 2
        return self._layers[layer][half : half + self.shape.half_bytes(self.n_blocks)]

    def make_cache(self, capacity: int) -> KVCache:
        """An empty cache for at most `capacity` tokens; it takes blocks when tokens come."""
        return KVCache(self, capacity)

    def assign(self, lease: Lease, n_blocks: int) -> None:
        """Give a sequence a row, and blocks until it has `n_blocks`, some more where there are.

        Raises:
            OutOfMemoryError: the device has no memory for them; the message says how many tokens would fit.
        """
        with self._lock:
            self._take_back()
            if lease.row is None:
                if not self._free_rows:
                    self._grow_table(2 * self.n_rows, self.n_blocks)
                lease.row = heapq.heappop(self._free_rows)
            missing = n_blocks - len(lease.blocks)
            if missing <= 0:
                return
            if missing > len(self._free_blocks):
                self._grow(self.n_blocks + missing - len(self._free_blocks))
            first = len(lease.blocks)
            for _ in range(min(max(missing, AHEAD), len(self._free_blocks))):
                lease.blocks.append(heapq.heappop(self._free_blocks))
            self._write_entries(lease.row, first, lease.blocks[first:])

    def give_back(self, lease: Lease, n_blocks: int) -> None:
        """Take the blocks of a sequence from number `n_blocks` on."""
        with self._lock:
            while len(lease.blocks) > n_blocks:
                heapq.heappush(self._free_blocks, lease.blocks.pop())

    def release(self) -> None:
        """Give all memory back; may be called twice."""
        with self._lock:
            for buffer in (*self._layers, self._table):
                if buffer is not None:
                    buffer.release()
            self._layers.clear()
            self._table = None
            self.generation += 1

    def _take_back(self) -> None:
        while self.dropped:
            lease = self.dropped.popleft()
            self.give_back(lease, 0)
            if lease.row is not None:
                heapq.heappush(self._free_rows, lease.row)
                lease.row = None

    def _write_entries(self, row: int, first: int, blocks: list[int]) -> None:
        """Put block numbers into a row of the table; what it holds already is not written again."""
        new = np.array(blocks, np.uint32)
        if np.array_equal(self._entries[row, first : first + len(new)], new):
            return
        self._entries[row, first : first + len(new)] = new
        start = 4 * (row * self.table_stride + first)
        self._device.upload(self.table[start : start + 4 * len(new)], new.tobytes())

    def _grow(self, needed: int) -> None:
        """Make room for `needed` blocks in all: for more than that, where memory allows."""
        target = self._checked_size(needed)
        old_size = self.shape.block_bytes * self.n_blocks
        half = self.shape.half_bytes(target)
        self.generation += 1
        for layer in range(self.shape.n_layers):
            new = self._device.create_buffer(2 * half, "device", f"KV cache, layer {layer}")
            if layer >= len(self._layers):
                self._layers.append(new)
                continue
            if old_size:
                self._copy(layer, new, old_size, half)
            self._layers[layer].release()
            self._layers[layer] = new
        self._grow_table(self.n_rows, target)

    def _copy(self, layer: int, new: Buffer, size: int, half: int) -> None:
        recording = self._device.create_recording(f"grow the KV cache, layer {layer}")
        try:
            old_half = self._layers[layer].size // 2
            recording.barrier()
            recording.copy(self._layers[layer][:size], new[:size])
            recording.copy(self._layers[layer][old_half : old_half + size], new[half : half + size])
            recording.finish()
            self._device.wait(self._device.submit(recording))  # so that the old memory is free for the next layer
        except BaseException:
            new.release()
            raise
        finally:
            recording.release()

    def _grow_table(self, n_rows: int, n_blocks: int) -> None:
        entries = np.zeros((n_rows, n_blocks), np.uint32)
        table = self._device.create_buffer(entries.nbytes, "device", "block table")
        entries[: self._entries.shape[0], : self._entries.shape[1]] = self._entries
        self._device.upload(table[:], entries.tobytes())
        if self._table is not None:
            self._table.release()
        for row in range(self._entries.shape[0], n_rows):
            heapq.heappush(self._free_rows, row)
        for block in range(self.n_blocks, n_blocks):
            heapq.heappush(self._free_blocks, block)
        self._table, self._entries, self.n_rows, self.n_blocks = table, entries, n_rows, n_blocks
        self.generation += 1

    def _checked_size(self, needed: int) -> int:
        """The blocks to grow to: the next step where memory allows, else what is needed, rounded up a little."""
        step = max(self.n_blocks, self.shape.blocks_for(FIRST_TOKENS))
        while step < needed:
            step *= GROWTH
        if needed <= self._most_blocks:
            step = min(step, self._most_blocks)
        fits = self.largest_fitting()
        sizes = [size for size in (step, round_up(needed, AHEAD), needed) if size <= fits]
        if sizes:
            return sizes[0]
        missing = self._extra_bytes(needed) - self._device.memory().free
        raise OutOfMemoryError(
            f"the KV cache holds {self.n_tokens:,} tokens and {needed * self.shape.block_tokens:,} are needed; "
            f"at most {fits * self.shape.block_tokens:,} fit into the memory of {self._device.info.name} "
            f"({max(missing, 0) / 2**20:,.0f} MiB are missing): use a shorter context (--context), or fewer "
            "conversations at once",
            needed=self._extra_bytes(needed),
            free=self._device.memory().free,
        )

    def largest_fitting(self) -> int:
        """The most blocks that the pool could have now."""
        info, free = self._device.info, self._device.memory().free
        bindable = min(info.max_storage_range, info.max_allocation // 2) // ALIGNMENT * ALIGNMENT
        low, high = self.n_blocks, bindable // self.shape.block_bytes
        while low < high:  # the largest that fits, by halving
            middle = (low + high + 1) // 2
            if self._extra_bytes(middle) <= free:
                low = middle
            else:
                high = middle - 1
        return low

    def _extra_bytes(self, n_blocks: int) -> int:
        """What growing to n_blocks takes at its peak, when the last layer is there twice."""
        old = self.shape.total_bytes(self.n_blocks)
        again = 2 * self.shape.half_bytes(self.n_blocks) if self._layers else 0
        return self.shape.total_bytes(n_blocks) - old + again


class KVCache:
    """Keys and values of one sequence; see `engine.Cache`. Its blocks go back to the pool when it is dropped."""

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        if capacity < 1:
            raise RequestError(f"a cache for {capacity} tokens was asked for: it must hold at least 1")
        self.capacity = capacity
        self.pool = pool
        self.ids: list[int] = []  # the tokens whose keys and values are held
        self.passes: list[tuple[int, int]] = []  # which passes made them: tokens, and the rows that the pass had
        self._lease = Lease()
        # Runs wherever the last reference goes, even within the pool's own methods: it only leaves a note.
        weakref.finalize(self, pool.dropped.append, self._lease).atexit = False

    @property
    def length(self) -> int:
        """Tokens whose keys and values are held."""
        return len(self.ids)

    @property
    def sequence(self) -> int:
        """Its row of the block table, once it has reserved something."""
        assert self._lease.row is not None
        return self._lease.row

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of its blocks, in the order of its tokens."""
        return tuple(self._lease.blocks)

    def reserve(self, n_tokens: int) -> None:
        """Have blocks for `n_tokens` in all.

        Raises:
            ContextLengthError: they are more than `capacity`. Nothing is changed.
            OutOfMemoryError: the device has no memory for them.
        """
        if n_tokens > self.capacity:
            new = n_tokens - self.length
            raise ContextLengthError(
                f"{new} tokens do not fit behind the {self.length} in the context of {self.capacity}: "
                f"shorten the prompt to {self.capacity - self.length} tokens or use a longer context"
            )
        needed = self.pool.shape.blocks_for(n_tokens)
        if self._lease.row is None or needed > len(self._lease.blocks):
            self.pool.assign(self._lease, needed)

    def append(self, ids: list[int], *, rows: int) -> None:
        """A pass of `rows` rows, padding included, has written the keys and values of `ids`."""
        self.ids += ids
        self.passes.append((len(ids), rows))

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if not 0 <= length <= self.length:
            raise RequestError(f"cannot cut a cache of {self.length} tokens to {length}")
        surplus = self.length - length
        while surplus > 0 and self.passes:
            n, rows = self.passes.pop()
            if n > surplus:
                self.passes.append((n - surplus, rows))
            surplus -= n
        del self.ids[length:]
        self.pool.give_back(self._lease, self.pool.shape.blocks_for(length))


def round_up(n: int, multiple: int) -> int:
    """The next multiple, n itself where it is one."""
    return -(-n // multiple) * multiple
