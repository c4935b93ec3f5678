"""The network as a sequence of ops: recorded for a number of rows, or run one by one with taps in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.gpu.api import Bindable, Buffer, BufferSlice, Device, Recording
from xinfer.gpu_model.tuning import Tuning
from xinfer.gpu_model.weights import DeviceLayer, DeviceWeights
from xinfer.kv_cache import BlockPool
from xinfer.model.config import Qwen2Config
from xinfer.ops import CacheBlocks, KernelSet, Recorder, Rows

Array = NDArray[np.float32]
Tap = Callable[[str, Array], None]
Named = tuple[str, Rows]  # a tap's name and the rows it shows


class Workspace:
    """The activations of up to `n_rows` rows, and their states: what a step reads and overwrites."""

    def __init__(self, device: Device, config: Qwen2Config, n_rows: int, label: str, *, packs: bool = True) -> None:
        """`packs`: whether there may be rows enough for matrix cores, and so memory for what they multiply."""
        self.n_rows = n_rows
        self._widths = widths(config)
        self._buffers: dict[str, Buffer] = {}
        try:
            for name, width in self._widths.items():
                self._buffers[name] = device.create_buffer(4 * n_rows * width, "device", f"{label} {name}")
            size = _packed_bytes(config, n_rows if packs else 1)
            self._buffers["packed"] = self.packed = device.create_buffer(size, "device", f"{label} packed rows")
            self._buffers["parts"] = self.parts = device.create_buffer(
                _parts_bytes(config, n_rows if packs else 1), "device", f"{label} parts of sums"
            )
            size = ops.STATE_BYTES * n_rows
            self._buffers["state"] = self.state = device.create_buffer(size, "device", f"{label} state")
            self._buffers["staging"] = self.staging = device.create_buffer(size, "upload", f"{label} rows")
        except BaseException:
            self.release()
            raise

    def rows(self, name: str, n: int) -> Rows:
        """`n` rows of an activation."""
        return Rows.dense(self._buffers[name], n, self._widths[name])

    def states(self, n: int) -> tuple[BufferSlice, BufferSlice]:
        """Where the host writes the states of n rows, and where the ops read them."""
        size = ops.STATE_BYTES * n
        return self.staging[:size], self.state[:size]

    def release(self) -> None:
        """Give the memory back; may be called twice."""
        for buffer in self._buffers.values():
            buffer.release()


def widths(config: Qwen2Config) -> dict[str, int]:
    """Floats of a row of each activation."""
    return {
        "x": config.hidden_size,
        "h": config.hidden_size,
        "qkv": config.q_size + 2 * config.kv_size,
        "attn": config.q_size,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
    }


def workspace_bytes(config: Qwen2Config, n_rows: int) -> int:
    """Device memory of a workspace."""
    rows = n_rows * (4 * sum(widths(config).values()) + ops.STATE_BYTES)
    return rows + _packed_bytes(config, n_rows) + _parts_bytes(config, n_rows)


def _packed_bytes(config: Qwen2Config, n_rows: int) -> int:
    """What the widest activations take when they are packed for matrix cores; a single row never is."""
    return 4 if n_rows == 1 else ops.packed_bytes(n_rows, max(widths(config).values()))


def _parts_bytes(config: Qwen2Config, n_rows: int) -> int:
    """What sums take that are divided, in the products of qkv, o and down."""
    if n_rows == 1:
        return 4
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = ((widths(config)["qkv"], hidden), (hidden, config.q_size), (hidden, inner))
    return max(4, *(ops.parts_bytes(n_rows, rows, columns) for rows, columns in shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What every pass binds: weights, cache and tables, as they are in one generation of the pool."""

    device: Device
    config: Qwen2Config
    kernels: KernelSet
    weights: DeviceWeights
    pool: BlockPool
    rope_table: Buffer  # float32 (positions, head_dim / 2, 2)
    scratch: Buffer  # of attention: counters of splits that are done, zero between steps, and partial results
    max_keys: int  # of one sequence
    tuning: Tuning
    exact: bool  # matrix cores multiply activations as two f16 numbers, not as one

    def cache(self, i: int) -> CacheBlocks:
        """The blocks of layer i."""
        return cache_blocks(self.pool, self.config, i)


