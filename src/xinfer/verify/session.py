"""One verification: which prompts and steps, layer after layer, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.errors import NumericalError
from xinfer.gpu.api import Buffer
from xinfer.gpu_model import QwenModel
from xinfer.gpu_model.forward import Network
from xinfer.gpu_model.steps import HEAD_BYTES, Steps
from xinfer.trials.judge import Array
from xinfer.verify.coverage import full_context, prompt_of, prompts_for_every_kernel
from xinfer.verify.ends import HeadJudge, judge_embed
from xinfer.verify.findings import Case, Finding
from xinfer.verify.layers import LayerJudge, Placement
from xinfer.verify.oracle import Oracle, OracleLayer
from xinfer.verify.recorded import Difference, Replay, Trace
from xinfer.verify.watch import WatchedPass

LENGTHS = (1, 2, 8, 17, 64, 65, 513)  # of prompts: around the borders of blocks, tiles and the kinds of kernels
SHORT_PROMPT = 17  # what the first decode steps stand behind
SOFTWARE_FLOPS = 20_000_000_000  # a prompt's on a software driver: some ten seconds each time it is run
HEAD_ROWS = 65  # of a prompt whose logits are looked at
SEED = 4

Progress = Callable[[int, int], None]


class Session:
    """Verifies one loaded model. Every prompt is a prefix of one sequence of random ids, in one cache.

    The walk is layer by layer, so that the oracle reads each layer once; within a layer every prompt, and every decode
    step behind it, runs as its recording would.
    """

    def __init__(
        self,
        model: QwenModel,
        oracle: Oracle,
        *,
        n_steps: int,
        longest: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.oracle = oracle
        self.findings: list[Finding] = []
        self.differences: list[Difference] = []
        self._steps: Steps = model.steps
        self._progress = progress or (lambda _done, _total: None)
        most = longest_prompt(oracle, model) if longest is None else longest
        self.cases = plan_cases(oracle.config.max_context, n_steps, longest=most)
        self.not_tried: list[str] = []  # kernels that only longer prompts would come to
        longest = max(case.n_prompt for case in self.cases)
        vocab = oracle.config.vocab_size
        self._ids = np.random.default_rng(SEED).integers(0, vocab, longest + 1)
        self._ids[: min(2, longest)] = [vocab - 1, 0][: min(2, longest)]
        self._room = longest + n_steps + 1
        self._cache = model.make_cache(self._room)
        self._fed: dict[str, NDArray[np.int64]] = {}  # what the steps of each case are given
        self._full: Network | None = None
        self._done = 0

    def run(self) -> None:
        """Judge everything; findings and differences are complete afterwards."""
        model = self.model
        model.claim(None)
        self._cache.reserve(self._room)  # at once, so that the pool, and with it the kernels' plans, stay as they are
        self._complete_cases()
        self._fed = {case.name: self._greedy_ids(case) for case in self.cases if case.n_steps}
        self._cache.reserve(self._room)  # what failed above may have given blocks back
        with ExitStack() as held:
            if any(case.full for case in self.cases):
                self._full = held.enter_context(full_context(self._steps))
            traces = [Trace(case, [self._embed(part, case) for part in self._parts(case)]) for case in self.cases]
            for i in range(self.oracle.config.num_hidden_layers):
                w = self.oracle.layer(i)
                self._steps.bring(i)
                for trace in traces:
                    self._layer(i, w, trace)
            self._heads(traces)
        self._replay(traces)

    def _complete_cases(self) -> None:
        """Add what it takes for every kernel of the model's recordings, those of a grown cache too, to be judged."""
        longest = max(case.n_prompt for case in self.cases)
        more, self.not_tried = prompts_for_every_kernel(self._steps, self.cases, longest)
        self.cases += more
        if self._steps.network().max_keys < self._steps.context:
            self.cases += full_cases(self.cases, self._steps.context)
        self.cases.sort(key=lambda case: (case.n_prompt, case.n_steps))  # steps read what their prompt has cached

    @property
    def _total(self) -> int:
        """What there is to do: every part passes each layer twice, watched and replayed, and both ends."""
        parts = sum(_cost(ids) for case in self.cases for _, ids in self._parts(case))
        return parts * (2 * self.oracle.config.num_hidden_layers + 2)

    def _advance(self, ids: NDArray[np.int64], times: int = 1) -> None:
        self._done += times * _cost(ids)
        self._progress(min(self._done, self._total - 1), self._total)

    def _parts(self, case: Case) -> list[tuple[int, NDArray[np.int64]]]:
        """(position, ids) of each pass of a case: chunks of a prompt, or steps of one token."""
        if case.n_steps:
            fed = self._fed[case.name] if self._fed else np.zeros(case.n_steps, np.int64)
            return [(case.n_prompt + n, fed[n : n + 1]) for n in range(case.n_steps)]
        size = self._steps.max_rows
        return [(begin, self._ids[begin : min(begin + size, case.n_prompt)]) for begin in range(0, case.n_prompt, size)]

    def _greedy_ids(self, case: Case) -> NDArray[np.int64]:
        """What greedy steps behind a prompt are given, as the engine's own queue makes them."""
        model, cache = self.model, self._cache
        cache.truncate(0)
        fed = self._ids[case.n_prompt : case.n_prompt + 1].tolist()
        try:
            model.extend(self._ids[: case.n_prompt], cache)
            fed += list(model.greedy(fed[0], cache, limit=case.n_steps))[:-1]
        except NumericalError:  # it will be found below, at its op
            rng = np.random.default_rng(SEED)
            fed += rng.integers(0, self.oracle.config.vocab_size, case.n_steps).tolist()
        return np.array(fed[: case.n_steps], np.int64)

    def _watched(self, case: Case, n: int, on_phase: Callable[[str, tuple[str, ...]], None]) -> WatchedPass:
        """A pass over n rows, in the workspace that the recording would use, padded as it would be."""
        space = self._steps.one if case.n_steps else self._steps.many
        network = self._steps.network()
        if case.full:
            assert self._full is not None
            network = self._full
        return WatchedPass(network, space, n if case.n_steps else self._steps.bucket(n), on_phase)

    def _stage(self, case: Case, start: int, ids: NDArray[np.int64]) -> None:
        """Let the cache end at `start`, and give the states of the rows behind it to the next pass."""
        cache, steps = self._cache, self._steps
        cache.ids[:] = self._ids[: min(start, len(self._ids))].tolist() + [0] * (start - len(self._ids))
        if case.n_steps:
            steps.stage_one(int(ids[0]), cache, position=start)
        else:
            steps.stage_chunk(ids.tolist(), cache, rows=steps.bucket(len(ids)))

    def _embed(self, part: tuple[int, NDArray[np.int64]], case: Case) -> Array:
        start, ids = part
        used: list[str] = []
        self._stage(case, start, ids)
        with self._watched(case, len(ids), lambda _label, variants: used.extend(variants)) as watched:
            watched.load()
            watched.embed()
            x = watched.read(watched.x)
        self.findings.append(judge_embed(self.oracle, case.name, ids, x[: len(ids)], tuple(used)))
        self._advance(ids)
        return x

    def _layer(self, i: int, w: OracleLayer, trace: Trace) -> None:
        """One layer of one case; x moves on, and what the layer cached is kept."""
        keys: list[Array] = []
        values: list[Array] = []
        for number, (start, ids) in enumerate(self._parts(trace.case)):
            self._stage(trace.case, start, ids)
            at = Placement(case=trace.case.name, cache=self._cache, start=start, n=len(ids))
            judge = LayerJudge(i, w, at, trace.x[number], self.findings.append)
            with self._watched(trace.case, len(ids), judge) as watched:
                judge.run = watched
                watched.load()
                watched.write(watched.x, trace.x[number])
                watched.layer(i)
            trace.x[number] = judge.x
            keys.append(judge.keys[start:])
            values.append(judge.values[start:])
            self._advance(ids)
        trace.keys.append(np.concatenate(keys))
        trace.values.append(np.concatenate(values))

    def _heads(self, traces: Iterable[Trace]) -> None:
        config, device = self.oracle.config, self.model.device
        heads = HeadJudge(self.oracle, self._steps, self.findings.append)
        most = max(1, min(HEAD_ROWS, HEAD_BYTES // (4 * config.vocab_size)))
        size = ops.argmax_scratch_bytes(1, config.vocab_size)
        scratch: Buffer = device.create_buffer(size, "device", "argmax candidates")
        try:
            for trace in traces:
                parts = self._parts(trace.case)
                for number, (start, ids) in enumerate(parts):
                    x = trace.x[number][: len(ids)]
                    if trace.case.n_steps:
                        self._stage(trace.case, start, ids)
                        token, logits = heads.run_step(trace.case.name, x, scratch=scratch)
                        trace.chosen.append(token)
                        trace.logits.append(logits)
                    elif number == len(parts) - 1:
                        heads.run_prefill(trace.case.name, x[-most:])
                    self._advance(ids)
        finally:
            scratch.release()
        heads.finish()

    def _replay(self, traces: list[Trace]) -> None:
        """The real recordings on the same rows: they must give what their ops gave one by one."""
        replay = Replay(self._steps, self._cache, self._ids)
        for trace in traces:
            case, parts = trace.case, self._parts(trace.case)
            if case.full:  # made when the cache grows; their kernels have been judged
                found = []
            elif case.n_steps:
                found = replay.steps(trace, parts)
            else:
                found = replay.prompt(trace, parts)
            self.differences += found
            for _, ids in parts:
                self._advance(ids, self.oracle.config.num_hidden_layers)
        self._progress(self._total, self._total)


def _cost(ids: NDArray[np.int64]) -> int:
    """A pass over so many rows, in rows: what a pass takes by itself is some rows' worth."""
    return len(ids) + 8


def longest_prompt(oracle: Oracle, model: QwenModel) -> int:
    """The longest prompt that is tried: on a software driver, what it can compute in bearable time."""
    if model.device.info.kind != "cpu":
        return max(LENGTHS)
    fits = SOFTWARE_FLOPS // (2 * oracle.config.num_parameters())
    return max(length for length in LENGTHS if length <= max(fits, SHORT_PROMPT))


def plan_cases(max_context: int, n_steps: int, *, longest: int = max(LENGTHS)) -> list[Case]:
    """Prompts of `LENGTHS`, as far as the context holds them, and decode steps behind a short and the longest one."""
    n_steps = min(n_steps, max_context - 1)
    room = max(1, min(max_context - n_steps - 1, longest))
    lengths = sorted({min(length, room) for length in LENGTHS})
    cases = []
    for length in lengths:
        cases.append(prompt_of(length))
        if n_steps and length in (min(SHORT_PROMPT, lengths[-1]), lengths[-1]):
            cases.append(Case(name=f"{n_steps} steps after {length}", n_prompt=length, n_steps=n_steps))
    return cases


def full_cases(cases: Iterable[Case], context: int) -> list[Case]:
    """The short prompt, and the steps behind the longest, once more as in a cache that has grown to the context."""
    prompts = [case for case in cases if not case.n_steps]
    steps = [case for case in cases if case.n_steps]
    short = max((case for case in prompts if case.n_prompt <= SHORT_PROMPT), key=lambda case: case.n_prompt)
    again = [short, *steps[-1:]]
    return [replace(case, name=f"{case.name}, full context of {context:,}", full=True) for case in again]
