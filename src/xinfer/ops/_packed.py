"""Matrix products on matrix cores: activations are packed into f16 halves once, then multiplied with any matrix."""

from __future__ import annotations

from dataclasses import dataclass

from xinfer.gpu.api import Bindable
from xinfer.ops._base import Matrix, MatrixSlice, Recorder, Rows, ceil_div, expect, span
from xinfer.ops._linear import FLAG_ACCUMULATE, FLAG_BIAS, GEMV_ROWS_MAX, expect_alike
from xinfer.shaders.catalog import LOAD_BYTES, PACKED_COLUMNS, PACKED_ROWS, Variant, coop_id, variants

# On an H200, whose 132 multiprocessors hold two large tiles each (benchmarks/LOG.md):
LARGE_TILE = 128
SMALL_TILE = 64
BUSY_TILES = 100  # large tiles from which on they are faster than small ones,
BUSY_LONG_TILES = 40  # or where sums are long
RESIDENT_TILES = {LARGE_TILE: 264, SMALL_TILE: 528}  # below which long sums are divided,
LONG_ROWS = 2048  # columns from which on a sum is long,
MOST_PARTS = 4  # into so many
PACKED_LOADS = PACKED_COLUMNS * 2 // LOAD_BYTES  # of a packed row, or part of one: a multiple
SUM_PARTS = "sum_parts.plain"


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
    forms = ["norm."] if norm else ["swiglu."] if up else ["fours.", ""] if _by_fours(x) else [""]
    chosen = on.choose([f"pack_rows.{form}{name}" for form in forms for name in ("wave", "plain")], variant)
    constants = {
        "width": x.width,
        "x_rows": x.n,
        **span(x, "x"),
        "up_offset": up.offset if up else 0,
        "row_loads": packed.row_loads,
        "low_offset": packed.low_offset,
        "eps": float(norm[1]) if norm else 0.0,
    }
    buffers = {"x": x.place, "scales": packed.scales, "halves": packed.halves}
    if norm:
        buffers["other"] = norm[0]
    if up:
        buffers["other"] = up.place
    on.dispatch(chosen, buffers, constants, (packed.padded, 1, 1), label)


def can_pack_fused(on: Recorder, *rows: Rows) -> bool:
    """Whether pack_rows takes these together with the op before: they are read four numbers at a time."""
    return all(_by_fours(x) for x in rows) and all(
        on.kernels.usable(f"pack_rows.{form}.wave") or on.kernels.usable(f"pack_rows.{form}.plain")
        for form in ("norm", "swiglu")
    )


def _by_fours(x: Rows) -> bool:
    """Whether rows can be read four numbers at a time, and written eight at a time."""
    return x.width % 8 == 0 and x.offset % 4 == 0 and x.stride % 4 == 0


def linear_packed(
    on: Recorder,
    x: PackedRows,
    w: Matrix,
    out: Rows,
    *,
    bias: Bindable | None = None,
    accumulate: bool = False,
    scratch: Bindable | None = None,
    label: str,
    variant: str | None = None,
    n_parts: int | None = None,
) -> None:
    """As `linear`, x packed, on matrix cores; where `can_pack` says so.

    With exact rows errors are like float32's, else as f16 activations have them. Where a product makes few tiles its
    sums are shared among `n_parts` workgroups each, as far as `scratch` holds the parts: `parts_bytes`.
    """
    expect(bias is None or bias.size >= 4 * w.rows, f"{label}: the bias is shorter than {w.rows} floats")
    chosen = _chosen(on, x, w, out, label=label, variant=variant, swiglu=False)
    tile = chosen.define("TILE_M")
    if n_parts is None:
        n_parts = _parts_of(x.n, w.rows, w.columns, tile) if on.kernels.usable(SUM_PARTS) else 1
    room = 0 if scratch is None else scratch.size // (4 * x.n * w.rows)
    n_parts = n_parts if n_parts <= room else 1
    loads = ceil_div(ceil_div(x.row_loads, n_parts), PACKED_LOADS) * PACKED_LOADS
    divided = scratch is not None and n_parts > 1
    target = Rows.dense(scratch, x.n, w.rows) if scratch is not None and divided else out
    flags = FLAG_BIAS * (bias is not None) + FLAG_ACCUMULATE * accumulate
    for part in w.slices:
        constants = _constants(x, w, part, target) | {"flags": 0 if divided else flags, "part_loads": loads}
        buffers = {
            "scales": x.scales,
            "halves": x.halves,
            "w": part.place,
            "bias": x.scales if bias is None else bias,
            "y": target.place,
        }
        grid = (ceil_div(x.n, tile), ceil_div(part.n_rows, tile), ceil_div(x.row_loads, loads))
        on.dispatch(chosen, buffers, constants, grid, label)
    if divided:
        on.recording.barrier()
        n_parts = ceil_div(x.row_loads, loads)
        sum_parts(on, target.place, n_parts, out, bias=bias, accumulate=accumulate, label=f"{label}.sum")


