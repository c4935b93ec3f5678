"""Which kernels the recordings of a model use in place of those that its ops would choose, and which ones there are.

`xinfer tune` finds them for a model's shapes on a device; what is not named here is chosen by the ops' own rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from xinfer import ops
from xinfer.gpu_model.weights import DeviceLayer
from xinfer.kv_cache import FIRST_TOKENS, GROWTH
from xinfer.ops import CacheBlocks, KernelSet, Matrix, Rows

PRODUCTS = ("qkv", "o", "gate_up", "down", "logits")  # of a decode step; those of a prompt are these but the last
MOST_SPLITS = 1024  # more than any kernel takes


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """A kernel, and into how many splits it divides the keys."""

    variant: str
    n_splits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Variants by op. Empty: everything is as the ops choose."""

    decode: Mapping[str, str] = field(default_factory=dict)  # by op, of steps of one row
    attention: Mapping[int, AttentionChoice] = field(default_factory=dict)  # of such steps, by `keys_bucket`
    prompts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # by rows of the recording, and op

    def __bool__(self) -> bool:
        return bool(self.decode or self.attention or any(self.prompts.values()))

    def products(self, n_rows: int) -> Mapping[str, str]:
        """Variants by op, for recordings of so many rows."""
        return self.decode if n_rows == 1 else self.prompts.get(n_rows, {})

    def attention_for(self, max_keys: int) -> AttentionChoice | None:
        """What a step uses whose sequence may have so many keys."""
        return self.attention.get(keys_bucket(max_keys))

    @property
    def variants(self) -> frozenset[str]:
        """Every variant that is named."""
        chosen = {*self.decode.values(), *(choice.variant for choice in self.attention.values())}
        return frozenset(chosen.union(*(by_op.values() for by_op in self.prompts.values())))

    def without(self, dropped: Collection[str]) -> Tuning:
        """The rest, where some variants must not be used."""
        return Tuning(
            decode=_left(self.decode, dropped),
            attention={keys: choice for keys, choice in self.attention.items() if choice.variant not in dropped},
            prompts={rows: _left(by_op, dropped) for rows, by_op in self.prompts.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, which `from_json` takes."""
        return {
            "decode": dict(self.decode),
            "attention": {str(keys): [c.variant, c.n_splits] for keys, c in self.attention.items()},
            "prompts": {str(rows): dict(by_op) for rows, by_op in self.prompts.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Raises ValueError where it is not what `as_json` gives. Whether the variants exist is not looked at."""
        try:
            found = cls(
                decode=_texts(value["decode"]),
                attention={int(keys): AttentionChoice(*choice) for keys, choice in value["attention"].items()},
                prompts={int(rows): _texts(by_op) for rows, by_op in value["prompts"].items()},
            )
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"a choice is not one: {error!r}") from None
        for choice in found.attention.values():
            if not isinstance(choice.variant, str) or type(choice.n_splits) is not int:
                raise ValueError(f"a choice is not one: {choice}")
        return found


def _left(chosen: Mapping[str, str], dropped: Collection[str]) -> dict[str, str]:
    return {op: name for op, name in chosen.items() if name not in dropped}


def _texts(value: dict[Any, Any]) -> dict[str, str]:
    if not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ValueError(f"a choice is not one: {value}")
    return dict(value)


def keys_bucket(max_keys: int) -> int:
    """The size of a cache, of those that it grows through, that so many keys of a sequence fit into."""
    size = FIRST_TOKENS
    while size < max_keys:
        size *= GROWTH
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """What kernels are chosen for: the shapes of one model on one device."""

    kernels: KernelSet
    layer: DeviceLayer
    head: Matrix
    cache: CacheBlocks
    one: Mapping[str, Rows]  # activations of a decode step: "x", "attn" and "gate"
    max_rows: int  # of a chunk of a prompt
    exact: bool

    def products(self, n_rows: int) -> dict[str, list[str]]:
        """Variants of each op that can run in recordings of so many rows, the ops' own choice first."""
        layer = self.layer
        matrices = {"qkv": layer.qkv, "o": layer.o, "gate_up": layer.gate, "down": layer.down, "logits": self.head}
        if n_rows == 1:
            return {op: self._gemv(op, w) for op, w in matrices.items()}
        del matrices["logits"]
        return {op: self._gemm(op, w, n_rows) for op, w in matrices.items()}

    def attention(self) -> list[str]:
        """Variants of a decode step's attention, likewise."""
        on = ops.Recorder(ops.WantedKernels(), self.kernels)  # nothing is recorded
        turn = ops.can_rope_append(on, self.cache)  # as `plan_attention` has it
        names = ops.attention_candidates(self.cache, 1, turn=turn, exact=self.exact)
        return [name for name in names if self.kernels.usable(name)]

    def accepted(self, tuning: Tuning) -> Tuning:
        """What of it can be used here."""
        attention = self.attention() if tuning.attention else []
        return Tuning(
            decode=_known(tuning.decode, self.products(1)) if tuning.decode else {},
            attention={
                keys: choice
                for keys, choice in tuning.attention.items()
                if choice.variant in attention and 1 <= choice.n_splits <= MOST_SPLITS
            },
            prompts={
                rows: _known(by_op, self.products(rows))
                for rows, by_op in tuning.prompts.items()
                if 1 < rows <= self.max_rows
            },
        )

    def _gemv(self, op: str, w: Matrix) -> list[str]:
        """Those made for one row; with whole waves where the device has them, which are never slower."""
        x = self.one[{"o": "attn", "down": "gate"}.get(op, "x")]
        norm, swiglu = op in ("qkv", "gate_up", "logits"), op == "gate_up"
        names = [
            name
            for name in ops.gemv_candidates(w, x, norm=norm, swiglu=swiglu, capacity=self.kernels.capacity)
            if self.kernels.usable(name)
        ]
        single = [name for name in names if ".t1." in f"{name}."]
        waves = [name for name in single if ".wave" in name]
        return waves or single or names

    def _gemm(self, op: str, w: Matrix, n_rows: int) -> list[str]:
        """On matrix cores where there are any, gate and up in one product where that can be."""
        if n_rows <= ops.GEMV_ROWS_MAX:
            return []
        families = [
            ops.packed_candidates(w, n_rows, exact=self.exact, swiglu=swiglu)
            for swiglu in ((True, False) if op == "gate_up" else (False,))
        ]
        for names in (*families, ops.gemm_candidates(w, n_rows)):
            usable = [name for name in names if self.kernels.usable(name)]
            if usable:
                return usable
        return []


def _known(chosen: Mapping[str, str], candidates: Mapping[str, list[str]]) -> dict[str, str]:
    return {op: name for op, name in chosen.items() if name in candidates.get(op, ())}