def cache_blocks(pool: BlockPool, config: Qwen2Config, i: int) -> CacheBlocks:
    """Layer i's part of a pool, as the ops take it."""
    a_value = pool.shape.token_bytes // config.kv_size
    return CacheBlocks(
        k=pool.keys(i),
        v=pool.values(i),
        table=pool.table,
        table_stride=pool.table_stride,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        format="f16" if a_value == 2 else "f32",
    )


class Pass:
    """Records the network for `n` rows of a workspace, each op followed by a barrier.

    One row runs the fused ops where the device has them. With `timed`, a timestamp follows every op.
    """

    tapped = False
    alone = False  # each row gets the bits that it gets by itself

    def __init__(
        self, network: Network, space: Workspace, n: int, recording: Recording, *, timed: bool = False
    ) -> None:
        self.network = network
        self.config = network.config
        self.on = Recorder(recording, network.kernels)
        self.timed = timed
        self.x, self.h = space.rows("x", n), space.rows("h", n)  # (n, hidden)
        self.qkv = space.rows("qkv", n)  # (n, q_size + 2 * kv_size)
        self.attn = space.rows("attn", n)  # (n, q_size)
        self.gate, self.up = space.rows("gate", n), space.rows("up", n)  # (n, intermediate)
        self.state = space.states(n)[1]
        self._packed, self._parts = space.packed, space.parts
        tuning = Tuning() if self.tapped else network.tuning
        at_once = 1 if self.alone else n  # rows of what kernels are chosen for
        self._tuned = tuning.products(at_once)  # variants by op
        attention = tuning.attention_for(network.max_keys) if at_once == 1 else None
        self._plan = self._attention_plan(
            at_once,
            variant=None if attention is None else attention.variant,
            n_splits=None if attention is None else attention.n_splits,
        )
        self._scratch: Bindable = network.scratch

    def _attention_plan(self, n: int, **options: Any) -> ops.AttentionPlan:
        """For n rows at a time."""
        network = self.network
        return ops.plan_attention(
            *(self.on, network.cache(0)),
            n_heads=self.config.num_attention_heads,
            n_rows=n,
            max_keys=network.max_keys,
            turn=n == 1 and not self.tapped,
            exact=network.exact,
            **options,
        )

    @property
    def recording(self) -> Recording:
        """What is being recorded into."""
        return self.on.recording

    def done(self, label: str, *named: Named) -> None:
        """An op has been recorded: `named` is what it made."""
        del named
        self.recording.barrier()
        if self.timed:
            self.recording.timestamp(label)

    def embed(self) -> None:
        """The tokens' embeddings become x."""
        ops.embed(self.on, self.state, self.network.weights.embed, self.x)
        self.done("embed", ("embed", self.x))

    def layer(self, i: int, *, cache_only: bool = False) -> None:
        """Run layer i on x. `cache_only` stops once its keys and values are cached, for when x is not used any more."""
        w = self.network.weights.layers[i]
        self._project(i, w)
        if cache_only or not self._plan.turns:
            self._append(i)
        if not cache_only:
            self._attend(i, w)
            self._mlp(i, w)

    def head(self, logits: Rows, *, first: int = 0) -> None:
        """The logits of as many rows of x as `logits` has, from row `first` on."""
        x, h = self.x.rows(first, logits.n), self.h.rows(first, logits.n)
        weights, eps = self.network.weights, self.config.rms_norm_eps
        if self._fuses(x, weights.head):
            options: dict[str, Any] = {"label": "logits", "variant": self._tuned.get("logits")}
            ops.norm_linear(self.on, x, weights.norm, weights.head, logits, eps=eps, **options)
        else:
            operand = self._normed(x, weights.norm, h, weights.head, "norm", "head")
            self._product(operand, weights.head, logits, label="logits")
        self.done("logits", ("logits", logits))

    def _project(self, i: int, w: DeviceLayer) -> None:
        """q, k and v of x."""
        name, eps, qkv = f"layers.{i}", self.config.rms_norm_eps, self.qkv
        if self._fuses(self.x, w.qkv):
            options: dict[str, Any] = {"bias": w.qkv_b, "label": f"{name}.qkv", "variant": self._tuned.get("qkv")}
            ops.norm_linear(self.on, self.x, w.input_ln, w.qkv, qkv, eps=eps, **options)
        else:
            operand = self._normed(self.x, w.input_ln, self.h, w.qkv, f"{name}.input_ln", name)
            self._product(operand, w.qkv, qkv, bias=w.qkv_b, label=f"{name}.qkv")
        q, k, v = self._heads()
        self.done(f"{name}.qkv", (f"{name}.q", q), (f"{name}.k", k), (f"{name}.v", v))

    def _heads(self) -> tuple[Rows, Rows, Rows]:
        """The columns of q, k and v."""
        q_size, kv_size = self.config.q_size, self.config.kv_size
        q, k = self.qkv.columns(0, q_size), self.qkv.columns(q_size, kv_size)
        return q, k, self.qkv.columns(q_size + kv_size, kv_size)

    def _append(self, i: int) -> None:
        """Turn q and k; k and v into the cache."""
        name, (q, k, v) = f"layers.{i}", self._heads()
        qk = self.qkv.columns(0, q.width + k.width)
        table, cache, dim = self.network.rope_table, self.network.cache(i), self.config.head_dim
        if not self.tapped and ops.can_rope_append(self.on, cache):
            ops.rope_append(self.on, self.state, table, q, k, v, cache, label=f"{name}.rope_append")
        else:
            ops.rope(self.on, self.state, table, qk, head_dim=dim, label=f"{name}.rope")  # q and k turn alike
            self.done(f"{name}.rope", (f"{name}.q_rope", q), (f"{name}.k_rope", k))
            ops.kv_append(self.on, self.state, k, v, cache, label=f"{name}.kv_append")
        self.done(f"{name}.append")

    def _attend(self, i: int, w: DeviceLayer) -> None:
        """Add attention and its projection to x."""
        name = f"layers.{i}"
        self._attention(i)
        self.done(f"{name}.attn", (f"{name}.attn", self.attn))
        total = f"{name}.attn_residual"
        self._add_product(self._operand(self.attn, w.o, total), w.o, f"{name}.o", total)

    def _attention(self, i: int) -> None:
        """Attention of all rows; their keys join the cache where the kernel does that."""
        cache, (q, k, v) = self.network.cache(i), self._heads()
        options: dict[str, Any] = {
            "window": self.config.layer_windows[i],
            "scratch": self._scratch,
            "label": f"layers.{i}.attn",
        }
        if self._plan.turns:
            on = (self.on, self._plan, self.state, self.network.rope_table)
            ops.turn_attention(*on, q, k, v, cache, self.attn, **options)
        else:
            ops.attention(self.on, self._plan, self.state, q, cache, self.attn, **options)

    def _mlp(self, i: int, w: DeviceLayer) -> None:
        """Add down(silu(gate) * up) to x."""
        name, eps = f"layers.{i}", self.config.rms_norm_eps
        if self._fuses(self.x, w.gate, swiglu=True):
            options: dict[str, Any] = {"label": f"{name}.gate_up", "variant": self._tuned.get("gate_up")}
            ops.gate_up(self.on, self.x, w.gate, w.up, self.gate, norm=(w.post_ln, eps), **options)
            self.done(f"{name}.swiglu", (f"{name}.swiglu", self.gate))
            operand = self._operand(self.gate, w.down, name)
        else:
            h = self._normed(self.x, w.post_ln, self.h, w.gate, f"{name}.post_ln", name)
            operand = self._gated(h, w, name)
        self._add_product(operand, w.down, f"{name}.down", name)

    def _gated(self, h: Rows | ops.PackedRows, w: DeviceLayer, name: str) -> Rows | ops.PackedRows:
        """silu(gate(h)) * up(h), as the product with down takes it."""
        if isinstance(h, ops.PackedRows) and self._packs(w.gate, h.n, swiglu=True):
            variant = self._tuned.get("gate_up")
            ops.gate_up_packed(self.on, h, w.gate, w.up, self.gate, label=f"{name}.gate_up", variant=variant)
            self.done(f"{name}.swiglu", (f"{name}.swiglu", self.gate))
            return self._operand(self.gate, w.down, name)
        for rows, matrix, what in ((self.gate, w.gate, "gate"), (self.up, w.up, "up")):
            # No barrier is between them: they cannot take turns in the memory for parts of sums.
            self._product(h, matrix, rows, in_parts=False, label=f"{name}.{what}")
        self.done(f"{name}.gate_up", (f"{name}.gate", self.gate), (f"{name}.up", self.up))
        if self._packs(w.down, self.gate.n) and ops.can_pack_fused(self.on, self.gate, self.up):
            packed = self._packed_rows(self.gate)
            ops.pack_rows(self.on, self.gate, packed, up=self.up, label=f"{name}.swiglu_pack")
            self.done(f"{name}.swiglu_pack")
            return packed
        ops.swiglu(self.on, self.gate, self.up, self.gate, label=f"{name}.swiglu")
        self.done(f"{name}.swiglu", (f"{name}.swiglu", self.gate))
        return self._operand(self.gate, w.down, name)

    def _add_product(self, operand: Rows | ops.PackedRows, w: ops.Matrix, product: str, total: str) -> None:
        """Add operand @ w^T to x: in one op, or in two where the product itself is to be seen."""
        if self.tapped:
            self._product(operand, w, self.h, label=product)
            self.done(product, (product, self.h))
            ops.add(self.on, self.x, self.h, label=total)
        else:
            self._product(operand, w, self.x, accumulate=True, label=product)
        self.done(product, (total, self.x))

    def _normed(
        self, x: Rows, weight: Bindable, h: Rows, w: ops.Matrix, norm: str, label: str
    ) -> Rows | ops.PackedRows:
        """rms_norm of x as products with w take it: packed in the same op where that can be, else by way of h."""
        eps = self.config.rms_norm_eps
        if self._packs(w, x.n) and ops.can_pack_fused(self.on, x):
            packed = self._packed_rows(x)
            ops.pack_rows(self.on, x, packed, norm=(weight, eps), label=f"{norm}_pack")
            self.done(f"{norm}_pack")
            return packed
        ops.rms_norm(self.on, x, weight, h, eps=eps, label=norm)
        self.done(norm, (norm, h))
        return self._operand(h, w, label)

    def _packs(self, w: ops.Matrix, n: int, *, swiglu: bool = False) -> bool:
        """Whether an op is done together with the packed product next to it: not where it is to be seen."""
        together = not self.tapped and not self.alone
        return together and ops.can_pack(self.on, w, n, exact=self.network.exact, swiglu=swiglu)

    def _packed_rows(self, x: Rows) -> ops.PackedRows:
        return ops.PackedRows(self._packed, x.n, x.width, self.network.exact)

    def _operand(self, x: Rows, w: ops.Matrix, label: str) -> Rows | ops.PackedRows:
        """Rows as products with w take them: packed where there are matrix cores and rows enough."""
        if self.alone or not ops.can_pack(self.on, w, x.n, exact=self.network.exact):
            return x
        packed = self._packed_rows(x)
        ops.pack_rows(self.on, x, packed, label=f"{label}.pack")
        self.done(f"{label}.pack")
        return packed

    def _product(
        self,
        x: Rows | ops.PackedRows,
        w: ops.Matrix,
        out: Rows,
        *,
        bias: Bindable | None = None,
        accumulate: bool = False,
        in_parts: bool = True,
        label: str,
    ) -> None:
        """`in_parts`: where tiles are few its sums may be divided, in memory that one product at a time has."""
        op = label.rpartition(".")[2]
        options: dict[str, Any] = {"bias": bias, "accumulate": accumulate, "label": label}
        options["variant"] = self._tuned.get("gate_up" if op in ("gate", "up") else op)
        if isinstance(x, ops.PackedRows):
            ops.linear_packed(self.on, x, w, out, scratch=self._parts if in_parts else None, **options)
        else:
            ops.linear(self.on, x, w, out, alone=self.alone, **options)

    def _fuses(self, x: Rows, w: ops.Matrix, *, swiglu: bool = False) -> bool:
        one = not self.tapped and (x.n == 1 or self.alone)
        return one and ops.can_fuse(self.on, x.rows(0, 1), w, norm=True, swiglu=swiglu)


