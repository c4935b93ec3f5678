"""What the device needs to draw an answer's tokens by itself: the request's values, its counts, its bias."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.choice import Choice
from xinfer.gpu.api import Bindable, Buffer, Device, Recording
from xinfer.ops import Recorder, Rows, SampleParams

# Segments that bring what an answer has of its own: only where it has some.
COUNTS, BIAS = "counts", "bias"


class Drawing:
    """The buffers of `ops.sample` for one row, and where the host stages what they begin with."""

    def __init__(self, device: Device, vocab: int) -> None:
        self._vocab = vocab
        with ExitStack() as held:

            def buffer(size: int, kind: Literal["device", "upload"], label: str) -> Buffer:
                made = device.create_buffer(size, kind, label)
                held.callback(made.release)
                return made

            self._params = buffer(ops.PARAM_BYTES, "device", "sampling values")
            self._counts = buffer(4 * vocab, "device", "counts of ids")
            self._bias = buffer(4 * vocab, "device", "bias of ids")
            self._scratch = buffer(ops.sample_scratch_bytes(1, vocab), "device", "keys of scores")
            self._staged_params = buffer(ops.PARAM_BYTES, "upload", "sampling values, staged")
            self._staged_counts = buffer(4 * vocab, "upload", "counts of ids, staged")
            self._staged_bias = buffer(4 * vocab, "upload", "bias of ids, staged")
            self._held = held.pop_all()

    def release(self) -> None:
        """Give the memory back; may be called twice."""
        self._held.close()

    def stage(self, choice: Choice) -> tuple[str, ...]:
        """Write an answer's own, as far as it has come; the segments that are to take it to the device."""
        self._staged_params.write(params_of(choice).pack())
        segments = []
        if choice.penalizes:
            self._staged_counts.write(counts_of(choice, self._vocab).tobytes())
            segments.append(COUNTS)
        if choice.bias:
            bias = np.zeros(self._vocab, np.float32)
            bias[np.fromiter(choice.bias.keys(), np.int64)] = np.fromiter(choice.bias.values(), np.float64)
            self._staged_bias.write(bias.tobytes())
            segments.append(BIAS)
        return tuple(segments)

    def record_params(self, recording: Recording) -> None:
        """Take the values that were staged."""
        recording.copy(self._staged_params, self._params)

    def record_rest(self, recording: Recording) -> None:
        """Segments that take counts and bias."""
        for segment, source, target in (
            (COUNTS, self._staged_counts, self._counts),
            (BIAS, self._staged_bias, self._bias),
        ):
            recording.segment(segment)
            recording.barrier()
            recording.copy(source, target)

    def record(self, on: Recorder, logits: Rows, state: Bindable, ring: Bindable, *, ring_size: int) -> None:
        """Draw the token behind the logits (1, vocab)."""
        ops.sample(
            *(on, logits, state, ring),
            params=self._params,
            counts=self._counts,
            bias=self._bias,
            ring_size=ring_size,
            advance=True,
            scratch=self._scratch,
        )


def drawing_bytes(vocab: int) -> int:
    """Device memory of a `Drawing`."""
    return ops.PARAM_BYTES + 8 * vocab + ops.sample_scratch_bytes(1, vocab)


def params_of(choice: Choice) -> SampleParams:
    """A choice's values as the op takes them."""
    return SampleParams(
        n_valid=choice.n_valid,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        min_p=choice.min_p,
        seed=choice.seed,
        repetition=choice.repetition_penalty,
        presence=choice.presence_penalty,
        frequency=choice.frequency_penalty,
        penalties=choice.penalizes,
        bias=bool(choice.bias),
    )


def counts_of(choice: Choice, vocab: int) -> NDArray[np.uint32]:
    """(vocab,): `ops.SEEN_IN_PROMPT` where an id is in the prompt, plus the times that it is in the answer."""
    counts = np.zeros(vocab, np.uint32)
    counts[np.asarray(choice.prompt_ids, np.int64)] = ops.SEEN_IN_PROMPT
    np.add.at(counts, np.asarray(choice.answer_ids, np.int64), np.uint32(1))
    return counts
