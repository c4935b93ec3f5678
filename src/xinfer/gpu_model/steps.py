"""Recordings of the network, made when first needed and replayed: the decode step, and chunks of a prompt.

All of them belong to one generation of the cache's pool and are made again in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np

from xinfer import ops
from xinfer.choice import Choice
from xinfer.gpu.api import Buffer, Device, Recording, Ticket
from xinfer.gpu_model.checks import CheckedRows
from xinfer.gpu_model.drawing import Drawing
from xinfer.gpu_model.forward import (
    Array,
    Network,
    Pass,
    Tap,
    TappedPass,
    Workspace,
    cache_blocks,
    download_rows,
)
from xinfer.gpu_model.loading import Progress
from xinfer.gpu_model.memory import MemoryPlan
from xinfer.gpu_model.tuning import Sites, Tuning
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.kv_cache import BlockPool, KVCache
from xinfer.model.config import Qwen2Config
from xinfer.model.reference import rope_tables
from xinfer.ops import KernelSet, Recorder, Rows, RowState, WantedKernels

RING = 64  # tokens that the device remembers
# Rows that recordings are made for; a chunk is padded to the next of them.
ROW_BUCKETS = (1, 2, 4, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HEAD_BYTES = 64 << 20  # logits of all rows are made in pieces of this size
TIMEOUT_S = 60.0  # behind which work that has not ended hangs
SOFTWARE_TIMEOUTS = 10  # times as long on a software device: others may have the CPU that it computes on
SPIN_S = 0.01  # a single step takes less

Timed = Literal["no", "whole", "ops"]  # where timestamps are taken

# Segments of the decode step: take the state from the host, run, copy the logits to where the host reads them.
LOAD, STEP, READ = "load", "step", "read"
STREAMED = "layer"  # "step layer 3": a segment before which layer 3 must be sent


def planned_rows(most: int) -> list[int]:
    """Of 1 to `most` rows, those of which one needs the most scratch: kernels take rows in tiles of 32 or more."""
    return sorted({*range(1, min(most, 32) + 1), *range(32, most + 1, 32), most})


class Steps:
    """The recordings of one model, and every buffer that they use but the weights."""

    def __init__(
        self,
        device: Device,
        config: Qwen2Config,
        weights: DeviceWeights,
        plan: MemoryPlan,
        *,
        context: int,
        exact: bool = False,
        quarantine: Iterable[str] = (),
        tuning: Tuning | None = None,
        on_compile: Progress | None = None,
    ) -> None:
        self.device = device
        self.config = config
        self.context = context
        self.max_rows = plan.rows
        self.exact = exact
        self._weights = weights
        self._checks: dict[int, CheckedRows] = {}  # by the rows that there is room for
        self._recordings: dict[tuple[str, int], Recording] = {}
        self._generation = -1  # of the pool, which network and recordings belong to
        self._network: Network | None = None
        self.tuning = Tuning()  # what of it can be used here
        self._staging_used: Ticket | None = None  # the last submission that reads what the host has staged
        with ExitStack() as held:
            self.kernels = held.enter_context(KernelSet(device, quarantine=quarantine, on_make=on_compile))
            held.callback(self._forget)
            self.pool = BlockPool(device, plan.shape, context=context)
            held.callback(self.pool.release)
            self.one = Workspace(device, config, 1, "decode")
            held.callback(self.one.release)
            self.many = Workspace(device, config, plan.rows, "prefill")
            held.callback(self.many.release)

            def buffer(size: int, kind: Literal["device", "readback"], label: str) -> Buffer:
                made = device.create_buffer(size, kind, label)
                held.callback(made.release)
                return made

            vocab = config.vocab_size
            self.logits = Rows.dense(buffer(4 * vocab, "device", "logits"), 1, vocab)
            self.logits_back = buffer(4 * vocab, "readback", "logits")
            self.ring = buffer(4 * RING, "readback", "chosen tokens")
            self._candidates = buffer(ops.argmax_scratch_bytes(1, vocab), "device", "argmax candidates")
            self.drawing = Drawing(device, vocab)
            held.callback(self.drawing.release)
            self.tune(tuning or Tuning())
            self.network()
            self._held = held.pop_all()

    def close(self) -> None:
        """Give everything back; may be called twice."""
        self._held.close()

    def network(self) -> Network:
        """What passes bind now; made again when the pool has changed, and every recording is forgotten."""
        if self._network is not None and self._generation == self.pool.generation:
            return self._network
        self._forget()
        max_keys = min(self.pool.n_tokens, self.context)
        scratch_bytes, counter_bytes = self.attention_bytes(max_keys)
        with ExitStack() as made:
            # A canary fills a block of the cache, however short the context is.
            table = self._rope_table(max(max_keys, ops.BLOCK_TOKENS))
            made.callback(table.release)
            scratch = self.device.create_buffer(scratch_bytes, "device", "attention splits")
            made.callback(scratch.release)
            self.device.upload(scratch[:counter_bytes], bytes(counter_bytes))
            made.pop_all()
        self._generation = self.pool.generation
        self._network = Network(
            device=self.device,
            config=self.config,
            kernels=self.kernels,
            weights=self._weights,
            pool=self.pool,
            rope_table=table,
            scratch=scratch,
            max_keys=max_keys,
            tuning=self.tuning,
            exact=self.exact,
        )
        return self._network

    def tune(self, tuning: Tuning) -> None:
        """Use these variants from now on, those that can be used here; what was recorded is recorded again."""
        self.tuning = self.sites().accepted(tuning) if tuning else tuning
        self._generation = -1

    def sites(self) -> Sites:
        """What kernels are chosen for."""
        return Sites(
            kernels=self.kernels,
            layer=self._weights.layers[0],
            head=self._weights.head,
            cache=cache_blocks(self.pool, self.config, 0),
            one={name: self.one.rows(name, 1) for name in ("x", "attn", "gate")},
            max_rows=self.max_rows,
            exact=self.exact,
        )

    def layers_moved(self) -> None:
        """Forget what was recorded: layers lie elsewhere. Nothing is allocated."""
        self._forget_recordings()
        if self._network is not None:
            self._network = replace(self._network)  # for those who ask whether it is still the same

    def can_choose(self, choice: Choice) -> bool:
        """Whether the device chooses so by itself."""
        return choice.is_argmax or ops.can_sample(self.kernels, self.config.vocab_size)

    def choosing(self, choice: Choice) -> Recording:
        """The decode step of answers that choose so."""
        return self.decode(choice.n_valid) if choice.is_argmax else self.draw()

    def stage_choice(self, choice: Choice) -> tuple[str, ...]:
        """Write what an answer's choice needs, behind `stage_one`; the segments that take it besides LOAD."""
        return () if choice.is_argmax else self.drawing.stage(choice)

    def decode(self, n_valid: int) -> Recording:
        """A decode step that takes the best of the ids below n_valid: segments LOAD, STEP and READ."""

        def record(recording: Recording) -> None:
            recording.segment(LOAD)
            self.record_load(recording, self.one, 1)
            recording.segment(STEP)
            self.record_step(recording, n_valid)
            recording.segment(READ)
            recording.barrier()
            recording.copy(self.logits.place, self.logits_back)

        return self._kept(("decode", n_valid), record)

    def draw(self) -> Recording:
        """A decode step that draws as the staged choice wants it: segments LOAD, COUNTS, BIAS and STEP."""

        def record(recording: Recording) -> None:
            recording.segment(LOAD)
            recording.barrier()
            recording.copy(*self.one.states(1))
            self.drawing.record_params(recording)
            self.drawing.record_rest(recording)
            recording.segment(STEP)
            self.record_step(recording, None)

        return self._kept(("draw", 0), record)

    def check(self, n: int, n_valid: int) -> Recording:
        """N rows that follow each other, and the best id below n_valid behind each, to the bit as in n steps.

        Segments LOAD and STEP.
        """
        rows = self._checked_rows(n)

        def record(recording: Recording) -> None:
            recording.segment(LOAD)
            recording.barrier()
            rows.record_load(recording, n)
            recording.segment(STEP)
            recording.barrier()
            rows.record(recording, self.network(), n, n_valid, lambda step: self.record_layers(step, STEP))

        return self._kept((f"check {n}", n_valid), record)

    def stage_check(self, tokens: Sequence[int], cache: KVCache) -> None:
        """Write the states of tokens behind the cache, for the next `check` of so many."""
        if self._staging_used is not None:
            self.wait(self._staging_used)
        self._checked_rows(len(tokens)).stage(
            [
                RowState(token=token, position=cache.length + i, sequence=cache.sequence)
                for i, token in enumerate(tokens)
            ]
        )

    def forget_checks(self) -> None:
        """Give back what checking takes, until it is wanted again."""
        for key in [key for key in self._recordings if key[0].startswith("check ")]:
            self._recordings.pop(key).release()
        for rows in self._checks.values():
            rows.release()
        self._checks.clear()

    def checked(self, n: int) -> list[int]:
        """The tokens that the last `check` of n rows has chosen, once it has been waited for."""
        return self._checked_rows(n).chosen(n)

    def checked_logits(self, n: int) -> Array:
        """The logits behind each of them, (n, vocab)."""
        return self._checked_rows(n).logits(n)

    def _checked_rows(self, n: int) -> CheckedRows:
        """Room for n rows, made when first needed: for twice as many each time, so that little is made in vain."""
        size = 1 << (n - 1).bit_length()
        if size not in self._checks:
            self._checks[size] = CheckedRows(self.device, self.config, size)
            self._held.callback(self._checks[size].release)
        return self._checks[size]

    def record_step(self, recording: Recording, n_valid: int | None, *, timed: Timed = "no") -> None:
        """One token through the network, and the choice of the next one: the best id below n_valid, or a drawn one."""
        recording.barrier()
        if timed != "no":
            recording.timestamp("begin")
        step = Pass(self.network(), self.one, 1, recording, timed=timed == "ops")
        step.embed()
        self.record_layers(step, STEP)
        step.head(self.logits)
        if n_valid is None:
            self.drawing.record(step.on, self.logits, step.state, self.ring, ring_size=RING)
        else:
            ops.argmax(
                *(step.on, self.logits, step.state, self.ring),
                n_valid=n_valid,
                ring_size=RING,
                advance=True,
                scratch=self._candidates,
            )
        step.done("sample" if n_valid is None else "argmax")
        if timed == "whole":
            recording.timestamp("step")

    def prefill(self, n: int, *, whole: bool) -> Recording:
        """Chunks of n rows into the cache; `whole` runs the last layer to its end, so that x is the network's."""

        def record(recording: Recording) -> None:
            recording.segment(STEP)
            self.record_load(recording, self.many, n)
            chunk = Pass(self.network(), self.many, n, recording)
            chunk.embed()
            self.record_layers(chunk, STEP, cache_only=not whole)

        return self._kept(("whole" if whole else "prefill", n), record)

    def record_layers(
        self, step: Pass, name: str, *, cache_only: bool = False, after: Callable[[int], None] | None = None
    ) -> None:
        """All layers, each streamed one in a segment of its own; `cache_only` is for the last one.

        `after` may record more behind each layer.
        """
        split, last = self._weights.split, self.config.num_hidden_layers - 1
        for i in range(last + 1):
            if i in split.streamed:
                step.recording.segment(f"{name} {STREAMED} {i}")
            elif i - 1 in split.streamed:
                step.recording.segment(f"{name} behind {i - 1}")
            step.layer(i, cache_only=cache_only and i == last)
            if after is not None:
                after(i)
        if last in split.streamed:
            step.recording.segment(f"{name} behind {last}")

    def bucket(self, n: int) -> int:
        """The rows of the recording that takes n rows."""
        return next((rows for rows in ROW_BUCKETS if n <= rows <= self.max_rows), n)

    def stage_one(self, token: int, cache: KVCache, *, position: int, steps: int = 0) -> None:
        """Write the state of a decode step, for the next LOAD. `steps` is the number of tokens chosen before."""
        state = RowState(token=token, position=position, sequence=cache.sequence, steps=steps)
        self._stage(self.one, state.pack())

    def stage_chunk(self, tokens: Sequence[int], cache: KVCache, *, rows: int, begin: int | None = None) -> None:
        """Write the states of `tokens`, and padding up to `rows`, for the next chunk.

        They stand behind `cache`, or from position `begin` on.
        """
        begin = cache.length if begin is None else begin
        words = ops.STATE_BYTES // 4
        states = np.zeros((rows, words), np.uint32)
        columns = {field.name: states[:, i] for i, field in enumerate(fields(RowState))}
        n = len(tokens)
        columns["token"][:n] = tokens
        columns["position"][:n] = np.arange(begin, begin + n)
        columns["position"][n:] = ops.UNUSED_POSITION
        columns["sequence"][:n] = cache.sequence
        self._stage(self.many, states.tobytes())

    def _stage(self, space: Workspace, states: bytes) -> None:
        if self._staging_used is not None:
            self.wait(self._staging_used)
        space.staging.write(states)

    def submit(self, recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
        """Queue it. What loads states is remembered, so that staging is not written too early."""
        ticket = self.device.submit(recording, segments) if self.resident else self._stream(recording, segments)
        if segments is None or LOAD in segments:
            self._staging_used = ticket
        return ticket

    def submit_part(self, recording: Recording, segments: Sequence[str], *, loads: bool) -> Ticket:
        """Queue some segments by their full names, their layers being there; whether they take what was staged."""
        ticket = self.device.submit(recording, segments)
        if loads:
            self._staging_used = ticket
        return ticket

    @property
    def resident(self) -> bool:
        """Whether every layer stays on the device."""
        return not self._weights.split.streamed

    def bring(self, i: int) -> None:
        """Have layer i on the device for what is submitted next: send it where it is streamed."""
        if i in self._weights.split.streamed:
            self._weights.send(i)

    def _stream(self, recording: Recording, segments: Sequence[str] | None) -> Ticket:
        """Send each streamed layer, and then submit its segment; those between them go together."""
        together: list[str] = []
        for name in recording.segments:
            part, _, rest = name.partition(" ")
            if segments is not None and part not in segments:
                continue
            kind, _, layer = rest.partition(" ")
            if kind == STREAMED:
                if together:
                    ticket = self.device.submit(recording, together)
                    if LOAD in together or STEP in together:
                        self._staging_used = ticket  # also where sending fails
                self._weights.send(int(layer))
                together = []
            together.append(name)
        return self.device.submit(recording, together)

    def wait(self, ticket: Ticket, *, urgent: bool = False) -> None:
        """Block until it has ended; Ctrl-C works. An urgent wait, for work that nothing is queued behind, may spin."""
        software = self.device.info.kind == "cpu"
        patience = TIMEOUT_S * (SOFTWARE_TIMEOUTS if software else 1)
        self.device.wait(ticket, patience, spin_s=SPIN_S if urgent and not software else 0.0)

    def chosen(self, n: int) -> int:
        """The token that the step with `steps` = n has chosen, once it has been waited for."""
        at = 4 * (n % RING)
        return int.from_bytes(self.ring.read(at, 4), "little")

    def head(self, logits: Array) -> None:
        """Fill logits, (T, vocab), from the first T rows of x that a whole chunk left."""
        vocab, limit = self.config.vocab_size, min(HEAD_BYTES, self.device.info.max_storage_range)
        step = max(1, min(len(logits), limit // (4 * vocab)))
        buffer = self.device.create_buffer(4 * vocab * step, "device", "logits of a chunk")
        try:
            for first in range(0, len(logits), step):
                part = logits[first : first + step]
                rows = Rows.dense(buffer, len(part), vocab)
                self._run_head(rows, first, len(logits))
                part[:] = download_rows(self.device, rows)
        finally:
            buffer.release()

    def _run_head(self, logits: Rows, first: int, n: int) -> None:
        recording = self.device.create_recording("head")
        try:
            recording.barrier()
            Pass(self.network(), self.many, n, recording).head(logits, first=first)
            recording.finish()
            self.wait(self.device.submit(recording))
        finally:
            recording.release()

    def tapped(self, n: int, tap: Tap, *, last_only: bool) -> Array:
        """Run the n rows that have been staged op by op; logits of all of them, or of the last: (n or 1, vocab)."""
        rows = 1 if last_only else n
        made = np.empty((rows, self.config.vocab_size), np.float32)
        buffer = self.device.create_buffer(made.nbytes, "device", "logits")
        try:
            with TappedPass(self.network(), self.many, n, tap) as chunk:
                chunk.load()
                chunk.embed()
                for i in range(self.config.num_hidden_layers):
                    self.bring(i)
                    chunk.layer(i)
                logits = Rows.dense(buffer, rows, self.config.vocab_size)
                chunk.head(logits, first=n - rows)
            made[:] = download_rows(self.device, logits)
        finally:
            buffer.release()
        return made

    def record_load(self, recording: Recording, space: Workspace, n: int) -> None:
        """Take the states of n rows from where the host has staged them."""
        recording.barrier()
        recording.copy(*space.states(n))
        recording.barrier()

    def _kept(self, key: tuple[str, int], record: Callable[[Recording], None]) -> Recording:
        self.network()  # may forget what was recorded
        if key not in self._recordings:
            wanted = WantedKernels()
            record(wanted)
            self.kernels.make(wanted.variants.values())
            recording = self.device.create_recording(f"{key[0]} {key[1]}")
            try:
                record(recording)
                recording.finish()
            except BaseException:
                recording.release()
                raise
            self._recordings[key] = recording
        return self._recordings[key]

    def _forget_recordings(self) -> None:
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()

    def _forget(self) -> None:
        self._forget_recordings()
        if self._network is not None:
            for buffer in (self._network.rope_table, self._network.scratch):
                buffer.release()
            self._network = None

    def _rope_table(self, n_positions: int) -> Buffer:
        """float32 (positions, head_dim / 2, 2): cos and sin."""
        table = np.stack(rope_tables(self.config, np.arange(n_positions)), axis=-1)
        buffer = self.device.create_buffer(table.nbytes, "device", "rotary table")
        try:
            self.device.upload(buffer[:], table.tobytes())
        except BaseException:
            buffer.release()
            raise
        return buffer

    def attention_bytes(self, max_keys: int) -> tuple[int, int]:
        """The scratch of attention in the most demanding of the recordings, and how much of it are counters."""
        on = Recorder(WantedKernels(), self.kernels)  # nothing is recorded: plans are asked for
        cache = cache_blocks(self.pool, self.config, 0)
        heads = self.config.num_attention_heads
        plans = [
            ops.plan_attention(on, cache, n_heads=heads, n_rows=n, max_keys=max_keys, turn=n == 1, exact=self.exact)
            for n in planned_rows(self.max_rows)
        ]
        if (tuned := self.tuning.attention_for(max_keys)) is not None:
            options: dict[str, Any] = {"variant": tuned.variant, "n_splits": tuned.n_splits}
            plans.append(ops.plan_attention(on, cache, n_heads=heads, n_rows=1, max_keys=max_keys, **options))
        return max(4, *(plan.scratch_bytes for plan in plans)), max(plan.counter_bytes for plan in plans)
