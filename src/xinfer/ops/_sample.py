"""The next token drawn on the device."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from xinfer.gpu.api import Bindable
from xinfer.ops._base import STATE_BYTES, KernelSet, Recorder, Rows, ceil_div, expect
from xinfer.shaders.catalog import (
    SAMPLE_CANDIDATES_MAX,
    SAMPLE_CHUNKS_MAX,
    SAMPLE_PARAM_WORDS,
    Variant,
    variants,
)

PARAM_BYTES = 4 * SAMPLE_PARAM_WORDS
VOCAB_MOST = 2**18  # so that the sum of all weights has room, and half of it besides
WEIGHT_BITS = 45
SEEN_IN_PROMPT = 0x8000_0000  # in the counts
SMALLEST_CHUNK = 2  # 2^2 ids

OPTION_PENALTIES, OPTION_BIAS, OPTION_GREEDY, OPTION_SLOW = 1, 2, 4, 8
SCALE_MOST = 1e30  # a temperature so low that nothing but the best is left


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """How one row's token is drawn, as it lies on the device (`PARAM_BYTES` bytes).

    The values are those of `xinfer.sampling.SamplingParams`; a temperature of 0 takes the best one. `penalties` and
    `bias` say whether counts and bias are looked at. `slow` leaves it to the stage that always can, for tests.
    """

    n_valid: int  # ids from here on are never chosen
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    penalties: bool = False
    bias: bool = False
    slow: bool = False

    @property
    def scale(self) -> float:
        """log2(e) / temperature in units of 2^-24, which fits float32."""
        return 1.0 if self.temperature == 0 else min(math.log2(math.e) / self.temperature * 2**24, SCALE_MOST)

    @property
    def top_p_fraction(self) -> int:
        """top_p in units of 2^-32; 0 where it keeps all."""
        return 0 if self.top_p >= 1 else max(int(math.ldexp(self.top_p, 32)), 1)

    @property
    def min_weight(self) -> int:
        """min_p in units of the weights."""
        return math.ceil(math.ldexp(self.min_p, WEIGHT_BITS))

    def pack(self) -> bytes:
        """Its words."""
        greedy = self.temperature == 0
        options = OPTION_PENALTIES * self.penalties + OPTION_BIAS * self.bias
        options += OPTION_GREEDY * greedy + OPTION_SLOW * self.slow
        words = struct.pack(
            "<4I2Q5f",
            *(self.n_valid, options, 1 if greedy else min(self.top_k, 2**31), self.top_p_fraction),
            *(self.min_weight, self.seed),
            *(self.scale, self.repetition, 1 / self.repetition, self.presence, self.frequency),
        )
        return words.ljust(PARAM_BYTES, b"\0")


def sample(
    on: Recorder,
    logits: Rows,
    state: Bindable,
    ring: Bindable,
    *,
    params: Bindable,
    counts: Bindable,
    bias: Bindable,
    ring_size: int,
    advance: bool,
    scratch: Bindable,
    label: str = "sample",
    variant: str | None = None,
) -> None:
    """Draw each row's next token: logits (T, vocab), and move the row on as `argmax` does.

    Row t's request is in row t of `params`, `PARAM_BYTES` each. Where it says so, `bias`, float32 (T, vocab), is added
    (minus infinity forbids an id), and `counts`, u32 (T, vocab), tells which ids penalties concern: `SEEN_IN_PROMPT`
    where an id is in the prompt, plus the number of times that it is in the answer. The token drawn is counted there.
    The uniform number is that of the seed and of the position behind the row's own.

    The token is the same on every device: but for the penalties' products, integers decide. `scratch` holds
    `sample_scratch_bytes`.
    """
    n, vocab = logits.n, logits.width
    expect(can_sample(on.kernels, vocab), f"{label}: {vocab} ids are more than {VOCAB_MOST}, or a kernel is missing")
    expect(state.size >= STATE_BYTES * n and params.size >= PARAM_BYTES * n, f"{label}: there are fewer than {n} rows")
    expect(counts.size >= 4 * vocab * n and bias.size >= 4 * vocab * n, f"{label}: counts or bias are too short")
    expect(ring_size > 0 and ring.size >= 4 * ring_size * n, f"{label}: the ring is smaller than {ring_size}")
    expect(scratch.size >= sample_scratch_bytes(n, vocab), f"{label}: the scratch is too small")
    shift = chunk_shift(vocab)
    n_chunks = ceil_div(vocab, 1 << shift)
    lie: dict[str, int | float] = {"vocab": vocab, "scratch_stride": scratch_words(vocab)}
    chunked = lie | {"chunk_shift": shift}
    ends: dict[str, int | float] = {"n_chunks": n_chunks, "ring_size": ring_size, "advance": int(advance)}
    rows = {"logits_stride": logits.stride, "logits_offset": logits.offset}
    first = {"params": params, "logits": logits.place, "counts": counts, "bias": bias, "scratch": scratch}
    last = {"params": params, "scratch": scratch, "state": state, "ring": ring, "counts": counts}
    grid = (n_chunks, n, 1)
    on.dispatch(on.choose(["sample.chunk"], None), first, chunked | rows, grid, label)
    on.recording.barrier()
    sums = {"params": params, "scratch": scratch}
    on.dispatch(on.choose(["sample.sum"], None), sums, chunked | {"n_chunks": n_chunks}, grid, f"{label}.sum")
    on.recording.barrier()
    few, whole = (_stage(on, stage, variant) for stage in ("few", "all"))
    on.dispatch(few, last, chunked | ends, (n, 1, 1), f"{label}.few")
    on.recording.barrier()
    on.dispatch(whole, last, lie | ends, (n, 1, 1), f"{label}.all")


def can_sample(kernels: KernelSet, vocab: int) -> bool:
    """Whether the device draws from so many logits by itself."""
    stages = [["sample.chunk"], ["sample.sum"], *(stage_variants(stage) for stage in ("few", "all"))]
    return vocab <= VOCAB_MOST and all(any(kernels.usable(name) for name in stage) for stage in stages)


def stage_variants(stage: str) -> list[str]:
    """The variants of a stage, best first."""
    return [f"sample.{stage}.wide", f"sample.{stage}"]


def _stage(on: Recorder, stage: str, variant: str | None) -> Variant:
    names = stage_variants(stage)
    return on.choose(names, variant if variant in names else None)


def chunk_shift(vocab: int) -> int:
    """Chunks have 2 to the power of this ids: as few as there may be chunks for."""
    return max(SMALLEST_CHUNK, (ceil_div(vocab, SAMPLE_CHUNKS_MAX) - 1).bit_length())


def scratch_words(vocab: int) -> int:
    """Words of a row's scratch: keys, three for each chunk, and the verdict."""
    return vocab + 3 * ceil_div(vocab, 1 << chunk_shift(vocab)) + 1


