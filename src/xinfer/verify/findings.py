"""What verification found: one judged phase, and the cases that phases belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from xinfer.trials.base import Trial
from xinfer.trials.judge import Expected, Judgement, judge

# In the network's order; reports show them so. Not every pass has all of them: fused ones stand for several.
LAYER_OPS = (
    *("input_ln", "input_ln_pack", "qkv", "rope", "append", "attn", "o"),
    *("post_ln", "post_ln_pack", "gate_up", "swiglu", "swiglu_pack", "down", "pack"),
)
END_OPS = ("embed", "norm", "norm_pack", "pack", "logits", "argmax", "sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, or decode steps behind one; `full`: by the kernels of a cache that has grown to the whole context."""

    name: str
    n_prompt: int
    n_steps: int = 0
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One phase of one pass, judged. `trials` repeat it alone: the op itself, then the single ops it stands for."""

    case: str
    layer: int | None  # None: the embedding and the head
    op: str
    variants: tuple[str, ...]
    what: str
    judgement: Judgement
    trials: Callable[[], list[Trial]] | None = None

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.op} of layer {self.layer}" if self.layer is not None else self.op


Found = tuple[str, NDArray[Any], Expected]  # what it is, the device's numbers, and the reference's


def finding(
    case: str,
    layer: int | None,
    op: str,
    variants: Sequence[str],
    found: Sequence[Found],
    trials: Callable[[], list[Trial]],
) -> Finding:
    """Judge the results of a phase by the worst of them. Only what is wrong keeps its inputs in memory."""
    judged = [(what, judge(numbers, expected)) for what, numbers, expected in found]
    what, judgement = max(judged, key=lambda item: item[1].ratio)
    return Finding(
        case=case,
        layer=layer,
        op=op,
        variants=tuple(dict.fromkeys(variants)),
        what=what,
        judgement=judgement,
        trials=None if judgement.right else trials,
    )
