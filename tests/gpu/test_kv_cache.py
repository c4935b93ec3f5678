"""The pool of cache blocks: who gets which, what growing keeps, and what is said when there is no more memory."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from xinfer.errors import ContextLengthError, OutOfMemoryError, RequestError
from xinfer.gpu.api import Bindable, Buffer, BufferKind, Bytes, Device
from xinfer.gpu.null import INFO, NullDevice
from xinfer.kv_cache import AHEAD, FIRST_SEQUENCES, BlockPool, CacheShape, KVCache

SHAPE = CacheShape(n_layers=3, token_bytes=40, block_tokens=32)  # 1,280 bytes a block: no multiple of any alignment


@pytest.fixture(params=["null", "real"])
def any_device(request: pytest.FixtureRequest, device: Device) -> Iterator[Device]:
    """The null device shows the bookkeeping, a real one that the bytes are there."""
    if request.param == "real":
        yield device
        return
    with NullDevice() as null:
        yield null


def objects_of(device: Device) -> Counter[str]:
    """Native objects alive, but for what Direct3D 12 makes when first needed: the kernel that fills, and for each chunk
    of staging a buffer, an allocator and a list.
    """
    device.flush_uploads()
    device.create_buffer(16).release()  # with it goes what was released while it was in use
    objects = Counter(device.live_objects())
    chunks = objects.pop("ID3D12CommandAllocator", 0)
    for kind in ("ID3D12GraphicsCommandList", "ID3D12PipelineState", "ID3D12RootSignature"):
        objects.pop(kind, None)
    objects["ID3D12Resource"] -= chunks
    return objects


@pytest.fixture
def pool(any_device: Device) -> Iterator[BlockPool]:
    before = objects_of(any_device)
    made = BlockPool(any_device, SHAPE, context=5000)
    yield made
    made.release()
    made.release()
    assert objects_of(any_device) == before


def small_device(heap_bytes: int, **limits: int) -> NullDevice:
    return NullDevice(dataclasses.replace(INFO, heap_bytes=heap_bytes, **limits))  # type: ignore[arg-type]


def table_of(device: Device, pool: BlockPool) -> NDArray[np.uint32]:
    return np.frombuffer(device.download(pool.table), np.uint32).reshape(-1, pool.table_stride)


def check_table(device: Device, pool: BlockPool, *caches: KVCache) -> None:
    """Every cache's row of the table names its blocks, and no block belongs to two."""
    table = table_of(device, pool)
    for cache in caches:
        assert tuple(table[cache.sequence, : len(cache.blocks)]) == cache.blocks
    taken = [block for cache in caches for block in cache.blocks]
    assert len(set(taken)) == len(taken)
    assert all(block < pool.n_blocks for block in taken)


def test_one_sequence_has_the_blocks_in_order(any_device: Device, pool: BlockPool) -> None:
    cache = pool.make_cache(5000)
    for n_tokens in (1, 33, 500, 513, 3000, 5000):
        cache.reserve(n_tokens)
        assert cache.blocks == tuple(range(len(cache.blocks)))
        assert len(cache.blocks) * 32 >= n_tokens
    check_table(any_device, pool, cache)


def test_sequences_share_no_block(any_device: Device, pool: BlockPool) -> None:
    caches = [pool.make_cache(2000) for _ in range(5)]
    for n_tokens in (10, 200, 700, 1500):
        for cache in caches:
            cache.reserve(n_tokens)
    check_table(any_device, pool, *caches)


def test_more_sequences_than_rows(any_device: Device, pool: BlockPool) -> None:
    caches = [pool.make_cache(100) for _ in range(2 * FIRST_SEQUENCES + 1)]
    generation = pool.generation
    for cache in caches:
        cache.reserve(40)
    assert pool.generation > generation  # the table has moved: recordings must be made again
    check_table(any_device, pool, *caches)
    assert len({cache.sequence for cache in caches}) == len(caches)


def test_growing_keeps_what_was_there(any_device: Device, pool: BlockPool) -> None:
    cache = pool.make_cache(5000)
    cache.reserve(500)
    rng = np.random.default_rng(0)
    content = {}
    for layer in range(SHAPE.n_layers):
        for name, half in (("k", pool.keys(layer)), ("v", pool.values(layer))):
            content[layer, name] = rng.bytes(SHAPE.block_bytes * pool.n_blocks)
            any_device.upload(half[: len(content[layer, name])], content[layer, name])
    generation, blocks, objects = pool.generation, pool.n_blocks, objects_of(any_device)
    cache.reserve(600)
    assert pool.generation > generation
    assert pool.n_blocks == 4 * blocks
    cache.reserve(5000)
    assert pool.n_blocks == 157  # no more than the context
    for layer in range(SHAPE.n_layers):
        for name, half in (("k", pool.keys(layer)), ("v", pool.values(layer))):
            assert any_device.download(half[: len(content[layer, name])]) == content[layer, name]
    check_table(any_device, pool, cache)
    assert objects_of(any_device) == objects  # the old memory is back


