"""How a model is to lie on a device and to run there: what users choose, checked when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from xinfer.errors import RequestError

KVType = Literal["f16", "f32"]
KV_TYPES: tuple[KVType, ...] = get_args(KVType)
Mode = Literal["auto", "resident", "streaming"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is to lie on a device and to run there. On the CPU only `context` means something.

    Args:
        context: the most tokens of one sequence, prompt and answer together, for which memory must be free; None: all
            that the model can take, and memory is taken when it is needed.
        kv_cache: type of the KV cache: "f16", or "f32", which is twice as large and leaves nothing but the order of
            sums to tell the GPU's answers from the CPU's.
        mode: "auto" keeps as many layers on the device as fit, and copies the others there for each step; "resident"
            refuses a model that does not fit, "streaming" streams at least a layer.
        vram_budget: bytes of the device's memory that all of it may take; None: what is free.
        exact: on matrix cores read prompts with activations of 22 bits, which is float32's accuracy; else they have 11,
            as f16 has, which is twice as fast. Without matrix cores, and for single tokens, they are float32 in either
            case.
        tuning: prefer the kernels that `xinfer tune` has chosen for the model's shapes on the device, where it has been
            run. Sums run in another order: greedy text may differ where two tokens are as good as equal.

    Raises:
        RequestError: a value is not among the known ones.
    """

    context: int | None = None
    kv_cache: KVType = "f16"
    mode: Mode = "auto"
    vram_budget: int | None = None
    exact: bool = False
    tuning: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (("kv_cache", self.kv_cache, KV_TYPES), ("mode", self.mode, MODES)):
            if value not in known:
                raise RequestError(f"{name}={value!r}; expected one of {', '.join(known)}")
        for name, switch in (("exact", self.exact), ("tuning", self.tuning)):
            if not isinstance(switch, bool):
                raise RequestError(f"{name}={switch!r}; expected True or False")
        budget = self.vram_budget
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
            raise RequestError(f"vram_budget={budget!r}; expected a whole number of bytes, 1 or more")


class OptionValues(TypedDict, total=False):
    """Single values of `ModelOptions`, as keywords."""

    context: int | None
    kv_cache: KVType
    mode: Mode
    vram_budget: int | None
    exact: bool
    tuning: bool
