"""A model that outlives its device, so that whoever asked for tokens goes on getting them.

When the device is lost it is opened again, the weights are loaded again, and each sequence's keys and values are
computed again from its token ids when they are next needed. The answer is the one that an undisturbed run gives: every
pass is repeated with the rows that it had, and sampling is a function of seed and position.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from xinfer.choice import Choice
from xinfer.errors import DeviceError, DeviceHungError, DeviceLostError, Loss, NumericalError
from xinfer.gpu.api import Device, DeviceInfo
from xinfer.gpu_model import Canary, QwenModel, canary_ids
from xinfer.kv_cache import KVCache
from xinfer.quarantine import Quarantine

SAME_OP = 3  # losses at one op, and it is given up
MARKED_FROM = SAME_OP - 1  # losses, and every op is marked, so that the last one before giving up names its op
IN_ALL = 10  # losses wherever, and the device is given up
MEMORY_S = 3600.0  # what lies longer ago is forgotten

_log = logging.getLogger("xinfer")


class Loaded(Protocol):
    """A model on a device, both to be closed together."""

    model: Any  # a QwenModel where there is a device
    device: Device | None

    def close(self) -> None:
        """Give both back."""


T = TypeVar("T")
KnownAnswer = Callable[[list[int]], list[NDArray[np.float32]]]
L = TypeVar("L", bound=Loaded)


class LossLog:
    """The losses of the last hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._losses: deque[tuple[float, frozenset[str]]] = deque()

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, loss: Loss, stage: str) -> str | None:
        """Note a loss; where it is one too many, what has failed how often.

        A loss whose op is not known counts for each that may have been running.
        """
        places = frozenset(op.label for op in loss.suspects) or frozenset([loss.work or stage])
        now = self._clock()
        self._losses.append((now, places))
        while now - self._losses[0][0] > MEMORY_S:
            self._losses.popleft()
        counts = Counter(place for _, noted in self._losses for place in noted & places)
        place, count = max(counts.items(), key=lambda item: (item[1], item[0]))
        if count >= SAME_OP:
            return f"it was lost {count} times at {place}"
        if len(self._losses) >= IN_ALL:
            return f"it was lost {len(self._losses)} times in {MEMORY_S / 60:.0f} minutes"
        return None

    def clear(self) -> None:
        """Forget them all."""
        self._losses.clear()


