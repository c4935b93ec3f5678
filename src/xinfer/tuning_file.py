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

from xinfer import gpu, shaders
from xinfer.errors import DeviceError
from xinfer.gpu.api import DeviceInfo
from xinfer.gpu_model.memory import MemoryPlan
from xinfer.gpu_model.tuning import Tuning
from xinfer.quarantine import Driver
from xinfer.shaders.catalog import variants
from xinfer.state_files import alone, entries_of, write_whole

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
    """The entries of one file. Reading it never fails: `warn` is told once what is wrong with it."""

    def __init__(self, path: Path | None = None, *, warn: Warn | None = None) -> None:
        self.path = path or tuning_path()
        self._warn = warn or (lambda _: None)
        self._told = False

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

    def _rewrite(self, dropped: Callable[[Entry], bool], added: list[Entry]) -> int:
        if self.path is None:
            raise DeviceError(f"there is no folder to keep a choice in; name a file in {PATH_VARIABLE}")
        try:
            with alone(self.path):
                before = self._entries()
                kept = [entry for entry in before if not dropped(entry)]
                if added or len(kept) < len(before):
                    content = {"version": VERSION, "entries": [entry.as_json() for entry in (*kept, *added)]}
                    write_whole(self.path, json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            raise DeviceError(
                f"{self.path} cannot be written ({error.strerror or error}); name another file in {PATH_VARIABLE}"
            ) from error
        return len(before) - len(kept)

    def _entries(self) -> list[Entry]:
        try:
            if self.path is None or not self.path.is_file():
                return []
            with self.path.open("rb") as file:
                return [_entry(item) for item in entries_of(file.read(LARGEST), VERSION)]
        except (ValueError, RecursionError) as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        if not self._told:
            self._told = True
            self._warn(
                f"the choices of `xinfer tune` in {self.path} cannot be read ({reason}); kernels are chosen by rule, "
                "until it is run again"
            )
        return []


def tuning_path() -> Path | None:
    """Where the file is: XINFER_TUNING, or beside the cache of pipelines; None where there is no home."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named)
    folder = gpu.cache_folder("tuning")
    return folder / "kernels.json" if folder else None


def _entry(item: Any) -> Entry:
    try:
        driver, sources = Driver(**item["driver"]), item["sources"]
        return Entry(driver=driver, shapes=item["shapes"], tuning=Tuning.from_json(item["tuning"]), sources=sources)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"an entry is not one: {error!r}") from None
