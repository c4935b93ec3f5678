from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from xinfer.errors import ConfigError, RequestError
from xinfer.model.config import GenerationConfig, Qwen2Config
from xinfer.model.synthetic import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    MIN_VOCAB,
    PRESETS,
    TURN_END,
    TURN_START,
    SyntheticSpec,
    random_weights,
    special_token_ids,
    write_checkpoint,
)
from xinfer.model.weights import ModelWeights

CheckpointFactory = Callable[..., Path]

PINNED_FIRST = [-0.003231, 0.003376, -0.323095, 0.325718]
PINNED_HASH = "115c2d9391a195ed7859413509a24db8a99571216120d06952d16a2b9de237e6"

TEXTS = [
    "",
    "The harbour lay quiet.",
    "  two  spaces, a tab\t and\r\nline ends \n\n",
    "def f(x): return x ** 2  # 3.14159",
    "I'll say it's 1234567890",
    "Größe, Ελληνικά, 你好世界, שלום, é is e + U+0301: e\u0301",
    "\U0001f469\u200d\U0001f680 and \U0001f1eb\U0001f1f7",
    "\x00\x01\x7f\u200b\ufeff",
    f"{TURN_START}user\nhello{TURN_END}{END_OF_TEXT}",
]


def test_presets_cover_every_feature() -> None:
    specs = PRESETS.values()
    ratios = {(spec.num_attention_heads, spec.num_key_value_heads) for spec in specs}
    assert any(heads == kv_heads for heads, kv_heads in ratios)
    assert any(heads > kv_heads == 1 for heads, kv_heads in ratios)
    assert any(heads > kv_heads > 1 for heads, kv_heads in ratios)
    assert any(spec.head_dim not in (None, spec.hidden_size // spec.num_attention_heads) for spec in specs)
    assert {spec.tie_word_embeddings for spec in specs} == {True, False}
    assert {spec.dtype for spec in specs} == {"float32", "float16", "bfloat16"}
    assert {spec.spelling for spec in specs} == {"transformers4", "transformers5"}
    assert any(spec.num_hidden_layers == 1 for spec in specs)
    assert any(spec.shards > 1 for spec in specs)
    assert {spec.spelling for spec in specs if spec.yarn_factor} == {"transformers4", "transformers5"}
    assert any(spec.sliding_window for spec in specs)
    assert any(spec.layer_types for spec in specs)
    assert any(spec.k_bias_scale > 10 for spec in specs)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_opens_as_what_it_says(checkpoint: CheckpointFactory, preset: str) -> None:
    spec = PRESETS[preset]
    with ModelWeights.open(checkpoint(preset)) as weights:
        config = weights.config
        assert len({info.file for info in weights.tensors.values()}) == spec.shards
        assert weights.lm_head_is_embed == spec.tie_word_embeddings
        for layer in range(config.num_hidden_layers):
            fields = weights.layer(layer)
            assert np.abs(fields.q_b).min() > 0
            assert np.abs(fields.k_b.astype(np.float32)).mean() == pytest.approx(0.24 * spec.k_bias_scale, rel=0.5)
            assert np.std(fields.down_w.astype(np.float32)) == pytest.approx(spec.intermediate_size**-0.5, rel=0.1)
            assert np.mean(fields.post_ln.astype(np.float32)) == pytest.approx(1, abs=0.1)
    assert (config.num_attention_heads, config.num_key_value_heads) == (
        spec.num_attention_heads,
        spec.num_key_value_heads,
    )
    assert config.head_dim == (spec.head_dim or spec.hidden_size // spec.num_attention_heads)
    assert (config.dtype, config.rope_theta, config.rms_norm_eps) == (spec.dtype, spec.rope_theta, spec.rms_norm_eps)
    assert (config.yarn.factor if config.yarn else None) == spec.yarn_factor
    assert set(config.layer_windows) <= {None, spec.sliding_window}
    ids = special_token_ids(spec)
    assert config.eos_token_ids == (ids[TURN_END],)
    generation = GenerationConfig.from_folder(checkpoint(preset))
    assert generation is not None
    assert generation.eos_token_ids == (ids[TURN_END], ids[END_OF_TEXT])
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.7, 20, 0.8)


def test_windows_and_yarn_of_the_presets() -> None:
    def config(preset: str) -> Qwen2Config:
        return Qwen2Config.from_json(PRESETS[preset].config_json())

    assert config("sliding").layer_windows == (None, None, 16, 16)
    assert config("sliding_all").layer_windows == (7, 7)
    assert config("layer_types").layer_windows == (12, None, 12)
    yarn, silent = config("yarn").yarn, config("yarn_silent").yarn
    assert yarn is not None
    assert silent is not None
    assert yarn.original_max_position_embeddings == 64
    assert silent.original_max_position_embeddings == 512


def test_spellings_differ_in_keys_and_not_in_meaning() -> None:
    spec = PRESETS["yarn"]
    old = replace(spec, spelling="transformers4").config_json()
    new = replace(spec, spelling="transformers5").config_json()
    assert {"torch_dtype", "rope_theta", "rope_scaling"} <= old.keys() - new.keys()
    assert {"dtype", "rope_parameters"} <= new.keys() - old.keys()
    assert old["rope_scaling"]["type"] == new["rope_parameters"]["rope_type"] == "yarn"
    assert Qwen2Config.from_json(old) == Qwen2Config.from_json(new)


def digest(folder: Path) -> str:
    total = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    spec = PRESETS["bf16_sharded"]
    folders = [write_checkpoint(tmp_path / str(i), spec, seed=seed) for i, seed in enumerate([5, 5, 6])]
    assert digest(folders[0]) == digest(folders[1]) != digest(folders[2])


def test_the_stream_of_weights_is_pinned() -> None:
    """Golden files elsewhere rest on these values: with any NumPy, on any platform."""
    spec = PRESETS["untied"]
    weights = random_weights(spec, Qwen2Config.from_json(spec.config_json()), seed=2024)
    embed = weights["model.embed_tokens.weight"]
    assert [round(float(value), 6) for value in embed[0, :4]] == PINNED_FIRST
    total = hashlib.sha256()
    for name, array in weights.items():
        total.update(name.encode() + array.astype("<f4").tobytes())
    assert total.hexdigest() == PINNED_HASH


def test_files_are_those_of_hugging_face(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("gqa")
    texts = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == texts | {"model.safetensors"}
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    sharded = checkpoint("sharded")
    files = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert {file.name for file in sharded.iterdir()} == texts | files | {"model.safetensors.index.json"}
    index = json.loads((sharded / "model.safetensors.index.json").read_text(encoding="utf-8"))
    for name in files:
        assert load_file(sharded / name).keys() == {key for key, value in index["weight_map"].items() if value == name}
    with ModelWeights.open(sharded) as weights:
        assert index["metadata"]["total_size"] == weights.nbytes


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB, 384, 1000])
def test_tokenizer(tmp_path: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer

    spec = SyntheticSpec(vocab_size=vocab_size, num_hidden_layers=1)
    folder = write_checkpoint(tmp_path / "x", spec, seed=0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = special_token_ids(spec)
    assert [tokenizer.token_to_id(text) for text in (END_OF_TEXT, TURN_START, TURN_END)] == list(ids.values())
    assert tokenizer.get_vocab_size() == max(tokenizer.get_vocab().values()) + 1 == ids[TURN_END] + 1
    assert vocab_size - tokenizer.get_vocab_size() >= 8  # rows that no token has
    for text in TEXTS:
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)
    assert len(tokenizer.encode("the harbour").ids) < len("the harbour")


class TestRefusals:
    def test_folder_that_holds_something(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
        with pytest.raises(RequestError, match="is not empty; give a new folder"):
            write_checkpoint(tmp_path, PRESETS["gqa"], seed=0)
        assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]

    def test_path_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("x", encoding="utf-8")
        for path in (tmp_path / "x", tmp_path / "x" / "y"):
            with pytest.raises(RequestError, match="cannot be written"):
                write_checkpoint(path, PRESETS["gqa"], seed=0)

    @pytest.mark.parametrize(
        ("changes", "error", "fact"),
        [
            ({"vocab_size": MIN_VOCAB - 1}, RequestError, "a vocabulary of 287; expected 288 or more"),
            ({"shards": 0}, RequestError, "0 shards; expected 1 to 26"),
            ({"shards": 27}, RequestError, "27 shards; expected 1 to 26"),
            ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads is 3"),
            ({"head_dim": 7}, ConfigError, "head_dim is 7"),
            ({"yarn_factor": 0.5}, ConfigError, "factor is 0.5"),
            ({"layer_types": ("full_attention",)}, ConfigError, "layer_types is"),
        ],
    )
    def test_impossible_specs(self, tmp_path: Path, changes: dict[str, Any], error: type[Exception], fact: str) -> None:
        with pytest.raises(error, match=fact):
            write_checkpoint(tmp_path / "x", replace(SyntheticSpec(), **changes), seed=0)
        assert not (tmp_path / "x").exists()


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")
class TestTransformers:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_model_loads_whole_and_its_logits_have_a_spread(self, checkpoint: CheckpointFactory, preset: str) -> None:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        folder = checkpoint(preset)
        model, report = transformers.Qwen2ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values()), report
        state = model.state_dict()
        with ModelWeights.open(folder) as weights:
            for name in weights.tensors:
                assert np.array_equal(state[name].numpy(), weights.read(name).astype(np.float32)), name
        tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 280, (1, 64)))
        with torch.no_grad():
            logits = model(tokens).logits[0].double()
        likely = torch.log_softmax(logits, -1)
        entropy = -(likely.exp() * likely).sum(-1)
        assert 1 < float(logits.std()) < 4
        assert 2 < float(entropy.mean()) < 5.5  # ln(384) is 5.95
        assert len(set(logits.argmax(-1).tolist())) > 5

    def test_checkpoint_without_a_changed_dtype_is_read_in_its_own(self, checkpoint: CheckpointFactory) -> None:
        transformers = pytest.importorskip("transformers")
        for preset in ("f16", "bf16", "bf16_sharded", "gqa"):
            model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(preset))
            assert str(model.dtype) == f"torch.{PRESETS[preset].dtype}"
            assert type(model).__name__ == "Qwen2ForCausalLM"

    def test_tokenizer_and_chat_template_load(self, checkpoint: CheckpointFactory) -> None:
        from tokenizers import Tokenizer

        transformers = pytest.importorskip("transformers")
        folder = checkpoint("gqa")
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for text in TEXTS:
            assert theirs(text).input_ids == raw.encode(text).ids
        ids = special_token_ids(PRESETS["gqa"])
        assert (theirs.eos_token_id, theirs.pad_token_id) == (ids[TURN_END], ids[END_OF_TEXT])
        assert len(theirs) == ids[TURN_END] + 1
        assert theirs.chat_template == CHAT_TEMPLATE
        talk = [{"role": "user", "content": "hello"}]
        rendered = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert rendered.startswith(f"{TURN_START}system\nYou are a tiny model")
        assert rendered.endswith(f"{TURN_START}user\nhello{TURN_END}\n{TURN_START}assistant\n")
        own = [{"role": "system", "content": "S"}, *talk]
        assert theirs.apply_chat_template(own, tokenize=False) == (
            f"{TURN_START}system\nS{TURN_END}\n{TURN_START}user\nhello{TURN_END}\n"
        )


def test_progress_ends_when_everything_is_written(tmp_path: Path) -> None:
    folder, told = tmp_path / "model", list[tuple[int, int, bool]]()
    write_checkpoint(
        folder, SyntheticSpec(), seed=0, progress=lambda done, total: told.append((done, total, folder.exists()))
    )
    totals = {total for _, total, _ in told}
    assert len(totals) == 1
    assert [done for done, _, _ in told] == list(range(totals.pop() + 1))
    assert [there for _, _, there in told] == [False] * (len(told) - 1) + [True]
