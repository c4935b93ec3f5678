"""argmax on the device against NumPy's, and what it does to the state and the ring."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.op_bench import Array, Bench, Output

from xinfer import ops

RING = 4


def choose(
    bench: Bench,
    logits: Array,
    *,
    n_valid: int | None = None,
    advance: bool = True,
    rows: list[ops.RowState] | None = None,
    times: int = 1,
) -> tuple[list[ops.RowState], Output]:
    """Run it `times` times; the rows' states, and the ring."""
    n = len(logits)
    rows = rows or [ops.RowState(token=7, position=10 + i, sequence=i) for i in range(n)]
    words = np.frombuffer(b"".join(row.pack() for row in rows), np.uint32).reshape(n, -1)
    state, ring = bench.out(*words.shape, dtype=np.uint32, fill=words), bench.out(n, RING, dtype=np.uint32)
    valid = n_valid or logits.shape[1]
    scratch = bench.out(ops.argmax_scratch_bytes(n, valid) // 4, dtype=np.uint32)
    source = bench.put_rows(logits, stride=logits.shape[1] + 3, offset=1)

    def record(on: ops.Recorder) -> None:
        for _ in range(times):
            ops.argmax(
                *(on, source, state.place, ring.place),
                n_valid=valid,
                ring_size=RING,
                advance=advance,
                scratch=scratch.place,
            )
            on.recording.barrier()

    bench.run(record)
    scratch.read()
    found = state.read()
    return [ops.RowState.unpack(row.tobytes()) for row in found], ring


@pytest.mark.parametrize("n", [1, 31, 32, 33, 2048, 2049, 4097, 151_936])
def test_matches_numpy(bench: Bench, n: int) -> None:
    logits = np.random.default_rng(n).standard_normal((2, n), np.float32) - np.float32(10)  # all negative
    states, ring = choose(bench, logits)
    expected = np.argmax(logits, axis=1)
    assert [row.token for row in states] == expected.tolist()
    assert ring.read()[:, 0].tolist() == expected.tolist()
    assert [(row.position, row.sequence, row.steps, row.flags) for row in states] == [(11, 0, 1, 0), (12, 1, 1, 0)]


@pytest.mark.parametrize("places", [(0, 1), (5, 4096), (2047, 2048), (127, 128), (3000, 3001)])
def test_the_lowest_id_wins_a_tie(bench: Bench, places: tuple[int, int]) -> None:
    logits = np.zeros((1, 4097), np.float32)
    logits[0, list(places)] = 3.5
    assert choose(bench, logits)[0][0].token == places[0]


def test_zeros_of_either_sign_are_equal_and_subnormals_are_not(bench: Bench) -> None:
    assert choose(bench, np.array([[-1.0, -0.0, 0.0]], np.float32))[0][0].token == 1
    assert choose(bench, np.array([[0.0, -0.0, 1e-45, -1e-45]], np.float32))[0][0].token == 2


def test_ids_past_the_tokenizer_are_not_chosen(bench: Bench) -> None:
    logits = np.arange(5000, dtype=np.float32)[None]
    logits[0, 4500] = np.nan  # nor looked at
    assert choose(bench, logits, n_valid=4001)[0][0].token == 4000


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 31, 4096])
def test_what_is_not_a_number_is_reported(bench: Bench, value: float, place: int) -> None:
    logits = np.random.default_rng(place).standard_normal((2, 4097), np.float32)
    logits[0, place] = value
    states, ring = choose(bench, logits, times=3)
    found = ring.read()
    assert found[0, :3].tolist() == [ops.BAD_TOKEN] * 3
    assert found[1, 0] == np.argmax(logits[1])
    assert (states[0].flags, states[0].bad_step, states[0].token) == (ops.FLAG_NOT_FINITE, 0, 7)
    assert (states[1].flags, states[1].steps) == (0, 3)


def test_the_ring_goes_round_and_the_first_bad_step_is_kept(bench: Bench) -> None:
    rows = [ops.RowState(token=0, position=3, steps=RING - 1)]
    logits = np.array([[0.0, 1.0, np.nan]], np.float32)
    states, ring = choose(bench, logits, n_valid=2, rows=rows, times=2)
    found = ring.read()[0]
    assert [found[RING - 1], found[0]] == [1, 1]
    assert found[1] == found[2]  # as they were
    assert (states[0].steps, states[0].position) == (RING + 1, 5)
    states, _ = choose(bench, logits, rows=rows, times=2)
    assert (states[0].bad_step, states[0].steps) == (RING - 1, RING + 1)


def test_prefill_leaves_the_position(bench: Bench) -> None:
    states, ring = choose(bench, np.array([[0.0, 2.0, 1.0]], np.float32), advance=False)
    assert (states[0].token, states[0].position, states[0].steps) == (1, 10, 1)
    assert ring.read()[0, 0] == 1
