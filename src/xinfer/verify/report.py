"""The report as data, and as text for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xinfer._version import __version__
from xinfer.gpu.api import DeviceInfo
from xinfer.model.config import Qwen2Config
from xinfer.verify.culprit import Diagnosis, first_not_finite, network_order
from xinfer.verify.findings import END_OPS, LAYER_OPS, Case, Finding
from xinfer.verify.recorded import Difference

TOLERANCE = (
    "A tolerance is how far rounding may take a right kernel from the reference at that number, by its type and the "
    "length of its sum: an error of 1 is all of it, as where a single rounding decides, and above 1 an op is wrong."
)
SHOWN_VARIANTS = 12
SHOWN_MESSAGES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Everything that one verification found."""

    model: str
    config: Qwen2Config
    info: DeviceInfo
    quarantine: Sequence[str]
    debug: bool
    debug_note: str  # why it is off
    messages: Sequence[str]
    cases: Sequence[Case]
    not_tried: Sequence[str]  # kernels that the model's recordings of longer prompts use
    findings: Sequence[Finding]
    differences: Sequence[Difference]
    diagnoses: Sequence[Diagnosis]
    damaged: Sequence[str] = ()  # tensors that hold NaN or infinity, where the first op that makes such takes them
    seconds: float


def as_dict(verified: Verified) -> dict[str, Any]:
    """The report for machines; no path, user or host is in it."""
    config, info = verified.config, verified.info
    wrong = [finding for finding in verified.findings if not finding.judgement.right]
    broken = first_not_finite(verified.findings)
    right = not wrong and not any(difference.wrong for difference in verified.differences) and broken is None
    return {
        "xinfer": __version__,
        "right": right,
        "model": {
            "name": verified.model,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "vocab_size": config.vocab_size,
            "parameters": config.num_parameters(),
        },
        "device": {
            "selector": f"{info.api}:{info.index}",
            **{
                name: getattr(info, name) for name in ("name", "kind", "driver", "driver_version", "api", "api_version")
            },
        },
        "quarantine": sorted(verified.quarantine),
        "debug_layer": {"on": verified.debug, "note": verified.debug_note, "messages": list(verified.messages)},
        "seconds": round(verified.seconds, 1),
        "cases": [dataclasses.asdict(case) for case in verified.cases],
        "not_tried": list(verified.not_tried),
        "ops_judged": len(verified.findings),
        "numbers_judged": sum(finding.judgement.n for finding in verified.findings),
        "numbers_not_finite": sum(finding.judgement.n_skipped for finding in verified.findings),
        "not_finite": None if broken is None else _not_finite(broken, verified.damaged),
        "first": _finding(min(wrong, key=network_order)) if wrong else None,
        "worst": _finding(max(verified.findings, key=lambda finding: finding.judgement.ratio)),
        "divergences": [_diagnosis(diagnosis) for diagnosis in verified.diagnoses],
        "recordings": [
            {"case": d.case, "what": d.what, "error": min(d.error, 1e9), "wrong": d.wrong} for d in verified.differences
        ],
        "errors": _errors(verified),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    judgement = finding.judgement
    return {
        "op": finding.op,
        "layer": finding.layer,
        "case": finding.case,
        "variants": list(finding.variants),
        "what": finding.what,
        "ratio": _short(judgement.ratio),
        "error": _finite(judgement.error),
        "tolerance": _finite(judgement.tolerance),
        "wrong_numbers": judgement.n_wrong,
        "numbers": judgement.n,
        "detail": str(judgement),
    }


def _not_finite(finding: Finding, tensors: Sequence[str]) -> dict[str, Any]:
    return {"op": finding.op, "layer": finding.layer, "case": finding.case, "tensors": list(tensors)}


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        **_finding(diagnosis.finding),
        "layers": list(diagnosis.layers),
        "cases": list(diagnosis.cases),
        "culprits": list(diagnosis.culprits),
        "verdict": diagnosis.verdict,
        "alone": [
            {
                "op": part.op,
                "shape": part.shape,
                "variants": [
                    {"variant": a.variant, "right": a.right, "ratio": _short(a.ratio), "detail": a.detail}
                    for a in part.attempts
                ],
            }
            for part in diagnosis.alone
        ],
        "elsewhere": [
            {"device": other.device, "right": other.attempt.right, "detail": other.attempt.detail}
            for other in diagnosis.elsewhere
        ],
    }


