"""embed, rms_norm, rope, kv_append, swiglu and add: what is done to each row, or each element, by itself."""

from __future__ import annotations

from xinfer.gpu.api import Bindable
from xinfer.ops._base import CacheBlocks, Matrix, Recorder, Rows, ceil_div, expect, span
from xinfer.shaders.catalog import Variant, variants


def _elements(variant: Variant, n_elements: int, n_rows: int) -> tuple[int, int, int]:
    """The grid of a kernel with a lane for each of n_elements, and rows in y."""
    return ceil_div(n_elements, variant.workgroup[0]), n_rows, 1


def embed(
    on: Recorder, state: Bindable, table: Matrix, out: Rows, *, label: str = "embed", variant: str | None = None
) -> None:
    """`out[t] = table[the token of row t of `state`]`, (T, columns); a dispatch for each slice of the table.

    A row whose token lies outside the table is left as it is.
    """
    expect(out.width == table.columns, f"{label}: out is {out.width} wide, the table {table.columns}")
    chosen = on.choose([f"embed.{table.format}"], variant)
    for part in table.slices:
        constants = {
            "width": table.columns,
            "row_loads": table.row_loads,
            "first_row": part.first_row,
            "n_rows": part.n_rows,
            **span(out, "out"),
        }
        buffers = {"state": state, "table": part.place, "result": out.place}
        grid = _elements(chosen, ceil_div(table.columns, table.values_per_load), out.n)
        on.dispatch(chosen, buffers, constants, grid, label)


def rms_norm(
    on: Recorder, x: Rows, weight: Bindable, out: Rows, *, eps: float, label: str, variant: str | None = None
) -> None:
    """`out = x / sqrt(mean(x^2) + eps) * weight`: x, out (T, width), weight (width,) float32."""
    expect((x.n, x.width) == (out.n, out.width), f"{label}: x is {x.n} x {x.width}, out {out.n} x {out.width}")
    expect(weight.size >= 4 * x.width, f"{label}: the weight has {weight.size} bytes, {4 * x.width} are read")
    chosen = on.choose(["rms_norm.wave", "rms_norm.plain"], variant)
    constants = {"width": x.width, **span(x, "x"), **span(out, "out"), "eps": float(eps)}
    on.dispatch(chosen, {"x": x.place, "weight": weight, "result": out.place}, constants, (x.n, 1, 1), label)


def rms_norm_trips(variant_id: str, *, width: int) -> int:
    """Loop iterations of one lane."""
    group = variants()[variant_id].workgroup[0]
    return 2 * ceil_div(width, group) + group


def rope(
    on: Recorder, state: Bindable, table: Bindable, x: Rows, *, head_dim: int, label: str, variant: str | None = None
) -> None:
    """Turn every head of x in place, (T, heads * head_dim), by the angles of its row's position in `state`.

    `table` is float32 (positions, head_dim / 2, 2): cos and sin. Pairs are (i, i + head_dim / 2).
    """
    expect(x.width % head_dim == 0 and head_dim % 2 == 0, f"{label}: {x.width} columns in heads of {head_dim}")
    chosen = on.choose(["rope.plain"], variant)
    constants = {"n_heads": x.width // head_dim, "head_dim": head_dim, **span(x, "x")}
    grid = _elements(chosen, x.width // 2, x.n)
    on.dispatch(chosen, {"state": state, "table": table, "x": x.place}, constants, grid, label)


def kv_append(
    on: Recorder, state: Bindable, k: Rows, v: Rows, cache: CacheBlocks, *, label: str, variant: str | None = None
) -> None:
    """Write k and v, (T, n_kv_heads * head_dim) each, into the cache at their rows' sequences and positions."""
    width = cache.n_kv_heads * cache.head_dim
    expect(
        k.n == v.n and k.width == v.width == width, f"{label}: k and v are {k.width} and {v.width} wide, not {width}"
    )
    chosen = on.choose([f"kv_append.{cache.format}"], variant)
    constants = {
        "n_kv_heads": cache.n_kv_heads,
        "head_dim": cache.head_dim,
        "table_stride": cache.table_stride,
        **span(k, "k"),
        **span(v, "v"),
    }
    buffers = {
        "state": state,
        "block_table": cache.table,
        "k": k.place,
        "v": v.place,
        "k_cache": cache.k,
        "v_cache": cache.v,
    }
    on.dispatch(chosen, buffers, constants, _elements(chosen, width // 2, k.n), label)


def rope_append(
    on: Recorder,
    state: Bindable,
    table: Bindable,
    q: Rows | None,
    k: Rows,
    v: Rows,
    cache: CacheBlocks,
    *,
    label: str,
    variant: str | None = None,
) -> None:
    """`rope` of q and k, then `kv_append`, in one dispatch; k itself stays as it is. Where `can_rope_append` says so.

    q (T, n_heads * head_dim), k, v (T, n_kv_heads * head_dim) are columns of the same rows. Without q only the cache is
    written, with the bits that `turn_attention` would write.
    """
    dim, width = cache.head_dim, cache.n_kv_heads * cache.head_dim
    q_width = 0 if q is None else q.width
    expect(q_width % dim == 0 and k.width == v.width == width, f"{label}: q, k and v must be whole heads of {dim}")
    one = len({(rows.place, rows.n, rows.stride) for rows in (q or k, k, v)}) == 1
    expect(one and dim % 4 == 0, f"{label}: q, k and v must lie in the same rows, and head_dim be a multiple of 4")
    chosen = on.choose([f"rope_append.{cache.format}"], variant)
    constants = {
        "n_heads": q_width // dim,
        "n_kv_heads": cache.n_kv_heads,
        "head_dim": dim,
        "table_stride": cache.table_stride,
        "stride": k.stride,
        "q_offset": 0 if q is None else q.offset,
        "k_offset": k.offset,
        "v_offset": v.offset,
    }
    buffers = {
        "state": state,
        "table": table,
        "block_table": cache.table,
        "qkv": k.place,
        "k_cache": cache.k,
        "v_cache": cache.v,
    }
    on.dispatch(chosen, buffers, constants, _elements(chosen, (q_width + 2 * width) // 4, k.n), label)


def can_rope_append(on: Recorder, cache: CacheBlocks) -> bool:
    """Whether rope_append takes this cache."""
    return cache.head_dim % 4 == 0 and on.kernels.usable(f"rope_append.{cache.format}")


def swiglu(on: Recorder, gate: Rows, up: Rows, out: Rows, *, label: str, variant: str | None = None) -> None:
    """`out = silu(gate) * up`, (T, width) each."""
    shapes = {(rows.n, rows.width) for rows in (gate, up, out)}
    expect(len(shapes) == 1, f"{label}: gate, up and out have different shapes: {sorted(shapes)}")
    chosen = on.choose(["swiglu.plain"], variant)
    constants = {"width": out.width, **span(gate, "gate"), **span(up, "up"), **span(out, "out")}
    buffers = {"gate": gate.place, "up": up.place, "result": out.place}
    on.dispatch(chosen, buffers, constants, _elements(chosen, out.width, out.n), label)


def add(on: Recorder, x: Rows, y: Rows, *, label: str, variant: str | None = None) -> None:
    """`x += y`, (T, width) each."""
    expect((x.n, x.width) == (y.n, y.width), f"{label}: x is {x.n} x {x.width}, y {y.n} x {y.width}")
    chosen = on.choose(["add.plain"], variant)
    constants = {"width": x.width, **span(y, "y"), **span(x, "x")}
    on.dispatch(chosen, {"y": y.place, "x": x.place}, constants, _elements(chosen, x.width, x.n), label)
