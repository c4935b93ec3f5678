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
    """`n` rows of `width` activations as f16 halves and a scale a row; `place` holds `packed_bytes`.

    `exact`: two halves, whose sum is right to 22 bits of a row's largest value; else one, right to 11.
    """

    place: Bindable
    n: int
    width: int
    exact: bool = True

    @property
    def padded(self) -> int:
        """Rows, padding included."""
        return ceil_div(self.n, PACKED_ROWS) * PACKED_ROWS

    @property
    def row_loads(self) -> int:
        """16-byte loads of a row of halves."""
        return ceil_div(self.width, PACKED_COLUMNS) * PACKED_COLUMNS * 2 // LOAD_BYTES

    @property
    def low_offset(self) -> int:
        """16-byte loads from the high halves to the low ones; 0 where there are none."""
        return self.padded * self.row_loads if self.exact else 0

    @property
    def scales(self) -> Bindable:
        """One float32 a row."""
        return self.place[: 4 * self.padded]

    @property
    def halves(self) -> Bindable:
        """The high halves of all rows, then the low ones."""
        return self.place[4 * self.padded : packed_bytes(self.n, self.width, exact=self.exact)]


def packed_bytes(n: int, width: int, *, exact: bool = True) -> int:
    """Bytes of n packed rows."""
    padded = ceil_div(n, PACKED_ROWS) * PACKED_ROWS
    return padded * (4 + (4 if exact else 2) * ceil_div(width, PACKED_COLUMNS) * PACKED_COLUMNS)


def pack_rows(
    on: Recorder,
    x: Rows,
    packed: PackedRows,
    *,
    norm: tuple[Bindable, float] | None = None,
    up: Rows | None = None,
    label: str,
    variant: str | None = None,
) -> None:
    """Pack x, (T, width), or what one of the ops before a product makes of it.

    Args:
        on: where to record.
        x: activations.
        packed: what they become.
        norm: weight (width,) float32 and eps: rms_norm of x is packed, where `can_pack_fused` says so.
        up: as x: silu(x) * up is packed, likewise.
        label: for messages.
        variant: insist on it.
    """
    expect((x.n, x.width) == (packed.n, packed.width), f"{label}: x is {x.n} x {x.width}, not as packed")
    size = packed_bytes(x.n, x.width, exact=packed.exact)
    expect(packed.place.size >= size, f"{label}: {size} bytes are needed")
    expect(up is None or (up.n, up.width, up.stride) == (x.n, x.width, x.stride), f"{label}: up is not as x")
    expect(norm is None or up is None, f"{label}: one op at a time")
    form = "norm." if norm else "swiglu." if up else ""
    chosen = on.choose([f"pack_rows.{form}wave", f"pack_rows.{form}plain"], variant)
    constants = {
        "width": x.width,
        "x_rows": x.n,
        **span(x, "x"),
        "up_offset": up.offset if up else 0,
        "row_loads": packed.row_loads,
        "low_offset": packed.low_offset,
        "eps": float(norm[1]) if norm else 0.0,
    }
    other = norm[0] if norm else up.place if up else x.place
    buffers = {"x": x.place, "other": other, "scales": packed.scales, "halves": packed.halves}
    on.dispatch(chosen, buffers, constants, (packed.padded, 1, 1), label)


def can_pack_fused(on: Recorder, *rows: Rows) -> bool:
    """Whether pack_rows takes these together with the op before: they are read four numbers at a time."""
    fit = all(x.width % 8 == 0 and x.offset % 4 == 0 and x.stride % 4 == 0 for x in rows)
    return fit and all(
        on.kernels.usable(f"pack_rows.{form}.wave") or on.kernels.usable(f"pack_rows.{form}.plain")
        for form in ("norm", "swiglu")
    )


def linear_packed(
    on: Recorder,
    x: PackedRows,
    w: Matrix,
    out: Rows,
    *,
    bias: Bindable | None = None,
    accumulate: bool = False,
    label: str,
    variant: str | None = None,
) -> None:
    """As `linear`, x packed, on matrix cores; where `can_pack` says so.

    With exact rows errors are like float32's, else as f16 activations have them.
    """
    expect(x.width == w.columns and out.width == w.rows and out.n == x.n, f"{label}: x, w and out do not fit")
    expect(bias is None or bias.size >= 4 * w.rows, f"{label}: the bias is shorter than {w.rows} floats")
    chosen = on.choose(packed_candidates(w, x.n, exact=x.exact), variant)
    expect(bool(chosen.define("SPLIT")) == x.exact, f"{label}: {chosen.id} does not fit the rows")
    for part in w.slices:
        constants = {
            "rows": part.n_rows,
            "row_loads": w.row_loads,
            "x_rows": x.n,
            "x_loads": x.row_loads,
            "low_offset": x.low_offset,
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
    return 2 * ceil_div(width, 8 * group) + 2 * group


def packed_trips(*, columns: int) -> int:
    """Loop iterations of one lane of linear_packed."""
    return ceil_div(columns, PACKED_COLUMNS) + 64 * 8
