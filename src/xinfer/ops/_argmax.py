"""The choice of the next token on the device."""

from __future__ import annotations

from xinfer.gpu.api import Bindable
from xinfer.ops._base import STATE_BYTES, Recorder, Rows, ceil_div, expect
from xinfer.shaders.catalog import variants

CHUNK = 512  # logits a workgroup


def argmax(
    on: Recorder,
    logits: Rows,
    state: Bindable,
    ring: Bindable,
    *,
    n_valid: int,
    ring_size: int,
    advance: bool,
    scratch: Bindable,
    label: str = "argmax",
) -> None:
    """Choose the id of each row's largest logit, the lowest on ties, below n_valid: logits (T, vocab).

    Row t of `state` gets it as its next token, its position moves on by one where `advance` says so (a decode step; not
    after a prefill, whose host set the position), and row t of `ring`, u32 (T, ring_size), gets it at
    [steps % ring_size]. A NaN or infinity among the logits gives BAD_TOKEN in the ring and FLAG_NOT_FINITE in the
    state instead. `scratch` holds `argmax_scratch_bytes`.
    """
    expect(0 < n_valid <= logits.width, f"{label}: {n_valid} valid ids of {logits.width}")
    expect(state.size >= STATE_BYTES * logits.n, f"{label}: the state has fewer than {logits.n} rows")
    expect(ring_size > 0 and ring.size >= 4 * ring_size * logits.n, f"{label}: the ring is smaller than {ring_size}")
    expect(scratch.size >= argmax_scratch_bytes(logits.n, n_valid), f"{label}: the scratch is too small")
    n_chunks = ceil_div(n_valid, CHUNK)
    first = on.choose(["argmax.chunk"], None)
    on.dispatch(
        first,
        {"logits": logits.place, "candidates": scratch},
        {
            "n_valid": n_valid,
            "chunk": CHUNK,
            "n_chunks": n_chunks,
            "logits_stride": logits.stride,
            "logits_offset": logits.offset,
        },
        (n_chunks, logits.n, 1),
        label,
    )
    on.recording.barrier()
    second = on.choose(["argmax.pick"], None)
    on.dispatch(
        second,
        {"candidates": scratch, "state": state, "ring": ring},
        {"n_chunks": n_chunks, "ring_size": ring_size, "advance": int(advance)},
        (logits.n, 1, 1),
        f"{label}.pick",
    )


def argmax_scratch_bytes(n_rows: int, n_valid: int) -> int:
    """Bytes of the candidates between the two stages."""
    return 8 * n_rows * ceil_div(n_valid, CHUNK)


def argmax_trips(*, n_valid: int) -> int:
    """Loop iterations of one lane, in the longer of the stages."""
    group = variants()["argmax.chunk"].workgroup[0]
    steps = group.bit_length()
    return max(CHUNK // group, ceil_div(ceil_div(n_valid, CHUNK), group)) + steps