def test_a_dropped_cache_gives_its_blocks_back(any_device: Device, pool: BlockPool) -> None:
    first = pool.make_cache(2000)
    first.reserve(1500)
    blocks, row = first.blocks, first.sequence
    del first
    gc.collect()
    second = pool.make_cache(2000)
    second.reserve(1500)
    assert (second.blocks, second.sequence) == (blocks, row)
    check_table(any_device, pool, second)


def test_caches_may_be_dropped_by_other_threads(any_device: Device, pool: BlockPool) -> None:
    def work() -> None:
        for _ in range(50):
            cache = pool.make_cache(400)
            cache.reserve(300)
            cache.ids += [0] * 300
            cache.truncate(5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    gc.collect()
    cache = pool.make_cache(5000)
    cache.reserve(32 * pool.n_blocks)  # every block is to be had again
    assert sorted(cache.blocks) == list(range(pool.n_blocks))


def test_truncating_frees_blocks_and_the_table_is_written_only_where_it_changes(
    any_device: Device, pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = pool.make_cache(2000), pool.make_cache(2000)
    cache.reserve(400)
    cache.ids += list(range(400))
    uploads: list[int] = []
    upload = any_device.upload

    def counted(target: Bindable, data: Bytes) -> None:
        uploads.append(target.size)
        upload(target, data)

    monkeypatch.setattr(any_device, "upload", counted)
    cache.truncate(33)
    assert cache.length == 33
    assert len(cache.blocks) == 2
    cache.reserve(400)  # the same blocks again
    assert uploads == []
    cache.truncate(33)
    other.reserve(100)
    cache.reserve(400)
    assert uploads
    check_table(any_device, pool, cache, other)


def test_blocks_are_taken_some_at_a_time(pool: BlockPool) -> None:
    cache = pool.make_cache(1000)
    cache.reserve(1)
    assert len(cache.blocks) == AHEAD


def test_a_cache_that_is_too_small_is_said_and_left_alone(pool: BlockPool) -> None:
    cache = pool.make_cache(10)
    cache.reserve(8)
    cache.ids += [1] * 8
    with pytest.raises(ContextLengthError, match="3 tokens do not fit behind the 8 in the context of 10"):
        cache.reserve(11)
    assert cache.length == 8
    for length in (-1, 9):
        with pytest.raises(RequestError, match="cannot cut"):
            cache.truncate(length)
    with pytest.raises(RequestError, match="at least 1"):
        pool.make_cache(0)


def test_too_little_memory_for_the_next_step_takes_what_is_needed() -> None:
    pool = BlockPool(small_device(SHAPE.total_bytes(100)), SHAPE, context=100_000)
    assert pool.n_blocks == 16
    pool.make_cache(5000).reserve(600)  # a step to 64 blocks fits while the last layer is there twice
    assert pool.n_blocks == 64
    cache = pool.make_cache(5000)
    cache.reserve(2400)
    assert pool.n_blocks < 100  # 256 would not have fitted


def test_no_memory_is_an_error_that_says_what_would_fit() -> None:
    device = small_device(SHAPE.total_bytes(100))
    pool = BlockPool(device, SHAPE, context=100_000)
    cache = pool.make_cache(100_000)
    cache.reserve(500)
    fits = 32 * pool.largest_fitting()
    with pytest.raises(OutOfMemoryError, match=f"4,000 are needed; at most {fits:,} fit") as caught:
        cache.reserve(4000)
    assert caught.value.missing > 0
    cache.reserve(fits)  # it told the truth
    assert len(cache.blocks) * 32 == fits
    with pytest.raises(OutOfMemoryError):
        cache.reserve(fits + 1)


def test_a_binding_limits_the_pool() -> None:
    device = small_device(1 << 30, max_storage_range=SHAPE.block_bytes * 40)
    pool = BlockPool(device, SHAPE, context=100_000)
    cache = pool.make_cache(100_000)
    with pytest.raises(OutOfMemoryError, match="at most 1,2"):
        cache.reserve(41 * 32)
    cache.reserve(39 * 32)
    assert pool.keys(0).size <= device.info.max_storage_range


def test_a_failure_while_growing_leaves_the_pool_usable(any_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have grown and some have not: what was there is still there, and growing works the next time."""
    pool = BlockPool(any_device, SHAPE, context=5000)
    cache = pool.make_cache(5000)
    cache.reserve(500)
    content = [np.random.default_rng(layer).bytes(SHAPE.block_bytes * 16) for layer in range(3)]
    for layer, data in enumerate(content):
        any_device.upload(pool.values(layer)[: len(data)], data)
    create = any_device.create_buffer
    calls: list[str] = []

    def failing(size: int, kind: BufferKind, label: str) -> Buffer:
        calls.append(label)
        if len(calls) == 2:
            raise OutOfMemoryError("planted")
        return create(size, kind, label)

    with monkeypatch.context() as patch:
        patch.setattr(any_device, "create_buffer", failing)
        with pytest.raises(OutOfMemoryError, match="planted"):
            cache.reserve(600)
    assert len(cache.blocks) * 32 < 600
    for _ in range(2):
        for layer, data in enumerate(content):
            assert any_device.download(pool.values(layer)[: len(data)]) == data
        cache.reserve(600)
    check_table(any_device, pool, cache)
    pool.release()
