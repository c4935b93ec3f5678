"""The trials of argmax and of sample: each stage judged by what it was given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import RowState, SampleParams
from xinfer.ops._argmax import CHUNK
from xinfer.ops._sample import chunk_shift, stage_variants
from xinfer.shaders.catalog import Variant
from xinfer.trials import draws, expected
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTrial:
    """logits (vocab,), drawn once for each seed."""

    logits: Array
    params: tuple[SampleParams, ...]  # a row each
    counts: NDArray[np.uint32]  # (vocab,)
    bias: Array  # (vocab,)
    op: str = "sample"

    @property
    def shape(self) -> str:
        """Its sizes."""
        first = self.params[0]
        return f"{len(self.params)} x {len(self.logits)}, top_k {first.top_k}, top_p {first.top_p}, min_p {first.min_p}"

    def fits(self, variant: Variant) -> bool:
        """The stages that do something here."""
        params = self.params[0]
        idle = (variant.id == "sample.sum" and params.top_k) or (
            variant.id in stage_variants("all") and not params.slow
        )
        return variant.op == "sample" and not idle

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Keys of the first stage, sums of the second, tokens of the others, all to the bit."""
        n, vocab = len(self.params), len(self.logits)
        rows = [RowState(token=FIRST_TOKEN, position=10 + i, sequence=i, steps=i) for i in range(n)]
        words = np.frombuffer(b"".join(row.pack() for row in rows), np.uint32).reshape(n, -1)
        state = bench.out(*words.shape, dtype=np.uint32, fill=words)
        ring = bench.out(n, RING, dtype=np.uint32)
        counts = bench.out(n, vocab, dtype=np.uint32, fill=np.tile(self.counts, (n, 1)))
        scratch = bench.out(n, ops.sample_scratch_bytes(1, vocab) // 4, dtype=np.uint32)
        params = bench.put(np.frombuffer(b"".join(row.pack() for row in self.params), np.uint32))
        bias, logits = bench.put(np.tile(self.bias, (n, 1))), bench.put_rows(np.tile(self.logits, (n, 1)))
        bench.run(
            lambda on: ops.sample(
                *(on, logits, state.place, ring.place),
                params=params,
                counts=counts.place,
                bias=bias,
                ring_size=RING,
                advance=True,
                scratch=scratch.place,
                variant=variant,
            )
        )
        left, states, tokens, counted = scratch.read(), state.read(), ring.read(), counts.read()
        chosen = np.array(
            [
                draws.drawn(self.logits, row, self.counts, self.bias, position=11 + i)
                for i, row in enumerate(self.params)
            ]
        )
        checks = self._check_rest(left)
        found = np.stack([states[:, 0], states[:, 1], states[:, 3], tokens[np.arange(n), np.arange(n) % RING]], axis=1)
        wanted = np.stack([chosen, 11 + np.arange(n), 1 + np.arange(n), chosen], axis=1)
        added = (counted - self.counts).sum(axis=1)
        found = np.column_stack([found, counted[np.arange(n), chosen], added]).astype(np.float32)
        wanted = np.column_stack([wanted, self.counts[chosen] + 1, np.ones(n)]).astype(np.float32)
        last = variant if variant in stage_variants("few") + stage_variants("all") else stage_variants("few")[0]
        return [*checks, Check(last, "token, position, steps, counts", found, expected.exact(wanted))]

    def _check_rest(self, left: NDArray[np.uint32]) -> list[Check]:
        """What the stages before the choice leave."""
        n, vocab = len(self.params), len(self.logits)
        scores = [draws.scored(self.logits, row, self.counts, self.bias) for row in self.params]
        keys = np.stack([draws.keys_of(row) for row in scores])
        checks = [Check("sample.chunk", "keys", _halves(left[:, :vocab]), expected.exact(_halves(keys)))]
        if not self.params[0].top_k:
            starts = np.arange(0, vocab, 1 << chunk_shift(vocab))
            weights = [draws.weights_of(row, one) for row, one in zip(scores, self.params, strict=True)]
            sums = np.stack([np.add.reduceat(row, starts) for row in weights]).view(np.uint32)  # (n, 2 * chunks)
            found = left[:, vocab:-1].reshape(n, -1, 3)[:, :, 1:].reshape(n, -1)
            checks.append(Check("sample.sum", "sums of weights", _halves(found), expected.exact(_halves(sums))))
        return checks


def _halves(words: NDArray[np.uint32]) -> Array:
    """Words as float32, which holds 24 bits, by their halves."""
    return np.stack([words >> 16, words & 0xFFFF], axis=-1).astype(np.float32)


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