def _errors(verified: Verified) -> dict[str, Any]:
    """The heat map: for each case, rows of layers by columns of ops, errors in units of their tolerances."""
    ops = [op for op in LAYER_OPS if any(f.op == op and f.layer is not None for f in verified.findings)]
    ends = [op for op in END_OPS if any(f.op == op and f.layer is None for f in verified.findings)]
    worst: dict[tuple[str, int | None, str], float] = {}
    variants: dict[tuple[str, str], set[str]] = {}
    for finding in verified.findings:
        key = (finding.case, finding.layer, finding.op)
        worst[key] = max(worst.get(key, 0.0), finding.judgement.ratio)
        variants.setdefault((finding.case, finding.op), set()).update(finding.variants)

    def cell(case: str, layer: int | None, op: str) -> float | None:
        value = worst.get((case, layer, op))
        return None if value is None else _short(value)

    return {
        "ops": ops,
        "ends": ends,
        "by_case": [
            {
                "case": case.name,
                "layers": [[cell(case.name, i, op) for op in ops] for i in range(verified.config.num_hidden_layers)],
                "ends": [cell(case.name, None, op) for op in ends],
                "variants": {op: sorted(variants.get((case.name, op), ())) for op in (*ops, *ends)},
            }
            for case in verified.cases
        ],
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _finite(value: float) -> float | None:
    """JSON has no NaN: a number that is none becomes null."""
    return value if value - value == 0 else None


def as_text(report: dict[str, Any]) -> str:
    """The report for people."""
    device, model = report["device"], report["model"]
    debug = report["debug_layer"]
    note = f" ({debug['note']})" if debug["note"] else ""
    what = f"{model['name']} ({model['layers']} layers, {model['parameters']:,} parameters)"
    where = f"{device['selector']} {device['name']}, {device['driver']} {device['driver_version']}"
    count = f"{len(report['cases'])} cases, {report['ops_judged']:,} ops, {report['numbers_judged']:,} numbers"
    lines = [
        f"{what} on {where}",
        f"{count} against the reference in {report['seconds']} s; debug layer {'on' if debug['on'] else 'off'}{note}",
    ]
    if report["quarantine"]:
        lines.append(f"in quarantine, and not used: {', '.join(report['quarantine'])}")
    if report["not_tried"]:
        lines.append(f"not tried, as only longer prompts use them (--longest): {', '.join(report['not_tried'])}")
    lines += _verdict_lines(report)
    for divergence in report["divergences"]:
        lines += ["", *_divergence_lines(divergence)]
    messages = debug["messages"]
    if messages:
        lines += ["", f"the debug layer said ({len(messages)}):", *(f"  {text}" for text in messages[:SHOWN_MESSAGES])]
    if report.get("against"):
        lines += ["", "against:", as_text(report["against"]), "", f"both: {report['both']}"]
    return "\n".join(lines)


def _verdict_lines(report: dict[str, Any]) -> list[str]:
    worst, first = report["worst"], report["first"]
    wrong = [entry for entry in report["recordings"] if entry["wrong"]]
    lines = []
    if first is not None:
        lines.append(f"DIVERGED, first at {place(first)}, {first['case']}, by {' and '.join(first['variants'])}:")
        lines.append(f"  {first['what']}: {first['detail']}")
    else:
        lines.append(
            f"every op {'that could be judged ' if report['not_finite'] else ''}is right; the largest error is "
            f"{worst['ratio']:.3g} of its tolerance ({place(worst)}, {worst['case']})"
        )
    lines.append(TOLERANCE)
    if report["not_finite"]:
        lines.append(f"{not_finite(report)}; {report['numbers_not_finite']:,} numbers were not judged")
    if wrong:
        lines.append(
            f"DIVERGED: the recording of {wrong[0]['case']!r} does not give what its ops give one by one: "
            f"{wrong[0]['what']}, relative error {wrong[0]['error']:.2g}; a barrier is missing, or the driver reorders"
        )
    elif report["recordings"]:
        largest = max(entry["error"] for entry in report["recordings"])
        lines.append(f"recordings give what their ops give one by one, but for rounding (relative error {largest:.2g})")
    else:
        lines.append("recordings give what their ops give one by one, bit for bit")
    return lines


def not_finite(report: dict[str, Any]) -> str:
    """Where NaN or infinity comes up first, and who makes it, for people."""
    entry = report["not_finite"]
    where = f"{place(entry)}, {entry['case']}"
    if entry["tensors"]:
        return f"NOT FINITE, first at {where}: not by the device, but by the weights: {', '.join(entry['tensors'])}"
    if report["first"] is not None:
        return f"NOT FINITE from {where} on, in the reference, too, which is given what the device made"
    return (
        f"NOT FINITE, first at {where}: not by the device, as the reference makes NaN or infinity of the same weights, "
        "which are finite themselves but too large"
    )


def place(entry: dict[str, Any]) -> str:
    """Where in the network, for people."""
    return str(entry["op"]) if entry["layer"] is None else f"{entry['op']} of layer {entry['layer']}"


def _divergence_lines(divergence: dict[str, Any]) -> list[str]:
    layers = [layer for layer in divergence["layers"] if layer is not None]
    where = f" in {len(layers)} layers" if len(layers) > 1 else ""
    what = f"{divergence['op']} by {' and '.join(divergence['variants'])}"
    lines = [f"{what}{where}, {len(divergence['cases'])} cases: {divergence['verdict']}"]
    for part in divergence["alone"]:
        lines.append(f"  {part['op']} alone ({part['shape']}):")
        shown = sorted(part["variants"], key=lambda entry: entry["right"])[:SHOWN_VARIANTS]
        lines += [f"    {'right' if v['right'] else 'WRONG'}  {v['variant']}, {v['ratio']:.2g}" for v in shown]
        if len(part["variants"]) > len(shown):
            lines.append(f"    and {len(part['variants']) - len(shown)} more that are right")
    lines += [f"  on {other['device']}: {'right' if other['right'] else 'WRONG'}" for other in divergence["elsewhere"]]
    return lines
