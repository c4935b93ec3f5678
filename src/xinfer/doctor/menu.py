"""What every kernel variant is tried on: its op at the shapes of real models, and at a few awkward ones.

The trials of a variant follow from what the catalog says of it, so that a new variant has its trials by being there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.ops import SampleParams
from xinfer.shaders.catalog import FORMATS, Variant
from xinfer.trials.attention import COMBINE, AttentionTrial, TurnTrial, cache_numbers
from xinfer.trials.base import Trial
from xinfer.trials.bench import DTYPES
from xinfer.trials.cache import AppendTrial, CacheFormat
from xinfer.trials.choice import ArgmaxTrial, SampleTrial
from xinfer.trials.judge import Array
from xinfer.trials.linear import LinearTrial, PackTrial, SumTrial
from xinfer.trials.rows import AddTrial, EmbedTrial, NormTrial, RopeTrial, SwigluTrial

EPS = 1e-6
FORMAT_NAMES: dict[int, ops.Format] = {0: "f32", 1: "f16", 2: "bf16"}
ROWS_OF_ITS_OWN = (
    509  # of a matrix; further rows repeat them, as making and multiplying them would take most of the time
)
HEAD_FROM = 50_000  # rows of weights: a vocabulary
HEAD_ROWS = 17  # of activations that a whole vocabulary is multiplied with: a head seldom sees more


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a published model."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv(self) -> int:
        """Rows of the projections of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


