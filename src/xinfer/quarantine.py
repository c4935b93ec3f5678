"""Which kernels not to use with which driver: found by `xinfer doctor`, honoured wherever a model is loaded.

One JSON file in the user's state folder (`quarantine_path`), written whole or not at all. An entry holds for one
adapter, driver, driver version and kernel variant: a new driver begins with a clean slate.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu.api import DeviceInfo
from xinfer.state_files import alone, write_whole

PATH_VARIABLE = "XINFER_QUARANTINE"  # another file than `quarantine_path` would give
VERSION = 1
MARK = b'"entries"'  # what every quarantine file has, damaged or not
LARGEST = 4 << 20  # bytes that are read of the file
DETAIL_CHARS = 400

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What an entry holds for."""

    api: str
    vendor_id: int
    device_id: int
    driver: str
    driver_version: str

    @classmethod
    def of(cls, info: DeviceInfo) -> Driver:
        """The driver of an adapter."""
        return cls(**{field.name: getattr(info, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One variant that failed with one driver."""

    driver: Driver
    variant: str
    outcome: str  # "wrong", "hung", "lost", "crashed", "refused"
    detail: str = ""  # by how much, or the reason, or the signal


class Quarantine:
    """The entries of one file. Reading it never fails: a file that is damaged is set aside, and `warn` is told."""

    def __init__(self, path: Path | None = None, *, warn: Warn | None = None) -> None:
        self.path = path or quarantine_path()
        self._named = path is None and bool(os.environ.get(PATH_VARIABLE))  # by the user, who may name anything
        self._told: set[str] = set()
        self._tell = warn or (lambda _: None)

    def _warn(self, text: str) -> None:
        """Once, however often the file is read."""
        if text not in self._told:
            self._told.add(text)
            self._tell(text)

    def entries(self) -> list[Entry]:
        """Every entry."""
        try:
            if self.path.exists() and not self.path.is_file():  # reading a pipe or a device may never end
                self._warn(f"the quarantine file {self.path} is no file; it is ignored")
                return []
            with self.path.open("rb") as file:
                return _parse(file.read(LARGEST))
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError) as error:
            self._set_aside(str(error))
            return []
        except OSError as error:
            self._warn(f"the quarantine file {self.path} cannot be read ({error.strerror or error}); it is ignored")
            return []

    def entries_for(self, info: DeviceInfo) -> list[Entry]:
        """The entries of this adapter's driver, a variant each."""
        driver = Driver.of(info)
        return [entry for entry in self.entries() if entry.driver == driver]

    def variants_for(self, info: DeviceInfo) -> frozenset[str]:
        """The variants not to use on an adapter."""
        return frozenset(entry.variant for entry in self.entries_for(info))

    def add(self, info: DeviceInfo, variant: str, outcome: str, detail: str = "") -> None:
        """Put one variant in quarantine, in place of what was known of it before."""
        self.update(info, failed={variant: (outcome, detail)})

    def lift(self, info: DeviceInfo, variants: Iterable[str]) -> None:
        """Allow variants again."""
        self.update(info, passed=variants)

    def update(
        self, info: DeviceInfo, *, failed: dict[str, tuple[str, str]] | None = None, passed: Iterable[str] = ()
    ) -> None:
        """Put variants in quarantine (outcome and detail by id) and allow others again, in one writing.

        Raises:
            DeviceError: the file cannot be written.
        """
        failed, passed = failed or {}, frozenset(passed)
        if self._updated(info, failed, passed) is None:
            return
        self._ensure_ours()
        with alone(self.path):  # two doctors, on two GPUs perhaps, must not undo what the other has found
            entries = self._updated(info, failed, passed)
            if entries is not None:
                self._write(entries)

    def _updated(
        self, info: DeviceInfo, failed: dict[str, tuple[str, str]], passed: frozenset[str]
    ) -> list[Entry] | None:
        """All entries afterwards; None where nothing changes."""
        driver, before = Driver.of(info), self.entries()
        changed = {*passed, *failed}
        kept = [entry for entry in before if entry.driver != driver or entry.variant not in changed]
        new = [
            Entry(driver=driver, variant=variant, outcome=outcome, detail=detail[:DETAIL_CHARS])
            for variant, (outcome, detail) in sorted(failed.items())
        ]
        return [*kept, *new] if new or len(kept) != len(before) else None

    def _ensure_ours(self) -> None:
        if self._is_foreign():
            raise DeviceError(f"{self.path} is not ours to write: it holds no quarantine; name another file, or none")

    def _write(self, entries: list[Entry]) -> None:
        self._ensure_ours()
        content = {"version": VERSION, "entries": [dataclasses.asdict(entry) for entry in entries]}
        try:
            write_whole(self.path, json.dumps(content, indent=1).encode() + b"\n")
        except OSError as error:
            raise DeviceError(
                f"the quarantine file {self.path} cannot be written ({error.strerror or error}); name another one in "
                f"{PATH_VARIABLE}"
            ) from error

    def _is_foreign(self) -> bool:
        """Whether somebody named a file that never was a quarantine: it is neither moved nor written."""
        try:
            if not self._named or not self.path.exists():
                return False
            return not self.path.is_file() or MARK not in self.path.read_bytes()[:LARGEST]
        except OSError:
            return False  # the attempt to write will say why

    def _set_aside(self, reason: str) -> None:
        if self._is_foreign():
            self._warn(f"{self.path} holds no quarantine ({reason}); it is ignored, and left as it is")
            return
        aside = self.path.with_name(self.path.name + ".damaged")
        try:
            self.path.replace(aside)
        except OSError:
            aside = self.path
        self._warn(
            f"the quarantine file {self.path} is damaged ({reason}); it is kept as {aside.name}, and no kernel is in "
            "quarantine until `xinfer doctor` has run again"
        )


def quarantine_path() -> Path:
    """Where the file is: XINFER_QUARANTINE, or the platform's folder for what programs remember."""
    named = os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named)
    try:
        if sys.platform == "win32":
            base = _named("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Application Support"
        else:
            base = _named("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # no home
        base = Path(tempfile.gettempdir())
    return base / "xinfer" / "quarantine.json"


def _named(variable: str) -> Path | None:
    """The folder that a variable names; None where it depends on the current one, which XDG wants to be ignored."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else None


def describe(info: DeviceInfo, entries: list[Entry]) -> str:
    """One line that says what is not used, and how to try again."""
    named = ", ".join(f"{entry.variant} ({entry.outcome})" for entry in entries[:4])
    more = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
    kernels = "kernel is" if len(entries) == 1 else "kernels are"
    return (
        f"{len(entries)} {kernels} in quarantine with {info.driver} {info.driver_version}, others are used in their "
        f"place: {named}{more}; `xinfer doctor` tries them again"
    )


def _parse(data: bytes) -> list[Entry]:
    content = json.loads(data)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it has no list of entries")  # noqa: TRY004  # of a file's content, not a caller's
    if content.get("version") != VERSION:
        raise ValueError(f"its version is {content.get('version')!r}; expected {VERSION}")
    return [_entry(item) for item in content["entries"]]


def _entry(item: Any) -> Entry:
    try:
        entry = Entry(**{**item, "driver": Driver(**item["driver"])})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"an entry is not one: {error}") from None
    texts = (entry.variant, entry.outcome, entry.detail, entry.driver.api, entry.driver.driver)
    numbers = (entry.driver.vendor_id, entry.driver.device_id)
    right = all(isinstance(text, str) for text in (*texts, entry.driver.driver_version))
    if not right or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"an entry is not one: {item}")
    return entry
