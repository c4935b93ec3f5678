"""Matrix products on matrix cores: activations are packed into f16 halves once, then multiplied with any matrix."""

from __future__ import annotations

from dataclasses import dataclass

from xinfer.gpu.api import Bindable
from xinfer.ops._base import Matrix, Recorder, Rows, ceil_div, expect, span
from xinfer.ops._linear import FLAG_ACCUMULATE, FLAG_BIAS, GEMV_ROWS_MAX
from xinfer.shaders.catalog import LOAD_BYTES, PACKED_COLUMNS, PACKED_ROWS, coop_id, variants

BUSY_TILES = 100  # large tiles that keep a large GPU busy; where there are fewer, small ones are faster


@dataclass(frozen=True, slots=True)
class PackedRows:
    """`n` rows of `width` activations as two f16 halves and a scale a row; `place` holds `packed_bytes`."""

    place: Bindable
    n: int
    width: int

    @property
    def padded(self) -> int:
        """Rows, padding included."""
        return ceil_div(self.n, PACKED_ROWS) * PACKED_ROWS

    @property
    def row_loads(self) -> int:
        """16-byte loads of a row of halves."""
        return ceil_div(self.width, PACKED_COLUMNS) * PACKED_COLUMNS * 2 // LOAD_BYTES

    @property
    def scales(self) -> Bindable:
        """One float32 a row."""
        return self.place[: 4 * self.padded]

    @property
    def halves(self) -> Bindable:
        """The high halves of all rows, then the low ones."""
        return self.place[4 * self.padded : packed_bytes(self.n, self.width)]


def packed_bytes(n: int, width: int) -> int:
    """Bytes of n packed rows."""
    padded = ceil_div(n, PACKED_ROWS) * PACKED_ROWS
    return padded * (4 + 4 * ceil_div(width, PACKED_COLUMNS) * PACKED_COLUMNS)


def pack_rows(on: Recorder, x: Rows, packed: PackedRows, *, label: str, variant: str | None = None) -> None:
    """Pack x, (T, width): scale * (high + low), to 22 bits of a row's largest value."""
    expect((x.n, x.width) == (packed.n, packed.width), f"{label}: x is {x.n} x {x.width}, not as packed")
    expect(packed.place.size >= packed_bytes(x.n, x.width), f"{label}: {packed_bytes(x.n, x.width)} bytes are needed")
    chosen = on.choose(["pack_rows.wave", "pack_rows.plain"], variant)
    constants = {
        "width": x.width,
        "x_rows": x.n,
        "row_loads": packed.row_loads,
        "low_offset": packed.padded * packed.row_loads,
        **span(x, "x"),
    }
    buffers = {"x": x.place, "scales": packed.scales, "halves": packed.halves}
    on.dispatch(chosen, buffers, constants, (packed.padded, 1, 1), label)


def linear_packed(
    on: Recorder,
    x: PackedRows,
    w: Matrix,
    out: Rows,
    *,
    bias: Bindable | None = None,
    accumulate: bool = False,
    exact: bool = True,
    label: str,
    variant: str | None = None,
) -> None:
    """As `linear`, x packed, on matrix cores; where `can_pack` says so.

    `exact` multiplies both halves (errors like float32's); without, only the high ones, as f16 activations would.
    """
    expect(x.width == w.columns and out.width == w.rows and out.n == x.n, f"{label}: x, w and out do not fit")
    expect(bias is None or bias.size >= 4 * w.rows, f"{label}: the bias is shorter than {w.rows} floats")
    chosen = on.choose(packed_candidates(w, x.n, exact=exact), variant)
    for part in w.slices:
        constants = {
            "rows": part.n_rows,
            "row_loads": w.row_loads,
            "x_rows": x.n,
            "x_loads": x.row_loads,
            "low_offset": x.padded * x.row_loads,
            "bias_offset": part.first_row,
            "y_stride": out.stride,
            "y_offset": out.offset + part.first_row,
            "flags": FLAG_BIAS * (bias is not None) + FLAG_ACCUMULATE * accumulate,
        }
        buffers = {
            "scales": x.scales,
            "halves": x.halves,
            "w": part.place,
            "bias": x.scales if bias is None else bias,
            "y": out.place,
        }
        grid = (ceil_div(x.n, chosen.define("TILE_M")), ceil_div(part.n_rows, chosen.define("TILE_N")), 1)
        on.dispatch(chosen, buffers, constants, grid, label)


def can_pack(on: Recorder, w: Matrix, n_rows: int, *, exact: bool = True) -> bool:
    """Whether linear_packed takes the matrix, and pays for so many rows."""
    return n_rows > GEMV_ROWS_MAX and any(on.kernels.usable(name) for name in packed_candidates(w, n_rows, exact=exact))


def packed_candidates(w: Matrix, n_rows: int, *, exact: bool) -> list[str]:
    """Variants that fit, best first."""
    if w.format == "f32":
        return []
    large = ceil_div(n_rows, 128) * ceil_div(w.rows, 128) >= BUSY_TILES
    tiles = (128, 64) if large else (64, 128)
    return [coop_id(w.format, tile, split=exact) for tile in tiles]


def pack_trips(variant_id: str, *, width: int) -> int:
    """Loop iterations of one lane of pack_rows."""
    group = variants()[variant_id].workgroup[0]
    return ceil_div(width, group) + ceil_div(width, 8 * group) + group


def packed_trips(*, columns: int) -> int:
    """Loop iterations of one lane of linear_packed."""
    return ceil_div(columns, PACKED_COLUMNS) + 64 * 8
