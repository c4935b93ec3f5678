"""Guessed tokens that are checked in one pass: what their rows bind, and how the pass is recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from xinfer import ops
from xinfer.gpu.api import Buffer, BufferKind, Device, Recording
from xinfer.gpu_model.forward import Array, Network, RowsAlone, Workspace, download_rows
from xinfer.model.config import Qwen2Config
from xinfer.ops import Rows, RowState


class CheckedRows:
    """Up to `n_rows` rows that follow each other in a sequence, and the best id behind each, to the bit as in steps."""

    def __init__(self, device: Device, config: Qwen2Config, n_rows: int) -> None:
        self.n_rows = n_rows
        self._device = device
        self._scratch: Buffer | None = None
        vocab = config.vocab_size
        with ExitStack() as held:

            def buffer(size: int, kind: BufferKind, label: str) -> Buffer:
                made = device.create_buffer(size, kind, f"check {label}")
                held.callback(made.release)
                return made

            self._space = Workspace(device, config, n_rows, "check", packs=False)
            held.callback(self._space.release)
            self._logits = Rows.dense(buffer(4 * n_rows * vocab, "device", "logits"), n_rows, vocab)
            self._candidates = buffer(ops.argmax_scratch_bytes(n_rows, vocab), "device", "argmax candidates")
            self._chosen = buffer(4 * n_rows, "readback", "chosen tokens")
            self._held = held.pop_all()

    def release(self) -> None:
        """Give the memory back; may be called twice."""
        self._held.close()
        self._release_scratch()

    def stage(self, states: Sequence[RowState]) -> None:
        """Write the rows' states, for the next load."""
        self._space.staging.write(b"".join(state.pack() for state in states))

    def record_load(self, recording: Recording, n: int) -> None:
        """Take the states of n rows from where they were staged."""
        recording.copy(*self._space.states(n))

    def record(
        self, recording: Recording, network: Network, n: int, n_valid: int, layers: Callable[[RowsAlone], None]
    ) -> None:
        """N rows through the network, whose layers are recorded by `layers`; the best of the ids below n_valid."""
        rows = RowsAlone(network, self._space, n, recording, room=self.n_rows, scratch=self._scratch_for)
        logits = self._logits.rows(0, n)
        rows.embed()
        layers(rows)
        rows.head(logits)
        ops.argmax(
            *(rows.on, logits, rows.state, self._chosen),
            n_valid=n_valid,
            ring_size=1,
            advance=True,
            scratch=self._candidates,
        )
        rows.done("argmax")

    def chosen(self, n: int) -> list[int]:
        """What was chosen behind each of n rows, once the pass has been waited for."""
        return [int.from_bytes(self._chosen.read(4 * row, 4), "little") for row in range(n)]

    def logits(self, n: int) -> Array:
        """The logits behind each of n rows, (n, vocab), once the pass has been waited for."""
        return download_rows(self._device, self._logits.rows(0, n))

    def _scratch_for(self, plan: ops.AttentionPlan) -> Buffer:
        """For attention of all rows that there is room for. Another plan than before: nothing uses the old one now."""
        size = max(4, plan.scratch_bytes)
        if self._scratch is None or self._scratch.size != size:
            self._release_scratch()
            self._scratch = self._device.create_buffer(size, "device", "check attention splits")
            self._device.upload(self._scratch[: plan.counter_bytes], bytes(plan.counter_bytes))
        return self._scratch

    def _release_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.release()
            self._scratch = None
