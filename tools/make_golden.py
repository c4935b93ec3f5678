"""Write tests/golden: what transformers computes for the synthetic checkpoints, so that tests can do without torch.

    python tools/make_golden.py

One small safetensors file for each preset of `xinfer.model.synthetic`: the tokens, the positions kept, and the logits
there, float32 on the CPU. The weights themselves are made again from the seed; their checksum is in the metadata.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import save_file

from xinfer.model.synthetic import PRESETS, write_checkpoint
from xinfer.model.weights import ModelWeights

sys.path.insert(0, str(Path(__file__).parents[1]))  # where tests/ is

from tests.golden.format import FOLDER, LENGTH, SEED, weights_checksum

# Positions whose logits are kept: the first ones, around powers of two (windows, blocks), and the last ones.
POSITIONS = np.array([0, 1, 2, 7, 15, 16, 17, 63, 64, 65, 200, 298, 299], np.int32)


def golden(preset: str, folder: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays and metadata of one golden file."""
    write_checkpoint(folder, PRESETS[preset], seed=SEED)
    with ModelWeights.open(folder) as weights:
        checksum = weights_checksum(weights)
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = np.random.default_rng(len(preset)).integers(0, model.config.vocab_size, LENGTH)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].numpy()
    arrays = {"tokens": tokens.astype(np.int32), "positions": POSITIONS, "logits": logits[POSITIONS]}
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return arrays, {"weights": checksum, "made_with": made_with}


def main() -> None:
    """Write all of them."""
    for preset in PRESETS:
        with tempfile.TemporaryDirectory() as scratch:
            arrays, metadata = golden(preset, Path(scratch) / "checkpoint")
        save_file(arrays, FOLDER / f"{preset}.safetensors", metadata=metadata)
        print(f"{preset}: {len(arrays['tokens'])} tokens, logits {arrays['logits'].shape}")


if __name__ == "__main__":
    main()
