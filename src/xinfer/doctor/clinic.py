"""Goes through adapters and kernel variants, each in a process of its own, and keeps the quarantine."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from xinfer._version import __version__
from xinfer.doctor import menu
from xinfer.doctor.isolated import BROKEN, FAILURES, HUNG, RIGHT, Ended, Isolated, run_isolated
from xinfer.doctor.rounds import Round, Tried, cores, width
from xinfer.errors import DeviceError, RequestError
from xinfer.gpu.api import DeviceInfo
from xinfer.quarantine import Quarantine
from xinfer.shaders.catalog import variants

CHILD = "xinfer.doctor.child"
SURVEY_S = 60.0
LIMIT_S = 60.0  # of a variant's process: on a GPU it takes a few seconds
CHILD_BYTES = 2 << 30  # of memory that a process may take, and a tenth of it where shapes are scaled down
LIMIT_SOFTWARE_S = 300.0
DEEP_FACTOR = 5
REPORTED_PACKAGES = ("numpy", "ml-dtypes", "safetensors", "onnxruntime", "onnxruntime-directml")

Progress = Callable[[str, int, int, str], None]


def examine(
    *,
    device: str | None = None,
    deep: bool = False,
    only: str | None = None,
    limit_s: float | None = None,
    quarantine: Quarantine | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The report on every GPU of this machine, or on the one that `device` names.

    Args:
        device: "vulkan:0", or a part of an adapter's name; None: every GPU, software drivers where there is none.
        deep: whole shapes on software drivers, and long contexts on GPUs.
        only: a pattern of variant ids, such as "linear_gemv.*"; None tries all.
        limit_s: seconds for each variant's process.
        quarantine: where failures are put, and lifted from; None: the user's own.
        progress: called with "doctor", variants tried, variants in all and the one that is being tried.

    Raises:
        DeviceError: `device` fits no adapter.
        RequestError: `only` fits no variant.
    """
    quarantine = quarantine or Quarantine()
    names = [name for name in variants() if only is None or fnmatch.fnmatchcase(name, only)]
    if not names:
        raise RequestError(f"--only {only!r} fits no kernel variant; expected a pattern such as 'linear_gemv.*'")
    started = time.monotonic()
    found = run_isolated(CHILD, {"kind": "survey"}, timeout_s=SURVEY_S)
    answer = found.answer or {}
    infos = [device_info(entry) for entry in answer.get("devices", [])]
    chosen = choose(infos, device, answer.get("missing", {}))
    total, done, adapters = len(names) * len(chosen), 0, []
    for info in chosen:

        def tick(count: int, current: str, before: int = done) -> None:
            if progress is not None:
                progress("doctor", before + count, total, current)

        adapters.append(_examine_adapter(info, names, deep, limit_s, quarantine, tick))
        done += len(names)
    directml = run_isolated(CHILD, {"kind": "directml"}, timeout_s=LIMIT_S) if only is None else None
    return {
        "xinfer": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": _packages(),
        "survey": {"outcome": found.outcome, "detail": found.detail},
        "adapters": adapters,
        "not_examined": [f"{info.api}:{info.index} {info.name}" for info in infos if info not in chosen],
        "missing": answer.get("missing", {}),
        "directml": None
        if directml is None
        else {"outcome": directml.outcome, "detail": directml.detail}
        | ({"provider": directml.answer.get("provider")} if directml.answer else {}),
        "seconds": round(time.monotonic() - started, 1),
        "right": found.outcome == RIGHT and adapters != [] and all(adapter["right"] for adapter in adapters),
    }


def _examine_adapter(
    info: DeviceInfo,
    names: Sequence[str],
    deep: bool,
    limit_s: float | None,
    quarantine: Quarantine,
    tick: Callable[[int, str], None],
) -> dict[str, Any]:
    started, selector = time.monotonic(), f"{info.api}:{info.index}"
    software = info.kind == "cpu"
    scale = (menu.USUAL if deep else menu.SCALED_DOWN) if software else (menu.DEEP if deep else menu.USUAL)
    usual = (LIMIT_SOFTWARE_S if software else LIMIT_S) * (DEEP_FACTOR if deep else 1)
    described = {field.name: getattr(info, field.name) for field in fields(info)} | {"features": sorted(info.features)}
    report: dict[str, Any] = {"selector": selector, **described, "scale": scale.name, "variants": [], "not_kept": ""}
    opened = run_isolated(CHILD, {"kind": "open", "device": selector}, timeout_s=SURVEY_S)
    report["opened"] = {"outcome": opened.outcome, "detail": opened.detail}
    report["memory"] = (opened.answer or {}).get("memory")
    before = quarantine.variants_for(info)
    if opened.outcome == RIGHT:  # else no kernel is to blame
        report["variants"], report["not_kept"] = _try_variants(
            info, names, scale, limit_s or usual, usual, quarantine, tick
        )
    after = quarantine.variants_for(info)
    report["quarantined"], report["lifted"] = sorted(after), sorted(before - after)
    failed = [entry for entry in report["variants"] if entry["outcome"] in (*FAILURES, BROKEN)]
    report["right"] = opened.outcome == RIGHT and not failed and not report["not_kept"]
    report["seconds"] = round(time.monotonic() - started, 1)
    return report


