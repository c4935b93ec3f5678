"""Judges what is before the layers and behind them: the embedding, the last norm, the logits, argmax and sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.choice import Choice
from xinfer.gpu.api import Buffer
from xinfer.gpu_model.drawing import params_of
from xinfer.gpu_model.forward import download_rows
from xinfer.gpu_model.steps import RING, Steps
from xinfer.ops import BAD_TOKEN, Rows, RowState
from xinfer.trials import draws, expected
from xinfer.trials.base import Trial
from xinfer.trials.bench import DTYPES
from xinfer.trials.choice import ArgmaxTrial, SampleTrial
from xinfer.trials.expected import Weights
from xinfer.trials.judge import Array, Judgement, judge
from xinfer.trials.linear import LinearTrial, PackTrial, check_packed, unpack
from xinfer.trials.rows import EmbedTrial, NormTrial
from xinfer.verify.findings import Finding, finding
from xinfer.verify.oracle import Oracle
from xinfer.verify.watch import WatchedPass

TRIAL_ROWS = 16_384  # of a head too large to try whole

DRAW = Choice(n_valid=1 << 30, temperature=0.7, top_k=20, top_p=0.8, seed=7)  # as checkpoints ask for it, as a rule

Emit = Callable[[Finding], None]


def judge_embed(oracle: Oracle, case: str, tokens: NDArray[np.int64], x: Array, used: tuple[str, ...]) -> Finding:
    """The embedding x (T, hidden), which the device made of tokens (T,)."""
    rows = oracle.embed_rows(tokens)

    def trials() -> list[Trial]:
        distinct, places = np.unique(tokens, return_inverse=True)
        table = oracle.embed_rows(distinct).astype(DTYPES[oracle.embed_format])
        return [EmbedTrial(tokens=places, table=table, format=oracle.embed_format)]

    return finding(case, None, "embed", used, [("embedding", x, expected.exact(rows))], trials)


@dataclass(slots=True)
class HeadRun:
    """The head on some rows: what it was given, what came out, and by which kernels."""

    case: str
    x: Array  # (n, hidden): what it begins with
    logits: Array  # (n, vocab)
    used: tuple[str, ...] = ()
    operand: Array | None = None  # the normed rows as the product read them; None: normed on the way
    h: Array | None = None  # the same before they were packed
    judgements: list[Judgement] = field(default_factory=list)
    choosing: dict[str, tuple[str, ...]] = field(default_factory=dict)  # kernels of what chose a token behind it


class HeadJudge:
    """Runs heads, and judges all of them in one walk over the LM head's rows."""

    def __init__(self, oracle: Oracle, steps: Steps, emit: Emit) -> None:
        self._oracle = oracle
        self._steps = steps
        self._emit = emit
        self._runs: list[HeadRun] = []

    def run_prefill(self, case: str, x: Array) -> None:
        """The logits of rows x (n, hidden) as a prompt's are made."""
        steps, vocab = self._steps, self._oracle.config.vocab_size
        buffer = steps.device.create_buffer(4 * vocab * len(x), "device", "logits")
        try:
            logits = Rows.dense(buffer, len(x), vocab)
            run = HeadRun(case, x, np.empty(0, np.float32))
            with WatchedPass(steps.network(), steps.many, len(x), self._watch(run)) as watched:
                self._begin(run, watched)
                watched.head(logits)
            self._end(run, logits)
        finally:
            buffer.release()

    def run_step(self, case: str, x: Array, *, scratch: Buffer) -> tuple[int, Array]:
        """The logits and the choice behind a decode step's x (1, hidden); the token, and the logits (vocab,)."""
        steps, vocab = self._steps, self._oracle.config.vocab_size
        run = HeadRun(case, x, np.empty(0, np.float32))
        with WatchedPass(steps.network(), steps.one, 1, self._watch(run)) as watched:
            self._begin(run, watched)
            watched.load()
            watched.head(steps.logits)
            self._end(run, steps.logits)
            ops.argmax(
                *(watched.on, steps.logits, watched.state, steps.ring),
                n_valid=vocab,
                ring_size=RING,
                advance=True,
                scratch=scratch,
            )
            watched.done("argmax")
            if steps.can_choose(DRAW):
                self._draw(run, watched)
        token = steps.chosen(0)
        logits = run.logits
        wanted = expected.argmax(logits, vocab, BAD_TOKEN)
        self._emit(
            finding(
                *(case, None, "argmax", run.choosing["argmax"]),
                [("token", np.array([token], np.float32), expected.exact(wanted))],
                lambda: [ArgmaxTrial(logits=logits, n_valid=vocab)],
            )
        )
        return token, logits[0]

    def _draw(self, run: HeadRun, watched: WatchedPass) -> None:
        """Draw one more token behind the same logits."""
        steps, vocab = self._steps, self._oracle.config.vocab_size
        steps.drawing.stage(DRAW)
        watched.recording.barrier()
        steps.drawing.record_params(watched.recording)
        watched.recording.barrier()
        steps.drawing.record(watched.on, steps.logits, watched.state, steps.ring, ring_size=RING)
        watched.done("sample")
        position = RowState.unpack(steps.device.download(steps.one.states(1)[1])).position
        logits, params, none, zero = (
            run.logits[0],
            params_of(DRAW),
            np.zeros(vocab, np.uint32),
            np.zeros(vocab, np.float32),
        )
        wanted = draws.drawn(logits, params, none, zero, position) if np.isfinite(logits).all() else BAD_TOKEN
        self._emit(
            finding(
                *(run.case, None, "sample", run.choosing["sample"]),
                [("token", np.array([steps.chosen(1)], np.float32), expected.exact(np.array([wanted])))],
                lambda: [SampleTrial(logits=logits, params=(params,), counts=none, bias=zero)],
            )
        )

    def finish(self) -> None:
        """Judge the logits of every run."""
        oracle = self._oracle
        for first, rows in oracle.head_blocks():
            weights = Weights(rows)
            for run in self._runs:
                part = run.logits[:, first : first + len(rows)]
                if run.operand is not None:
                    wanted = expected.linear(run.operand, weights)
                else:
                    wanted = expected.norm_linear(run.x, oracle.norm, weights, eps=oracle.config.rms_norm_eps)
                judged = judge(part, wanted)
                where = (judged.where[0], judged.where[1] + first)
                run.judgements.append(dataclasses.replace(judged, where=where))
        for run in self._runs:
            worst = max(run.judgements, key=lambda judgement: judgement.ratio)
            counts = {name: sum(getattr(j, name) for j in run.judgements) for name in ("n_wrong", "n", "n_skipped")}
            judgement = dataclasses.replace(worst, **counts)
            trials = None if judgement.right else self._trials(run, judgement.where[1])
            self._emit(
                Finding(
                    case=run.case,
                    layer=None,
                    op="logits",
                    variants=run.used,
                    what="logits",
                    judgement=judgement,
                    trials=trials,
                )
            )
        self._runs.clear()

    def _begin(self, run: HeadRun, watched: WatchedPass) -> None:
        watched.write(watched.x, run.x)
        self._watched = watched

    def _end(self, run: HeadRun, logits: Rows) -> None:
        run.logits = download_rows(self._steps.device, logits)
        self._runs.append(run)

    def _watch(self, run: HeadRun) -> Callable[[str, tuple[str, ...]], None]:
        oracle, eps = self._oracle, self._oracle.config.rms_norm_eps

        def on_phase(label: str, used: tuple[str, ...]) -> None:
            watched = self._watched
            if label == "norm":
                run.h = run.operand = watched.read(watched.h)
                wanted = expected.rms_norm(run.x, oracle.norm, eps=eps)
                trial = NormTrial(x=run.x, weight=oracle.norm, eps=eps)
                self._emit(finding(run.case, None, "norm", used, [("norm", run.h, wanted)], lambda: [trial]))
            elif label in ("head.pack", "norm_pack"):
                self._judge_packed(run, label, used)
            elif label == "logits":
                run.used = tuple(dict.fromkeys(used))
            elif label in ("argmax", "sample"):
                run.choosing[label] = tuple(dict.fromkeys(used))
            else:
                raise LookupError(
                    f"no judge for the phase {label!r}: say in verify/ends.py what the reference makes of it"
                )

        return on_phase

    def _judge_packed(self, run: HeadRun, label: str, used: tuple[str, ...]) -> None:
        watched, exact = self._watched, self._watched.network.exact
        if label == "norm_pack":
            trial = PackTrial(x=run.x, exact=exact, norm=(self._oracle.norm, self._oracle.config.rms_norm_eps))
        else:
            assert run.h is not None
            trial = PackTrial(x=run.h, exact=exact)
        wanted = trial.expected()
        packed, words = watched.read_packed(wanted.values.shape[1])
        found = [(check.what, check.found, check.expected) for check in check_packed("", wanted, words, packed)]
        self._emit(finding(run.case, None, label.removeprefix("head."), used, found, lambda: [trial]))
        run.h, run.operand = wanted.values, unpack(words, packed)

    def _trials(self, run: HeadRun, worst_row: int) -> Callable[[], list[Trial]]:
        def trials() -> list[Trial]:
            oracle, eps = self._oracle, self._oracle.config.rms_norm_eps
            first = worst_row // TRIAL_ROWS * TRIAL_ROWS
            w = oracle.head_rows(first, min(first + TRIAL_ROWS, oracle.config.vocab_size))
            if run.h is not None:
                return [LinearTrial(x=run.h, w=w, format=oracle.head_format)]
            normed = expected.rms_norm(run.x, oracle.norm, eps=eps).values
            return [
                LinearTrial(x=run.x, w=w, format=oracle.head_format, norm=(oracle.norm, eps)),
                NormTrial(x=run.x, weight=oracle.norm, eps=eps),
                LinearTrial(x=normed, w=w, format=oracle.head_format),
            ]

        return trials
