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
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from xinfer.errors import DeviceError, RequestError
from xinfer.gpu.api import DeviceInfo
from xinfer.state_files import alone, entries_of, once, set_aside, write_whole

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
    adapter: str = ""  # its name, for people
    since: str = ""  # "2026-03-01T12:00:00+00:00"

    def flat(self) -> dict[str, Any]:
        """Everything under one roof, for JSON."""
        fields = dataclasses.asdict(self)
        return {**fields.pop("driver"), **fields}


class Quarantine:
    """The entries of one file. Reading it never fails: `warn` is told once what is wrong with it.

    What cannot be understood is passed over, and kept: an entry as it is, a whole file under another name.
    """

    def __init__(self, path: Path | None = None, *, warn: Warn | None = None) -> None:
        self.path = path or quarantine_path()
        self._named = path is None and bool(os.environ.get(PATH_VARIABLE))  # by the user, who may name anything
        self._warn = once(warn)

    def entries(self) -> list[Entry]:
        """What failed, on every adapter."""
        return self._read()[0]

    def _read(self) -> tuple[list[Entry], list[Any]]:
        """The entries, and what stands among them and is none."""
        try:
            if self.path.exists() and not self.path.is_file():  # reading a pipe or a device may never end
                self._warn(f"the quarantine file {self.path} is no file; it is ignored")
                return [], []
            with self.path.open("rb") as file:
                entries, strange = entries_of(file.read(LARGEST), VERSION, _entry)
        except FileNotFoundError:
            return [], []
        except (ValueError, RecursionError) as error:
            self._set_aside(str(error))
            return [], []
        except OSError as error:
            self._warn(f"the quarantine file {self.path} cannot be read ({error.strerror or error}); it is ignored")
            return [], []
        if strange:
            self._warn(
                f"{len(strange)} of the entries in the quarantine file {self.path} cannot be understood, and are "
                "passed over: another version of xinfer may have written them; `xinfer doctor` tries the kernels again"
            )
        return entries, strange

    def entries_for(self, info: DeviceInfo) -> list[Entry]:
        """What failed with this adapter's driver, a variant each."""
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
        driver, now = Driver.of(info), datetime.now(UTC).isoformat(timespec="seconds")
        new = [
            Entry(
                driver=driver,
                variant=variant,
                outcome=outcome,
                detail=detail[:DETAIL_CHARS],
                adapter=info.name,
                since=now,
            )
            for variant, (outcome, detail) in sorted((failed or {}).items())
        ]
        changed = {*passed, *(entry.variant for entry in new)}
        self._replace(lambda entry: entry.driver == driver and entry.variant in changed, new)

    def lift_matching(self, patterns: Iterable[str]) -> list[Entry]:
        """Allow the variants that fit one of these patterns again, on every adapter; what was lifted.

        Raises:
            RequestError: a pattern fits none.
            DeviceError: the file cannot be written.
        """
        patterns, there = list(patterns), self.entries()
        for pattern in patterns:
            if pattern != "*" and not any(fnmatchcase(entry.variant, pattern) for entry in there):
                names = ", ".join(sorted({entry.variant for entry in there})) or "none"
                raise RequestError(f"no kernel in quarantine fits {pattern!r}; there are: {names}")

        def fits(entry: Entry) -> bool:
            return any(fnmatchcase(entry.variant, pattern) for pattern in patterns)

        return self._replace(fits, [], all_of_it="*" in patterns)

    def _replace(self, gone: Callable[[Entry], bool], new: list[Entry], *, all_of_it: bool = False) -> list[Entry]:
        """Write `new` in place of the entries that are to go, which are returned; nothing where nothing changes.

        What is no entry stays as it is, unless all of it is to go.
        """
        before, strange = self._read()
        if not new and not any(map(gone, before)) and not (all_of_it and strange):
            return []
        self._ensure_ours()
        with alone(self.path):  # two doctors, on two GPUs perhaps, must not undo what the other has found
            before, strange = self._read()
            kept = [entry for entry in before if not gone(entry)]
            self._write([*map(dataclasses.asdict, (*kept, *new)), *([] if all_of_it else strange)])
            return [entry for entry in before if gone(entry)]

    def _ensure_ours(self) -> None:
        if self._is_foreign():
            raise DeviceError(f"{self.path} is not ours to write: it holds no quarantine; name another file, or none")

    def _write(self, items: list[Any]) -> None:
        self._ensure_ours()
        content = {"version": VERSION, "entries": items}
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
        try:
            aside = set_aside(self.path)
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
        f"place: {named}{more}; `xinfer quarantine` says why, `xinfer doctor` tries them again"
    )


def as_text(entries: list[Entry]) -> str:
    """A list for people, by adapter and driver."""
    by_driver: dict[Driver, list[Entry]] = {}
    for entry in entries:
        by_driver.setdefault(entry.driver, []).append(entry)
    parts = []
    for driver, found in by_driver.items():
        adapter = found[-1].adapter or f"adapter {driver.vendor_id:04x}:{driver.device_id:04x}"
        width = max(len(entry.variant) for entry in found)
        lines = [f"{adapter}, {driver.api}, {driver.driver} {driver.driver_version}"]
        for entry in found:
            why = f"{entry.outcome}: {entry.detail}" if entry.detail else entry.outcome
            since = f", since {entry.since[:10]}" if entry.since else ""
            lines.append(f"  {entry.variant:<{width}}  {why}{since}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) or "no kernel is in quarantine"


def _entry(item: Any) -> Entry | None:
    """What was written of an entry; None where it is something else."""
    try:
        entry = Entry(**{**item, "driver": Driver(**item["driver"])})
    except (TypeError, KeyError, AttributeError):
        return None
    texts = (entry.variant, entry.outcome, entry.detail, entry.adapter, entry.since)
    names = (entry.driver.api, entry.driver.driver, entry.driver.driver_version)
    numbers = (entry.driver.vendor_id, entry.driver.device_id)
    right = all(isinstance(text, str) for text in (*texts, *names))
    return entry if right and all(isinstance(number, int) for number in numbers) else None
