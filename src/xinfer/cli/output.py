"""What commands print: text, statistics and JSON to stdout or stderr."""

from __future__ import annotations

import enum
import json
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from xinfer.cli.status import ERROR

if TYPE_CHECKING:
    from xinfer.llm import Chunk, Completion, Stream
    from xinfer.sampling import Sampled

ANSWERED = "xinfer_answered"  # an attribute of the interrupt behind which what there was of an answer has been printed
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Form(enum.Enum):
    """How an answer is printed."""

    TEXT = "text as it comes, statistics to stderr"
    OBJECT = "one JSON object"
    LINE = "one JSON object on one line"
    CHUNKS = "a JSON object a line for each token, and one for the whole"

    @classmethod
    def chosen(cls, as_json: bool, stream: bool) -> Form:
        """What --json and --stream ask for; text streams by itself, and --stream without --json is wrong usage."""
        if not as_json and stream:
            raise typer.BadParameter("text streams by itself; add --json for an object a token", param_hint="--stream")
        if not as_json:
            return cls.TEXT
        return cls.CHUNKS if stream else cls.OBJECT


def print_answer(stream: Stream, *, form: Form, quiet: bool) -> None:
    """Print an answer; what there is of it, when Ctrl-C or SIGTERM ends it."""
    if form is Form.TEXT:
        _print_text(stream, quiet=quiet)
        return
    compact = form is not Form.OBJECT
    try:
        for chunk in stream:
            if form is Form.CHUNKS:
                print_json(_chunk_json(chunk), compact=True)
    except (KeyboardInterrupt, SystemExit) as ended:  # Ctrl-C, SIGTERM
        print_json(_completion_json(stream.completion), compact=compact)
        setattr(ended, ANSWERED, True)
        raise
    print_json(_completion_json(stream.completion), compact=compact)


def _print_text(stream: Stream, *, quiet: bool) -> None:
    shown = _visible if sys.stdout.isatty() else str
    printed = 0
    last = "\n"
    try:
        for chunk in stream:
            sys.stdout.write(shown(chunk.text))
            sys.stdout.flush()
            printed += len(chunk.text)
            last = chunk.text[-1:] or last
    finally:
        held = stream.completion.text[printed:]  # of an answer that was stopped where a stop string might have begun
        sys.stdout.write(shown(held))
        if (held[-1:] or last) != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()
        if stream.completion.token_ids and not quiet:
            say(_statistics(stream.completion))


def _visible(text: str) -> str:
    """Control characters made harmless: a model must not be able to steer the user's terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _statistics(completion: Completion) -> str:
    stats = completion.stats
    rate = f" {stats.decode_tokens_per_second:,.1f} tok/s" if stats.generated_tokens > 1 else ""
    cached = f" ({stats.cached_tokens:,} kept)" if stats.cached_tokens else ""
    guesses = ""
    if stats.guessed_tokens:
        passes = stats.generated_tokens / max(1, stats.generated_tokens - stats.accepted_tokens)
        guesses = f", {stats.accepted_tokens:,} of {stats.guessed_tokens:,} guesses right: {passes:.1f} tokens a pass"
    if stats.no_guesses:
        guesses = f", nothing guessed: {stats.no_guesses}"
    device = f"{stats.device}, tuned" if stats.tuned else stats.device
    return (
        f"[{device}] load {stats.load_seconds:.2f} s, prompt {stats.prompt_tokens:,} tokens{cached} "
        f"{stats.prefill_tokens_per_second:,.0f} tok/s, answer {stats.generated_tokens:,} tokens"
        f"{rate}{guesses}, seed {stats.seed}, {completion.finish_reason or 'stopped'}"
    )


def _completion_json(completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    result: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason or "stopped",
        "stats": {
            **{name: getattr(stats, name) for name in stats.__dataclass_fields__},
            "prefill_tokens_per_second": stats.prefill_tokens_per_second,
            "decode_tokens_per_second": stats.decode_tokens_per_second,
        },
    }
    if completion.sampled and completion.sampled[0].logprob is not None:
        result["logprobs"] = [{"token_id": sampled.token, **_logprobs_json(sampled)} for sampled in completion.sampled]
    return result


def _chunk_json(chunk: Chunk) -> dict[str, Any]:
    result = {"text": chunk.text, "token_id": chunk.sampled.token, "finish_reason": chunk.finish_reason}
    return result if chunk.sampled.logprob is None else {**result, **_logprobs_json(chunk.sampled)}


def _logprobs_json(sampled: Sampled) -> dict[str, Any]:
    return {
        "logprob": sampled.logprob,
        "top": [{"token_id": token, "logprob": logprob} for token, logprob in sampled.top],
    }


def print_json(value: object, *, compact: bool = False) -> None:
    """One JSON value to stdout, escaped where its encoding is too narrow; on one line if `compact`."""
    narrow = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    typer.echo(json.dumps(value, ensure_ascii=narrow, indent=None if compact else 2, allow_nan=False))


def print_error(kind: str, message: str) -> None:
    """An error as JSON, on one line, so that it can also end a stream of lines."""
    print_json({"error": {"type": kind, "message": message}}, compact=True)


def say(text: str) -> None:
    """A line to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def fail(kind: str, message: str, *, as_json: bool) -> NoReturn:
    """End with an error and status 1."""
    if as_json:
        with suppress(OSError):  # it may be the output itself that fails
            print_error(kind, message)
            sys.stdout.flush()
    say(f"error: {message}")
    raise typer.Exit(ERROR) from None
