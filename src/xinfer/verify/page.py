"""The report as one page: inline style and SVG, nothing from the network."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from xinfer.gpu import kind_name
from xinfer.verify.report import TOLERANCE, not_finite, place

CELL_W, CELL_H, LEFT, TOP = 62, 15, 66, 20
FLOOR = 1e-4  # errors below this share of the tolerance look alike

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #626a73; --line: #d7dbe0; --paper: #fff; --none: #eceef1; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #9aa3ad; --line: #3a4048; --paper: #15181c; --none: #262b31; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.05rem; padding: .7rem 1rem; border-left: .35rem solid; margin: 1rem 0; }
.right { border-color: #1b8a5a; } .wrong { border-color: #c62f3b; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem .9rem .15rem 0; vertical-align: top; }
th { color: var(--soft); font-weight: 500; } code { font-size: .88em; } .soft { color: var(--soft); }
rect { width: 60px; height: 13px; rx: 2px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); } .bad { color: #c62f3b; font-weight: 600; }
details { margin: .4rem 0; } summary { cursor: pointer; } .scroll { overflow-x: auto; }
"""


_EXPLANATION = (
    f'<p class="soft">Each cell is the largest error in units of its tolerance, over all cases. {TOLERANCE} '
    "A fused op stands for those left of it that were not run. Point at a cell for its number.</p>"
)


def as_page(report: dict[str, Any]) -> str:
    """The whole page."""
    title = f"xinfer verify: {report['model']['name']} on {report['device']['name']}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>",
        *_report(report),
    ]
    if report.get("against"):
        parts += [f"<h2>Both</h2><p>{escape(report['both'])}</p><hr>", *_report(report["against"])]
    return "\n".join([*parts, "</html>"]) + "\n"


def _report(report: dict[str, Any]) -> list[str]:
    device, model = report["device"], report["model"]
    rows = [
        ("device", f"{device['name']} ({device['selector']}, {kind_name(device['kind'])})"),
        ("driver", f"{device['driver']} {device['driver_version']}, {device['api']} {device['api_version']}"),
        ("model", f"{model['layers']} layers of {model['hidden_size']}, {model['parameters']:,} parameters"),
        ("compared", f"{report['numbers_judged']:,} numbers of {report['ops_judged']:,} ops, {report['seconds']} s"),
        ("debug layer", _debug(report["debug_layer"])),
        ("quarantine", ", ".join(report["quarantine"]) or "empty"),
        ("not tried", ", ".join(report["not_tried"]) or "no kernel of the model's recordings"),
        ("xinfer", report["xinfer"]),
    ]
    return [
        f"<h1>{escape(model['name'])} on {escape(device['name'])}</h1>",
        '<p class="soft">Every op of every layer against the reference, on what the device itself gave it.</p>',
        _verdict(report),
        _table(rows),
        *_divergences(report["divergences"]),
        *_recordings(report["recordings"]),
        "<h2>Errors by layer and op</h2>",
        _EXPLANATION,
        _legend(),
        _heat_map(report["errors"], report["errors"]["by_case"]),
        "<h2>Case by case</h2>",
        *(_case(report["errors"], case) for case in report["errors"]["by_case"]),
        *_messages(report["debug_layer"]["messages"]),
    ]


def _debug(layer: dict[str, Any]) -> str:
    said = f", {len(layer['messages'])} messages" if layer["messages"] else ", silent"
    return f"on{said}" if layer["on"] else f"off ({layer['note']})"


def _verdict(report: dict[str, Any]) -> str:
    first, worst = report["first"], report["worst"]
    wrong = [entry for entry in report["recordings"] if entry["wrong"]]
    if report["right"]:
        text = f"Everything is right. The largest error is {worst['ratio']:.3g} of its tolerance, at {place(worst)}."
    elif first is not None:
        names = " and ".join(first["variants"])
        text = f"Diverged, first at {place(first)} by {names} ({first['case']}): {first['detail']}."
    elif report["not_finite"]:
        text = f"{not_finite(report)}. What could be judged is right."
    else:
        text = f"Diverged: the recording of {wrong[0]['case']} differs from its ops at {wrong[0]['what']}."
    return f'<p class="verdict {"right" if report["right"] else "wrong"}">{escape(text)}</p>'


def _table(rows: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}<td>{escape(b)}" for a, b in rows) + "</table>"


