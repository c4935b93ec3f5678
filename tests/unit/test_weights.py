from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from xinfer.errors import ModelNotFoundError, WeightsError
from xinfer.model import _safetensors, names
from xinfer.model._safetensors import SafetensorsFile
from xinfer.model.synthetic import PRESETS, SyntheticSpec
from xinfer.model.weights import ModelWeights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Tensors = dict[str, NDArray[Any]]
CheckpointFactory = Callable[..., Path]


def problem_with(folder: Path) -> str:
    """The message with which the checkpoint is refused."""
    with pytest.raises(WeightsError) as caught:
        ModelWeights.open(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def shard(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


class SlowSeek:
    """A file whose seek takes its time."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def seek(self, offset: int) -> None:
        self.file.seek(offset)
        time.sleep(0.0003)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class TestReading:
    @pytest.mark.parametrize("preset", ["gqa", "untied", "sharded", "f16", "bf16", "bf16_sharded"])
    def test_every_tensor_is_the_librarys_own(self, checkpoint: CheckpointFactory, preset: str) -> None:
        folder = checkpoint(preset)
        theirs: Tensors = {}
        for file in folder.glob("*.safetensors"):
            theirs |= load_file(file)
        with ModelWeights.open(folder) as weights:
            assert weights.tensors.keys() == theirs.keys() == names.expected_shapes(weights.config).keys()
            for name, expected in theirs.items():
                ours = weights.read(name)
                assert ours.dtype == expected.dtype == np.dtype(expected.dtype)
                assert weights.tensors[name].dtype == PRESETS[preset].dtype == expected.dtype.name
                assert ours.shape == expected.shape == weights.tensors[name].shape
                assert ours.tobytes() == expected.tobytes()
            for layer in range(weights.config.num_hidden_layers):
                fields = weights.layer(layer)
                for field in names.LAYER_FIELDS:
                    expected = theirs[names.layer_tensor_name(layer, field)]
                    assert getattr(fields, field).tobytes() == expected.tobytes()
            assert weights.embed.tobytes() == theirs["model.embed_tokens.weight"].tobytes()
            assert weights.norm.tobytes() == theirs["model.norm.weight"].tobytes()
            head = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
            assert weights.lm_head.tobytes() == head.tobytes()
            assert weights.lm_head_is_embed == PRESETS[preset].tie_word_embeddings
            assert weights.nbytes == sum(array.nbytes for array in theirs.values())
            assert weights.bytes_by_dtype() == {PRESETS[preset].dtype: weights.nbytes}

    def test_types_may_differ_between_tensors(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("bf16")

        def norms_in_float32(tensors: Tensors) -> None:
            for name in tensors:
                if "norm" in name:
                    tensors[name] = tensors[name].astype(np.float32)
            tensors["model.layers.0.self_attn.q_proj.bias"] = np.full(64, 0.5, np.float16)

        rewrite(folder, norms_in_float32)
        with ModelWeights.open(folder) as weights:
            assert weights.norm.dtype == np.float32
            assert weights.embed.dtype == ml_dtypes.bfloat16
            assert weights.layer(0).q_b.dtype == np.float16
            assert list(weights.bytes_by_dtype()) == ["bfloat16", "float32", "float16"]
            assert sum(weights.bytes_by_dtype().values()) == weights.nbytes

    def test_read_into_a_callers_buffer(self, checkpoint: CheckpointFactory) -> None:
        with ModelWeights.open(checkpoint("bf16")) as weights:
            raw = bytearray(weights.tensors["model.norm.weight"].nbytes)
            weights.read_into("model.norm.weight", memoryview(raw))
            assert bytes(raw) == weights.norm.tobytes()
            table = np.zeros(weights.tensors["model.embed_tokens.weight"].shape, np.uint16)
            weights.read_into("model.embed_tokens.weight", table.data)
            assert table.tobytes() == weights.embed.tobytes()

    def test_arrays_are_the_callers_own(self, checkpoint: CheckpointFactory) -> None:
        with ModelWeights.open(checkpoint("gqa")) as weights:
            first = weights.norm
            first[:] = 0
            assert weights.norm.all()

    @pytest.mark.parametrize("positional", [True, False])
    def test_reads_that_return_less_than_asked(
        self, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, *, positional: bool
    ) -> None:
        expected = load_file(checkpoint("f16") / SINGLE)["model.layers.1.mlp.up_proj.weight"]

        def seven_at_most(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            data = os.pread(descriptor, min(7, buffers[0].nbytes), offset)
            buffers[0][: len(data)] = data
            return len(data)

        monkeypatch.setattr(_safetensors, "_preadv", seven_at_most if positional else None)
        with ModelWeights.open(checkpoint("f16")) as weights:
            assert weights.read("model.layers.1.mlp.up_proj.weight").tobytes() == expected.tobytes()

    @pytest.mark.parametrize("positional", [True, False])
    def test_threads_may_read_at_once(
        self, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, *, positional: bool
    ) -> None:
        if not positional:
            monkeypatch.setattr(_safetensors, "_preadv", None)
        expected = load_file(checkpoint("gqa") / SINGLE)
        wrong: list[str] = []
        with ModelWeights.open(checkpoint("gqa")) as weights:
            if not positional:  # let another thread in between every seek and its read
                for file in weights._files.values():
                    monkeypatch.setattr(file, "_file", SlowSeek(file._file))

            def read_all(seed: int) -> None:
                order = list(expected)
                random.Random(seed).shuffle(order)
                wrong.extend(name for name in order if weights.read(name).tobytes() != expected[name].tobytes())

            threads = [threading.Thread(target=read_all, args=(seed,)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []

    def test_opening_reads_headers_only(self, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        read: list[int] = []
        original = SafetensorsFile.read_into

        def counted(self: SafetensorsFile, offset: int, buffer: memoryview) -> None:
            read.append(buffer.nbytes)
            original(self, offset, buffer)

        monkeypatch.setattr(SafetensorsFile, "read_into", counted)
        with ModelWeights.open(checkpoint("gqa")) as weights:
            assert sum(read) < 5000
            read.clear()
            layer = weights.layer(1)
            assert sum(read) == sum(getattr(layer, field).nbytes for field in names.LAYER_FIELDS)

    def test_close_closes_the_files(self, checkpoint: CheckpointFactory) -> None:
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None  # noqa: PTH208
        weights = ModelWeights.open(checkpoint("sharded"))
        weights.close()
        weights.close()
        with pytest.raises(ValueError, match="closed file"):
            _ = weights.norm
        if before is not None:
            assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


class TestAcceptedVariants:
    def test_redundant_head_of_a_tied_checkpoint(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("tied")
        rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"]}))
        with ModelWeights.open(folder) as weights:
            assert weights.lm_head_is_embed
            assert "lm_head.weight" not in weights.tensors

    def test_head_that_differs_in_a_tied_checkpoint_is_refused(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint(SyntheticSpec(vocab_size=2100))  # more rows than are compared at once

        def add_head(tensors: Tensors) -> None:
            head = tensors["model.embed_tokens.weight"].copy()
            head[-1, -1] += 1
            tensors["lm_head.weight"] = head

        rewrite(folder, add_head)
        message = problem_with(folder)
        assert "lm_head.weight, which differs from model.embed_tokens.weight" in message
        assert "tie_word_embeddings" in message

    def test_absent_head_of_an_untied_checkpoint_is_the_embedding(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("untied")
        rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
        with ModelWeights.open(folder) as weights:
            assert weights.lm_head_is_embed
            assert weights.lm_head.tobytes() == weights.embed.tobytes()

    def test_stored_rotary_frequencies_are_skipped(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        rewrite(folder, lambda tensors: tensors.update({name: np.zeros(8, np.int64)}))
        with ModelWeights.open(folder) as weights:
            assert name not in weights.tensors

    def test_names_of_a_base_model(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        tensors = load_file(folder / SINGLE)
        save_file({name.removeprefix("model."): array for name, array in tensors.items()}, folder / SINGLE)
        with ModelWeights.open(folder) as weights:
            assert weights.tensors.keys() == tensors.keys()
            assert weights.tensors["model.norm.weight"].name == "norm.weight"
            assert weights.layer(1).up_w.tobytes() == tensors["model.layers.1.mlp.up_proj.weight"].tobytes()

    def test_one_file_comes_before_an_index(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        (folder / INDEX).write_text("this is not read", encoding="utf-8")
        ModelWeights.open(folder).close()

    def test_links_into_the_hubs_cache(self, own_checkpoint: CheckpointFactory, tmp_path: Path) -> None:
        source = own_checkpoint("sharded")
        snapshot, blobs = tmp_path / "hub/snapshots/0123", tmp_path / "hub/blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, file in enumerate(source.iterdir()):
            file.rename(blobs / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        with ModelWeights.open(snapshot) as weights:
            assert len(weights.tensors) == 39

    def test_a_config_given_by_the_caller_is_used(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        with ModelWeights.open(folder) as weights:
            config = weights.config
        (folder / "config.json").unlink()
        with ModelWeights.open(folder, config=config) as weights:
            assert weights.config is config


class TestTensorTable:
    def test_all_problems_come_together_each_with_what_was_expected(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("untied")

        def spoil(tensors: Tensors) -> None:
            del tensors["model.layers.1.self_attn.k_proj.bias"]
            tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.copy()
            tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
            tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)
            tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((112, 64), np.float32)
            tensors["model.layers.0.mlp.gate_proj.qweight"] = np.ones((8, 112), np.int32)

        rewrite(folder, spoil)
        message = problem_with(folder)
        assert "6 problems" in message
        assert "model.layers.1.self_attn.k_proj.bias is missing; expected shape (32,)" in message
        assert "model.layers.0.mlp.up_proj.weight has shape (64, 112); expected (112, 64)" in message
        assert "model.norm.weight has dtype 'F64'; expected one of F32, F16, BF16" in message
        assert "'model.layers.0.self_attn.q_norm.weight' is not a tensor of this model" in message
        assert "'model.layers.2.mlp.up_proj.weight' is not a tensor of this model" in message
        assert "'model.layers.0.mlp.gate_proj.qweight' is not a tensor of this model" in message
        assert "quantized weights are not supported" in message

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.bool_, np.int32, ml_dtypes.float8_e4m3fn])
    def test_wrong_types(self, own_checkpoint: CheckpointFactory, dtype: Any) -> None:
        folder = own_checkpoint("one_layer")
        rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(64).astype(dtype)}))
        assert "model.norm.weight has dtype" in problem_with(folder)

    def test_a_long_list_is_cut(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("deep")
        rewrite(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
        message = problem_with(folder)
        assert "108 problems" in message
        assert "and 88 more" in message
        assert message.count("\n") == 22

    def test_the_wrong_config(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 385}), encoding="utf-8")
        assert "model.embed_tokens.weight has shape (384, 64); expected (385, 64)" in problem_with(folder)

    def test_prefixed_and_bare_name_at_once(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        rewrite(folder, lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"]}))
        assert "expected it once" in problem_with(folder)

    def test_head_of_a_tied_checkpoint_is_checked_too(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("tied")
        rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": np.ones((383, 64), np.int8)}))
        message = problem_with(folder)
        assert "lm_head.weight has shape (383, 64); expected (384, 64)" in message
        assert "lm_head.weight has dtype 'I8'" in message


class TestIndex:
    @pytest.mark.parametrize(
        "name",
        [
            "../model.safetensors",
            "..",
            ".",
            "",
            "/etc/passwd",
            "sub/model.safetensors",
            "..\\model.safetensors",
            "C:model.safetensors",
            "x" * 300 + ".safetensors",
        ],
    )
    def test_names_that_leave_the_folder(self, own_checkpoint: CheckpointFactory, name: str) -> None:
        folder = own_checkpoint("sharded")
        rewrite_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": name}))
        message = problem_with(folder)
        assert "which is not a plain name; expected a file in the model's own folder" in message
        assert INDEX in message

    @pytest.mark.parametrize(
        ("name", "fact"),
        [
            ("pytorch_model-00001-of-00002.bin", "a pickle, which can run any code and is never loaded"),
            ("model.gguf", "which is not a .safetensors file"),
            ("a\0b.safetensors", "which has characters that no file name of a checkpoint has"),
            ("\ud800.safetensors", "which has characters that no file name of a checkpoint has"),
            ("absent.safetensors", "absent.safetensors does not exist"),
        ],
    )
    def test_other_names(self, own_checkpoint: CheckpointFactory, name: str, fact: str) -> None:
        folder = own_checkpoint("sharded")
        rewrite_index(folder, lambda weight_map: weight_map.update({"model.norm.weight": name}))
        assert fact in problem_with(folder)

    def test_every_absent_file_is_named(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("sharded")
        (folder / shard(1)).unlink()
        (folder / shard(3)).unlink()
        message = problem_with(folder)
        assert "2 problems" in message
        assert f"{shard(1)} does not exist" in message
        assert f"{shard(3)} does not exist" in message
        assert "is missing" not in message  # 26 tensors of those files are not missing problems of their own

    def test_problems_of_files_and_of_tensors_come_together(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("sharded")
        (folder / shard(1)).write_bytes(b"")
        tensors = load_file(folder / shard(2))
        name = next(iter(tensors))
        save_file(tensors | {name: tensors[name].astype(np.float64)}, folder / shard(2))
        message = problem_with(folder)
        assert f"{shard(1)} has 0 bytes, too few" in message
        assert f"{name} has dtype 'F64'" in message

    def test_index_and_files_disagree(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("sharded")

        def swap(weight_map: dict[str, str]) -> None:
            assert weight_map["model.norm.weight"] == shard(3)
            weight_map["model.norm.weight"] = shard(1)
            del weight_map["model.embed_tokens.weight"]

        rewrite_index(folder, swap)
        message = problem_with(folder)
        assert f"places 'model.norm.weight' in {shard(1)}, which does not hold it" in message
        assert f"{shard(1)} holds 'model.embed_tokens.weight', which {INDEX} does not name" in message

    def test_tensor_in_two_files(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("sharded")
        norm = load_file(folder / shard(3))["model.norm.weight"]
        save_file(load_file(folder / shard(1)) | {"model.norm.weight": norm}, folder / shard(1))
        message = problem_with(folder)
        assert f"'model.norm.weight' in {shard(3)} is also 'model.norm.weight' in {shard(1)}" in message

    @pytest.mark.parametrize(
        ("content", "fact"),
        [
            ("", "is not valid JSON"),
            ("[]", "holds [] at the top"),
            ("{}", "has weight_map None"),
            ('{"weight_map": {}}', "has weight_map {}"),
            ('{"weight_map": ["model.norm.weight"]}', "has weight_map ['model.norm.weight']"),
            ('{"weight_map": {"a": 1}}', "names the file '1', which is not a .safetensors file"),
            ('{"weight_map": {"a": null}}', "names the file 'None'"),
            ('{"weight_map": {"a": "b", "a": "c"}}', "has the key 'a' twice"),
        ],
    )
    def test_malformed(self, own_checkpoint: CheckpointFactory, content: str, fact: str) -> None:
        folder = own_checkpoint("sharded")
        (folder / INDEX).write_text(content, encoding="utf-8")
        assert fact in problem_with(folder)


class TestFolder:
    def test_no_folder(self, tmp_path: Path, checkpoint: CheckpointFactory) -> None:
        for path in (tmp_path / "gone", checkpoint("gqa") / SINGLE, Path("a\0b"), Path("x" * 5000)):
            with pytest.raises(ModelNotFoundError, match=r"is not a folder; expected one with config\.json"):
                ModelWeights.open(path)

    @pytest.mark.parametrize(
        ("files", "facts"),
        [
            ([], ["there are no weights; download the model again"]),
            (
                ["pytorch_model.bin"],
                ["'pytorch_model.bin', a pickle", "never loaded", "save_pretrained", "AutoModelForCausalLM"],
            ),
            (["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"], ["a pickle", "save_pretrained"]),
            (["consolidated.00.pth"], ["'consolidated.00.pth', a pickle"]),
            (["model.pt"], ["'model.pt', a pickle"]),
            (["last.ckpt"], ["'last.ckpt', a pickle"]),
            (["qwen2.5-0.5b-q4_k_m.gguf"], ["does not read GGUF", "safetensors release"]),
            (["consolidated.safetensors"], ["'consolidated.safetensors'; rename it to model.safetensors"]),
            (["adapter_model.safetensors"], ["LoRA adapter; merge it into its base model"]),
        ],
    )
    def test_other_formats(self, own_checkpoint: CheckpointFactory, files: list[str], facts: list[str]) -> None:
        folder = own_checkpoint("gqa")
        (folder / SINGLE).unlink()
        for name in files:
            (folder / name).write_bytes(b"\x80\x04\x95")
        message = problem_with(folder)
        assert f"has neither {SINGLE} nor {INDEX}" in message
        for fact in facts:
            assert fact in message

    def test_pickle_beside_safetensors_is_not_looked_at(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04\x95")
        ModelWeights.open(folder).close()

    def test_folder_of_that_name(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        (folder / SINGLE).unlink()
        (folder / SINGLE).mkdir()
        assert f"{SINGLE} is a folder; expected a file" in problem_with(folder)

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no FIFOs")
    def test_fifo_is_not_waited_for(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        (folder / SINGLE).unlink()
        os.mkfifo(folder / SINGLE)
        assert f"{SINGLE} is not a regular file" in problem_with(folder)

    def test_link_to_nothing(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        (folder / SINGLE).unlink()
        (folder / SINGLE).symlink_to("../../blobs/0123")
        message = problem_with(folder)
        assert "is a link to ../../blobs/0123, which does not exist" in message
        assert "download may be incomplete" in message

    @pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
    def test_no_permission(self, own_checkpoint: CheckpointFactory) -> None:
        folder = own_checkpoint("gqa")
        (folder / SINGLE).chmod(0)
        assert "cannot be opened" in problem_with(folder)
