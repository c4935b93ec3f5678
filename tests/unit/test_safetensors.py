"""Broken and vanishing safetensors files, and our reading of headers beside the library's own."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from xinfer.errors import CheckpointError, WeightsError
from xinfer.model import _safetensors
from xinfer.model._safetensors import SafetensorsFile
from xinfer.model.weights import ModelWeights

SINGLE = "model.safetensors"
Tensors = dict[str, NDArray[Any]]
CheckpointFactory = Callable[..., Path]


def problem_with(folder: Path) -> str:
    """The message with which the checkpoint is refused."""
    with pytest.raises(WeightsError) as caught:
        ModelWeights.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a header and leave the data as it is."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def spoiled_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda file: rewrite_header(file, change)


def spoiled_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        file.write_bytes(change(file.read_bytes()))

    return spoil


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


NORM = "model.norm.weight"
BROKEN_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (spoiled_bytes(lambda data: b""), "has 0 bytes, too few"),
    "seven bytes": (spoiled_bytes(lambda data: data[:7]), "has 7 bytes, too few"),
    "cut in the header": (spoiled_bytes(lambda data: data[:100]), "bytes as the length of its header"),
    "cut in the data": (spoiled_bytes(lambda data: data[:-1]), "it is truncated"),
    "one byte more": (spoiled_bytes(lambda data: data + b"\0"), "there is something after the last tensor"),
    "length of 2^64 - 1": (spoiled_bytes(lambda data: b"\xff" * 8 + data[8:]), "gives 18446744073709551615 bytes"),
    "length of zero": (spoiled_bytes(lambda data: b"\0" * 8 + data[8:]), "does not start with a brace"),
    "html": (spoiled_bytes(lambda data: b"<!DOCTYPE html><html>Access denied"), "or no safetensors file"),
    "git lfs": (
        spoiled_bytes(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n"),
        "is a Git LFS pointer, not the weights themselves; run: git lfs pull",
    ),
    "zip": (spoiled_bytes(lambda data: b"PK\x03\x04" + data), "or no safetensors file"),
    "not JSON": (spoiled_bytes(lambda data: with_header(b"{oops}")), "is not valid JSON"),
    "not UTF-8": (spoiled_bytes(lambda data: with_header(b'{"\xff": 1}')), "is not UTF-8"),
    "deep": (spoiled_bytes(lambda data: with_header(b'{"a":' * 50_000)), "is nested too deeply"),
    "twice": (spoiled_bytes(lambda data: with_header(b'{"a": {}, "a": {}}')), "has the key 'a' twice"),
    "a list": (spoiled_bytes(lambda data: with_header(b"[1]")), "does not start with a brace"),
    "entry is a list": (spoiled_header(lambda h: h.update({NORM: []})), f"gives [] for '{NORM}'"),
    "no offsets": (spoiled_header(lambda h: h[NORM].pop("data_offsets")), "expected dtype, shape and data_offsets"),
    "dtype is a number": (spoiled_header(lambda h: h[NORM].update(dtype=32)), "gives 32 as the dtype"),
    "dtype is unknown": (spoiled_header(lambda h: h[NORM].update(dtype="F128")), "refused by the safetensors library"),
    "shape is a number": (spoiled_header(lambda h: h[NORM].update(shape=64)), "gives 64 as the shape"),
    "shape is negative": (spoiled_header(lambda h: h[NORM].update(shape=[-64])), "gives [-64] as the shape"),
    "shape is huge": (spoiled_header(lambda h: h[NORM].update(shape=[2**62, 2**62])), "has 256 bytes; expected"),
    "another dtype": (spoiled_header(lambda h: h[NORM].update(dtype="F16")), f"'{NORM}' has 256 bytes; expected 128"),
    "another shape": (spoiled_header(lambda h: h[NORM].update(shape=[63])), f"'{NORM}' has 256 bytes; expected 252"),
    "no extent": (spoiled_header(lambda h: h[NORM].update(shape=[])), f"'{NORM}' has 256 bytes; expected 4"),
    "shape of booleans": (spoiled_header(lambda h: h[NORM].update(shape=[True])), "gives [True] as the shape"),
    "shape of floats": (spoiled_header(lambda h: h[NORM].update(shape=[64.0])), "gives [64.0] as the shape"),
    "one offset": (spoiled_header(lambda h: h[NORM].update(data_offsets=[0])), "gives [0] as the data_offsets"),
    "negative": (spoiled_header(lambda h: h[NORM].update(data_offsets=[-256, 0])), "gives [-256, 0] as the data"),
    "backwards": (spoiled_header(lambda h: h[NORM]["data_offsets"].reverse()), "expected an end after the begin"),
    "huge offsets": (spoiled_header(lambda h: h[NORM].update(data_offsets=[0, 10**30])), "as the data_offsets"),
    "overlap": (
        spoiled_header(lambda h: h[NORM].update(data_offsets=[x - 4 for x in h[NORM]["data_offsets"]])),
        "which overlaps",
    ),
    "overlap at the start": (spoiled_header(lambda h: h[NORM].update(data_offsets=[0, 256])), "which overlaps"),
    "hole": (spoiled_header(lambda h: h.pop("model.layers.0.self_attn.q_proj.bias")), "which leaves a hole after"),
    "past the end": (
        spoiled_header(lambda h: h[NORM].update(data_offsets=[10**9, 10**9 + 256])),
        "which leaves a hole after",
    ),
    "metadata": (spoiled_header(lambda h: h.update(__metadata__={"format": 1})), "has __metadata__ {'format': 1}"),
}


class TestFileFormat:
    @pytest.mark.parametrize("which", BROKEN_FILES)
    def test_broken(self, own_checkpoint: CheckpointFactory, which: str) -> None:
        spoil, fact = BROKEN_FILES[which]
        folder = own_checkpoint("one_layer")
        spoil(folder / SINGLE)
        message = problem_with(folder)
        assert fact in message
        assert len(message) < 2 * len(str(folder)) + 1000

    @pytest.mark.parametrize("cut", [1, 300_000])
    def test_file_that_shrinks_after_it_was_opened(self, own_checkpoint: CheckpointFactory, cut: int) -> None:
        folder = own_checkpoint("gqa")
        with ModelWeights.open(folder) as weights:
            size = (folder / SINGLE).stat().st_size
            os.truncate(folder / SINGLE, size - cut)
            last = max(weights.tensors.values(), key=lambda info: info.offset)
            with pytest.raises(WeightsError, match=rf"ends at byte {size - cut if cut == 1 else ''}.*became shorter"):
                weights.read(last.name)

    @pytest.mark.skipif(os.name == "nt", reason="Windows does not let an open file be removed")
    def test_file_that_is_removed_after_it_was_opened(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        with ModelWeights.open(folder) as weights:
            expected = weights.norm
            (folder / SINGLE).unlink()
            assert weights.norm.tobytes() == expected.tobytes()

    def test_disk_that_fails(self, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object) -> int:
            raise OSError(5, "Input/output error")

        with ModelWeights.open(checkpoint("gqa")) as weights:
            monkeypatch.setattr(_safetensors, "_preadv", fail)
            with pytest.raises(WeightsError, match=r"cannot be read at byte \d+: .*Input/output error"):
                _ = weights.norm

    def test_nothing_stays_open_after_a_refusal(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("sharded")
        (folder / "model-00003-of-00003.safetensors").write_bytes(b"")
        problem_with(folder)  # a file left open would warn when collected, and a warning fails the test


def mutated_header(chance: random.Random, header: dict[str, Any]) -> bytes:
    """A header as JSON with one to three things changed in its values or its bytes."""
    junk: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        4,
        256,
        2**31,
        2**63,
        2**64,
        1.0,
        1e300,
        "F32",
        "BF16",
        "I4",
        "",
        [],
        [0, 4],
        {},
    ]
    for _ in range(chance.randint(0, 2)):
        name = chance.choice([name for name in header if name != "__metadata__"])
        entry = header[name]
        action = chance.randrange(7)
        if action == 0:
            header[name] = chance.choice(junk)
        elif action == 1 and isinstance(entry, dict):
            entry[chance.choice(["dtype", "shape", "data_offsets", "extra"])] = chance.choice(junk)
        elif action == 2 and isinstance(entry, dict) and isinstance(entry.get("data_offsets"), list):
            at = chance.randrange(2)
            if len(entry["data_offsets"]) == 2 and isinstance(entry["data_offsets"][at], int):
                entry["data_offsets"][at] += chance.choice([-4, -1, 1, 4, 64])
        elif action == 3 and isinstance(entry, dict) and isinstance(entry.get("shape"), list):
            entry["shape"].append(chance.choice(junk))
        elif action == 4:
            header[chance.choice(list(header))] = header.pop(name)
        elif action == 5:
            header["__metadata__"] = chance.choice([*junk, {"a": 1}, {"a": "b"}])
        elif action == 6:
            header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    text = bytearray(json.dumps(header).encode())
    if chance.random() < 0.3:
        text[chance.randrange(len(text))] = chance.randrange(256)
    return bytes(text)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_accepted_the_library_accepts_too_and_reads_alike(tmp_path: Path, seed: int) -> None:
    """Our own reading of headers beside the library's, over mutated files: neither crashes, and we are never laxer."""
    chance = random.Random(seed)
    path = tmp_path / "x.safetensors"
    arrays: Tensors = {"a": np.arange(64, dtype=np.float32), "b": np.arange(6, dtype=np.int16).reshape(2, 3)}
    save_file(arrays | {"c": np.ones((4, 4), np.float16)}, path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    accepted = 0
    for _ in range(60):
        text = mutated_header(chance, json.loads(whole[8 : 8 + length]))
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        try:
            ours = SafetensorsFile(path)
        except CheckpointError:
            continue
        accepted += 1
        with safetensors.safe_open(path, framework="numpy") as theirs:
            assert set(theirs.keys()) == set(ours.tensors)
            for name, stored in ours.tensors.items():
                buffer = bytearray(stored.nbytes)
                ours.read_into(stored.offset, memoryview(buffer))
                assert stored.shape == tuple(theirs.get_slice(name).get_shape())
                assert stored.dtype == theirs.get_slice(name).get_dtype()
                assert bytes(buffer) == theirs.get_tensor(name).tobytes()
        ours.close()
    assert accepted >= 10
