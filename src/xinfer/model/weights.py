"""`ModelWeights`: the tensors of a checkpoint folder, checked as a whole when opened and read when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xinfer.errors import ModelNotFoundError, WeightsError
from xinfer.files import is_folder, is_there, read_json_object, shown
from xinfer.model import names
from xinfer.model._safetensors import SafetensorsFile, StoredTensor
from xinfer.model.config import Qwen2Config
from xinfer.model.names import LayerWeights

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_DTYPES: Final[Mapping[str, tuple[str, np.dtype[Any]]]] = {
    "F32": ("float32", np.dtype(np.float32)),
    "F16": ("float16", np.dtype(np.float16)),
    "BF16": ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
}
_QUANTIZED_SUFFIXES: Final = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv")
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_PROBLEMS_SHOWN: Final = 20
_ROWS_COMPARED: Final = 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint."""

    name: str  # as stored, which a base model writes without the prefix `model.`
    dtype: str  # "float32", "float16" or "bfloat16"
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    nbytes: int


class ModelWeights:
    """The weights of an open checkpoint. Arrays come in the stored type, freshly read on every access.

    Made by `ModelWeights.open`; a context manager. Reads may come from several threads at once.
    """

    def __init__(
        self, folder: Path, config: Qwen2Config, tensors: Mapping[str, TensorInfo], files: Iterable[SafetensorsFile]
    ) -> None:
        self.folder = folder
        self.config = config
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))  # by canonical name
        self._files = {file.path: file for file in files}

    def reopen(self) -> ModelWeights:
        """The same checkpoint, opened once more; both have to be closed.

        Raises:
            WeightsError: it is not the same any more.
        """
        again = type(self).open(self.folder, config=self.config)
        if {path: file.stamp for path, file in self._files.items()} != {
            path: file.stamp for path, file in again._files.items()
        }:
            again.close()
            raise WeightsError(f"the files in {self.folder} were replaced while they were in use; start again")
        return again

    def check_unchanged(self) -> None:
        """Raise WeightsError where one of the open files was written to since it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def first_layers(self, n: int) -> ModelWeights:
        """The same open files as a model of the first n layers alone. This one closes them."""
        config = dataclasses.replace(self.config, num_hidden_layers=n, layer_windows=self.config.layer_windows[:n])
        wanted = names.expected_shapes(config).keys() & self.tensors.keys()
        return ModelWeights(
            self.folder,
            config,
            {name: info for name, info in self.tensors.items() if name in wanted},
            self._files.values(),
        )

    @classmethod
    def open(cls, path: Path, *, config: Qwen2Config | None = None) -> Self:
        """Open the checkpoint in the folder `path` and check every tensor against the config; nothing is read yet.

        Raises:
            ModelNotFoundError: there is no such folder.
            ConfigError: config.json is broken or unsupported.
            WeightsError: the files or tensors are not those of the config; all problems in one message.
        """
        folder = Path(path)
        if not is_folder(folder):
            raise ModelNotFoundError(f"{folder} is not a folder; expected one with config.json and {SINGLE_FILE}")
        if config is None:
            config = Qwen2Config.from_json(folder / "config.json")
        weight_map = _weight_map(folder)
        with ExitStack() as stack:
            files, problems = _open_files(folder, weight_map, stack)
            tensors = _tensor_table(files, problems)
            complete = not problems  # of a file that could not be opened, every tensor would seem missing
            problems += _check_index(weight_map, files, config)
            problems += _check_table(tensors, config, complete=complete)
            if problems:
                raise WeightsError(_message(folder, problems))
            used = {name: _info(*tensors[name]) for name in names.expected_shapes(config) if name in tensors}
            weights = cls(folder, config, used, files)
            head = tensors.get(names.global_tensor_name("lm_head"))
            if head is not None and weights.lm_head_is_embed:
                weights._check_redundant_head(_info(*head))
            stack.pop_all()
        return weights

    def close(self) -> None:
        """Close the files; reading afterwards is an error."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def embed(self) -> NDArray[Any]:
        """The embedding table, (vocab_size, hidden_size)."""
        return self.read(names.global_tensor_name("embed"))

    @property
    def norm(self) -> NDArray[Any]:
        """The last norm's weight, (hidden_size,)."""
        return self.read(names.global_tensor_name("norm"))

    @property
    def lm_head_is_embed(self) -> bool:
        """Whether the LM head is the embedding table: the config ties them, or the checkpoint has no head."""
        return names.global_tensor_name("lm_head") not in self.tensors

    @property
    def lm_head(self) -> NDArray[Any]:
        """The LM head, (vocab_size, hidden_size)."""
        return self.read(names.global_tensor_name("embed" if self.lm_head_is_embed else "lm_head"))

    def layer(self, layer: int) -> LayerWeights[NDArray[Any]]:
        """The twelve tensors of layer `layer`."""
        return LayerWeights(**{field: self.read(names.layer_tensor_name(layer, field)) for field in names.LAYER_FIELDS})

    def read(self, name: str) -> NDArray[Any]:
        """The tensor called `name` (a key of `tensors`) in a new array of its stored type.

        Raises:
            WeightsError: the file became shorter since it was opened, or the disk fails.
        """
        info = self.tensors[name]
        return self._read_rows(info, 0, info.shape[0])

    def _read_rows(self, info: TensorInfo, begin: int, end: int) -> NDArray[Any]:
        array = np.empty((end - begin, *info.shape[1:]), _numpy_dtype(info.dtype))
        offset = info.offset + begin * (info.nbytes // info.shape[0])
        self._files[info.file].read_into(offset, array.reshape(-1).view(np.uint8).data)
        return array

    def _check_redundant_head(self, head: TensorInfo) -> None:
        """Refuse a tied checkpoint whose own LM head is not the embedding: which of the two counts cannot be told."""
        embed = self.tensors[names.global_tensor_name("embed")]
        for begin in range(0, embed.shape[0], _ROWS_COMPARED):
            end = min(begin + _ROWS_COMPARED, embed.shape[0])
            expected, found = (self._read_rows(info, begin, end).astype(np.float32) for info in (embed, head))
            if not np.array_equal(expected, found, equal_nan=True):
                raise WeightsError(
                    f"{head.file} holds {head.name}, which differs from {embed.name} although config.json says "
                    "tie_word_embeddings true; expected the same values, or tie_word_embeddings false: set it to false "
                    "to use the head, or remove the tensor"
                )

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows start to stop of the matrix called `name`, (stop - start, columns): a table need not be read whole."""
        info = self.tensors[name]
        assert 0 <= start <= stop <= info.shape[0], (start, stop, info)
        return self._read_rows(info, start, stop)

    def read_into(self, name: str, buffer: memoryview, *, offset: int = 0) -> None:
        """Fill `buffer` with the stored bytes of the tensor called `name`, from its byte `offset` on."""
        info = self.tensors[name]
        flat = buffer.cast("B") if buffer.ndim != 1 or buffer.itemsize != 1 else buffer
        assert 0 <= offset <= info.nbytes - flat.nbytes, (offset, flat.nbytes, info)
        self._files[info.file].read_into(info.offset + offset, flat)

    def read_span(self, file: Path, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`, a flat view of bytes, with those of a file of the checkpoint, from its byte `offset` on."""
        self._files[file].read_into(offset, buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in use."""
        return sum(info.nbytes for info in self.tensors.values())

    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes of the tensors in use by their stored type, largest first."""
        totals: dict[str, int] = {}
        for info in self.tensors.values():
            totals[info.dtype] = totals.get(info.dtype, 0) + info.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


_Table = dict[str, tuple[str, StoredTensor, Path]]  # canonical name -> stored name, place, file


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return next(dtype for known, dtype in _DTYPES.values() if known == name)


def _info(name: str, stored: StoredTensor, file: Path) -> TensorInfo:
    return TensorInfo(name, _DTYPES[stored.dtype][0], stored.shape, file, stored.offset, stored.nbytes)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Which file holds which tensor, or None for a checkpoint in one file. As in transformers, one file comes first."""
    if is_there(folder / SINGLE_FILE):
        return None
    path = folder / INDEX_FILE
    if not is_there(path):
        raise WeightsError(_explain_absence(folder))
    weight_map = read_json_object(path, error=WeightsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has weight_map {shown(weight_map)}; expected an object of tensor and file names")
    problems = []
    for file in dict.fromkeys(value if isinstance(value, str) else repr(value) for value in weight_map.values()):
        problem = _refused_file_name(file)
        if problem is not None:
            problems.append(f"{INDEX_FILE} names the file {shown(file)}, {problem}")
    if problems:
        raise WeightsError(_message(folder, problems))
    return weight_map


def _refused_file_name(name: str) -> str | None:
    """What is wrong with a file name in the index; None where nothing is.

    The name is judged, not what it links to: the hub's cache links every file to one outside the folder.
    """
    if any(character in name for character in "/\\:") or name in (".", "..") or not 0 < len(name) < 256:
        return "which is not a plain name; expected a file in the model's own folder"
    if not name.isprintable():
        return "which has characters that no file name of a checkpoint has"
    if name.lower().endswith(_PICKLE_SUFFIXES):
        return "a pickle, which can run any code and is never loaded; convert the model to safetensors"
    if not name.endswith(".safetensors"):
        return "which is not a .safetensors file"
    return None


def _explain_absence(folder: Path) -> str:
    """Why there is nothing to load in `folder`, and what to do about it."""
    try:
        files = sorted(path.name for path in folder.iterdir())
    except OSError as problem:
        return f"{folder} cannot be listed: {problem}"
    pickles = [name for name in files if name.lower().endswith(_PICKLE_SUFFIXES)]
    ggufs = [name for name in files if name.lower().endswith(".gguf")]
    others = [name for name in files if name.lower().endswith(".safetensors")]
    found = f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if "adapter_model.safetensors" in files or "adapter_config.json" in files:
        return f"{found}, but a LoRA adapter; merge it into its base model (peft: merge_and_unload) and save that"
    if others:
        return f"{found}, but {shown(others[0])}; rename it to {SINGLE_FILE} if it holds the whole model"
    if pickles:
        return (
            f"{found}, but {shown(pickles[0])}, a pickle, which can run any code and is never loaded. Convert it once, "
            'with transformers and torch installed: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained(r'{folder}', dtype='auto').save_pretrained('converted')\", and copy the tokenizer's "
            "files beside it"
        )
    if ggufs:
        return f"{found}, but {shown(ggufs[0])}; xinfer does not read GGUF: use the model's safetensors release"
    return f"{found}: there are no weights; download the model again"


def _open_files(
    folder: Path, weight_map: Mapping[str, str] | None, stack: ExitStack
) -> tuple[list[SafetensorsFile], list[str]]:
    """Open every file, and say what is wrong with those that cannot be used."""
    files: list[SafetensorsFile] = []
    problems: list[str] = []
    for name in sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_FILE]:
        try:
            file = SafetensorsFile(folder / name)
        except WeightsError as problem:
            problems.append(str(problem))
        else:
            stack.callback(file.close)
            files.append(file)
    return files, problems


def _tensor_table(files: Iterable[SafetensorsFile], problems: list[str]) -> _Table:
    """All tensors by canonical name; one that is there twice is added to `problems`."""
    table: _Table = {}
    for file in files:
        for name, stored in file.tensors.items():
            key = names.canonical(name)
            if key in table:
                other = table[key]
                problems.append(
                    f"{shown(name)} in {file.path.name} is also {shown(other[0])} in {other[2].name}; expected it once"
                )
            table[key] = (name, stored, file.path)
    return table


def _check_index(
    weight_map: Mapping[str, str] | None, files: Iterable[SafetensorsFile], config: Qwen2Config
) -> list[str]:
    """What the index and the files that could be opened say differently."""
    if weight_map is None:
        return []
    opened = {file.path.name: file for file in files}
    problems = [
        f"{INDEX_FILE} places {shown(name)} in {file_name}, which does not hold it"
        for name, file_name in weight_map.items()
        if file_name in opened and name not in opened[file_name].tensors
    ]
    problems += [
        f"{file_name} holds {shown(name)}, which {INDEX_FILE} does not name"
        for file_name, file in opened.items()
        for name in file.tensors
        if name not in weight_map and not names.is_harmless_extra(names.canonical(name), config)
    ]
    return problems


def _check_table(table: _Table, config: Qwen2Config, *, complete: bool) -> list[str]:
    """Every tensor that is missing, surplus, misshapen or wrongly typed, with what was expected."""
    expected = names.expected_shapes(config)
    problems = []
    for name, shape in expected.items():
        if name in table:
            problems += _check_tensor(*table[name][:2], shape)
        elif complete and not names.may_be_absent(name):
            problems.append(f"{name} is missing; expected shape {shape}")
    for key, (name, stored, _) in table.items():
        if key in expected:
            continue
        if key == names.global_tensor_name("lm_head"):  # a tied checkpoint's
            problems += _check_tensor(name, stored, (config.vocab_size, config.hidden_size))
        elif not names.is_harmless_extra(key, config):
            hint = ": quantized weights are not supported" if name.endswith(_QUANTIZED_SUFFIXES) else ""
            problems.append(f"{shown(name)} is not a tensor of this model; expected no such tensor{hint}")
    return problems


def _check_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> list[str]:
    problems = []
    if stored.shape != shape:
        problems.append(f"{name} has shape {shown(stored.shape)}; expected {shape}")
    if stored.dtype not in _DTYPES:
        problems.append(f"{name} has dtype {shown(stored.dtype)}; expected one of " + ", ".join(_DTYPES))
    return problems


def _message(folder: Path, problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{folder}: {problems[0]}"
    lines = [f"{folder}: {len(problems)} problems with the weights:"]
    lines += [f"  - {problem}" for problem in problems[:_MAX_PROBLEMS_SHOWN]]
    if len(problems) > _MAX_PROBLEMS_SHOWN:
        lines.append(f"  and {len(problems) - _MAX_PROBLEMS_SHOWN} more")
    lines.append("Check that config.json and the weights belong to the same model, or download it again.")
    return "\n".join(lines)
