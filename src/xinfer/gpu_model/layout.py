"""Where each tensor of a checkpoint lies on a device, and which layers stay there.

One allocation a layer, its tensors at fixed offsets in it. Matrices keep the checkpoint's own 16-bit type, float32 ones
become f16; biases and norms are float32. The rows of q, k and v lie behind each other, so that one product makes all
three; gate and up are sliced alike, so that one product can make both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xinfer.model.names import LayerWeights, global_tensor_name, layer_shapes, layer_tensor_name
from xinfer.model.weights import ModelWeights
from xinfer.ops import Format, row_stride

SLOTS = 2  # that streamed layers take turns in: one comes while another runs
ALIGNMENT = 256  # of every binding's offset, enough for every device

_FORMATS: dict[str, Format] = {"float16": "f16", "bfloat16": "bf16", "float32": "f16"}
STORED: dict[Format, str] = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}  # a checkpoint's names of them


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its allocation, and in which form. A vector has one row."""

    name: str  # the checkpoint's
    offset: int
    rows: int
    columns: int
    stride: int  # bytes from row to row
    format: Format

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.rows * self.stride


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one allocation."""

    places: tuple[Place, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which layers stay on the device, and how the others come: the default is that all stay.

    A streamed layer is copied into a slot, which it shares with others, each time before it runs.
    """

    streamed: tuple[int, ...] = ()  # layers, in order
    n_slots: int = 0
    table_on_host: bool = False  # the device reads the few rows of the embedding that it needs over the bus
    pinned: bool = (
        True  # the host keeps streamed layers in memory that the device copies from; else they are read again
    )

    def slot(self, layer: int) -> int:
        """Which slot a streamed layer is copied into."""
        return self.streamed.index(layer) % self.n_slots


RESIDENT = Split()


class WeightsLayout:
    """Where every tensor of a checkpoint will lie. Nothing is allocated or read."""

    def __init__(self, weights: ModelWeights) -> None:
        self.config = weights.config
        self._stored = {name: info.dtype for name, info in weights.tensors.items()}
        self.layers = tuple(self._layer(i) for i in range(self.config.num_hidden_layers))
        self.table = self._globals("embed", "norm")
        self.head = None if weights.lm_head_is_embed else self._globals("lm_head")

    def nbytes(self, split: Split = RESIDENT) -> int:
        """Bytes of all allocations on the device."""
        rest = ([] if split.table_on_host else [self.table]) + ([] if self.head is None else [self.head])
        kept = [layout for i, layout in enumerate(self.layers) if i not in split.streamed]
        return sum(layout.size for layout in (*kept, *rest)) + split.n_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that any layer fits into."""
        return max(layout.size for layout in self.layers)

    def _format(self, names: Sequence[str]) -> Format:
        """The form of matrices that must be alike: their own, and float32 where they are not."""
        stored = {self._stored[name] for name in names}
        return _FORMATS[stored.pop()] if len(stored) == 1 else "f32"

    def _layer(self, i: int) -> Layout:
        shapes = layer_shapes(self.config)
        places: list[Place] = []
        end = 0
        for group in (("input_ln",), ("q_w", "k_w", "v_w"), ("q_b", "k_b", "v_b"), ("o_w",), ("post_ln",)):
            end = self._place(places, i, group, shapes, end)
        gate_up = self._format([layer_tensor_name(i, field) for field in ("gate_w", "up_w")])
        for group in (("gate_w",), ("up_w",), ("down_w",)):
            end = self._place(places, i, group, shapes, end, gate_up if group != ("down_w",) else None)
        return Layout(tuple(places), _round_up(end, ALIGNMENT))

    def _place(
        self,
        places: list[Place],
        layer: int,
        group: tuple[str, ...],
        shapes: LayerWeights[tuple[int, ...]],
        end: int,
        form: Format | None = None,
    ) -> int:
        """Place tensors behind each other without a gap; where they end."""
        names = [layer_tensor_name(layer, field) for field in group]
        form = form or self._format(names)
        end = _round_up(end, ALIGNMENT)
        for field, name in zip(group, names, strict=True):
            places.append(_placed(name, getattr(shapes, field), form, end))
            end = places[-1].end
        return end

    def _globals(self, *wanted: str) -> Layout:
        places: list[Place] = []
        end = 0
        for field in wanted:
            name = global_tensor_name(field)
            vocab_by_hidden = (self.config.vocab_size, self.config.hidden_size)
            shape = vocab_by_hidden if field != "norm" else (self.config.hidden_size,)
            places.append(_placed(name, shape, self._format([name]), _round_up(end, ALIGNMENT)))
            end = places[-1].end
        return Layout(tuple(places), _round_up(end, ALIGNMENT))


def _placed(name: str, shape: tuple[int, ...], form: Format, offset: int) -> Place:
    if len(shape) == 1:
        return Place(name, offset, 1, shape[0], 4 * shape[0], "f32")
    rows, columns = shape
    return Place(name, offset, rows, columns, row_stride(columns, form), form)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
