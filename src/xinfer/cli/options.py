"""Options that several commands share, and how a command reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xinfer.errors import DeviceError, RequestError

if TYPE_CHECKING:
    from xinfer.gpu_model import ModelOptions

CHECKPOINT = "the checkpoint's"  # where the default of a sampling value comes from
LARGEST_SIZE = 2**63  # bytes: more than there is anywhere
LEAST_SIZE = 1_000_000  # what is less and has no unit was not meant as bytes


def checked_device(value: str | None) -> str | None:
    """A name of a device, whose form is wrong usage where it can be none; whether there is one is seen later."""
    if value is None:
        return None
    from xinfer import gpu

    try:
        gpu.parse_selector(value)
    except DeviceError as error:
        raise typer.BadParameter(str(error)) from None
    return value


Model = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="Folder or hub name; 'demo' is the bundled model.")
]
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name; 'demo' is the bundled model.")]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        callback=checked_device,
        help="auto, cpu, vulkan, vulkan:1, d3d12, or part of an adapter's name; see xinfer devices.",
    ),
]
Context = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Most tokens, prompt and answer.", show_default="the model's")
]
Exact = Annotated[
    bool,
    typer.Option("--exact", metavar="", help="Read prompts in float32's accuracy on matrix cores too: slower."),
]
Canary = Annotated[
    bool,
    typer.Option(
        "--canary",
        metavar="",
        help="Check every layer with a known token before each token: finds a GPU that was reset in silence. Slower.",
    ),
]
Tuning = Annotated[
    bool,
    typer.Option(
        "--tuning/--no-tuning",
        metavar="",
        help="Use what xinfer tune has chosen, where it has been run.",
    ),
]
KVCache = Annotated[
    str,
    typer.Option(
        "--kv-cache", metavar="f16|f32", help="A GPU's KV cache; f32 is twice as large, and gives the CPU's tokens."
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="auto streams the layers that do not fit on a GPU, resident refuses, streaming streams one at least.",
    ),
]
VramBudget = Annotated[
    str | None,
    typer.Option(
        "--vram-budget",
        metavar="SIZE",
        help="Most of a GPU's memory to take, such as 8GB or 7.5GiB; layers that do not fit are streamed.",
        show_default="what is free",
    ),
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object to stdout, errors too.")]
JsonStream = Annotated[
    bool,
    typer.Option(
        "--stream",
        metavar="",
        help="With --json: an object a line for each token as it comes, and then the whole answer with its statistics.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No statistics and no progress on stderr.")]

Temperature = Annotated[float | None, typer.Option(metavar="T", help="0 is greedy.", show_default=CHECKPOINT)]
TopK = Annotated[
    int | None, typer.Option(metavar="K", help="Keep the K likeliest tokens; 0 keeps all.", show_default=CHECKPOINT)
]
TopP = Annotated[
    float | None, typer.Option(metavar="P", help="Keep the likeliest up to this mass.", show_default=CHECKPOINT)
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Drop tokens below this share of the likeliest one's probability.", show_default=CHECKPOINT
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="Above 1: less of what the text already has.", show_default=CHECKPOINT),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="Above 0: less of what the answer already has, -2 to 2.", show_default="0"),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(metavar="X", help="The same, for each time that it has it.", show_default="0"),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=VALUE", help="Add to the score of a token id; -inf forbids it. May be given several times."
    ),
]
Seed = Annotated[
    int | None, typer.Option(metavar="N", help="Same seed, same text.", show_default="drawn, and reported")
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text. May be given several times.")
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        metavar="ID",
        help="End at this token id, besides the model's own. May be given several times.",
    ),
]

Speculate = Annotated[
    int,
    typer.Option(
        min=0,
        max=15,
        metavar="N",
        help="Greedy without penalties, on a GPU: guess up to N tokens from earlier text and check them in one pass. "
        "Same text; pays where text repeats itself, most where layers are streamed.",
    ),
]


def byte_count(size: str | None) -> int | None:
    """`8GB`, `7.5GiB`, `500 MB` or plain bytes as a number of bytes."""
    if size is None:
        return None
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(I?)B?\s*", size.upper())
    if found is None:
        raise typer.BadParameter(f"{size!r}; expected a size such as 8GB, 7.5GiB or 500MB", param_hint="--vram-budget")
    number, prefix, binary = found.groups()
    unit: int = (1024 if binary else 1000) ** " KMGT".index(prefix or " ")
    n_bytes = round(min(float(number) * unit, LARGEST_SIZE))  # enough digits are infinity
    if n_bytes < 1:
        raise typer.BadParameter(f"{size!r}; expected more than 0, such as 8GB", param_hint="--vram-budget")
    if found[0].strip()[-1].isdigit() and n_bytes < LEAST_SIZE:
        raise typer.BadParameter(f"{size!r} are bytes; expected a unit, as in {number}GB", param_hint="--vram-budget")
    return n_bytes


def model_options(ctx: typer.Context) -> ModelOptions:
    """The options of a command that say how the model is to lie on a device."""
    from xinfer.gpu_model import ModelOptions

    given = {name: value for name, value in ctx.params.items() if name in ModelOptions.__dataclass_fields__}
    if "vram_budget" in given:
        given["vram_budget"] = byte_count(given["vram_budget"])
    try:
        return ModelOptions(**given)
    except RequestError as error:  # "name=value; what was expected"
        name, _, found = str(error).partition("=")
        raise typer.BadParameter(found, param_hint=f"--{name.replace('_', '-')}") from None


def numbers(text: str | None, option: str) -> list[int] | None:
    """Whole numbers above 0 between commas, each once, in order."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}; expected whole numbers above 0, such as 128,512", param_hint=option)
    return sorted({int(part) for part in parts})


def sampling_values(ctx: typer.Context) -> dict[str, Any]:
    """The sampling options that a command was given, under `SamplingParams`' names."""
    from xinfer.sampling import SamplingParams

    given = {name: value for name, value in ctx.params.items() if name in SamplingParams.__dataclass_fields__}
    if given.get("logit_bias"):
        given["logit_bias"] = _bias(given["logit_bias"])
    given = {name: value for name, value in given.items() if value not in (None, [], ())}
    try:
        SamplingParams(**given)
    except RequestError as error:  # before anything is loaded
        raise typer.BadParameter(str(error)) from None
    return given


def _bias(pairs: list[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            entry = int(token), float(value)
        except ValueError:
            raise typer.BadParameter(
                f"{pair!r}; expected ID=VALUE, such as 11=-5 or 11=-inf", param_hint="--logit-bias"
            ) from None
        if entry[0] in bias:
            raise typer.BadParameter(f"the id {entry[0]} is given twice; keep one of them", param_hint="--logit-bias")
        bias[entry[0]] = entry[1]
    return bias