class SafeCache:
    """A sequence's cache, wherever the model is now; see `engine.Cache`. Its ids outlive the device."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: KVCache | None = None
        self._home: QwenModel | None = None  # whose memory it lies in

    @property
    def length(self) -> int:
        """Tokens that it has; their keys and values are made again when they are next needed."""
        return 0 if self._held is None else self._held.length

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if self._held is not None:
            self._held.truncate(length)

    def on(self, model: QwenModel) -> KVCache:
        """The cache in this model's memory, filled again where it lay in another's that is gone."""
        if self._held is None or self._home is not model:
            fresh = model.make_cache(self.capacity)
            if self._held is not None:
                model.replay(self._held, fresh)
            self._held, self._home = fresh, model
        return self._held


class RecoveringModel(Generic[L]):
    """What the engine runs (`engine.Model`, `engine.QueuedModel`). Threads take turns.

    Args:
        load: opens the device and loads the model. It is given None, or after a loss the adapter to open again, and
            whether every op is to be marked. It may load without a device: then there is nothing to recover.
        canary: see `gpu_model.Canary`; it is asked before any token is given out, so that a device that was reset and
            did not say so counts as lost. A step takes about twice as long. The function gives the canary's outputs for
            token ids, computed without the device.

    Raises:
        DeviceLostError: the device was lost too often while loading.
    """

    def __init__(self, load: Callable[[DeviceInfo | None, bool], L], *, canary: KnownAnswer | None = None) -> None:
        self.losses = LossLog()
        self._load = load
        self._known_answer = canary
        self._expected: list[NDArray[np.float32]] = []
        self._lock = threading.RLock()
        self._loaded: L | None = None
        self._canary: Canary | None = None
        self._info: DeviceInfo | None = None
        self._closed = False
        self._run("loading the model", lambda _: None)

    @property
    def loaded(self) -> L:
        """What `load` made last."""
        assert self._loaded is not None
        return self._loaded

    @property
    def device(self) -> Device | None:
        """Where the model is now; None while it is nowhere."""
        return None if self._loaded is None else self._loaded.device

    def make_cache(self, capacity: int) -> SafeCache:
        """An empty cache for at most `capacity` tokens."""
        return SafeCache(capacity)

    def forward(self, tokens: NDArray[np.int64], cache: SafeCache, *, last_only: bool = False) -> NDArray[np.float32]:
        """As `QwenModel.forward`."""
        return self._run("a step", lambda model: model.forward(tokens, cache.on(model), last_only=last_only), cache)

    def tokens_at_once(self) -> int:
        """As `QwenModel.tokens_at_once`."""
        return self._run("reading the prompt", lambda model: model.tokens_at_once())

    def extend(
        self, tokens: NDArray[np.int64], cache: SafeCache, *, progress: Callable[[int], None] | None = None
    ) -> None:
        """As `QwenModel.extend`."""
        self._run("reading the prompt", lambda model: model.extend(tokens, cache.on(model), progress=progress), cache)

    def can_choose(self, choice: Choice) -> bool:
        """As `QwenModel.can_choose`."""
        return self._run("a step", lambda model: model.can_choose(choice))

    def choose(self, token: int, cache: SafeCache, choice: Choice, *, limit: int) -> Generator[int]:
        """As `QwenModel.choose`. Tokens that were queued on a lost device are queued again on the next."""
        made: list[int] = []
        while len(made) < limit:
            model = self._run("a step", self._with(cache), cache)
            left = limit - len(made)
            with closing(model.choose(token, cache.on(model), choice.after(made), limit=left)) as tokens:
                while len(made) < limit:
                    try:
                        chosen = self._next(model, tokens, cache)
                    except StopIteration:  # the cache is full
                        return
                    if chosen is None:
                        break
                    token = chosen
                    made.append(chosen)
                    yield chosen

    def chosen(self) -> str:
        """For people: which layers stay on the device."""
        return self._run("a step", lambda model: model.plan.chosen)

    def token_seconds(self) -> float:
        """As `QwenModel.token_seconds`."""
        return self._run("a step", lambda model: model.token_seconds())

    def close(self) -> None:
        """Give model and device back; may be called twice."""
        self._closed = True  # first: of many that wait for the lock none goes on
        with self._lock:
            self._drop()

    def _with(self, cache: SafeCache) -> Callable[[QwenModel], QwenModel]:
        def ready(model: QwenModel) -> QwenModel:
            cache.on(model)
            return model

        return ready

    def _next(self, model: QwenModel, tokens: Generator[int], cache: SafeCache) -> int | None:
        """The next chosen token; None where the device was lost, now or meanwhile by another thread's call.

        Raises StopIteration where there is none.
        """
        with self._lock:
            if self._loaded is None or self._loaded.model is not model:
                return None
            kept = cache.length
            try:
                chosen = self._checked(lambda: next(tokens))
            except DeviceLostError as error:
                cache.truncate(kept)
                self._lost(error, "a step")
                return None
            return chosen

    def _run(self, stage: str, work: Callable[[QwenModel], T], cache: SafeCache | None = None) -> T:
        """Do something with the model, again and again until no device is lost on the way."""
        with self._lock:
            kept = 0 if cache is None else cache.length
            while True:
                try:
                    return self._checked(partial(work, self._ready()))
                except DeviceLostError as error:
                    if cache is not None:
                        cache.truncate(min(kept, cache.length))
                    self._lost(error, stage)

    def _ready(self) -> QwenModel:
        """The model, loaded again if need be."""
        if self._closed:
            raise DeviceError("the model is closed; open it again")
        if self._loaded is None:
            self._loaded = self._load(self._info, len(self.losses) >= MARKED_FROM)
            try:
                if self._loaded.device is not None:
                    self._info = self._loaded.device.info
                    self._canary = self._hatch(self._loaded.model)
            except DeviceLostError:
                raise  # it is noted before all is let go
            except BaseException:
                self._drop()  # nobody may go on without the canary that was asked for
                raise
        model: QwenModel = self._loaded.model
        return model

    def _hatch(self, model: QwenModel) -> Canary | None:
        if self._known_answer is None:
            return None
        if not self._expected:
            self._expected = self._known_answer(canary_ids(model.config.vocab_size))
        return Canary(model.steps, self._expected)

    def _checked(self, work: Callable[[], T]) -> T:
        """Do something, and hear the canary before the result is believed. Garbage may show as a NaN first."""
        try:
            done = work()
        except NumericalError:
            self._listen()
            raise
        self._listen()
        return done

    def _listen(self) -> None:
        if self._canary is not None:
            self._canary.check()

    def _lost(self, error: DeviceLostError, stage: str) -> None:
        """Let go of the device, and say so. Raises where it is not to be tried again."""
        loss = error.loss
        self._drop()
        verdict = self.losses.add(loss, stage)
        if verdict is None:
            _log.warning(
                "%s was lost during %s (%s); it is opened again, the model is loaded again, and the answer goes on",
                loss.adapter or "the device",
                stage,
                loss,
            )
            return
        self.losses.clear()
        told = self._put_in_quarantine(error)
        raise type(error)(
            f"the device is given up: {verdict}, the last time during {stage}. {loss}; {told}", loss
        ) from error

    def _put_in_quarantine(self, error: DeviceLostError) -> str:
        """Forbid the kernel that was running, where it is known; what was done, and what to do."""
        variants = {op.variant for op in error.loss.suspects if op.variant}
        if len(variants) != 1 or self._info is None:
            return "try another driver or device, or device='cpu'; xinfer doctor looks for what fails"
        (variant,) = variants
        outcome = "hung" if isinstance(error, DeviceHungError) else "lost"
        try:
            Quarantine(warn=_log.warning).add(self._info, variant, outcome, str(error.loss))
        except DeviceError as problem:
            return str(problem)
        return (
            f"its kernel {variant} is in quarantine now, and the next call uses another in its place "
            "(xinfer quarantine lists it, xinfer doctor tries it again)"
        )

    def _drop(self) -> None:
        """Close what there is. A device that is lost, or busy for ever, may fail at that too: nothing to be done."""
        loaded, self._loaded, canary, self._canary = self._loaded, None, self._canary, None
        with suppress(DeviceError, ResourceWarning):
            if canary is not None:
                canary.release()
            if loaded is not None:
                loaded.close()
