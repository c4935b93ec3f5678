"""The mutated checkpoints: `case(n)` is the n-th, the same on every machine and every day.

Stages take turns in a fixed order of a hundred cases, so that any hundred in a row hold each stage's quota.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.files import Files, Mutation
from tests.fuzz.json_files import CONFIGS, FOLDERS, GENERATIONS, TOKENIZER_CONFIGS
from tests.fuzz.templates import TEMPLATES
from tests.fuzz.tokenizer_files import TOKENIZERS
from tests.fuzz.weight_files import DTYPES, HEADER, INDEXES, OFFSETS

from xinfer.model.synthetic import PRESETS, write_checkpoint

ALL = 10_000
TENTH = 1_000
SEED = 20  # another number is another ten thousand

QUOTAS: Mapping[str, int] = {  # of every hundred
    "header": 11,
    "offsets": 9,
    "dtypes": 9,
    "index": 9,
    "config": 14,
    "generation": 9,
    "tokenizer": 16,
    "tokenizer_config": 7,
    "template": 13,
    "folder": 3,
}
MUTATIONS: Mapping[str, tuple[Mutation, ...]] = {
    "header": HEADER,
    "offsets": OFFSETS,
    "dtypes": DTYPES,
    "index": INDEXES,
    "config": CONFIGS,
    "generation": GENERATIONS,
    "tokenizer": TOKENIZERS,
    "tokenizer_config": TOKENIZER_CONFIGS,
    "template": TEMPLATES,
    "folder": FOLDERS,
}

_SHARDED = ("sharded", "bf16_sharded")
_BASES = ("gqa", "untied", "f16", "bf16", "yarn", "yarn_silent", "sliding", "layer_types", "odd_sizes", *_SHARDED)


def _schedule() -> tuple[str, ...]:
    """A hundred stages, in an order in which no stage comes in a block."""
    assert sum(QUOTAS.values()) == 100
    slots = [stage for stage, quota in QUOTAS.items() for _ in range(quota)]
    Random(SEED).shuffle(slots)
    return tuple(slots)


SCHEDULE = _schedule()


@dataclass(frozen=True, slots=True)
class Case:
    """One mutated checkpoint."""

    number: int
    stage: str
    base: str  # of which synthetic checkpoint
    files: Files
    how: str


def stage_of(number: int) -> str:
    """The stage that case `number` belongs to."""
    return SCHEDULE[number % len(SCHEDULE)]


def quota(stage: str, count: int) -> int:
    """How many of the first `count` cases belong to a stage."""
    return Counter(SCHEDULE)[stage] * count // len(SCHEDULE)


def make_bases(root: Path) -> dict[str, Files]:
    """Write the sound checkpoints into `root`, a folder each, and read them."""
    bases: dict[str, Files] = {}
    for name in _BASES:
        # Small, so that ten thousand of them take minutes; every structural feature is as in the preset.
        spec = dataclasses.replace(
            PRESETS[name], intermediate_size=24, num_hidden_layers=min(3, PRESETS[name].num_hidden_layers)
        )
        folder = write_checkpoint(root / name, spec, seed=0)
        bases[name] = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return bases


def case(number: int, bases: Mapping[str, Files]) -> Case:
    """The case of that number, made of one of the sound checkpoints."""
    rng = Random(f"{SEED}:{number}")
    stage = stage_of(number)
    base = rng.choice(_SHARDED if stage == "index" else _BASES)
    files = dict(bases[base])
    how = rng.choice(MUTATIONS[stage])(rng, files)
    return Case(number, stage, base, files, how)