MODELS = (
    ModelShape(name="0.5B", hidden=896, inner=4864, heads=14, kv_heads=2, head_dim=64, vocab=151_936),
    ModelShape(name="1.5B", hidden=1536, inner=8960, heads=12, kv_heads=2, head_dim=128, vocab=151_936),
    ModelShape(name="7B", hidden=3584, inner=18_944, heads=28, kv_heads=4, head_dim=128, vocab=152_064),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much of the models' shapes is tried. Sums keep their whole length; rows and keys are cut."""

    name: str
    rows: int  # of weights
    vocab: int  # rows of an embedding or head, and logits
    keys: int
    queries: int  # rows of a prefill


SCALED_DOWN = Scale(name="scaled down", rows=67, vocab=4097, keys=300, queries=33)
USUAL = Scale(name="real shapes", rows=1 << 30, vocab=1 << 30, keys=1500, queries=130)
DEEP = Scale(name="real shapes, long contexts", rows=1 << 30, vocab=1 << 30, keys=12_000, queries=520)


def trials_for(variant: Variant, scale: Scale) -> Iterator[Trial]:
    """The trials of one variant, with fixed random numbers, one after the other as they are asked for."""
    make = _FAMILIES.get(variant.op)
    if make is None:
        raise LookupError(f"no trials are known for {variant.op}: say in doctor/menu.py what it is tried on")
    yield from make(variant, scale, np.random.default_rng(20))


def _embed(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    form = _format(variant)
    for model in MODELS[:2]:
        vocab = min(model.vocab, scale.vocab)
        tokens = rng.integers(0, vocab, 9)
        tokens[:2] = 0, vocab - 1
        yield EmbedTrial(tokens=tokens, table=_weights(rng, vocab, model.hidden, form), format=form, rows=vocab)
    yield EmbedTrial(tokens=np.array([2, 0, 1]), table=_weights(rng, 3, 37, form), format=form)


def _rms_norm(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    del variant
    for width, n in ((37, 3), *((model.hidden, n) for model in MODELS for n in (1, scale.queries))):
        x = _normal(rng, n, width)
        x[::2] *= np.float32(1e-3)  # where eps matters
        yield NormTrial(x=x, weight=_normal(rng, width), eps=EPS)


def _rope(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    del variant
    for heads, dim in ((3, 6), *((model.heads + model.kv_heads, model.head_dim) for model in MODELS)):
        cos, sin = _tables(scale.keys, dim)
        positions = rng.permutation(scale.keys)[: scale.queries]
        yield RopeTrial(x=_normal(rng, len(positions), heads * dim), positions=positions, cos=cos, sin=sin)


def _swiglu(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    del variant
    for width, n in ((37, 3), *((model.inner, n) for model in MODELS for n in (1, min(scale.queries, 130)))):
        yield SwigluTrial(gate=5 * _normal(rng, n, width), up=_normal(rng, n, width))


def _add(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    del variant
    for width, n in ((37, 3), *((model.hidden, scale.queries) for model in MODELS)):
        yield AddTrial(x=_normal(rng, n, width), y=_normal(rng, n, width))


def _append(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    form = _cache_format(variant)
    for heads, kv_heads, dim in ((3, 1, 8), *((model.heads, model.kv_heads, model.head_dim) for model in MODELS)):
        cos, sin = _tables(scale.keys, dim)
        positions = np.concatenate([[0, 31, 32], 33 + rng.permutation(scale.keys - 33)[: scale.queries]])
        n = len(positions)
        k, v = (_normal(rng, n, kv_heads * dim) * np.float32(10) for _ in range(2))
        turned: dict[str, Any] = {}
        if variant.op == "rope_append":
            turned = {"q": _normal(rng, n, heads * dim), "cos": cos, "sin": sin}
        yield AppendTrial(k=k, v=v, positions=positions, n_kv_heads=kv_heads, format=form, **turned)


def _linear(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    form, defines = _format(variant), dict(variant.defines)
    norm, gated = bool(defines.get("NORM")), bool(defines.get("SWIGLU"))
    most = defines.get("T_MAX", scale.queries)
    whole = bool(defines.get("VECTOR_X")) or "halves" in variant.buffers
    for number, (rows, columns) in enumerate(_matrices(scale, norm=norm, gated=gated, whole=whole)):
        n = most if number % 2 else most // 2 + 1
        if number == 0 and variant.op == "linear_gemm":
            n = 5  # with K=64 and N=32
        if rows > HEAD_FROM:
            n = min(n, HEAD_ROWS)
        x = _normal(rng, n, columns)
        if number % 2 and norm:
            x *= np.float32(1e-3)  # where eps matters
        plain = not norm and not gated
        yield LinearTrial(
            x=x,
            w=_weights(rng, rows, columns, form),
            format=form,
            bias=_normal(rng, rows) if not gated and number % 3 != 1 else None,
            before=_normal(rng, n, rows) if plain and number % 2 else None,
            norm=(_normal(rng, columns), EPS) if norm else None,
            up=_weights(rng, rows, columns, form) if gated else None,
            rows=rows,
        )


def _matrices(scale: Scale, *, norm: bool, gated: bool, whole: bool) -> Iterator[tuple[int, int]]:
    """Rows and columns: awkward ones, then each model's that this form is used for."""
    yield 32, 64
    yield (33, 264) if whole else (31, 37)
    for model in MODELS:
        if gated:
            yield min(model.inner, scale.rows), model.hidden
        elif norm:
            yield min(model.qkv, scale.rows), model.hidden
        else:
            yield min(model.hidden, scale.rows), model.heads * model.head_dim
            yield min(model.hidden, scale.rows), model.inner
    if not gated:
        yield min(MODELS[0].vocab, scale.vocab), MODELS[0].hidden


def _pack_rows(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    source = variant.define("SOURCE")
    for number, width in enumerate(
        (40 if source else 37, *(n for model in MODELS for n in (model.hidden, model.inner)))
    ):
        n, exact = min(scale.queries, 130), number % 2 == 0
        x = _normal(rng, n, width)
        if source in (0, 3):
            yield PackTrial(x=x * np.exp(rng.uniform(-20, 20, (n, 1))).astype(np.float32), exact=exact)
        elif source == 1:
            x[::2] *= np.float32(1e-3)  # where eps matters
            yield PackTrial(x=x, exact=exact, norm=(_normal(rng, width), EPS))
        else:
            yield PackTrial(x=5 * x, exact=exact, up=_normal(rng, n, width))


def _sum_parts(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    del variant
    for n, width in ((2, 37), *((n, model.hidden) for model in MODELS for n in (2, 4))):
        rows = min(scale.queries, 130)
        parts = _normal(rng, n * rows, width).reshape(n, rows, width)
        yield SumTrial(parts=parts, bias=_normal(rng, width), before=_normal(rng, rows, width) if n == 4 else None)


def _attention(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    form: CacheFormat = "f16" if variant.id == COMBINE else _cache_format(variant)
    queries, keys = scale.queries, scale.keys
    places: list[tuple[int, int, int | None, int | None]] = [  # rows, keys, splits, window
        *((1, 1, None, None), (1, 33, 1, None), (1, keys, None, None), (1, keys, 5, None), (1, keys, 3, keys // 2)),
        *((queries, queries, 1, None), (queries, queries + keys // 2, 2, None), (queries, max(queries, keys), 1, 40)),
    ]
    for heads, kv_heads, dim in dict.fromkeys((model.heads, model.kv_heads, model.head_dim) for model in MODELS):
        for n, n_keys, splits, window in places:
            k, v = (cache_numbers(_normal(rng, n_keys, kv_heads, dim), form) for _ in range(2))
            q = 2 * _normal(rng, n, heads, dim)
            named: dict[str, Any] = {"window": window, "n_splits": splits}
            trial: AttentionTrial | TurnTrial = AttentionTrial(q=q, k=k, v=v, format=form, **named)
            if "table" in variant.buffers:
                new_k, new_v = _normal(rng, kv_heads, dim), _normal(rng, kv_heads, dim)
                cos, sin = _tables(n_keys, dim)
                fresh: dict[str, Any] = {"new_k": new_k, "new_v": new_v, "cos": cos, "sin": sin}
                trial = TurnTrial(q=q[0], k=k[:-1], v=v[:-1], format=form, **fresh, **named)
            if trial.fits(variant) and (variant.id != COMBINE or splits is not None) and (n == 1 or not _turns(trial)):
                yield trial


def _turns(trial: Trial) -> bool:
    return isinstance(trial, TurnTrial)


def _argmax(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    del variant
    for vocab, n_valid in ((5, 5), *((min(model.vocab, scale.vocab), None) for model in MODELS)):
        logits = _normal(rng, 2, vocab) - np.float32(10)
        logits[1, [vocab // 3, vocab - 2]] = 3  # a tie
        yield ArgmaxTrial(logits=logits, n_valid=n_valid or vocab - 1)


def _sample(variant: Variant, scale: Scale, rng: np.random.Generator) -> Iterator[Trial]:
    cases: tuple[dict[str, Any], ...] = (
        *({"top_k": 20, "top_p": 0.8}, {"top_p": 0.9, "min_p": 0.01}, {}),
        *({"top_k": 300, "top_p": 0.95, "slow": True}, {"min_p": 0.1, "slow": True}, {"top_k": 1, "slow": True}),
    )
    for vocab, named in itertools.product((37, min(MODELS[0].vocab, scale.vocab)), cases):
        logits = 4 * _normal(rng, vocab)
        logits[[vocab // 3, vocab - 2]] = logits.max()  # a tie
        counts = np.zeros(vocab, np.uint32)
        counts[rng.integers(0, vocab, vocab // 2)] = ops.SEEN_IN_PROMPT
        counts[rng.integers(0, vocab, vocab // 2)] += np.uint32(2)
        bias = rng.choice(np.array([0, 0.5, -np.inf], np.float32), vocab)
        made: dict[str, Any] = {"repetition": 1.1, "presence": 0.5, "frequency": -0.25, "penalties": True, "bias": True}
        params = tuple(
            SampleParams(n_valid=vocab - 1, temperature=0.7, seed=seed << 20, **made, **named) for seed in range(4)
        )
        trial = SampleTrial(logits=logits, params=params, counts=counts, bias=bias)
        if trial.fits(variant):
            yield trial


_FAMILIES: dict[str, Callable[[Variant, Scale, np.random.Generator], Iterator[Trial]]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "swiglu": _swiglu,
    "add": _add,
    "kv_append": _append,
    "rope_append": _append,
    "linear_gemv": _linear,
    "linear_gemm": _linear,
    "pack_rows": _pack_rows,
    "sum_parts": _sum_parts,
    "attention": _attention,
    "argmax": _argmax,
    "sample": _sample,
}


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def _weights(rng: np.random.Generator, rows: int, columns: int, form: ops.Format) -> NDArray[Any]:
    """The rows of its own that a matrix of so many rows has."""
    return rng.standard_normal((min(rows, ROWS_OF_ITS_OWN), columns), np.float32).astype(DTYPES[form])


def _tables(n_positions: int, dim: int) -> tuple[Array, Array]:
    """Cos and sin (positions, D / 2), of angles that differ for every position and pair."""
    frequency = 10_000.0 ** -(np.arange(0, dim, 2) / dim)
    angles = np.arange(n_positions)[:, np.newaxis] * frequency
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _format(variant: Variant) -> ops.Format:
    return FORMAT_NAMES[variant.define("FORMAT")]


def _cache_format(variant: Variant) -> CacheFormat:
    """A cache holds float32 or f16."""
    return "f16" if variant.define("FORMAT") == FORMATS["f16"] else "f32"
