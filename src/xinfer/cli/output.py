"""What commands print: text, statistics and JSON to stdout or stderr."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from xinfer.llm import Completion, Stream
    from xinfer.sampling import Sampled

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_stream(stream: Stream) -> None:
    """Print an answer as it comes; statistics when it ends, also when Ctrl-C ends it."""
    terminal = sys.stdout.isatty()
    last = "\n"
    try:
        for chunk in stream:
            text = visible(chunk.text) if terminal else chunk.text
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text[-1:] or last
    finally:
        if last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
        if stream.completion.token_ids:
            say(statistics(stream.completion))


def visible(text: str) -> str:
    """Control characters made harmless: a model must not be able to steer the user's terminal."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def statistics(completion: Completion) -> str:
    """The line that follows an answer."""
    stats = completion.stats
    rate = f" {stats.decode_tokens_per_second:,.1f} tok/s" if stats.generated_tokens > 1 else ""
    cached = f" ({stats.cached_tokens:,} kept)" if stats.cached_tokens else ""
    return (
        f"[{stats.device}] load {stats.load_seconds:.2f} s, prompt {stats.prompt_tokens:,} tokens{cached} "
        f"{stats.prefill_tokens_per_second:,.0f} tok/s, answer {stats.generated_tokens:,} tokens"
        f"{rate}, seed {stats.seed}, {completion.finish_reason or 'stopped'}"
    )


def completion_json(completion: Completion) -> dict[str, Any]:
    """An answer as `--json` prints it."""
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


def print_json(value: object) -> None:
    """One JSON value to stdout, escaped where its encoding is too narrow."""
    narrow = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    typer.echo(json.dumps(value, ensure_ascii=narrow, indent=2, allow_nan=False))


def say(text: str) -> None:
    """A line to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def fail(kind: str, message: str) -> NoReturn:
    """End with an error and status 1; as JSON too where that was asked for."""
    if "--json" in sys.argv:
        with suppress(OSError):  # it may be the output itself that fails
            print_json({"error": {"type": kind, "message": message}})
            sys.stdout.flush()
    say(f"error: {message}")
    raise typer.Exit(1) from None