def _try_variants(
    info: DeviceInfo,
    names: Sequence[str],
    scale: menu.Scale,
    limit_s: float,
    usual_s: float,
    quarantine: Quarantine,
    tick: Callable[[int, str], None],
) -> tuple[list[dict[str, Any]], str]:
    """Each variant's entry, in order, whichever ended first; and why what they said could not be kept.

    What is learned goes into the quarantine at once, as the machine may not survive the next.
    """
    found: dict[str, dict[str, Any]] = {}
    not_kept: list[str] = []
    at_a_time = width(info.heap_bytes, CHILD_BYTES // (10 if scale is menu.SCALED_DOWN else 1))
    threads = max(1, cores() // at_a_time)

    def start(name: str) -> Isolated:
        job = {"kind": "variant", "device": f"{info.api}:{info.index}", "variant": name, "scale": scale.name}
        return Isolated(
            CHILD, {**job, "timeout_s": 0.8 * limit_s, "announced": True}, timeout_s=limit_s, threads=threads
        )

    def settle(tried: Tried) -> None:
        outcome, detail = verdict(tried.ended, limit_s=limit_s, usual_s=usual_s)
        try:
            if outcome in FAILURES:
                quarantine.add(info, tried.name, outcome, detail)
            elif outcome == RIGHT:
                quarantine.lift(info, [tried.name])
        except DeviceError as error:  # a home that is read-only, or full, is no reason to know less
            not_kept.append(str(error))
        answer = tried.ended.answer or {}
        found[tried.name] = {
            "variant": tried.name,
            "outcome": outcome,
            "detail": detail,
            "ratio": answer.get("ratio"),
            "trials": answer.get("trials"),
            "seconds": tried.seconds,
            "beside_others": None if tried.beside is None else f"{tried.beside.outcome} {tried.beside.detail}".rstrip(),
        }

    Round(start=start, at_a_time=at_a_time, settle=settle, tick=tick).run(names)
    tick(len(names), "")
    return [found[name] for name in names], "".join(not_kept[:1])


def verdict(ended: Ended, *, limit_s: float, usual_s: float) -> tuple[str, str]:
    """A kernel's outcome and details. Who is given less time than usual is slow, which says nothing of the kernel."""
    if ended.outcome == HUNG and limit_s < usual_s:
        return BROKEN, f"{ended.detail}; it counts as hung after {usual_s:.0f} s: give it more time (--time-limit)"
    return ended.outcome, ended.detail


def choose(
    infos: Sequence[DeviceInfo], device: str | None, missing: Mapping[str, Sequence[str]] | None = None
) -> list[DeviceInfo]:
    """The adapters to examine; `missing` is why an API shows no GPU."""
    if device is None:
        return [info for info in infos if info.kind != "cpu"] or list(infos)
    wanted = device.strip().lower()
    named = [info for info in infos if wanted in (info.api, f"{info.api}:{info.index}") or wanted in info.name.lower()]
    if not named:
        there = ", ".join(f"{info.api}:{info.index} ({info.name})" for info in infos) or "none"
        why = "; ".join(f"{api}: {reason}" for api, reasons in (missing or {}).items() for reason in reasons)
        raise DeviceError(f"no adapter is called {device!r}; there are: {there}" + (f" ({why})" if why else ""))
    return named


def device_info(entry: dict[str, Any]) -> DeviceInfo:
    """An adapter from its fields, as a child process sent them."""
    known = {field.name for field in fields(DeviceInfo)}
    values = {name: value for name, value in entry.items() if name in known}
    return DeviceInfo(**{**values, "features": frozenset(entry["features"]), "max_groups": tuple(entry["max_groups"])})


def _packages() -> dict[str, str]:
    found = {}
    for name in REPORTED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