def gate_up_packed(
    on: Recorder, x: PackedRows, gate: Matrix, up: Matrix, out: Rows, *, label: str, variant: str | None = None
) -> None:
    """As `gate_up`, x packed, on matrix cores; where `can_pack` with `swiglu` says so. Gate and up are sliced alike."""
    expect_alike(gate, up, label)
    chosen = _chosen(on, x, gate, out, label=label, variant=variant, swiglu=True)
    tile = chosen.define("TILE_M")
    for part, up_part in zip(gate.slices, up.slices, strict=True):
        constants = _constants(x, gate, part, out) | {"flags": 0, "part_loads": x.row_loads}
        buffers = {"scales": x.scales, "halves": x.halves, "w": part.place, "w2": up_part.place, "y": out.place}
        grid = (ceil_div(x.n, tile), ceil_div(2 * part.n_rows, tile), 1)  # half of a tile is up's
        on.dispatch(chosen, buffers, constants, grid, label)


def _chosen(
    on: Recorder, x: PackedRows, w: Matrix, out: Rows, *, label: str, variant: str | None, swiglu: bool
) -> Variant:
    expect(x.width == w.columns and out.width == w.rows and out.n == x.n, f"{label}: x, w and out do not fit")
    chosen = on.choose(packed_candidates(w, x.n, exact=x.exact, swiglu=swiglu), variant)
    fits = (bool(chosen.define("SPLIT")), bool(chosen.define("SWIGLU"))) == (x.exact, swiglu)
    expect(fits, f"{label}: {chosen.id} does not fit the rows")
    return chosen


def _constants(x: PackedRows, w: Matrix, part: MatrixSlice, out: Rows) -> dict[str, int | float]:
    """What every product of packed rows is told."""
    return {
        "rows": part.n_rows,
        "row_loads": w.row_loads,
        "x_rows": x.n,
        "x_loads": x.row_loads,
        "low_offset": x.low_offset,
        "bias_offset": part.first_row,
        "y_stride": out.stride,
        "y_offset": out.offset + part.first_row,
        "part_stride": x.n * w.rows,
    }


def sum_parts(
    on: Recorder,
    parts: Bindable,
    n_parts: int,
    out: Rows,
    *,
    bias: Bindable | None = None,
    accumulate: bool = False,
    label: str,
    variant: str | None = None,
) -> None:
    """`out = sum of parts (+ bias) (+ out)`: parts (n_parts, T, width), bias (width,) float32, out (T, width)."""
    expect(parts.size >= 4 * n_parts * out.n * out.width, f"{label}: there are less than {n_parts} parts")
    chosen = on.choose([SUM_PARTS], variant)
    constants = {
        "width": out.width,
        "n_parts": n_parts,
        "part_stride": out.n * out.width,
        **span(out, "y"),
        "flags": FLAG_BIAS * (bias is not None) + FLAG_ACCUMULATE * accumulate,
    }
    buffers = {"parts": parts, "bias": parts if bias is None else bias, "y": out.place}
    on.dispatch(chosen, buffers, constants, (ceil_div(out.width, chosen.workgroup[0]), out.n, 1), label)


def parts_bytes(n: int, rows: int, columns: int) -> int:
    """What linear_packed uses of a scratch at most, for up to n rows of x and a matrix (rows, columns)."""
    some = {*range(PACKED_ROWS, n + 1, PACKED_ROWS), n}
    sizes: list[int] = [4 * rows * m * _parts_of(m, rows, columns, tile) for m in some for tile in RESIDENT_TILES]
    return max(sizes)


def _parts_of(n: int, rows: int, columns: int, tile: int) -> int:
    """Into how many parts a sum over the columns is divided: few tiles leave most of a GPU idle for long."""
    tiles = ceil_div(n, tile) * ceil_div(rows, tile)
    if columns < LONG_ROWS or tiles >= RESIDENT_TILES[tile]:
        return 1
    wanted: int = ceil_div(RESIDENT_TILES[tile], tiles)
    return min(MOST_PARTS, wanted)


def can_pack(on: Recorder, w: Matrix, n_rows: int, *, exact: bool = True, swiglu: bool = False) -> bool:
    """Whether linear_packed (or gate_up_packed) takes the matrix, and pays for so many rows."""
    names = packed_candidates(w, n_rows, exact=exact, swiglu=swiglu)
    return n_rows > GEMV_ROWS_MAX and any(on.kernels.usable(name) for name in names)


def packed_candidates(w: Matrix, n_rows: int, *, exact: bool, swiglu: bool = False) -> list[str]:
    """Variants that fit, best first; `swiglu`: for w and another of its shape."""
    if w.format == "f32":
        return []
    n_large = ceil_div(n_rows, LARGE_TILE) * ceil_div((1 + swiglu) * w.rows, LARGE_TILE)
    busy = BUSY_LONG_TILES if w.columns >= LONG_ROWS else BUSY_TILES
    tiles = (LARGE_TILE, SMALL_TILE) if n_large >= busy else (SMALL_TILE, LARGE_TILE)
    return [coop_id(w.format, tile, split=exact, swiglu=swiglu) for tile in tiles]


def pack_trips(variant_id: str, *, width: int) -> int:
    """Loop iterations of one lane of pack_rows."""
    group = variants()[variant_id].workgroup[0]
    return 2 * ceil_div(width, 8 * group) + 2 * group


def packed_trips(*, columns: int) -> int:
    """Loop iterations of one lane of linear_packed."""
    return ceil_div(columns, PACKED_COLUMNS) + 64 * 8
