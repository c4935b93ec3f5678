"""The kernels that `xinfer tune` has chosen, by driver and by the shapes of a model: used wherever a model is loaded.

One JSON file beside the cache of pipelines (`tuning_path`), safe to delete. An entry holds for one adapter, driver and
driver version and for one set of shapes; a variant whose shader has changed since, or that is in quarantine, is passed
over, and so is one that this version does not know.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer import shaders
from xinfer.cache_files import cache_folder
from xinfer.errors import DeviceError
from xinfer.gpu.api import DeviceInfo
from xinfer.gpu_model.memory import MemoryPlan
from xinfer.gpu_model.tuning import Tuning
from xinfer.quarantine import Driver
from xinfer.shaders.catalog import variants
from xinfer.state_files import alone, entries_of, once, set_aside, write_whole

PATH_VARIABLE = "XINFER_TUNING"  # another file than `tuning_path` would give
VERSION = 1
LARGEST = 4 << 20  # bytes that are read of the file

Warn = Callable[[str], None]
Shapes = dict[str, Any]  # plain values; see `shapes_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What was chosen for some shapes with one driver."""

    driver: Driver
    shapes: Shapes
    tuning: Tuning
    sources: dict[str, str]  # of each variant: the hash of what it was compiled from

    def as_json(self) -> dict[str, Any]:
        """Plain values, which `_entry` takes."""
        return {
            "driver": dataclasses.asdict(self.driver),
            "shapes": self.shapes,
            "tuning": self.tuning.as_json(),
            "sources": self.sources,
        }

    def current(self) -> Tuning:
        """What of it was measured with the shaders that there are now."""
        known = variants()
        stale = {
            name
            for name in self.tuning.variants
            if name not in known or self.sources.get(name) != shaders.source_hash(known[name])
        }
        return self.tuning.without(stale)


def shapes_of(plan: MemoryPlan, *, exact: bool) -> Shapes:
    """All that the choice of kernels depends on but the device."""
    config, layer = plan.config, plan.layout.layers[0]
    a_value = plan.shape.token_bytes // config.kv_size
    return {
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "weights": sorted({place.format for place in (*layer.places, *plan.layout.table.places)}),
        "kv_cache": "f16" if a_value == 2 else "f32",
        "exact": exact,
    }


class TuningFile:
    """The entries of one file. Reading it never fails: `warn` is told once what is wrong with it.

    What cannot be understood is passed over, and kept: an entry as it is, a whole file under another name.
    """

    def __init__(self, path: Path | None = None, *, warn: Warn | None = None) -> None:
        self.path = path or tuning_path()
        self._warn = once(warn)

    def find(self, info: DeviceInfo, shapes: Shapes) -> Tuning:
        """What to use on a device for these shapes; empty where nothing is known."""
        driver = Driver.of(info)
        for entry in self._entries():
            if entry.driver == driver and entry.shapes == shapes:
                return entry.current()
        return Tuning()

    def preferred(self, info: DeviceInfo, plan: MemoryPlan, *, exact: bool = False) -> Tuning:
        """The same for what has been planned, as `QwenModel.load` asks."""
        return self.find(info, shapes_of(plan, exact=exact))

    def keep(self, info: DeviceInfo, shapes: Shapes, tuning: Tuning) -> None:
        """Remember a choice in place of what was known of these shapes. Raises DeviceError where it cannot be."""
        sources = {name: shaders.source_hash(variants()[name]) for name in sorted(tuning.variants)}
        entry = Entry(driver=Driver.of(info), shapes=shapes, tuning=tuning, sources=sources)
        self._rewrite(lambda known: (known.driver, known.shapes) == (entry.driver, shapes), [entry])

    def forget(self, info: DeviceInfo, shapes: Shapes) -> int:
        """Drop what is known of these shapes, whatever the cache's type and the accuracy; how many choices it was."""
        driver, rest = Driver.of(info), {"kv_cache": None, "exact": None}
        return self._rewrite(
            lambda known: known.driver == driver and {**known.shapes, **rest} == {**shapes, **rest}, []
        )

    def check(self) -> None:
        """Raise DeviceError where `keep` could not write: tuning takes a minute."""
        if self.path is None:
            raise DeviceError(f"there is no folder to keep a choice in; name a file in {PATH_VARIABLE}")
        folder = next((parent for parent in self.path.parents if parent.exists()), self.path.parent)
        fault = "it is no file" if self.path.exists() and not self.path.is_file() else ""
        if not fault and not (folder.is_dir() and os.access(folder, os.W_OK)):
            fault = f"this user may not write to {folder}"
        if fault:
            raise DeviceError(f"{self.path} cannot be written ({fault}); name another file in {PATH_VARIABLE}")

    def _rewrite(self, dropped: Callable[[Entry], bool], added: list[Entry]) -> int:
        self.check()
        assert self.path is not None
        try:
            with alone(self.path):
                try:
                    before, strange = self._read()
                except (ValueError, RecursionError) as error:
                    before, strange = [], []
                    if not added:
                        self._warn_of_all(str(error))
                    else:
                        self._warn(f"{self.path} is kept as {set_aside(self.path).name}, for it cannot be read")
                kept = [entry for entry in before if not dropped(entry)]
                if added or len(kept) < len(before):
                    entries = [*(entry.as_json() for entry in (*kept, *added)), *strange]
                    content = {"version": VERSION, "entries": entries}
                    write_whole(self.path, json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            raise DeviceError(
                f"{self.path} cannot be written ({error.strerror or error}); name another file in {PATH_VARIABLE}"
            ) from error
        return len(before) - len(kept)

    def _entries(self) -> list[Entry]:
        try:
            entries, strange = self._read()
        except (ValueError, RecursionError) as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            if strange:
                self._warn(
                    f"{len(strange)} of the choices in {self.path} cannot be understood, and are passed over: "
                    "another version of xinfer may have written them"
                )
            return entries
        self._warn_of_all(reason)
        return []

    def _warn_of_all(self, reason: str) -> None:
        self._warn(
            f"the choices of `xinfer tune` in {self.path} cannot be read ({reason}); kernels are chosen by rule, "
            "until it is run again"
        )

    def _read(self) -> tuple[list[Entry], list[Any]]:
        """The entries, and what stands among them and is none. Raises ValueError and OSError for the whole file."""
        if self.path is None or not self.path.exists():
            return [], []
        if not self.path.is_file():  # reading a pipe or a device may never end
            raise OSError("it is no file")
        with self.path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"it is longer than {LARGEST >> 20} MiB")
        return entries_of(data, VERSION, _entry)


def tuning_path() -> Path | None:
    """Where the file is: XINFER_TUNING, or beside the cache of pipelines; None where there is no home."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named)
    folder = cache_folder("tuning")
    return folder / "kernels.json" if folder else None


def _entry(item: Any) -> Entry | None:
    """What `as_json` wrote; None where it is something else."""
    try:
        driver, sources = Driver(**item["driver"]), item["sources"]
        return Entry(driver=driver, shapes=item["shapes"], tuning=Tuning.from_json(item["tuning"]), sources=sources)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
