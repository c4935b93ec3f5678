"""Goes through adapters and kernel variants, each in a process of its own, and keeps the quarantine."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from xinfer._version import __version__
from xinfer.doctor import menu
from xinfer.doctor.isolated import BROKEN, FAILURES, RIGHT, Ended, run_isolated
from xinfer.errors import DeviceError, RequestError
from xinfer.gpu.api import DeviceInfo
from xinfer.quarantine import Quarantine
from xinfer.shaders.catalog import variants

CHILD = "xinfer.doctor.child"
SURVEY_S = 60.0
LIMIT_S = 60.0  # of a variant's process: on a GPU it takes a second or two
LIMIT_SOFTWARE_S = 300.0
DEEP_FACTOR = 5
REPORTED_PACKAGES = ("numpy", "ml-dtypes", "safetensors", "onnxruntime", "onnxruntime-directml")

Progress = Callable[[str, int, int], None]


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
        progress: called with "doctor", variants tried and variants in all.

    Raises:
        DeviceError: `device` fits no adapter, or the quarantine cannot be written.
        RequestError: `only` fits no variant.
    """
    quarantine = quarantine or Quarantine()
    names = [name for name in variants() if only is None or fnmatch.fnmatchcase(name, only)]
    if not names:
        raise RequestError(f"--only {only!r} fits no kernel variant; expected a pattern such as 'linear_gemv.*'")
    found = run_isolated(CHILD, {"kind": "survey"}, timeout_s=SURVEY_S)
    answer = found.answer or {}
    infos = [device_info(entry) for entry in answer.get("devices", [])]
    chosen = choose(infos, device)
    total, done, adapters = len(names) * len(chosen), 0, []
    for info in chosen:

        def tried(count: int, before: int = done) -> None:
            if progress is not None:
                progress("doctor", before + count, total)

        adapters.append(_examine_adapter(info, names, deep, limit_s, quarantine, tried))
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
        "right": found.outcome == RIGHT and all(adapter["right"] for adapter in adapters),
    }


def _examine_adapter(
    info: DeviceInfo,
    names: Sequence[str],
    deep: bool,
    limit_s: float | None,
    quarantine: Quarantine,
    tried: Callable[[int], None],
) -> dict[str, Any]:
    selector = f"{info.api}:{info.index}"
    software = info.kind == "cpu"
    scale = (menu.USUAL if deep else menu.SCALED_DOWN) if software else (menu.DEEP if deep else menu.USUAL)
    limit = limit_s or (LIMIT_SOFTWARE_S if software else LIMIT_S) * (DEEP_FACTOR if deep else 1)
    described = {field.name: getattr(info, field.name) for field in fields(info)} | {"features": sorted(info.features)}
    report: dict[str, Any] = {"selector": selector, **described, "scale": scale.name, "variants": []}
    opened = run_isolated(CHILD, {"kind": "open", "device": selector}, timeout_s=SURVEY_S)
    report["opened"] = {"outcome": opened.outcome, "detail": opened.detail}
    report["memory"] = (opened.answer or {}).get("memory")
    before = quarantine.variants_for(info)
    if opened.outcome == RIGHT:  # else no kernel is to blame
        for count, name in enumerate(names):
            tried(count)
            report["variants"].append(_try_variant(info, selector, name, scale, limit, quarantine))
        tried(len(names))
    after = quarantine.variants_for(info)
    report["quarantined"], report["lifted"] = sorted(after), sorted(before - after)
    failed = [entry for entry in report["variants"] if entry["outcome"] in (*FAILURES, BROKEN)]
    report["right"] = opened.outcome == RIGHT and not failed
    return report


def _try_variant(
    info: DeviceInfo, selector: str, name: str, scale: menu.Scale, limit_s: float, quarantine: Quarantine
) -> dict[str, Any]:
    """One variant; what is learned goes into the quarantine at once, as the machine may not survive the next."""
    started = time.perf_counter()
    job = {"kind": "variant", "device": selector, "variant": name, "scale": scale.name, "timeout_s": 0.8 * limit_s}
    ended: Ended = run_isolated(CHILD, job, timeout_s=limit_s)
    if ended.outcome in FAILURES:
        quarantine.add(info, name, ended.outcome, ended.detail)
    elif ended.outcome == RIGHT:
        quarantine.lift(info, [name])
    answer = ended.answer or {}
    return {
        "variant": name,
        "outcome": ended.outcome,
        "detail": ended.detail,
        "ratio": answer.get("ratio"),
        "trials": answer.get("trials"),
        "seconds": round(time.perf_counter() - started, 2),
    }


def choose(infos: Sequence[DeviceInfo], device: str | None) -> list[DeviceInfo]:
    """The adapters to examine."""
    if device is None:
        return [info for info in infos if info.kind != "cpu"] or list(infos)
    wanted = device.strip().lower()
    named = [info for info in infos if wanted in (info.api, f"{info.api}:{info.index}") or wanted in info.name.lower()]
    if not named:
        there = ", ".join(f"{info.api}:{info.index} ({info.name})" for info in infos) or "none"
        raise DeviceError(f"no adapter is called {device!r}; there are: {there}")
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
