"""Weights on their way to the device's cache while an op that leaves the memory idle runs."""

from __future__ import annotations

from collections.abc import Sequence

from xinfer.gpu.api import Bindable
from xinfer.ops._base import Matrix, Recorder, ceil_div, expect
from xinfer.shaders.catalog import LOAD_BYTES, PREFETCH_LOADS

SINK_BYTES = 256  # of each dispatch: they run side by side


def prefetch(on: Recorder, matrices: Sequence[Matrix], sink: Bindable, *, n_bytes: int, label: str) -> None:
    """Read the first `n_bytes` of some matrices, one after the other; the results of ops do not change.

    To be recorded beside another op, without a barrier between. `sink` holds `prefetch_sink_bytes`.
    """
    for at, (place, size) in enumerate(_pieces(matrices, n_bytes)):
        chosen = on.choose(["prefetch.plain"], None)
        own = sink[at * SINK_BYTES : (at + 1) * SINK_BYTES]
        expect(own.size == SINK_BYTES, f"{label}: the sink is too small")
        groups = (ceil_div(size // LOAD_BYTES, PREFETCH_LOADS), 1, 1)
        on.dispatch(chosen, {"w": place[:size], "sink": own}, {"loads": size // LOAD_BYTES}, groups, label)


def prefetch_sink_bytes(matrices: Sequence[Matrix], *, n_bytes: int) -> int:
    """Bytes of the sink of one `prefetch`."""
    return max(SINK_BYTES * len(_pieces(matrices, n_bytes)), SINK_BYTES)


def _pieces(matrices: Sequence[Matrix], n_bytes: int) -> list[tuple[Bindable, int]]:
    """(slice, bytes from its start on), until n_bytes are reached."""
    pieces = []
    for matrix in matrices:
        for part in matrix.slices:
            size = min(part.n_rows * matrix.row_stride, n_bytes) // LOAD_BYTES * LOAD_BYTES
            if size:
                pieces.append((part.place, size))
                n_bytes -= size
    return pieces
