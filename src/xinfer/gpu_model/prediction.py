"""What a model will take of a device, and how fast it will be there, before it is loaded.

Nothing is looked up: the first layers are read from the checkpoint into memory like that which the model would take,
steps of these layers run by the kernels that it would run, and a streamed layer is copied as it would be. What a layer
costs follows from steps of more and of fewer layers; on the CPU, whose speed others change from step to step, from the
device's clock within a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

from xinfer.errors import OutOfMemoryError
from xinfer.gpu.api import Buffer, Device, DeviceInfo
from xinfer.gpu_model.layout import RESIDENT, WeightsLayout
from xinfer.gpu_model.loading import Job, Loader
from xinfer.gpu_model.memory import MemoryPlan, plan_for
from xinfer.gpu_model.options import ModelOptions
from xinfer.gpu_model.steps import LOAD, STEP, Steps
from xinfer.gpu_model.tuning import Tuning
from xinfer.gpu_model.weights import DeviceWeights
from xinfer.model.weights import ModelWeights

SAMPLE = 256 << 20  # bytes of layers that steps are timed on: more than caches hold
PINNED = 2 << 30  # bytes of layers that are made in the host's memory together
SAMPLE_SOFTWARE = 24 << 20  # on the CPU, where a step of that much takes as long
SHORT = 128  # tokens before a step that is timed
LOADING_S = 0.7  # that reading may take
STEPS_S = 0.3  # that steps of one kind are timed for
ROUNDS = 5  # about so many, whose median counts
MOST_STEPS = 32  # queued together
COPIES = 8  # of one layer, to time the bus
BUS_S = 0.15  # that copies are timed for
FILLER = 0x2C002C00  # 1/16 in f16, next to nothing in bf16 and f32: no number that slows anything down

Stages = Callable[[int, int], None]  # measurements done, and how many there are
N_STAGES = 5
TIMED_STEPS = 3  # whose layers are timed by the device's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Bytes, seconds, and bytes a second."""

    plan: MemoryPlan
    tuned: bool  # whether its steps use other kernels than those that ops would choose
    context: int | None  # tokens that a cache was asked for; None: it grows with the need
    load_speed: float  # of the checkpoint's bytes into the device's memory
    bus_speed: float  # from the host's memory into the device's
    memory_speed: float  # at which a step reads its layers
    load_seconds: float
    token_seconds: float  # behind a short prompt
    token_seconds_at_context: float  # behind all the tokens that the context allows, but one

    @property
    def vram(self) -> int:
        """Bytes of the device's memory."""
        return self.plan.needed(self.context)

    @property
    def tokens_per_second(self) -> float:
        """Of one sequence, behind a short prompt."""
        return 1 / self.token_seconds


