"""The doctor's report for people, and without anything that says whose machine it is."""

from __future__ import annotations

import getpass
import re
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from xinfer.doctor.isolated import BROKEN, FAILURES
from xinfer.gpu import kind_name

COMMON_NAMES = frozenset({"root", "user", "admin", "administrator", "runner", "build", "gpu"})  # they say nothing
LEAST_NAME = 3  # shorter names would be found in words
_HOMES = re.compile(r"(?:/home/|/Users/)[^/\s'\":;,]+|[A-Za-z]:\\+Users\\+[^\\\"':;,]+")


def anonymous(report: Any) -> Any:
    """The same with the home folder, user name and host name taken out of every text."""
    return _replaced(report, _private_names())


def _private_names() -> list[tuple[re.Pattern[str], str]]:
    names: list[tuple[re.Pattern[str], str]] = []
    with suppress(RuntimeError):  # no home
        names.append((re.compile(re.escape(str(Path.home()))), "~"))
    names.append((_HOMES, "~"))
    for read, stands_for in ((getpass.getuser, "<user>"), (socket.gethostname, "<host>")):
        try:
            name = read()
        except (OSError, KeyError, ImportError):
            continue
        if len(name) >= LEAST_NAME and name.lower() not in COMMON_NAMES | {"localhost"}:
            names.append((re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE), stands_for))
    return names


def _replaced(value: Any, names: list[tuple[re.Pattern[str], str]]) -> Any:
    if isinstance(value, str):
        for pattern, stands_for in names:
            value = pattern.sub(stands_for, value)
        return value
    if isinstance(value, dict):
        return {_replaced(key, names): _replaced(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, names) for item in value]
    return value


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"xinfer {report['xinfer']}, Python {report['python']}, {report['system']}"]
    survey = report["survey"]
    if survey["outcome"] != "right":
        lines.append(f"listing the adapters {survey['outcome']}: {survey['detail']}")
    if not report["adapters"]:
        lines += ["", "there is no adapter to examine"]
    for adapter in report["adapters"]:
        lines += ["", *_adapter_lines(adapter)]
    for name in report["not_examined"]:
        lines += ["", f"{name}: not examined; --device names it"]
    for api, reasons in report["missing"].items():
        lines += ["", f"no GPU through {api}:", *(f"  {reason}" for reason in reasons)]
    if report["directml"] is not None:
        provider = report["directml"].get("provider")
        what = f"DirectML ({provider})" if provider else "DirectML"
        lines += ["", f"{what}: {report['directml']['outcome']} {report['directml']['detail']}".rstrip()]
    lines += ["", f"it took {report['seconds']:,.0f} s"]
    return "\n".join(lines)


def _adapter_lines(adapter: dict[str, Any]) -> list[str]:
    memory = adapter["memory"]
    size = f"{adapter['heap_bytes'] / 1e9:.1f} GB"
    if memory:
        free, budget = max(0, memory["budget"] - memory["used"]), memory["budget"]
        size += f", {free / 1e9:.1f} GB of a budget of {budget / 1e9:.1f} free"
    lines = [
        f"{adapter['selector']}  {adapter['name']} ({kind_name(adapter['kind'])})",
        f"  driver     {adapter['driver']} {adapter['driver_version']}, {adapter['api']} {adapter['api_version']}",
        f"  memory     {size}",
        f"  bindings   up to {adapter['max_storage_range'] / 1e6:,.0f} MB",
        f"  workgroups up to {adapter['max_workgroup_invocations']:,} lanes, {adapter['max_shared_bytes']:,} B shared",
        f"  subgroups  {adapter['subgroup_size_min']} to {adapter['subgroup_size_max']}",
        f"  features   {', '.join(adapter['features']) or 'none'}",
    ]
    if adapter["opened"]["outcome"] != "right":
        return [*lines, f"  it cannot be opened: {adapter['opened']['outcome']} {adapter['opened']['detail']}"]
    counts = Counter(entry["outcome"] for entry in adapter["variants"])
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    lines.append(f"  kernels    {summary} ({adapter['scale']}; {adapter['seconds']:,.0f} s)")
    failed = [entry for entry in adapter["variants"] if entry["outcome"] in (*FAILURES, BROKEN)]
    lines += [f"  {entry['outcome'].upper():<9}  {entry['variant']}: {entry['detail']}" for entry in failed]
    unsteady = [entry for entry in adapter["variants"] if entry["beside_others"] and entry not in failed]
    lines += [f"  ALONE      {e['variant']}: {e['outcome']}; beside others: {e['beside_others']}" for e in unsteady]
    if adapter["not_kept"]:
        lines.append(f"  NOT KEPT   {adapter['not_kept']}")
    if adapter["quarantined"]:
        lines.append(f"  quarantine {', '.join(adapter['quarantined'])}: other kernels are used in their place")
    if adapter["lifted"]:
        lines.append(f"  lifted     {', '.join(adapter['lifted'])}: right again")
    return lines
