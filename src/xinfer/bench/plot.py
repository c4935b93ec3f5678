"""The report of `xinfer bench` as a picture: a roofline, made with matplotlib (extra `[plot]`).

What a kernel reaches, in operations a second, over how many it does with a byte of memory. The two roofs are what the
device reached in the same run; a point lies as far below them as there is to gain.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, BinaryIO

from xinfer.bench.text import in_units
from xinfer.errors import RequestError

FORMS = {".png": "png", ".svg": "svg"}
STYLES = {"prompt": ("o", "#1f77b4"), "decode": ("s", "#d95f02")}
SHARES = {
    "prompt": ("share_of_matrix_rate", "prompts: tokens, and share of the matrix rate"),
    "decode": ("share_of_memory_speed", "decode steps: tokens before them, and share of the memory's speed"),
}
ROOF = "#444444"


def check_plot() -> None:
    """Refuse, before anything is measured, to draw without matplotlib. Raises RequestError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("--plot needs matplotlib, which is not installed: pip install 'xinfer-llm[plot]'")


def draw(report: dict[str, Any], file: BinaryIO, form: str) -> None:
    """Write a report, of a GPU, as a picture: form is "png" or "svg"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, speeds = report["rows"], report["speeds"]
    matrix, memory = speeds["matrix"], speeds["memory"]
    ridge = matrix / memory
    at = [(row["flops"] / row["bytes"], row["flops"] / row["seconds"]["median"]) for row in rows]
    left = min([0.25, ridge / 10, *(x / 2 for x, _ in at)])
    right = max([ridge * 10, *(x * 3 for x, _ in at)])
    low = min([left * memory / 2, *(y / 3 for _, y in at)])
    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, matrix * 4))
    axes.plot([left, ridge, right], [left * memory, matrix, matrix], color=ROOF, linewidth=2, zorder=2)
    axes.fill_between([left, ridge, right], [left * memory, matrix, matrix], low, color=ROOF, alpha=0.05, zorder=1)
    _name_roofs(axes, left, right, low, matrix, memory)
    for kind, (marker, color) in STYLES.items():
        own = [(row, point) for row, point in zip(rows, at, strict=True) if row["kind"] == kind]
        if own:
            share, title = SHARES[kind]
            x, y = zip(*(point for _, point in own), strict=True)
            axes.plot(x, y, marker, color=color, markersize=8, markeredgecolor="white", label=title, zorder=4)
            _name_points(axes, [(row["tokens"], row[share], *point) for row, point in own], color)
    axes.set_xlabel("operations a byte of memory that has to be read")
    axes.set_ylabel("operations a second")
    axes.yaxis.set_major_formatter(lambda value, _: in_units(value))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.15g}")
    axes.grid(visible=True, which="major", alpha=0.25, zorder=0)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(f"{Path(report['model']).name} on {report['device']}", loc="left", fontsize=11)
    # Without a date and random names, so that the same report gives the same file.
    with rc_context({"svg.hashsalt": "xinfer", "svg.fonttype": "none"}):
        figure.savefig(file, format=form, metadata={"Date": None} if form == "svg" else None)


def _name_roofs(axes: Any, left: float, right: float, low: float, matrix: float, memory: float) -> None:
    style: dict[str, Any] = {"color": ROOF, "fontsize": 9}
    axes.text(
        right / 1.1, matrix * 1.12, f"matrix products, {in_units(matrix)}FLOP/s", ha="right", va="bottom", **style
    )
    begin = max(left, low / memory) * 1.15
    axes.text(
        *(begin, begin * memory * 1.25, f"memory, {in_units(memory)}B/s"),
        rotation=_angle(axes),
        rotation_mode="anchor",
        **style,
    )


def _angle(axes: Any) -> float:
    """Degrees at which the slope of 1 is seen between logarithmic axes."""
    from math import atan2, degrees, log10

    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    width, height = axes.figure.get_size_inches()
    return degrees(atan2(0.82 * height / log10(high / low), 0.88 * width / log10(right / left)))


def _name_points(axes: Any, points: list[tuple[int, float, float, float]], color: str) -> None:
    """Tokens and share beside each point, on its two sides in turns: decode steps lie close together."""
    for i, (tokens, share, x, y) in enumerate(sorted(points, key=lambda point: point[2])):
        below = i % 2 == 0
        axes.annotate(
            f"{tokens:,}: {share:.0%}",
            (x, y),
            xytext=(7, -5) if below else (-7, 5),
            textcoords="offset points",
            ha="left" if below else "right",
            va="top" if below else "bottom",
            fontsize=9,
            color=color,
            bbox={"facecolor": "white", "alpha": 0.6, "edgecolor": "none", "pad": 0.5},  # legible on a roof, too
            zorder=5,
        )