def predict(
    weights: ModelWeights,
    device: Device,
    options: ModelOptions | None = None,
    *,
    quarantine: Iterable[str] = (),
    tuning: Callable[[MemoryPlan], Tuning] | None = None,
    progress: Stages | None = None,
) -> Prediction:
    """Measure for a second or two. Arguments as for `QwenModel.load`.

    Raises:
        OutOfMemoryError: the model does not fit.
        WeightsError: the checkpoint cannot be read.
    """
    tell: Stages = progress or (lambda *_: None)
    options = options or ModelOptions()
    context = options.context
    device.limit_memory(options.vram_budget)
    try:
        plan = plan_for(weights, device, options)
        with ExitStack() as held:
            preferred = tuning(plan) if tuning is not None and options.tuning else Tuning()
            kernels = {"quarantine": tuple(quarantine), "tuning": preferred}
            probe = _Probe(weights, device, plan, kernels, held)
            tell(1, N_STAGES)
            start, load_speed, again_speed = probe.read()
            probe.fill()
            tell(2, N_STAGES)
            by_clock = device.info.kind == "cpu"
            few = max(1, probe.n // 4)
            positions = [SHORT] if context is None else [min(SHORT, context // 2), max(0, context - MOST_STEPS - 1)]
            fewer = [] if by_clock else probe.steps(few, positions[:1]).seconds
            tell(3, N_STAGES)
            setup, more, share = probe.steps(probe.n, positions, by_clock=by_clock)
            tell(4, N_STAGES)
            pinned_speed, bus_speed = probe.bus()  # behind work: a device that idles copies more slowly
            tell(5, N_STAGES)
    finally:
        device.limit_memory(None)
    if by_clock:
        a_layer = more[0] * share / probe.n
    else:
        a_layer = max(more[0] - fewer[0], 0.0) / (probe.n - few) if probe.n > few else 0.0
        a_layer = a_layer or more[0] * _share_of_a_layer(plan.layout, probe.n)
    rest = max(0.0, more[0] - probe.n * a_layer)
    of_keys = max(0.0, more[-1] - more[0]) / probe.n
    pinned = plan.on_host
    straight = plan.layout.nbytes(replace(plan.split, n_slots=0))
    stored = weights.nbytes / plan.layout.nbytes(RESIDENT)  # bytes that are read for each of the device's
    again_speed /= stored
    return Prediction(
        plan=plan,
        tuned=probe.tuned,
        context=context,
        load_speed=load_speed,
        bus_speed=bus_speed,
        memory_speed=plan.layout.slot_bytes / a_layer,
        load_seconds=start + setup + stored * straight / load_speed + pinned / pinned_speed,
        token_seconds=rest + _layers(plan, device.info, a_layer, bus_speed, again_speed),
        token_seconds_at_context=rest + _layers(plan, device.info, a_layer + of_keys, bus_speed, again_speed),
    )


def _share_of_a_layer(layout: WeightsLayout, n: int) -> float:
    """Of the bytes that a step of n layers reads: where steps of fewer layers tell nothing apart."""
    head = layout.head or layout.table
    return layout.slot_bytes / (n * layout.slot_bytes + head.size)


def _layers(plan: MemoryPlan, info: DeviceInfo, a_layer: float, bus_speed: float, again_speed: float) -> float:
    """Seconds of all layers of a step, streamed ones coming over the bus, or read again for each step.

    A queue of its own copies a layer while others run, as long as there is another slot; one queue does one after the
    other.
    """
    split, compute = plan.split, plan.config.num_hidden_layers * a_layer
    if not split.streamed:
        return compute
    copy = plan.a_token / (bus_speed if split.pinned else again_speed)
    apart = "transfer_queue" in info.features or (info.api == "d3d12" and info.kind != "cpu")
    if not apart:
        return copy + compute
    if split.n_slots == 1:
        return max(copy + len(split.streamed) * a_layer, compute)
    return max(copy, compute)


class _Timed(NamedTuple):
    """Seconds to set steps up, and of a step behind each of some numbers of tokens; the share that is layers'."""

    setup: float
    seconds: list[float]
    layers: float


class _Probe:
    """The first layers of a model on a device. Everything is given back by `held`."""

    def __init__(
        self,
        weights: ModelWeights,
        device: Device,
        plan: MemoryPlan,
        kernels: dict[str, Any],
        held: ExitStack,
    ) -> None:
        self.tuned = False  # whether steps use some of `tuning`
        self._device = device
        self._plan = plan
        self._kernels = kernels
        self._held = held
        n_layers, split = plan.config.num_hidden_layers, plan.split
        room = n_layers - len(split.streamed) + split.n_slots  # layers that the plan has memory for
        sample = SAMPLE_SOFTWARE if device.info.kind == "cpu" else SAMPLE
        self.n = max(1, min(n_layers, max(2, -(-sample // plan.layout.slot_bytes)), room))
        self._in_place = device.info.kind in ("integrated", "cpu")
        self._many = -(-SAMPLE // plan.layout.slot_bytes)  # layers to time reading with, where memory is written once
        self._spare = max(0, min(self._many, n_layers, room) - self.n) if self._in_place else 0
        self._weights = weights
        self._part = weights.first_layers(self.n)
        self._layout = WeightsLayout(self._part)
        self._loaded = DeviceWeights(
            device, self._part, self._layout, split=replace(RESIDENT, table_on_host=split.table_on_host)
        )
        held.callback(self._loaded.release)

    def read(self) -> tuple[float, float, float]:
        """Seconds before loading is at its full speed, that speed, and that of layers which are read for each step.

        The first layers are read, and others for a while, when the memory that they come through is there. Where the
        host writes the device's memory itself, new memory is slower than memory written before: others get their own.
        """
        split = self._plan.split
        with Loader(self._device, self._weights) as loader, ExitStack() as given_back:
            spare = [self._device.create_buffer(self._layout.slot_bytes, label="spare") for _ in range(self._spare)]
            for buffer in spare:
                given_back.callback(buffer.release)
            buffers = [*self._loaded.buffers, *spare]
            layers = [
                [(place, buffers[i % len(buffers)]) for place in layer.places]
                for i, layer in enumerate(WeightsLayout(self._weights).layers)
            ]
            first, others = layers[: self.n], layers[self.n :] or layers
            if self._in_place:
                others = layers[self.n :][: len(spare)] or first
            n_first, seconds = _timed_load(loader, [[*chain(*first)]])
            n_more, more = (n_first, seconds) if others is first else _timed_load(loader, [[*chain(*others)]])
            speed = again = n_more / more
            if split.streamed and not split.pinned:
                n_again, more = _timed_load(loader, others)
                again = n_again / more
            self._device.flush_uploads()
        return max(0.0, seconds - n_first / speed), speed, again

    def fill(self) -> None:
        """Give numbers to what was not read."""
        recording = self._device.create_recording("filler")
        self._held.callback(recording.release)
        for buffer in self._loaded.on_device:
            recording.fill(buffer[: buffer.size // 4 * 4], FILLER)
        recording.finish()
        self._device.wait(self._device.submit(recording))

    def bus(self) -> tuple[float, float]:
        """Bytes a second of filling memory that the device copies from, and of copying a layer from there."""
        size, targets = self._layout.layers[0].size, self._loaded.buffers
        # The next are made as those of the model will be: with the first, devices learn which way is faster. Several
        # are made before they are filled, as a load does.
        pinned, fill = self._pinned(1)
        if self._plan.on_host:
            pinned.release()
            wanted = self._many - 1 if self._in_place else -(-PINNED // size)
            pinned, seconds_each = self._pinned(max(1, min(wanted, len(self._plan.split.streamed) - 1)))
            fill = min(fill, seconds_each) if self._in_place else seconds_each
        seconds: list[float] = []
        until = time.perf_counter() + BUS_S
        while len(seconds) < 2 or time.perf_counter() < until:
            began = time.perf_counter()
            for i in range(COPIES):
                self._device.transfer(pinned[:size], targets[i % self.n][:size])
            self._device.flush_uploads()
            seconds.append((time.perf_counter() - began) / COPIES)
        return size / fill, size / median(seconds[1:])  # the first is from cold

    def _pinned(self, n: int) -> tuple[Buffer, float]:
        """A layer in memory that the device copies from, and the seconds that each of n takes to be made and filled.

        Where memory does not suffice for n it is fewer: a model that fits is not refused for the sake of a measurement.
        """
        began, made, first = time.perf_counter(), list[Buffer](), self._layout.layers[0]
        while len(made) < n:
            try:
                made.append(self._device.create_buffer(first.size, "upload", "bus"))
            except (OutOfMemoryError, MemoryError):
                if not made:
                    raise
                n = max(1, len(made) // 2)
                for buffer in made[n:]:
                    buffer.release()
                del made[n:]
            else:
                self._held.callback(made[-1].release)
        with Loader(self._device, self._part) as loader:
            loader.load([(place, buffer) for buffer in made for place in first.places])
        seconds = (time.perf_counter() - began) / n
        for buffer in made[1:]:
            buffer.release()
        return made[0], seconds

    def steps(self, n: int, positions: Sequence[int], *, by_clock: bool = False) -> _Timed:
        """Steps of the first n layers, behind so many tokens each; with `by_clock`, the share of layers too."""
        config = self._part.first_layers(n).config
        plan = replace(
            self._plan,
            config=config,
            layout=self._layout,
            shape=replace(self._plan.shape, n_layers=n),
            split=self._loaded.split,
        )
        context = max(positions) + MOST_STEPS + 1
        began = time.perf_counter()
        steps = Steps(self._device, config, self._loaded, plan, context=context, **self._kernels)
        self.tuned = bool(steps.tuning)
        try:
            setup = time.perf_counter() - began
            seconds = [step_seconds(steps, position) for position in positions]
            return _Timed(setup, seconds, layers_share(steps, positions[0]) if by_clock else 0.0)
        finally:
            steps.close()


def _timed_load(loader: Loader, parts: Sequence[Sequence[Job]]) -> tuple[int, float]:
    """Bytes read in LOADING_S at most, one part behind the other, and the seconds."""
    began, before, read = time.perf_counter(), 0, 0

    def enough(done: int, _: int) -> None:
        nonlocal read
        read = before + done
        if time.perf_counter() - began > LOADING_S:
            raise _EnoughError

    with suppress(_EnoughError):
        for part in parts:
            loader.load(part, progress=enough, flush=False)
            before = read
    return read, time.perf_counter() - began


class _EnoughError(Exception):
    """What was wanted is known."""


def step_seconds(steps: Steps, position: int, *, patience: float = STEPS_S) -> float:
    """Seconds of a step behind `position` tokens, in a queue of them; the median of some rounds.

    It takes three steps at least, and about `patience` seconds.
    """
    cache = steps.pool.make_cache(position + MOST_STEPS + 1)
    cache.reserve(position + MOST_STEPS)  # given back with the cache
    recording = steps.decode(steps.config.vocab_size)

    def run(n: int) -> float:
        steps.stage_one(0, cache, position=position)
        began = time.perf_counter()
        ticket = steps.submit(recording, (LOAD, STEP))
        for _ in range(n - 1):
            ticket = steps.submit(recording, (STEP,))
        steps.wait(ticket)
        return (time.perf_counter() - began) / n

    run(1)  # in which drivers do what they had put off
    until = time.perf_counter() + patience
    n = max(1, min(MOST_STEPS, round(patience / ROUNDS / run(1))))
    rounds = [run(n)]
    while time.perf_counter() < until:
        rounds.append(run(n))
    return median(rounds)


def layers_share(steps: Steps, position: int) -> float:
    """The share of a step behind `position` tokens that its layers take, by the device's clock; the median of a few."""
    cache = steps.pool.make_cache(position + 1)
    cache.reserve(position + 1)  # given back with the cache
    recording = steps.device.create_recording("timed step")
    shares: list[float] = []
    try:
        recording.copy(*steps.one.states(1))
        steps.record_step(recording, steps.config.vocab_size, timed="ops")
        recording.finish()
        for _ in range(TIMED_STEPS):
            steps.stage_one(0, cache, position=position)
            steps.wait(steps.submit(recording))
            stamps = steps.device.timestamps(recording)
            of_layers = sum(end - start for (_, start), (label, end) in pairwise(stamps) if label.startswith("layers."))
            shares.append(of_layers / max(1e-9, stamps[-1][1] - stamps[0][1]))
    finally:
        recording.release()
    return median(shares)
