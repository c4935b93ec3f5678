"""The command line: `xinfer generate`, `chat`, `devices`, `inspect`, `explain`, `logits`, `synth`.

Text goes to stdout; progress, statistics and warnings go to stderr. A command imports what costs time to import when it
runs, so that `xinfer --help` answers at once.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from xinfer._version import __version__
from xinfer.errors import ContextLengthError, NumericalError, RequestError, XinferError

if TYPE_CHECKING:
    from xinfer.llm import LLM, Completion, Conversation, Progress, Stream
    from xinfer.sampling import Sampled

INTERRUPTED = 130  # what a shell reports for Ctrl-C
INTERNAL = 70  # EX_SOFTWARE: a fault in this program

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Group(TyperGroup):
    """Turns whatever goes wrong in a command into one message and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except XinferError as error:
            _fail(type(error).__name__, str(error))
        except KeyboardInterrupt:
            _say("\ninterrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read our output has left, as `head` does. Python would complain again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except MemoryError:
            _fail("MemoryError", "out of memory; try a smaller --context, or close other programs")
        except OSError as error:
            _fail("OSError", str(error))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="Run Qwen2-family language models, and check the answers on your own machine.\n\n"
    "Start with [bold]xinfer generate 'To be, or not'[/bold]: it needs no download, a small demo model is included.",
    epilog="A model is a folder with config.json and *.safetensors, or a hub name such as Qwen/Qwen2.5-0.5B-Instruct.",
)

Model = Annotated[str, typer.Option("--model", "-m", help="Folder or hub name; 'demo' is the bundled model.")]
ModelArgument = Annotated[str, typer.Argument(metavar="[MODEL]", help="Folder or hub name; the demo model by default.")]
Device = Annotated[
    str, typer.Option(help="auto, cpu, vulkan, vulkan:1, or part of an adapter's name; see xinfer devices.")
]
Context = Annotated[int | None, typer.Option(min=2, help="Most tokens, prompt and answer. [default: the model's]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. [default: the checkpoint's]")]
TopK = Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all. [default: the checkpoint's]")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest up to this mass. [default: the checkpoint's]")]
MinP = Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1: less of what the text already has.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text. [default: drawn, and reported]")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"xinfer {__version__}")
        raise typer.Exit


@app.command()
def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; stdin when absent or -.")] = None,
    *,
    model: Model = "demo",
    device: Device = "auto",
    context: Context = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's stop tokens.")] = False,
    logprobs: Annotated[int | None, typer.Option(min=0, max=20, help="With --json: log-probabilities.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a text: the answer streams to stdout, statistics go to stderr.

    xinfer generate "ROMEO:" --max-tokens 80 --seed 1
    """
    text = _read_stdin() if prompt in (None, "-") else prompt
    with _load(model, device, context) as llm:
        stream = llm.stream(text, **_sampling(ctx))
        if as_json:
            for _ in stream:
                pass
            _print_json(_completion_json(stream.completion))
        else:
            _print_stream(stream)


@app.command()
def chat(
    ctx: typer.Context,
    *,
    model: Model = "demo",
    device: Device = "auto",
    context: Context = None,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens an answer. [default: no limit]")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk with a model. /reset begins again, /exit or Ctrl-D leaves; Ctrl-C stops an answer, not the program."""
    with _load(model, device, context) as llm:
        _converse(llm.conversation(system=system), _sampling(ctx))


def _sampling(ctx: typer.Context) -> dict[str, Any]:
    """The sampling options of a command, under `SamplingParams`' names."""
    from xinfer.sampling import SamplingParams

    return {name: value for name, value in ctx.params.items() if name in SamplingParams.__dataclass_fields__}


def _converse(conversation: Conversation, values: dict[str, Any]) -> None:
    """Turns until the end of input. Ctrl-C gives up the line or the answer, wherever it strikes; the program stays."""
    interactive = sys.stdin.isatty()
    if not interactive:  # whatever the locale; bad bytes are told of, line by line
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
    if interactive:
        _edit_lines()
        _say("/reset begins again, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    while True:
        try:
            line = _read_line("> " if interactive else "")
            if line is None or line == "/exit":
                return
            _turn(conversation, line, values)
        except KeyboardInterrupt:
            if not interactive:
                raise
            _say("\n(stopped; Ctrl-D or /exit leaves)")


def _read_line(prompt: str) -> str | None:
    """The next line without the spaces around it, or None at the end of input."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _edit_lines() -> None:
    with suppress(ImportError):  # Windows has none: its console edits lines itself
        import readline  # noqa: F401  # input() uses it from here on: arrow keys and history


def _turn(conversation: Conversation, line: str, values: dict[str, Any]) -> None:
    if line == "/reset":
        conversation.reset()
        _say("(a new conversation)")
    elif line.startswith("/"):
        _say(f"{line.split()[0]} is not a command; there are /reset and /exit")
    elif any("\ud800" <= char <= "\udfff" for char in line):
        _say("error: the line is not UTF-8 text")
    elif line:
        try:
            _print_stream(conversation.send(line, **values))
        except ContextLengthError as error:
            _say(f"error: {error}; or /reset")
        except XinferError as error:
            _say(f"error: {error}")


@app.command()
def inspect(
    model: ModelArgument = "demo",
    *,
    context: Context = None,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's configuration, its parameters and bytes, and the memory that it will need."""
    from xinfer.inspection import inspect_model, render_inspection

    report = inspect_model(_resolve(model), context=context)
    _print_json(report) if as_json else typer.echo(render_inspection(report))


@app.command()
def explain(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] MESSAGES",
            help="MESSAGES: a user message, a JSON list of messages, an object with messages and tools, "
            "a .json file that holds either, or - for stdin.",
        ),
    ],
    *,
    as_json: Json = False,
) -> None:
    """Show what the model is really given: prompt, ids, stop ids, each sampling value and its source.

    xinfer explain demo '[{"role": "user", "content": "Who goes there?"}]'
    """
    from xinfer.inspection import explain_messages, render_explanation

    if len(arguments) > 2:
        raise typer.BadParameter(f"expected [MODEL] MESSAGES, found {len(arguments)} arguments; quote the messages")
    model, text = arguments if len(arguments) == 2 else ("demo", arguments[0])
    report = explain_messages(model, *_read_messages(text))
    _print_json(report) if as_json else typer.echo(render_explanation(report))