class RowsAlone(Pass):
    """Rows that follow each other in one sequence, whose numbers are those of single steps to the bit.

    Each weight is read once for several of them. All keys are in the cache before attention, which each row looks back
    from.
    """

    alone = True

    def __init__(
        self,
        network: Network,
        space: Workspace,
        n: int,
        recording: Recording,
        *,
        room: int,
        scratch: Callable[[ops.AttentionPlan], Bindable],
    ) -> None:
        """`scratch` gives what attention of `room` rows needs, with zeros where the counters are."""
        super().__init__(network, space, n, recording)
        step: dict[str, Any] = {"variant": self._plan.variant.id, "n_splits": self._plan.n_splits}
        self._plan = self._attention_plan(n, **step)
        self._scratch = scratch(self._attention_plan(room, **step))

    def _attention(self, i: int) -> None:
        if self._plan.turns:
            _, k, v = self._heads()
            name, table = f"layers.{i}.append", self.network.rope_table
            ops.rope_append(self.on, self.state, table, None, k, v, self.network.cache(i), label=name)
            self.done(name)
        super()._attention(i)


class TappedPass(Pass):
    """Runs every op by itself and shows what it made: slow, and the same numbers but for fused ops' rounding."""

    tapped = True

    def __init__(self, network: Network, space: Workspace, n: int, tap: Tap) -> None:
        super().__init__(network, space, n, network.device.create_recording("tapped"))
        self._tap = tap
        self._states = space.states(n)

    def load(self) -> None:
        """Take the rows' states from the host."""
        self.recording.barrier()
        self.recording.copy(*self._states)
        self.recording.barrier()

    def done(self, label: str, *named: Named) -> None:
        """Run what has been recorded, and show it."""
        del label
        self.run()
        for name, rows in named:
            self._tap(name, download_rows(self.network.device, rows))

    def run(self) -> None:
        """Run what has been recorded and begin again."""
        device = self.network.device
        self.recording.finish()
        device.wait(device.submit(self.recording))
        self.recording.release()
        self.on = Recorder(device.create_recording("tapped"), self.network.kernels)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.recording.release()


def download_rows(device: Device, rows: Rows) -> Array:
    """(n, width): rows of activations as an array."""
    end = rows.offset + (rows.n - 1) * rows.stride + rows.width
    flat = np.frombuffer(device.download(_bytes_of(rows.place, 4 * rows.offset, 4 * end)), np.float32)
    strides = (4 * rows.stride, 4)
    return np.lib.stride_tricks.as_strided(flat, (rows.n, rows.width), strides, writeable=False).copy()


def _bytes_of(place: Bindable, start: int, stop: int) -> BufferSlice:
    return place[start:stop]
