"""From what a user calls a model to a folder: the bundled demo model, a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from xinfer.errors import ModelNotFoundError, WeightsError
from xinfer.files import is_there, read_json_object, shown

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo_model"

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_NO_GGUF = (
    "GGUF files are not supported; use the checkpoint they come from, a folder with config.json and *.safetensors"
)
_INDEX = "model.safetensors.index.json"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    _INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)


def resolve(model: str | Path | None) -> Path:
    """The folder of a model.

    Args:
        model: None or "demo" for the bundled demo model, a folder, or a hub name such as `Qwen/Qwen2.5-0.5B-Instruct`,
            with `@revision` for another revision than main. Files go to the hub's own cache; HF_HUB_OFFLINE is obeyed.

    Raises:
        ModelNotFoundError: there is no such folder, or the hub could not give the model.
    """
    if model is None or model == DEMO:
        return DEMO_FOLDER
    if not isinstance(model, str | Path):
        raise ModelNotFoundError(f"a model of type {type(model).__name__}; expected a folder or a hub name, as text")
    folder = Path(model or "\0").expanduser()  # "" would be the working folder; no folder has a NUL in its name
    if _is_dir(folder):
        return _model_folder(folder)
    match = _HUB_NAME.fullmatch(str(model))
    if _exists(folder):
        if folder.suffix == ".gguf":
            raise ModelNotFoundError(f"{model}: {_NO_GGUF}")
        raise ModelNotFoundError(
            f"{model} is a file; expected the model's folder, the one that holds config.json: give that folder"
        )
    if match is None or isinstance(model, Path):
        raise ModelNotFoundError(
            f"no folder {str(model)!r} here, and it is not a hub name; give a folder with config.json, tokenizer.json "
            "and *.safetensors, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or 'demo' for the bundled model"
        )
    return _download(match["repo"], match["revision"])


def is_model_name(text: str) -> bool:
    """Whether `text` looks like a model's name to a person: the demo model's, a folder's, or one on the hub."""
    return text == DEMO or _is_dir(Path(text or "\0").expanduser()) or _HUB_NAME.fullmatch(text) is not None


def _model_folder(folder: Path) -> Path:
    if os.path.lexists(folder / "config.json"):
        return folder
    if any(folder.glob("*.gguf")):
        raise ModelNotFoundError(f"{folder}: {_NO_GGUF}")
    raise ModelNotFoundError(
        f"{folder} holds no config.json; expected a model's folder, with config.json, tokenizer.json and *.safetensors"
    )


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # an over-long name, or one with a NUL
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _download(repo: str, revision: str | None) -> Path:
    folder = _snapshot(repo, revision, _SMALL_FILES)
    shards = _shards(folder)
    return _snapshot(repo, revision, [*_SMALL_FILES, *shards])


def _shards(folder: Path) -> list[str]:
    """The weight files that this snapshot needs: those that the index names, or the single file."""
    index = folder / _INDEX
    if not is_there(index):
        return ["model.safetensors"]
    weight_map = read_json_object(index, error=WeightsError).get("weight_map")
    if not isinstance(weight_map, dict):
        raise WeightsError(f"{index} has weight_map {shown(weight_map)}; expected an object of tensor and file names")
    return sorted({str(name) for name in weight_map.values()})


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {repo!r}, or it is private: log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"{repo} is not in the local cache and the hub cannot be reached; go online, unset HF_HUB_OFFLINE, "
            "or give the folder of a copy"
        ) from error
    except Exception as error:  # the hub client's own, its HTTP library's and the disk's: all mean no model
        raise ModelNotFoundError(f"the hub could not give {repo!r}: {error}") from error