@app.command()
def logits(
    *,
    tokens: Annotated[str, typer.Option(help="Token ids, separated by commas: 1,2,3.")],
    out: Annotated[Path, typer.Option(help="File to write: .npy, float32, tokens x vocabulary.")],
    model: Model = "demo",
    device: Device = "auto",
) -> None:
    """Write the logits after every token of a sequence, for comparison with another engine. Needs no tokenizer."""
    import numpy as np

    from xinfer.llm import load_model

    try:
        ids = np.array([int(token) for token in tokens.split(",")], dtype=np.int64)
    except (ValueError, OverflowError):
        raise RequestError(f"--tokens {tokens!r}; expected whole numbers separated by commas, such as 1,2,3") from None
    if out.suffix != ".npy":
        raise RequestError(f"--out {out}; expected a name that ends in .npy")
    if not out.parent.is_dir() or out.is_dir():
        raise RequestError(f"--out {out} is a folder, or lies in none; expected a file name in a folder that exists")
    with _progress_bars() as progress, load_model(_resolve(model), device=device, progress=progress) as loaded:
        limit = loaded.model.config.max_context
        if len(ids) > limit:
            raise ContextLengthError(f"{len(ids):,} tokens; this model takes {limit:,} at most: give fewer")
        values = loaded.model.forward(ids)  # (T, vocab_size)
        bad = ~np.isfinite(values).all(axis=1)
        if bad.any():
            raise NumericalError(
                f"the logits after token {int(bad.argmax())} are not finite (NaN or infinity); the weights of {model} "
                "are damaged, or too large for this device"
            )
        device_name = loaded.device_name
    partial = out.parent / f".xinfer-{os.getpid()}.partial"
    try:
        with partial.open("wb") as file:
            np.save(file, values)
        partial.replace(out)
    except OSError as error:
        raise RequestError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    _say(f"{out}: float32 {values.shape[0]} x {values.shape[1]}, from {device_name}")


@app.command()
def devices(*, as_json: Json = False) -> None:
    """List the adapters that --device can name: driver, API, memory, and the features that will be used."""
    from xinfer.inspection import list_adapters, render_adapters

    report = list_adapters()
    _print_json(report) if as_json else typer.echo(render_adapters(report))


