"""The report of `xinfer bench` for people."""

from __future__ import annotations

from typing import Any

HEADER = ("", "median", "quartiles", "tok/s")
SHARES = {"share_of_memory_speed": "memory", "share_of_matrix_rate": "matrix", "share_of_bus_speed": "bus"}


def as_text(report: dict[str, Any]) -> str:
    """A table, what the shares are of, and what was left out."""
    rows: list[dict[str, Any]] = report["rows"]
    shares = [name for name in SHARES if any(name in row for row in rows)]
    table = [[*HEADER, *(SHARES[name] for name in shares)]]
    for row in rows:
        seconds = row["seconds"]
        table.append(
            [
                f"{row['kind']} {'of' if row['kind'] == 'prompt' else 'behind'} {row['tokens']:,}",
                duration(seconds["median"]),
                f"{duration(seconds['quartile_low'])} to {duration(seconds['quartile_high'])}",
                rate(row["tokens_per_second"]),
                *(f"{row[name]:.0%}" if name in row else "-" for name in shares),
            ]
        )
    driver = f", driver {report['driver']}" if "driver" in report else ""
    lines = [
        f"{report['model']}: {report['parameters'] / 1e6:,.0f} M parameters on {report['device']}{driver}",
        "",
        *aligned(table),
        "",
        (
            f"Each is the median of {report['repeats']} runs, of {report['decode_tokens']} tokens where it is decode: "
            "the time of a whole prompt, or of one decoded token."
        ),
        *_device(report),
        f"Most memory taken: {_memory(report['memory'])}.",
        *(f"Left out: {what}." for what in report["left_out"]),
    ]
    return "\n".join(lines)


def _device(report: dict[str, Any]) -> list[str]:
    """The device's own speeds, which the shares are of."""
    speeds = report["speeds"]
    if speeds is None:
        return []
    lines = [
        (
            f"The device itself, in this run: kernels read memory at {in_units(speeds['memory'])}B/s and multiply "
            f"matrices at {in_units(speeds['matrix'])}FLOP/s ({speeds['matrix_kernel']}); the bus brings "
            f"{in_units(speeds['bus'])}B/s."
        ),
        "Shares are of these: what the work needs at least, over what the device could have done in the time.",
    ]
    if report["streamed_layers"]:
        lines.append(f"{report['streamed_layers']} layers are streamed: the bus limits decoding, not the memory.")
    return lines


def _memory(memory: dict[str, int | None]) -> str:
    parts = [("device_peak", "of the device"), ("process_peak", "of the host by this process")]
    told = [f"{memory[name] / 1e9:,.2f} GB {what}" for name, what in parts if memory.get(name)]  # type: ignore[operator]
    return ", ".join(told) or "the system does not say"


def aligned(table: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def in_units(value: float) -> str:
    """A large number with the prefix of its unit, which is to follow: "280 T"."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g} "


def duration(seconds: float) -> str:
    """Seconds in the unit that leaves three digits or four."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 100 else f"{seconds * scale:,.0f} {unit}"
    return f"{seconds * 1e6:,.0f} us"


def rate(tokens_per_second: float) -> str:
    """Tokens a second, a digit behind the point where there are few."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:,.1f}"
