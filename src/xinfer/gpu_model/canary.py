"""The canary: a token whose right outputs are known is run through the network now and then, and compared.

Some drivers reset a device and say nothing; its memory then holds garbage, and so do the answers. The canary's pass
reads every layer's weights, a block of every layer's cache, the tables, the embedding and the head, and each layer's
output is compared with what it was when the model had just been loaded, bit for bit. That first answer is compared with
one that was computed elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from xinfer.errors import DeviceLostError, Loss, NumericalError
from xinfer.gpu.api import Buffer, Recording
from xinfer.gpu_model.forward import Array, Network, Pass
from xinfer.gpu_model.steps import STEP, Steps
from xinfer.ops import BLOCK_TOKENS, Rows

GARBAGE = "GARBAGE"  # the reason of a loss that only the canary has noticed
CLOSE = 2e-2  # of the largest value: the cache's f16 and other orders of summing stay below it, garbage does not


def canary_ids(vocab_size: int) -> list[int]:
    """The tokens of the canary: a block of the cache."""
    return [(37 * i + 11) % vocab_size for i in range(BLOCK_TOKENS)]


class Canary:
    """Made when the model has just been loaded; `check` raises DeviceLostError where the device has changed its mind.

    It costs about as much as a decode step, and a block of the cache. `expected` are the outputs for `canary_ids`, of
    each layer (hidden,) and the logits (vocab,), as they were computed without the device.
    """

    def __init__(self, steps: Steps, expected: Sequence[Array]) -> None:
        config = steps.config
        self._steps = steps
        self._names = [f"layers.{i}" for i in range(config.num_hidden_layers)] + ["logits"]
        for name, values in zip(self._names, expected, strict=True):
            if not np.isfinite(values).all():
                raise NumericalError(
                    f"the reference makes a NaN or an infinity of the canary's tokens, first in the output of {name}: "
                    "nothing can be held against that; the weights are damaged, or go beyond float32"
                )
        self._widths = [config.hidden_size] * config.num_hidden_layers + [config.vocab_size]
        self._network: Network | None = None  # what the recording and the sums belong to
        self._recording: Recording | None = None
        self._back: Buffer = steps.device.create_buffer(4 * sum(self._widths), "readback", "canary outputs")
        self._cache = steps.pool.make_cache(BLOCK_TOKENS)
        self._ids = canary_ids(config.vocab_size)
        self._values = list(expected)
        self._sums: list[int] = []
        try:
            self._fill_cache()
            self.check()
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Run the token again. Raises DeviceLostError that names the first layer whose output is another one."""
        values = self._run()
        sums = [zlib.crc32(part.tobytes()) for part in values]
        if self._network is self._steps.network():
            wrong = [n for n, (a, b) in enumerate(zip(sums, self._sums, strict=True)) if a != b]
        else:  # for the first time, or the cache has grown and everything is recorded anew
            wrong = [n for n, (a, b) in enumerate(zip(values, self._values, strict=True)) if not _close(a, b)]
        if wrong:
            raise self._error(self._names[wrong[0]], len(wrong))
        self._values, self._sums, self._network = values, sums, self._steps.network()

    def release(self) -> None:
        """Give everything back; may be called twice."""
        for held in (self._recording, self._back):
            if held is not None:
                held.release()

    def _fill_cache(self) -> None:
        steps, ids = self._steps, self._ids[:-1]
        self._cache.reserve(BLOCK_TOKENS)
        begin = 0
        while begin < len(ids):
            chunk = ids[begin : begin + steps.max_rows]
            rows = steps.bucket(len(chunk))
            recording = steps.prefill(rows, whole=False)
            steps.stage_chunk(chunk, self._cache, rows=rows)
            steps.wait(steps.submit(recording))
            self._cache.append(chunk, rows=rows)
            begin += len(chunk)
        self._cache.truncate(len(ids))  # gives back the blocks that were taken ahead

    def _run(self) -> list[Array]:
        """Each layer's output (hidden,), and the logits (vocab,)."""
        recording = self._recorded()
        self._steps.stage_chunk(self._ids[-1:], self._cache, rows=1)
        self._steps.wait(self._steps.submit(recording))
        flat = np.frombuffer(self._back.read(), np.float32)
        return np.split(flat, np.cumsum(self._widths)[:-1])

    def _recorded(self) -> Recording:
        steps = self._steps
        if self._recording is not None and self._network is steps.network():
            return self._recording
        recording = steps.device.create_recording("canary")
        try:
            recording.segment(STEP)
            steps.record_load(recording, steps.many, 1)
            step = Pass(steps.network(), steps.many, 1, recording)
            step.embed()
            steps.record_layers(step, STEP, after=lambda i: self._copy(recording, step.x, i))
            step.head(steps.logits)  # no step is between its logits and their use
            self._copy(recording, steps.logits, steps.config.num_hidden_layers)
            recording.finish()
        except BaseException:
            recording.release()
            raise
        if self._recording is not None:
            self._recording.release()
        self._recording = recording
        return recording

    def _copy(self, recording: Recording, rows: Rows, i: int) -> None:
        """Copy one row to where the host reads output number i."""
        start = 4 * sum(self._widths[:i])
        recording.copy(rows.place[: 4 * rows.width], self._back[start : start + 4 * rows.width])
        recording.barrier()

    def _error(self, name: str, count: int) -> DeviceLostError:
        info = self._steps.device.info
        found = (
            f"the output of {name} is not what it has to be, nor are {count - 1} behind it; the device's memory was "
            "lost and the driver has not said so, or it computes wrongly"
        )
        loss = Loss(
            call="the canary",
            reason=GARBAGE,
            details=(found,),
            adapter=f"{info.api}:{info.index} {info.name}",
            driver=f"{info.driver} {info.driver_version}",
            work=name,
        )
        return DeviceLostError(loss=loss)


def _close(a: Array, b: Array) -> bool:
    scale = float(np.abs(b).max()) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):  # of garbage
        return bool(np.abs(a - b).max() <= CLOSE * scale)  # False where there is a NaN
