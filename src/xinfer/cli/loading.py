"""Models, progress bars and stdin, as commands need them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from xinfer.cli.output import say
from xinfer.errors import RequestError

if TYPE_CHECKING:
    from xinfer.gpu_model import ModelOptions
    from xinfer.llm import LLM, Progress


def resolve(model: str) -> Path:
    """The folder of a model, as a user calls it."""
    from xinfer.hub import resolve

    return resolve(model)


@contextmanager
def load(model: str, device: str, options: ModelOptions, *, canary: bool = False, quiet: bool = False) -> Iterator[LLM]:
    """A model, with progress bars while it loads and reads long prompts."""
    with progress_bars(quiet=quiet) as progress, _opened(model, device, options, canary, progress) as llm:
        warn_of_device(device, llm.device, is_software=llm.is_software, fallback=None if quiet else llm.fallback)
        if not quiet:
            if (chosen := llm.chosen()) is not None:
                say(chosen)
            elif options.vram_budget is not None or options.mode != "auto":
                say("--vram-budget and --mode are for GPUs; the CPU takes what the model needs")
        yield llm


def _opened(model: str, device: str, options: ModelOptions, canary: bool, progress: Progress | None) -> LLM:
    from xinfer import gpu

    with gpu.drivers_loading(device):  # beside half a second of imports
        from xinfer.llm import LLM

        return LLM(model, options, device=device, canary=canary, progress=progress)


def warn_of_device(selector: str, device_name: str, *, is_software: bool, fallback: str | None) -> None:
    """Say so where no GPU is used: "auto" found none, or the API that was asked for has a software driver only."""
    from xinfer import gpu

    if fallback is not None:
        say(f"the CPU is used, for --device auto found no GPU: {fallback} (xinfer devices says more)")
    if is_software and selector.strip().lower() in gpu.BACKENDS:
        say(f"warning: {device_name} is not a GPU, and slow; xinfer devices says what there is")


@contextmanager
def progress_bars(*, quiet: bool = False, first: str | None = None) -> Iterator[Callable[..., None] | None]:
    """Bars on stderr, a stage each, for what takes longer than a second; a line now and then where it is no terminal.

    What is yielded takes a stage, what is done, what there is to do, and perhaps what is at hand. `first` is the stage
    that the command is about: its bar is there before anything is known of it.
    """
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        from xinfer.progress_lines import Lines

        yield Lines().update
        return
    from xinfer.progress import Bars

    with Bars(first=first) as bars:
        yield bars.update


def read_stdin() -> str:
    """All of stdin, which must be UTF-8."""
    if sys.stdin.isatty():
        say("type the prompt, then Ctrl-D")
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 (byte {error.start}); expected UTF-8 text") from None
