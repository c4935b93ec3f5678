"""How the golden files are made and read; tools/make_golden.py writes them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from xinfer.model.weights import ModelWeights

FOLDER = Path(__file__).parent
SEED = 2024
LENGTH = 300  # tokens of each prompt


@dataclass(frozen=True)
class Golden:
    """What transformers computed for one preset."""

    tokens: NDArray[np.int32]  # (LENGTH,)
    positions: NDArray[np.int32]  # (P,)
    logits: NDArray[np.float32]  # (P, vocab), those after tokens[positions]
    weights: str  # checksum of the checkpoint
    made_with: str


def read(preset: str) -> Golden:
    with safe_open(FOLDER / f"{preset}.safetensors", framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in ("tokens", "positions", "logits")}
        return Golden(**arrays, **file.metadata())


def weights_checksum(weights: ModelWeights) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, however they are spread over files."""
    digest = hashlib.sha256()
    for name in sorted(weights.tensors):
        tensor = weights.read(name)
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()