@app.command()
def synth(
    ctx: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    *,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    preset: Annotated[str, typer.Option(help="Start from a named structure; a wrong name lists them all.")] = "gqa",
    tie_word_embeddings: Annotated[
        bool | None, typer.Option("--tied/--untied", help="Share embedding and head.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")] = None,
    hidden_size: Annotated[int | None, typer.Option("--hidden", min=1)] = None,
    intermediate_size: Annotated[int | None, typer.Option("--intermediate", min=1)] = None,
    num_hidden_layers: Annotated[int | None, typer.Option("--layers", min=1)] = None,
    num_attention_heads: Annotated[int | None, typer.Option("--heads", min=1)] = None,
    num_key_value_heads: Annotated[int | None, typer.Option("--kv-heads", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(min=2, help="Need not be hidden / heads.")] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab", min=1)] = None,
    max_position_embeddings: Annotated[int | None, typer.Option("--positions", min=1)] = None,
    shards: Annotated[int | None, typer.Option(min=1, help="Files to spread the weights over.")] = None,
    yarn_factor: Annotated[float | None, typer.Option("--yarn", help="YaRN factor.")] = None,
    sliding_window: Annotated[int | None, typer.Option(min=1, help="Window of the sliding layers, in tokens.")] = None,
    max_window_layers: Annotated[int | None, typer.Option(min=0, help="Layers from this one on slide.")] = None,
    k_bias_scale: Annotated[float | None, typer.Option(help="Size of the key biases; trained ones are large.")] = None,
) -> None:
    """Write a tiny checkpoint with random weights and a real tokenizer, to try things on.

    xinfer synth /tmp/tiny --untied --dtype bfloat16 --yarn 4
    """
    import dataclasses

    from xinfer.model.synthetic import PRESETS, SyntheticSpec, write_checkpoint

    if preset not in PRESETS:
        raise RequestError(f"--preset {preset!r} is not known; expected one of: {', '.join(PRESETS)}")
    if dtype not in (None, "float32", "float16", "bfloat16"):
        raise RequestError(f"--dtype {dtype!r}; expected float32, float16 or bfloat16")
    chosen = {name: value for name, value in ctx.params.items() if name in SyntheticSpec.__dataclass_fields__}
    spec = dataclasses.replace(PRESETS[preset], **{name: value for name, value in chosen.items() if value is not None})
    write_checkpoint(out, spec, seed=seed)
    _say(f"{out}: {preset}, seed {seed}; try: xinfer generate --model {out} hello")


def _resolve(model: str) -> Path:
    from xinfer.hub import resolve

    return resolve(model)


@contextmanager
def _load(model: str, device: str, context: int | None) -> Iterator[LLM]:
    from xinfer.llm import LLM

    with _progress_bars() as progress, LLM(model, device=device, context=context, progress=progress) as llm:
        yield llm


@contextmanager
def _progress_bars() -> Iterator[Progress | None]:
    """Bars on stderr, a stage each, for what takes longer than a second; none where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from xinfer.progress import Bars

    with Bars() as bars:
        yield bars.update


def _read_stdin() -> str:
    if sys.stdin.isatty():
        _say("type the prompt, then Ctrl-D")
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin is not UTF-8 (byte {error.start}); expected UTF-8 text") from None


def _print_stream(stream: Stream) -> None:
    """Print an answer as it comes; statistics when it ends, also when Ctrl-C ends it."""
    terminal = sys.stdout.isatty()
    last = "\n"
    try:
        for chunk in stream:
            text = _visible(chunk.text) if terminal else chunk.text
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text[-1:] or last
    finally:
        if last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
        if stream.completion.token_ids:
            _say(_statistics(stream.completion))


def _visible(text: str) -> str:
    """Control characters made harmless: a model must not be able to steer the user's terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _statistics(completion: Completion) -> str:
    stats = completion.stats
    rate = f" {stats.decode_tokens_per_second:,.1f} tok/s" if stats.generated_tokens > 1 else ""
    cached = f" ({stats.cached_tokens:,} kept)" if stats.cached_tokens else ""
    return (
        f"[{stats.device}] load {stats.load_seconds:.2f} s, prompt {stats.prompt_tokens:,} tokens{cached} "
        f"{stats.prefill_tokens_per_second:,.0f} tok/s, answer {stats.generated_tokens:,} tokens"
        f"{rate}, seed {stats.seed}, {completion.finish_reason or 'stopped'}"
    )


def _completion_json(completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "stats": {
            **{name: getattr(stats, name) for name in stats.__dataclass_fields__},
            "prefill_tokens_per_second": stats.prefill_tokens_per_second,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
        },
    }
    if completion.sampled and completion.sampled[0].logprob is not None:
        result["logprobs"] = [_logprobs_json(sampled) for sampled in completion.sampled]
    return result


def _logprobs_json(sampled: Sampled) -> dict[str, Any]:
    return {
        "token_id": sampled.token,
        "logprob": sampled.logprob,
        "top": [{"token_id": token, "logprob": logprob} for token, logprob in sampled.top],
    }


def _read_messages(text: str) -> tuple[Any, Any]:
    """Messages and tools from an argument: a user message, JSON, a .json file, or - for stdin."""
    if text == "-":
        text = _read_stdin()
    elif text.endswith(".json"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RequestError(f"cannot read the messages: {error}; expected a JSON file") from None
    if not text.lstrip().startswith(("[", "{")):
        return text, None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the messages are not JSON: {error}") from None
    if isinstance(value, list):
        return value, None
    unknown = set(value) - {"messages", "tools"}
    if unknown or "messages" not in value:
        raise RequestError(f"found keys {sorted(value)}; expected messages, and tools if there are any")
    return value["messages"], value.get("tools")


def _print_json(value: object) -> None:
    narrow = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    typer.echo(json.dumps(value, ensure_ascii=narrow, indent=2, allow_nan=False))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _fail(kind: str, message: str) -> None:
    if "--json" in sys.argv:
        with suppress(OSError):  # it may be the output itself that fails
            _print_json({"error": {"type": kind, "message": message}})
            sys.stdout.flush()
    _say(f"error: {message}")
    raise typer.Exit(1) from None


def _configure_streams() -> None:
    """Never fail to print: what a narrow encoding cannot show is escaped, and a closed stream leads nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """The `xinfer` command."""
    _configure_streams()
    try:
        app()
    except OSError as error:  # writing the help to a full disk, say
        _say(f"error: {error}")
        sys.exit(1)
    except Exception as error:  # a fault of ours: whoever reports it is told how to show us where
        if os.environ.get("XINFER_TRACEBACK"):
            raise
        _say(f"internal error: {type(error).__name__}: {error}\nthis is a bug; XINFER_TRACEBACK=1 shows where it is")
        sys.exit(INTERNAL)
