"""The command itself: its commands, and what becomes of what goes wrong in them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import cleandoc
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from xinfer._version import __version__
from xinfer.cli.bench import bench
from xinfer.cli.chat import chat
from xinfer.cli.devices import devices
from xinfer.cli.doctor import doctor
from xinfer.cli.explain import explain
from xinfer.cli.generate import generate
from xinfer.cli.inspect import inspect
from xinfer.cli.logits import logits
from xinfer.cli.output import ANSWERED, fail, print_error, say
from xinfer.cli.quarantine import quarantine
from xinfer.cli.status import ERROR, INTERNAL, INTERRUPTED, MEANINGS, OK, TERMINATED
from xinfer.cli.synth import synth
from xinfer.cli.tune import tune
from xinfer.cli.verify import verify
from xinfer.errors import XinferError

# A new command is one more name here; the help lists them in this order.
COMMANDS = (generate, chat, inspect, explain, logits, devices, doctor, quarantine, verify, bench, tune, synth)

NARROW = 70  # columns
_WANTS_JSON = "xinfer.json"  # in the context's `meta`, which all contexts of a run share
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings its own click, or uses the installed one


class _Command(TyperCommand):
    """A command that notes whether --json was given, before anything can be found wrong with its arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_WANTS_JSON] = _wants_json(self, ctx, args)
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if shutil.get_terminal_size().columns < NARROW:
            self.rich_markup_mode = None  # no frames: names of options would be cut off
        with _readers_may_leave():
            super().format_help(ctx, formatter)


class _Group(TyperGroup):
    """Turns whatever goes wrong in a command into one message and an exit status.

    For the list of commands their names and descriptions are enough: the options of a command, which take longer to
    put together than all else that is ours, are made when it is run.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in COMMANDS:
            self.add_command(TyperCommand(command.__name__, help=_unwrapped(command.__doc__ or "")))

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _readers_may_leave():
            super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        as_json = _spells_json(args)  # the parser takes them away one by one
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            if as_json:
                print_error("UsageError", error.format_message())  # type: ignore[attr-defined]
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        ctx.meta[_WANTS_JSON] = _spells_json(args)
        name, _, rest = super().resolve_command(ctx, args)
        return name, with_options(name), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if ctx.meta.get(_WANTS_JSON):
                print_error("UsageError", error.format_message())  # type: ignore[attr-defined]
            raise
        except XinferError as error:
            _fail(ctx, type(error).__name__, str(error))
        except KeyboardInterrupt as ended:
            say("\ninterrupted")
            _tell_end(ctx, ended, "Interrupted", "interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except SystemExit as ended:
            if ended.code == TERMINATED:
                _tell_end(ctx, ended, "Terminated", "ended by SIGTERM")
            raise
        except BrokenPipeError:
            # Whoever read our output has left, as `head` does. Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None
        except MemoryError:
            _fail(ctx, "MemoryError", "out of memory; try a smaller --context, or close other programs")
        except OSError as error:
            _fail(ctx, "OSError", str(error))


def _tell_end(ctx: Any, ended: BaseException, kind: str, message: str) -> None:
    """In JSON where that was asked for, unless what there is of an answer was printed, which says so itself."""
    if ctx.meta.get(_WANTS_JSON) and not hasattr(ended, ANSWERED):
        print_error(kind, message)


@contextmanager
def _readers_may_leave() -> Iterator[None]:
    """Within, rich ends the process with 1 when whoever reads the help leaves, as `head` does: it is no error."""
    try:
        yield
    except SystemExit:
        raise typer.Exit(OK) from None


def with_options(name: str | None) -> Any:
    """The command of that name, ready to run."""
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    chosen = next(command for command in COMMANDS if command.__name__ == name)
    single.command(cls=_Command, help=_unwrapped(chosen.__doc__ or ""))(chosen)
    return typer.main.get_command(single)


def _unwrapped(doc: str) -> str:
    """A docstring's paragraphs, each on one line: the help breaks them where the terminal is wide."""
    paragraphs = cleandoc(doc).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _wants_json(command: TyperCommand, ctx: Any, args: list[str]) -> bool:
    """Whether --json is among the arguments as an option: not behind --, not another option's value.

    Where an option before it is wrong as well.
    """
    parser = command.make_parser(ctx)
    parser.ignore_unknown_options = True
    try:
        values, _, _ = parser.parse_args(list(args))
    except _UsageError:  # told by the parse that counts
        return _spells_json(args)
    return bool(values.get("as_json"))


def _spells_json(args: list[str]) -> bool:
    """The same where no command is known, nor what options there are: --json is what is spelled so."""
    before = args[: args.index("--") if "--" in args else None]
    return any(arg == "--json" or arg.startswith("--json=") for arg in before)


def _without_type(option: Any) -> Any:
    if option is not None:
        option.metavar = ""  # a flag takes no value
    return option


def _fail(ctx: Any, kind: str, message: str) -> NoReturn:
    fail(kind, message, as_json=bool(ctx.meta.get(_WANTS_JSON)))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="Run Qwen2-family language models, and check the answers on your own machine.\n\n"
    "Start with [bold]xinfer generate 'To be, or not'[/bold]: it needs no download, a small demo model is included.",
    epilog="A model is a folder with config.json and *.safetensors, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct."
    + "\n\n".join(["", "Exit status:", *(f"{status}: {meaning}" for status, meaning in MEANINGS.items())]),
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, metavar="", help="Print the version and exit.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"xinfer {__version__}")
        raise typer.Exit


def _configure_streams() -> None:
    """Never fail to print: what a narrow encoding cannot show is escaped, and a closed stream leads nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _terminate(*_: object) -> NoReturn:
    """End as Ctrl-C does: what was begun is given back, temporary files and child processes too."""
    raise SystemExit(TERMINATED)


def main() -> None:
    """The `xinfer` command."""
    _configure_streams()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # not where whoever runs us wants it to be ignored
        signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except OSError as error:  # writing the help to a full disk, say
        say(f"error: {error}")
        sys.exit(ERROR)
    except Exception as error:  # a fault of ours: whoever reports it is told how to show us where
        if os.environ.get("XINFER_TRACEBACK"):
            raise
        say(f"internal error: {type(error).__name__}: {error}\nthis is a bug; XINFER_TRACEBACK=1 shows where it is")
        sys.exit(INTERNAL)
