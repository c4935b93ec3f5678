"""The weights as the device holds them, in float32, a layer at a time: a model larger than RAM can be verified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.gpu_model.layout import Layout, Place, WeightsLayout
from xinfer.model.names import LAYER_FIELDS, global_tensor_name, layer_tensor_name
from xinfer.model.reference import round_weights, to_float32
from xinfer.model.weights import ModelWeights
from xinfer.ops import Format
from xinfer.trials.expected import Weights
from xinfer.trials.judge import Array

HEAD_BYTES = 64 << 20  # float32 rows of the head that are held at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleMatrix:
    """A matrix, and the form in which the device holds it."""

    weights: Weights
    format: Format

    @property
    def values(self) -> Array:
        """(rows, columns)."""
        return self.weights.values


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleLayer:
    """One layer."""

    input_ln: Array  # (hidden,)
    qkv: OracleMatrix  # (q_size + 2 * kv_size, hidden)
    qkv_b: Array  # (q_size + 2 * kv_size,)
    o: OracleMatrix  # (hidden, q_size)
    post_ln: Array  # (hidden,)
    gate: OracleMatrix  # (intermediate, hidden)
    up: OracleMatrix  # (intermediate, hidden)
    down: OracleMatrix  # (hidden, intermediate)


class Oracle:
    """Reads an open checkpoint."""

    def __init__(self, weights: ModelWeights) -> None:
        self.config = weights.config
        self._weights = weights
        layout = WeightsLayout(weights)
        parts: list[Layout] = [*layout.layers, layout.table, *([layout.head] if layout.head else [])]
        self._places: dict[str, Place] = {place.name: place for part in parts for place in part.places}
        self._embed_name = global_tensor_name("embed")
        self._head_name = self._embed_name if weights.lm_head_is_embed else global_tensor_name("lm_head")
        self.norm: Array = to_float32(weights.norm)

    @property
    def embed_format(self) -> Format:
        """The form of the embedding on the device."""
        return self._places[self._embed_name].format

    @property
    def head_format(self) -> Format:
        """The form of the LM head on the device."""
        return self._places[self._head_name].format

    def layer(self, i: int) -> OracleLayer:
        """Read one layer."""
        read = {field: self._read(layer_tensor_name(i, field)) for field in LAYER_FIELDS}

        def matrix(*fields: str) -> OracleMatrix:
            values = np.concatenate([read[field] for field in fields]) if len(fields) > 1 else read[fields[0]]
            return OracleMatrix(weights=Weights(values), format=self._places[layer_tensor_name(i, fields[0])].format)

        return OracleLayer(
            input_ln=read["input_ln"],
            qkv=matrix("q_w", "k_w", "v_w"),
            qkv_b=np.concatenate([read[field] for field in ("q_b", "k_b", "v_b")]),
            o=matrix("o_w"),
            post_ln=read["post_ln"],
            gate=matrix("gate_w"),
            up=matrix("up_w"),
            down=matrix("down_w"),
        )

    def not_finite(self, layer: int | None) -> list[str]:
        """Names of the tensors that hold NaN or infinity: a layer's, or those before and behind the layers."""
        if layer is not None:
            names = [layer_tensor_name(layer, field) for field in LAYER_FIELDS]
            return [name for name in names if not np.isfinite(self._weights.read(name)).all()]
        tables = dict.fromkeys((self._embed_name, self._head_name))
        found = [name for name in tables if not all(np.isfinite(rows).all() for _, rows in self._blocks(name))]
        return found + [global_tensor_name("norm")] * (not np.isfinite(self.norm).all())

    def embed_rows(self, tokens: NDArray[np.integer]) -> Array:
        """The embeddings of tokens, (T, hidden)."""
        distinct, places = np.unique(tokens, return_inverse=True)
        rows = [self._rows(self._embed_name, int(token), int(token) + 1) for token in distinct]
        return np.concatenate(rows)[places]

    def head_blocks(self) -> Iterator[tuple[int, Array]]:
        """(first row, rows (n, hidden)) of the LM head, front to back."""
        return self._blocks(self._head_name)

    def head_rows(self, first: int, stop: int) -> Array:
        """Some rows of the LM head."""
        return self._rows(self._head_name, first, stop)

    def _blocks(self, name: str) -> Iterator[tuple[int, Array]]:
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        step = max(1, HEAD_BYTES // (4 * hidden))
        for first in range(0, vocab, step):
            yield first, self._rows(name, first, min(first + step, vocab))

    def _read(self, name: str) -> Array:
        return self._rounded(self._weights.read(name), name)

    def _rows(self, name: str, first: int, stop: int) -> Array:
        return self._rounded(self._weights.read_rows(name, first, stop), name)

    def _rounded(self, stored: NDArray[Any], name: str) -> Array:
        """As `gpu_model.loading` uploads it: float32 matrices may become f16, the rest is exact."""
        becomes_f16 = stored.ndim == 2 and self._places[name].format == "f16"
        return to_float32(round_weights(stored, name, "float16") if becomes_f16 else stored)