def _divergences(divergences: list[dict[str, Any]]) -> list[str]:
    if not divergences:
        return []
    parts = ["<h2>Divergences</h2>"]
    for entry in divergences:
        parts.append(f"<h3><code>{escape(' + '.join(entry['variants']))}</code>, {escape(place(entry))}</h3>")
        parts.append(f"<p>{escape(entry['verdict'])}.</p>")
        for part in entry["alone"]:
            rows = "".join(
                f"<tr><td><code>{escape(v['variant'])}</code><td>{_right(v)}<td>{v['ratio']:.3g}"
                for v in part["variants"]
            )
            title = f"{part['op']} alone, {part['shape']}"
            parts.append(f"<details open><summary>{escape(title)}</summary><table>{rows}</table></details>")
        parts += [f"<p>{escape(other['device'])}: {_right(other)}</p>" for other in entry["elsewhere"]]
    return parts


def _right(entry: dict[str, Any]) -> str:
    return "right" if entry["right"] else '<span class="bad">wrong</span>'


def _recordings(differences: list[dict[str, Any]]) -> list[str]:
    if not differences:
        return ["<p>The recorded steps give what their ops give one by one, bit for bit.</p>"]
    rows = [(entry["case"], f"{entry['what']}: relative error {entry['error']:.2g}") for entry in differences]
    return ["<h2>Recordings that differ from their ops</h2>", _table(rows)]


def _messages(messages: list[str]) -> list[str]:
    if not messages:
        return []
    return ["<h2>What the debug layer said</h2><ul>", *(f"<li>{escape(text)}" for text in messages), "</ul>"]


def _case(errors: dict[str, Any], case: dict[str, Any]) -> str:
    rows = [(op, ", ".join(names)) for op, names in case["variants"].items() if names]
    return (
        f"<details><summary>{escape(case['case'])}</summary>{_heat_map(errors, [case])}"
        f"<p class='soft'>The kernels that ran:</p>{_table(rows)}</details>"
    )


def _heat_map(errors: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    """Layers downwards, ops to the right; the embedding above, the head below."""
    ops, ends = errors["ops"], errors["ends"]
    n_layers = len(cases[0]["layers"])
    first = [op for op in ends if op == "embed"]
    last = [op for op in ends if op != "embed"]
    width = LEFT + CELL_W * max(len(ops), len(ends)) + 4
    height = TOP + CELL_H * (n_layers + 2) + 2 * TOP + 6
    svg = [
        f'<div class="scroll"><svg width="{width}" height="{height}" role="img" aria-label="errors by layer and op">'
    ]

    def row(y: int, name: str, labels: list[str], values: list[float | None]) -> None:
        svg.append(f'<text x="0" y="{y + 11}">{escape(name)}</text>')
        svg.extend(_cell(LEFT + CELL_W * j, y, f"{name}, {labels[j]}", value) for j, value in enumerate(values))

    def heads(y: int, labels: list[str]) -> None:
        svg.extend(f'<text x="{LEFT + CELL_W * j}" y="{y}">{escape(label)}</text>' for j, label in enumerate(labels))

    y = 0
    for op in first:
        row(y, "embed", [op], [_worst([case["ends"][ends.index(op)] for case in cases])])
    y += TOP + CELL_H
    heads(y - 4, ops)
    for i in range(n_layers):
        values = [_worst([case["layers"][i][j] for case in cases]) for j in range(len(ops))]
        row(y, f"layer {i}", ops, values)
        y += CELL_H
    y += TOP
    heads(y - 4, last)
    row(y, "head", last, [_worst([case["ends"][ends.index(op)] for case in cases]) for op in last])
    svg.append("</svg></div>")
    return "".join(svg)


def _worst(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _cell(x: int, y: int, what: str, value: float | None) -> str:
    said = "not run by itself" if value is None else f"{value:.3g}"
    return f'<rect x="{x}" y="{y}" fill="{_colour(value)}"><title>{escape(what)}: {said}</title></rect>'


def _colour(value: float | None) -> str:
    """From pale to deep blue up to the tolerance, on a logarithmic scale; red above."""
    if value is None:
        return "var(--none)"
    if value > 1:
        return "#c62f3b"
    share = math.log(max(value, FLOOR) / FLOOR) / math.log(1 / FLOOR)
    return f"hsl({205 + 20 * share:.0f} {45 + 25 * share:.0f}% {88 - 48 * share:.0f}%)"


def _legend() -> str:
    steps = [FLOOR, 1e-3, 1e-2, 1e-1, 1.0, 2.0]
    cells = "".join(_cell(i * CELL_W, 0, "legend", value) for i, value in enumerate(steps))
    names = ["0.0001", "0.001", "0.01", "0.1", "1", "above 1"]
    texts = "".join(f'<text x="{i * CELL_W}" y="{CELL_H + 11}">{name}</text>' for i, name in enumerate(names))
    return (
        f'<svg width="{CELL_W * len(steps)}" height="{CELL_H + 16}" role="img" aria-label="legend">{cells}{texts}</svg>'
    )
