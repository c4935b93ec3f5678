"""The trial of argmax: both of its stages, each judged by what it was given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import RowState
from xinfer.ops._argmax import CHUNK
from xinfer.shaders.catalog import Variant
from xinfer.trials import expected
from xinfer.trials.base import Check
from xinfer.trials.bench import Bench
from xinfer.trials.judge import Array

RING = 4
FIRST_TOKEN = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgmaxTrial:
    """logits (T, vocab); ids from n_valid on are never chosen."""

    logits: Array
    n_valid: int
    op: str = "argmax"

    @property
    def shape(self) -> str:
        """Its sizes."""
        return f"{self.logits.shape[0]} x {self.logits.shape[1]}, {self.n_valid} valid"

    def fits(self, variant: Variant) -> bool:
        """Both stages."""
        return variant.op == "argmax"

    def run(self, bench: Bench, variant: str) -> list[Check]:  # noqa: ARG002  # both stages run anyway
        """Stage one against the largest of every chunk, stage two against the best of its candidates."""
        n = len(self.logits)
        rows = [RowState(token=FIRST_TOKEN, position=10 + i, sequence=i, steps=i) for i in range(n)]
        words = np.frombuffer(b"".join(row.pack() for row in rows), np.uint32).reshape(n, -1)
        state = bench.out(*words.shape, dtype=np.uint32, fill=words)
        ring = bench.out(n, RING, dtype=np.uint32)
        scratch = bench.out(n, ops.argmax_scratch_bytes(1, self.n_valid) // 8, 2, dtype=np.uint32)
        logits = bench.put_rows(self.logits)
        bench.run(
            lambda on: ops.argmax(
                *(on, logits, state.place, ring.place),
                n_valid=self.n_valid,
                ring_size=RING,
                advance=True,
                scratch=scratch.place,
            )
        )
        candidates = scratch.read()  # (T, chunks, 2): key, id
        chunked = _best_of_chunks(self.logits[:, : self.n_valid])
        chosen = candidates[:, :, 1][np.arange(n), _best_candidate(candidates)]
        states, tokens = state.read(), ring.read()
        found = np.stack([states[:, 0], states[:, 1], states[:, 3], tokens[np.arange(n), np.arange(n) % RING]], axis=1)
        wanted = np.stack([chosen, 11 + np.arange(n), 1 + np.arange(n), chosen], axis=1)
        return [
            Check("argmax.chunk", "ids", candidates[:, :, 1].astype(np.float32), expected.exact(chunked)),
            Check("argmax.pick", "token, position, steps", found.astype(np.float32), expected.exact(wanted)),
        ]


def _best_of_chunks(logits: Array) -> NDArray[np.int64]:
    """(T, chunks): the id of each chunk's largest logit."""
    starts = range(0, logits.shape[1], CHUNK)
    return np.stack([start + np.argmax(logits[:, start : start + CHUNK], axis=1) for start in starts], axis=1)


def _best_candidate(candidates: NDArray[np.uint32]) -> NDArray[np.intp]:
    """(T,): which candidate has the largest key, the lowest id on ties."""
    order = (candidates[:, :, 0].astype(np.uint64) << np.uint64(32)) | (
        0xFFFF_FFFF - candidates[:, :, 1].astype(np.uint64)
    )
    best: NDArray[np.intp] = np.argmax(order, axis=1)
    return best