def sample_scratch_bytes(n_rows: int, vocab: int) -> int:
    """Bytes of what the stages leave for each other."""
    return 4 * n_rows * scratch_words(vocab)


def sample_trips(variant_id: str, *, vocab: int) -> int:
    """Loop iterations of one lane, at worst."""
    group = variants()[variant_id].workgroup[0]
    shift = chunk_shift(vocab)
    n_chunks = ceil_div(vocab, 1 << shift)
    mine, turns = ceil_div(n_chunks, group), 10
    if variant_id in ("sample.chunk", "sample.sum"):
        return ceil_div(1 << shift, group) + mine
    if variant_id in stage_variants("few"):
        candidates = ceil_div(SAMPLE_CANDIDATES_MAX, group)
        # Of the chunks that reach the wanted one's best, all may be as good.
        gathered = ceil_div(n_chunks << shift, group)
        ranks = mine * n_chunks + candidates * SAMPLE_CANDIDATES_MAX
        return ceil_div(SAMPLE_CHUNKS_MAX, group) + ranks + 2 * mine + gathered + 5 * candidates + turns
    a_pass = ceil_div(vocab, group)
    search = 4 * (1 + 2 * ceil_div(256, group) + a_pass + 256)
    return mine + 3 * search + 2 * a_pass + 2 * 20 + turns + 2 * a_pass + group
