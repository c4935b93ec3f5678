"""A prompt of several chunks through streamed layers: each layer is sent once, and every chunk runs through it then.

What the chunks have become so far waits in memory of its own meanwhile. The kernels, their rows and their order within
a chunk are those of one chunk after the other, and so are the numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from xinfer import ops
from xinfer.gpu.api import Recording, Ticket
from xinfer.gpu_model.steps import STREAMED, Steps
from xinfer.kv_cache import KVCache

HELD = 256 << 20  # bytes that chunks may wait in
SHARE = 0.5  # of what is free on the device, likewise
AHEAD = 3  # groups of layers in the queue: one more than there are slots, so that the bus has always something to do


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of the prompt, and how it comes into the workspace and goes from there."""

    ids: Sequence[int]
    rows: int  # with padding
    enter: Recording
    leave: Recording


def chunks_at_once(steps: Steps, rows: int) -> int:
    """How many chunks of so many rows go through the layers together."""
    room = min(HELD, int(SHARE * steps.device.memory().free))
    return max(1, room // _held_bytes(steps, rows))


def run_together(
    steps: Steps, parts: Sequence[Sequence[int]], cache: KVCache, progress: Callable[[float], None]
) -> list[int]:
    """Run the chunks `parts`, which follow each other behind the cache; the rows that each took.

    The cache has room for them; they join it when this has returned. `progress` is told which share of the layers has
    run.
    """
    with ExitStack() as held:
        chunks = [_prepared(steps, ids, held) for ids in parts]
        ends: list[Ticket] = []
        groups = _groups(steps.prefill(chunks[0].rows, whole=False).segments)
        for n, (layer, segments) in enumerate(groups):
            if n >= AHEAD:
                steps.wait(ends[n - AHEAD])
                progress((n - AHEAD + 1) / len(groups))
            if layer is not None:
                steps.bring(layer)
            begin = cache.length
            for chunk in chunks:
                if n == 0:
                    steps.stage_chunk(chunk.ids, cache, rows=chunk.rows, begin=begin)
                    begin += len(chunk.ids)
                else:
                    steps.device.submit(chunk.enter)
                steps.submit_part(steps.prefill(chunk.rows, whole=False), segments, loads=n == 0)
                end = steps.device.submit(chunk.leave)
            ends.append(end)
        steps.wait(ends[-1])
        return [chunk.rows for chunk in chunks]


def _groups(segments: Sequence[str]) -> list[tuple[int | None, list[str]]]:
    """The segments that run together: each streamed layer begins a group."""
    groups: list[tuple[int | None, list[str]]] = [(None, [])]
    for name in segments:
        kind, _, layer = name.partition(" ")[2].partition(" ")
        if kind == STREAMED:
            groups.append((int(layer), []))
        groups[-1][1].append(name)
    return groups


def _held_bytes(steps: Steps, rows: int) -> int:
    return rows * (4 * steps.config.hidden_size + ops.STATE_BYTES)


def _prepared(steps: Steps, ids: Sequence[int], held: ExitStack) -> _Chunk:
    rows = steps.bucket(len(ids))
    x = steps.many.rows("x", rows).place[: 4 * steps.config.hidden_size * rows]  # not all that there is room for
    states = steps.many.states(rows)[1]
    buffer = steps.device.create_buffer(_held_bytes(steps, rows), "device", "waiting chunk")
    held.callback(buffer.release)
    kept = buffer[: x.size], buffer[x.size : x.size + states.size]
    recordings = []
    for name, pairs in (
        ("chunk enters", ((kept[0], x), (kept[1], states))),
        ("chunk leaves", ((x, kept[0]), (states, kept[1]))),
    ):
        recording = steps.device.create_recording(name)
        held.callback(recording.release)
        recording.barrier()
        for source, target in pairs:
            recording.copy(source, target)
        recording.barrier()
        recording.finish()
        recordings.append(recording)
    return _Chunk(ids, rows, *recordings)
