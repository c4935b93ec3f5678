"""Runs the ops of a recorded step one at a time: the same kernels on the same buffers, stopped after each."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xinfer.gpu.api import Bindable, Device, Recording
from xinfer.gpu_model.forward import Named, Network, Pass, Workspace, download_rows
from xinfer.kv_cache import KVCache
from xinfer.ops import PackedRows, Recorder, Rows, packed_bytes
from xinfer.trials.bench import DTYPES, WatchedRecorder
from xinfer.trials.cache import sequence_of
from xinfer.trials.judge import Array

TIMEOUT_S = 60.0
SOFTWARE_TIMEOUT_S = 900.0  # a software driver on a busy machine is slow, not hung

OnPhase = Callable[[str, tuple[str, ...]], None]  # a phase's label, and the variants that it dispatched


class WatchedPass(Pass):
    """A pass over `n` rows that chooses its ops as a recording does, fused ones too, and pauses after every one.

    `on_phase` is called when a phase has run, its results still in the workspace. Use it within `with`.
    """

    def __init__(self, network: Network, space: Workspace, n: int, on_phase: OnPhase) -> None:
        super().__init__(network, space, n, network.device.create_recording("watched"))
        self._on_phase = on_phase
        self._states = space.states(n)
        self._begin(self.on.recording)

    def load(self) -> None:
        """Take the rows' states from the host."""
        self.recording.barrier()
        self.recording.copy(*self._states)
        self.recording.barrier()
        self._run()

    def done(self, label: str, *named: Named) -> None:
        """Run what has been recorded, and show it."""
        del named
        used = tuple(self._used)
        self._run()
        self._on_phase(label, used)

    def read(self, rows: Rows) -> Array:
        """Rows of the workspace, (n, width)."""
        return download_rows(self.network.device, rows)

    def write(self, rows: Rows, values: Array) -> None:
        """Fill rows of the workspace that lie without gaps."""
        assert rows.stride == rows.width == values.shape[1]
        assert len(values) == rows.n
        place: Bindable = rows.place[4 * rows.offset : 4 * (rows.offset + values.size)]
        self.network.device.upload(place, np.ascontiguousarray(values).tobytes())

    def read_packed(self, width: int) -> tuple[PackedRows, Array]:
        """What the last packing left."""
        packed = PackedRows(self._packed, self.x.n, width, self.network.exact)
        place = packed.place[: packed_bytes(self.x.n, width, exact=packed.exact)]
        return packed, np.frombuffer(self.network.device.download(place), np.float32)

    def _begin(self, recording: Recording) -> None:
        self._used: list[str] = []
        self.on: Recorder = WatchedRecorder(recording, self.network.kernels, self._used)

    def _run(self) -> None:
        device = self.network.device
        self.recording.finish()
        device.wait(device.submit(self.recording), patience(device))
        self.recording.release()
        self._begin(device.create_recording("watched"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.recording.release()


def patience(device: Device) -> float:
    """Seconds to wait for one submission."""
    return SOFTWARE_TIMEOUT_S if device.info.kind == "cpu" else TIMEOUT_S


def cached_rows(network: Network, i: int, cache: KVCache, n: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of layer i at a sequence's first n positions, (n, KV heads, D), in the cache's type."""
    blocks = network.cache(i)
    dtype = DTYPES[blocks.format]
    found = []
    for place in (blocks.k, blocks.v):
        flat = np.frombuffer(network.device.download(place), dtype)
        a_block = blocks.n_kv_heads * network.pool.shape.block_tokens * blocks.head_dim
        whole = flat[: len(flat) // a_block * a_block]
        shaped = whole.reshape(-1, blocks.n_kv_heads, network.pool.shape.block_tokens, blocks.head_dim)
        found.append(sequence_of(shaped, cache.blocks)[:n])
    return found[0], found[1]
