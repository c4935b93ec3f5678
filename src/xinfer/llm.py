"""Text in, text out: one model folder, its tokenizer, its chat template and an engine on a device, put together."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from xinfer import gpu
from xinfer.checkpoint import Checkpoint, Message, check_context
from xinfer.engine import Engine, FinishReason, Session, Step, Timing, check_length, check_prompt
from xinfer.errors import RequestError
from xinfer.gpu.api import Device, DeviceInfo
from xinfer.gpu_model import ModelOptions, OptionValues, QwenModel
from xinfer.model.config import Qwen2Config
from xinfer.model.reference import ReferenceModel
from xinfer.model.weights import ModelWeights
from xinfer.quarantine import Quarantine, describe
from xinfer.recovery import RecoveringModel
from xinfer.sampling import Sampled, Sampler, SamplingParams
from xinfer.settings import Settings
from xinfer.tokenizer import IncrementalDecoder, StopMatcher, Tokenizer
from xinfer.transcript import Turn, encode_after
from xinfer.tuning_file import TuningFile

# Stage ("load" in bytes, "prefill" in tokens, "compile" in kernels), done, total.
Progress = Callable[[str, int, int], None]

CPU = "cpu"
LONG_TEXT = 100_000  # characters; less is encoded in a moment

_log = logging.getLogger("xinfer")  # warnings go to stderr where nobody has set up logging


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one generation cost. Times in seconds.

    `fallback` says why the device is the CPU where "auto" was to find a GPU; else it is None.
    """

    device: str
    tuned: bool  # whether kernels that `xinfer tune` has chosen are in use
    fallback: str | None
    seed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    guessed_tokens: int  # by speculation,
    accepted_tokens: int  # and those of them that the model chose, too
    no_guesses: str | None  # why nothing could be guessed, where `speculate` asked for it

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens that were computed, over the time they took."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first, which the prefill already paid for, over the time they took."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.generated_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One generated token and the text that became certain with it (often a word, sometimes nothing yet)."""

    text: str
    sampled: Sampled
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer. `finish_reason` is None only where the stream was left before its end.

    `token_ids` has every generated id, a stop id included; `text` has neither stop ids nor stop strings. Before the end
    it also has what no chunk has brought yet because it may become a stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    sampled: tuple[Sampled, ...]
    stats: Stats


OnChunk = Callable[[Chunk, str], None]  # a chunk, and the text that is held back behind it


class _Texts(Iterator[Chunk]):
    """Steps as text, holding back half characters and whatever may become a stop string."""

    def __init__(self, steps: Iterator[Step], tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._steps = steps
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(stop)
        self._stopped = False

    def __next__(self) -> Chunk:
        if self._stopped:
            raise StopIteration
        step = next(self._steps)
        reason = step.finish_reason
        text, self._stopped = self._matcher.push(self._decoder.push(step.sampled.token))
        if not self._stopped and reason is not None:
            tail, self._stopped = self._matcher.push(self._decoder.finish())
            text += tail if self._stopped else tail + self._matcher.finish()
        return Chunk(text=text, sampled=step.sampled, finish_reason="stop" if self._stopped else reason)

    @property
    def held(self) -> str:
        """What may become a stop string: part of the answer as long as it has not."""
        return self._matcher.held


class Stream(Iterator[Chunk]):
    """Chunks as they are generated. `completion` is what has come so far, and whole once the stream has ended."""

    def __init__(
        self,
        chunks: _Texts,
        prompt_ids: Sequence[int],
        stats: Callable[[], Stats],
        on_chunk: OnChunk | None = None,
    ) -> None:
        self._chunks = chunks
        self._prompt_ids = tuple(prompt_ids)
        self._stats = stats
        self._on_chunk = on_chunk
        self._received: list[Chunk] = []

    def __next__(self) -> Chunk:
        chunk = next(self._chunks)
        self._received.append(chunk)
        if self._on_chunk is not None:
            self._on_chunk(chunk, self._chunks.held)
        return chunk

    @property
    def completion(self) -> Completion:
        """The answer so far."""
        return Completion(
            text="".join(chunk.text for chunk in self._received) + self._chunks.held,
            token_ids=tuple(chunk.sampled.token for chunk in self._received),
            prompt_token_ids=self._prompt_ids,
            finish_reason=self._received[-1].finish_reason if self._received else None,
            sampled=tuple(chunk.sampled for chunk in self._received),
            stats=self._stats(),
        )


class LLM:
    """A model, ready to answer. Safe to share between threads: each call has a sequence of its own.

    Args:
        model: a folder in Hugging Face form, a hub name such as "Qwen/Qwen2.5-0.5B-Instruct", or None for the bundled
            demo model.
        device: "auto" (a GPU where there is one, else the CPU), "cpu", "vulkan" (also where only a software driver is),
            "vulkan:1", "d3d12", or part of an adapter's name.
        options: context, kv_cache, mode, vram_budget and exact, as `ModelOptions` describes them.
        progress: called with (stage, done, total) while loading, making kernels and reading long prompts.
        canary: before any token is given out, compare each layer's output for a known token with the reference's. It
            finds a device that was reset and has not said so; a step takes about twice as long. Not on the CPU.
        values: single values of `ModelOptions` in place of those of `options`, such as `context=4096`.

    A device that is lost is opened again and the model loaded again; a warning says so, and answers go on as they would
    have. After the third loss at one op they end in a DeviceLostError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        options: ModelOptions | None = None,
        *,
        device: str = "auto",
        progress: Progress | None = None,
        canary: bool = False,
        **values: Unpack[OptionValues],
    ) -> None:
        started = time.perf_counter()
        _check_types(options, device, progress, canary=canary)
        chosen = dataclasses.replace(options or ModelOptions(), **values)
        self._progress = progress
        with ExitStack() as held:

            def start(folder: Path, config: Qwen2Config) -> None:
                self.context = check_context(chosen.context, config)

                def load(before: DeviceInfo | None, mark_ops: bool) -> LoadedModel:
                    selector = device if before is None else f"{before.api}:{before.index}"
                    return load_model(folder, chosen, device=selector, mark_ops=mark_ops, progress=progress)

                self._loaded = RecoveringModel(load, canary=partial(known_answer, folder) if canary else None)
                held.callback(self._loaded.close)

            self.checkpoint = Checkpoint(model, meanwhile=start)
            vocab_size = self.checkpoint.config.vocab_size
            self._invalid_ids = self.checkpoint.tokenizer.invalid_ids(vocab_size)  # (vocab_size,) bool
            held.pop_all()
        first = self._loaded.loaded
        self._engine: Engine[Any] = Engine(first.model if first.device is None else self._loaded, context=self.context)
        self.device = first.device_name
        self.fallback = first.fallback  # for people: why "auto" took the CPU
        self.is_software = first.is_software
        self.tuned = first.tuned  # whether kernels that `xinfer tune` has chosen are in use
        self.streaming = first.streaming  # for people: what is streamed, None where everything stays
        self.load_seconds = time.perf_counter() - started

    def chosen(self) -> str | None:
        """For people: which layers stay on the GPU, and the speed to expect. None on the CPU.

        A few steps are run and timed; not on software devices, where they take long.
        """
        self._engine.check_usable()
        if self.device == CPU:
            return None
        if self.is_software:
            return self._loaded.chosen()
        return f"{self._loaded.chosen()}; about {1 / self._loaded.token_seconds():,.1f} tok/s"

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Any
    ) -> Completion:
        """Continue a prompt (text, or token ids) to its end.

        Args:
            prompt: text, encoded with the tokenizer's own special tokens, or ids used as they are.
            params: how to sample and when to stop; what it leaves open comes from the checkpoint.
            overrides: single values of `SamplingParams`, such as `max_tokens=64`.
        """
        return _exhaust(self.stream(prompt, params, **overrides))

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **overrides: Any) -> Stream:
        """Like `generate`, token by token."""
        settings = self.checkpoint.settings(params, **overrides)
        if isinstance(prompt, str):
            self.check_length(prompt)
        return self.start(self._engine.session(), self.checkpoint.encode(prompt), settings)

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Message] | None = None,
        **overrides: Any,
    ) -> Completion:
        """The assistant's answer to messages with "role" and "content", or to one user message given as a string."""
        return _exhaust(self.stream_chat(messages, params, tools=tools, **overrides))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Message] | None = None,
        **overrides: Any,
    ) -> Stream:
        """Like `chat`, token by token."""
        settings = self.checkpoint.settings(params, **overrides)
        prompt = self.checkpoint.render_chat(messages, tools=tools)
        self.check_length(prompt)
        return self.start(
            self._engine.session(), self.checkpoint.tokenizer.encode(prompt, add_special_tokens=False), settings
        )

    def conversation(self, *, system: str | None = None) -> Conversation:
        """A conversation that keeps its KV cache from turn to turn. Not for two threads at once."""
        self.checkpoint.require_chat_template()
        return Conversation(self, self._engine.session(), system=system)

    def close(self) -> None:
        """Release the model's memory and files; what still runs ends in a RequestError.

        A second close does nothing, and one in a forked child neither: all belongs to the parent.
        """
        self._engine.close()
        if not self._engine.forked:
            self._loaded.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        session: Session[Any],
        prompt_ids: Sequence[int],
        settings: Settings,
        *,
        on_chunk: OnChunk | None = None,
    ) -> Stream:
        """Continue the ids in a session: what `stream`, `stream_chat` and conversations share."""
        check_prompt(prompt_ids, self.context)
        timing = Timing(prompt_tokens=len(prompt_ids))
        sampler = Sampler(
            settings.params,
            prompt_ids=prompt_ids,
            vocab_size=self.checkpoint.config.vocab_size,
            invalid_ids=self._invalid_ids,
        )
        steps = session.generate(
            prompt_ids,
            sampler,
            max_tokens=settings.params.max_tokens,
            stop_ids=settings.stop_ids,
            timing=timing,
            on_prefill=self._on_prefill,
        )
        chunks = _Texts(steps, self.checkpoint.tokenizer, settings.params.stop)
        return Stream(chunks, prompt_ids, lambda: self._stats(timing, settings), on_chunk)

    def check_length(self, prompt: str) -> None:
        """Refuse at once a text that cannot fit, however it is cut: encoding a hundred megabytes takes minutes."""
        if len(prompt) > LONG_TEXT:
            check_length(self.checkpoint.tokenizer.fewest_tokens(prompt), self.context, bound="at least ")

    def _on_prefill(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress("prefill", done, total)

    def _stats(self, timing: Timing, settings: Settings) -> Stats:
        seed = settings.params.seed
        assert seed is not None
        return Stats(
            device=self.device,
            tuned=self.tuned,
            fallback=self.fallback,
            seed=seed,
            load_seconds=self.load_seconds,
            no_guesses=settings.why_no_guesses(on_cpu=self.device == CPU),
            **dataclasses.asdict(timing),
        )


class Conversation:
    """Turns between a user and the model. What the cache already holds of a turn is not computed again."""

    def __init__(self, llm: LLM, session: Session[Any], *, system: str | None) -> None:
        self._llm = llm
        self._session = session
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = list(self._system)
        self._last: Turn | None = None

    def reset(self) -> None:
        """Begin again, with the system message only."""
        self.messages = list(self._system)
        self._last = None
        self._session.reset()

    def send(self, text: str, params: SamplingParams | None = None, **overrides: Any) -> Stream:
        """The answer to one more user message, token by token.

        The answer joins `messages` as far as it was read, also when it is left half way. A message that is refused,
        because it does not fit into the context for example, leaves the conversation as it was.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt = self._llm.checkpoint.render_chat(asked)
        self._llm.check_length(prompt)
        turn = Turn(prompt, encode_after(self._last, prompt, self._llm.checkpoint.tokenizer))
        answer = ""

        def record(chunk: Chunk, held: str) -> None:
            nonlocal answer
            answer += chunk.text
            turn.answer_ids.append(chunk.sampled.token)
            self._last = turn
            self.messages = [*asked, {"role": "assistant", "content": answer + held}]

        return self._llm.start(
            self._session, turn.prompt_ids, self._llm.checkpoint.settings(params, **overrides), on_chunk=record
        )


class LoadedModel:
    """A model on a device. A context manager: at its end model and device are closed."""

    def __init__(
        self, model: ReferenceModel | QwenModel, device: Device | None = None, *, fallback: str | None = None
    ) -> None:
        self.model = model
        self.fallback = fallback  # for people: why "auto" took the CPU; None where a device was asked for, or found
        self.device = device  # None: the CPU
        info = None if device is None else device.info
        self.is_software = info is not None and info.kind == "cpu"  # a driver that computes on the CPU
        self.streaming = model.plan.streaming if isinstance(model, QwenModel) else None
        self.tuned = isinstance(model, QwenModel) and bool(model.steps.tuning)
        software = " (software)" if self.is_software else ""
        self.device_name = CPU if info is None else f"{info.api}:{info.index} {info.name}{software}"

    def close(self) -> None:
        """Give back what it holds; a second close does nothing."""
        self.model.close()
        if self.device is not None:
            self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_model(
    folder: Path,
    options: ModelOptions | None = None,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    mark_ops: bool = False,
) -> LoadedModel:
    """The model of a folder on a device, which the caller closes. The loss of the device is an error here.

    See `LLM` for the arguments, `gpu.open_device` for `mark_ops`. Kernels in quarantine are not used; a warning
    names them.

    Raises:
        DeviceError: there is no such device, or it cannot be used.
        OutOfMemoryError: the device has too little memory; the message says which context would fit.
    """
    if device.strip().lower() == CPU:
        return LoadedModel(_load_reference(folder, progress))
    opened = gpu.open_device(device, mark_ops=mark_ops)
    if opened is None:
        return LoadedModel(_load_reference(folder, progress), fallback=gpu.why_no_gpu())

    def staged(stage: str) -> Callable[[int, int], None]:
        return lambda done, total: None if progress is None else progress(stage, done, total)

    try:
        forbidden = Quarantine(warn=_log.warning).entries_for(opened.info)
        if forbidden:
            _log.warning(describe(opened.info, forbidden))
        variants = [entry.variant for entry in forbidden]
        exact = options is not None and options.exact
        with ModelWeights.open(folder) as weights:
            model = QwenModel.load(
                *(weights, opened, options),
                quarantine=variants,
                tuning=partial(TuningFile(warn=_log.warning).preferred, opened.info, exact=exact),
                progress=staged("load"),
                on_compile=staged("compile"),
            )
        return LoadedModel(model, opened)
    except BaseException:
        with suppress(ResourceWarning):  # of a device that hangs; what went wrong is to be told
            opened.close()
        raise


def _check_types(options: object, device: object, progress: object, *, canary: object) -> None:
    """Raise RequestError where an argument's type says that something else was meant: "no" would be true."""
    if not isinstance(options, ModelOptions | None):
        raise RequestError(f"options={options!r}; expected ModelOptions(...), or its values by name")
    if not isinstance(device, str):
        raise RequestError(f"device={device!r}; expected text: auto, cpu, vulkan or part of an adapter's name")
    if progress is not None and not callable(progress):
        raise RequestError(f"progress={progress!r}; expected a function of (stage, done, total), or None")
    if not isinstance(canary, bool):
        raise RequestError(f"canary={canary!r}; expected True or False")


def _load_reference(folder: Path, progress: Progress | None) -> ReferenceModel:
    weights = ModelWeights.open(folder)

    def loaded(parts: int, of: int) -> None:
        if progress is not None:
            progress("load", weights.nbytes * parts // of, weights.nbytes)

    try:
        return ReferenceModel(weights, on_load=loaded)
    except BaseException:
        weights.close()
        raise


def known_answer(folder: Path, ids: Sequence[int]) -> list[NDArray[np.float32]]:
    """What the network makes of the last of `ids` by the reference: each layer's output, and the logits."""
    outputs: list[NDArray[np.float32]] = []
    with ModelWeights.open(folder) as weights:
        names = [f"layers.{i}" for i in range(weights.config.num_hidden_layers)] + ["logits"]

        def tap(name: str, values: NDArray[np.float32]) -> None:
            if name in names:
                outputs.append(values[-1].copy())

        ReferenceModel(weights, keep=False).forward(ids, last_only=True, tap=tap)
    return outputs


def _exhaust(stream: Stream) -> Completion:
    for _ in stream:
        pass
    return stream.completion
