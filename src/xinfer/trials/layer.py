"""The trial of a whole layer in one dispatch: phase by phase against the reference, and then all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer import ops
from xinfer.gpu.api import BufferSlice
from xinfer.ops import LayerPlan, LayerRows, Matrix, MatrixSlice, Phase, Recorder, Rows, RowState
from xinfer.ops._layer import ALL_PHASES, layer_candidates
from xinfer.shaders.catalog import Variant
from xinfer.trials import expected
from xinfer.trials.attention import put_cache, put_scratch, read_scratch
from xinfer.trials.base import Check
from xinfer.trials.bench import DTYPES, Bench, Output
from xinfer.trials.cache import CacheFormat, sequence_of
from xinfer.trials.expected import Weights
from xinfer.trials.judge import Array

ALIGNMENT = 256
PARTS = ("x", "qkv", "attn", "gated")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerValues:
    """A layer's weights as arrays; a matrix of `rows` repeats the rows of its array."""

    input_ln: Array  # (hidden,)
    qkv: NDArray[Any]  # (q_size + 2 * kv_size, hidden)
    qkv_b: Array  # (q_size + 2 * kv_size,)
    o: NDArray[Any]  # (hidden, q_size)
    post_ln: Array  # (hidden,)
    gate: NDArray[Any]  # (inner, hidden)
    up: NDArray[Any]  # (inner, hidden)
    down: NDArray[Any]  # (hidden, inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayer:
    """A layer in one buffer: `ops.LayerTensors`."""

    input_ln: BufferSlice
    qkv: Matrix
    qkv_b: BufferSlice
    o: Matrix
    post_ln: BufferSlice
    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrial:
    """x (1, hidden) through a layer of `inner`, behind k and v (S, KV heads, D), by `n_groups` workgroups.

    cos and sin are (positions, D / 2). Without `n_groups` there are as many as stay on the device, or one.
    """

    x: Array
    w: LayerValues
    inner: int
    k: Array
    v: Array
    cos: Array
    sin: Array
    eps: float
    format: ops.Format
    cache_format: CacheFormat
    window: int | None = None
    n_groups: int | None = None
    n_splits: int | None = None
    op: str = "decode_layer"

    @property
    def shape(self) -> str:
        """Its sizes."""
        _, n_kv, dim = self.k.shape
        heads = self.q_size // dim
        sizes = f"{self.x.shape[1]} wide, {self.inner} within, {heads} heads on {n_kv} of {dim}"
        return f"{sizes}, {len(self.k) + 1} keys {self.cache_format}, weights {self.format}"

    @property
    def q_size(self) -> int:
        """Heads times D."""
        return int(self.w.o.shape[1])

    def fits(self, variant: Variant) -> bool:
        """The kernels of these formats and heads, in each of their forms."""
        if variant.op != self.op:
            return False
        named = layer_candidates(*self._sizes(), few_keys=True)
        return any(variant.id == name or variant.id.startswith(f"{name}.") for name in named)

    def run(self, bench: Bench, variant: str) -> list[Check]:
        """Each phase by itself on what the phase before left, then all of them with the barriers between."""
        given = _Given(self, bench)
        plan = given.plan(variant)
        if plan is None:
            return []
        given.begin(plan)
        checks = []
        for phase in Phase:
            before = given.read()
            given.dispatch(plan, (phase, phase))
            checks += self._judge(variant, phase, before, given)
        by_phase = given.read()
        given.begin(plan)
        given.dispatch(plan, ALL_PHASES)
        state = RowState.unpack(given.state.read().tobytes())
        given_up = np.array([state.arrived >= ops.ABORTED], np.float32)
        checks.append(Check(variant, "barriers given up", given_up, expected.exact(np.zeros(1, np.float32))))
        if not given_up[0]:
            whole = given.read()
            checks += [
                Check(variant, f"{name} of one dispatch", whole[name], expected.exact(by_phase[name]))
                for name in ("x", "keys", "values")
            ]
            counters = read_scratch(given.scratch, plan)[0]
            checks.append(Check(variant, "counters", counters, expected.exact(np.zeros_like(counters))))
        return checks

    def _judge(self, variant: str, phase: Phase, before: dict[str, Array], given: _Given) -> list[Check]:
        now, w, position = given.read(), self.w, len(self.k)
        norm_eps = {"eps": self.eps}
        if phase is Phase.QKV:
            n_rows = now["qkv"].shape[1]
            wanted = expected.norm_linear(before["x"], w.input_ln, _weights(w.qkv, n_rows), bias=w.qkv_b, **norm_eps)
            return [Check(variant, "q, k and v", now["qkv"], wanted)]
        if phase is Phase.ATTENTION:
            return self._judge_attention(variant, now, position)
        if phase is Phase.GATE_UP:
            gate, up = (_weights(m, self.inner) for m in (w.gate, w.up))
            wanted = expected.gate_up(before["x"], gate, up, norm=(w.post_ln, self.eps))
            return [Check(variant, "gated", now["gated"], wanted)]
        source, matrix = ("attn", w.o) if phase is Phase.OUTPUT else ("gated", w.down)
        wanted = expected.linear(before[source], _weights(matrix, self.x.shape[1]), before=before["x"])
        return [Check(variant, f"sum with the residual, phase {int(phase)}", now["x"], wanted)]

    def _judge_attention(self, variant: str, now: dict[str, Array], position: int) -> list[Check]:
        n_kv, dim = self.k.shape[1:]
        q, k, v = np.split(now["qkv"], [self.q_size, self.q_size + n_kv * dim], axis=1)
        cos, sin = self.cos[position : position + 1], self.sin[position : position + 1]
        keys, values = now["keys"], now["values"]
        wanted = expected.turned_attention(
            q.reshape(1, -1, dim), cos, sin, keys, values, start=position, window=self.window
        )
        turned = expected.cached(expected.rope(k, cos, sin), self.cache_format)
        checks = [
            Check(variant, "new key", keys[position:].reshape(1, -1), turned),
            Check(
                variant,
                "new value",
                values[position:].reshape(1, -1),
                expected.cached(expected.exact(v), self.cache_format),
            ),
            Check(variant, "earlier keys", keys[:position], expected.exact(self.k)),
            Check(variant, "earlier values", values[:position], expected.exact(self.v)),
            Check(variant, "attention", now["attn"], wanted),
        ]
        return [check for check in checks if check.found.size]

    def _sizes(self) -> tuple[Any, Any]:
        """What `layer_candidates` looks at."""
        nowhere: Any = None
        n_kv, dim = self.k.shape[1:]
        cache = ops.CacheBlocks(
            k=nowhere, v=nowhere, table=nowhere, table_stride=0, n_kv_heads=n_kv, head_dim=dim, format=self.cache_format
        )
        return _OnlyFormat(_OnlyFormat.Of(self.format)), cache


@dataclass(frozen=True, slots=True)
class _OnlyFormat:
    """A layer that is only asked for its weights' format."""

    @dataclass(frozen=True, slots=True)
    class Of:
        """A matrix of that format."""

        format: ops.Format

    qkv: Of


class _Given:
    """A trial's buffers on a bench."""

    def __init__(self, trial: LayerTrial, bench: Bench) -> None:
        self._trial, self._bench = trial, bench
        n_kv, dim = trial.k.shape[1:]
        self.position = len(trial.k)
        self.cache, self._stored, self._order = put_cache(bench, trial.k, trial.v, trial.cache_format, spare=1)
        self._kept = [part.read() for part in self._stored]
        widths = (trial.x.shape[1], trial.q_size + 2 * n_kv * dim, trial.q_size, trial.inner)
        self._ends = np.cumsum([-(-width // 64) * 64 for width in widths])
        self._widths = widths
        self.floats = bench.out(int(self._ends[-1]))
        words = np.frombuffer(self._row(), np.uint32)
        self.state = bench.out(len(words), dtype=np.uint32, fill=words)
        self.table = bench.put(np.stack([trial.cos, trial.sin], axis=-1))
        self.layer = put_layer(bench, trial)
        self.scratch: Output
        self.rows = LayerRows(**{name: self._rows(i) for i, name in enumerate(PARTS)})

    def _row(self) -> bytes:
        return RowState(token=0, position=self.position).pack()

    def _rows(self, i: int) -> Rows:
        start, width = int(self._ends[i - 1]) if i else 0, self._widths[i]
        return Rows(place=self.floats.place, n=1, width=width, stride=width, offset=start)

    def plan(self, variant: str) -> LayerPlan | None:
        """As the trial says, by one variant."""
        trial, info = self._trial, self._bench.device.info
        return ops.plan_layer(
            self._bench.kernels,
            [self.layer],
            self.cache,
            n_heads=trial.q_size // self.cache.head_dim,
            max_keys=self.position + 1,
            variant=variant,
            n_groups=trial.n_groups or ops.resident_groups(info) or 1,
            n_splits=trial.n_splits,
        )

    def begin(self, plan: LayerPlan) -> None:
        """Everything as it was: x, the cache, the state, counters; NaN in all that is to be made."""
        device = self._bench.device
        flat = np.full(int(self._ends[-1]), np.nan, np.float32)
        flat[: self._widths[0]] = self._trial.x[0]
        device.upload(self.floats.place[: flat.nbytes], flat.tobytes())
        device.upload(self.state.place[: ops.STATE_BYTES], self._row())
        for part, kept in zip(self._stored, self._kept, strict=True):
            device.upload(part.place[: kept.nbytes], kept.tobytes())
        scratch = put_scratch(self._bench, plan)
        assert scratch is not None
        self.scratch = scratch

    def dispatch(self, plan: LayerPlan, phases: tuple[Phase, Phase]) -> None:
        """Run a range of phases."""
        trial = self._trial

        def record(on: Recorder) -> None:
            ops.decode_layer(
                *(on, plan, self.state.place, self.table, self.layer, self.rows, self.cache),
                eps=trial.eps,
                scratch=self.scratch.place,
                window=trial.window,
                phases=phases,
                label="trial",
            )

        self._bench.run(record)

    def read(self) -> dict[str, Array]:
        """Activations, (1, width) each, and the sequence's keys and values, its newest too."""
        flat = self.floats.read()
        found = {}
        for i, name in enumerate(PARTS):
            start = int(self._ends[i - 1]) if i else 0
            found[name] = flat[np.newaxis, start : start + self._widths[i]].copy()
        for name, part in zip(("keys", "values"), self._stored, strict=True):
            found[name] = sequence_of(part.read(), self._order)[: self.position + 1]
        return found


def put_layer(bench: Bench, trial: LayerTrial) -> PlacedLayer:
    """A layer's weights in one buffer, each tensor at a multiple of ALIGNMENT."""
    dtype, w = DTYPES[trial.format], trial.w
    hidden, n_kv, dim = trial.x.shape[1], *trial.k.shape[1:]
    rows = {"qkv": trial.q_size + 2 * n_kv * dim, "o": hidden, "gate": trial.inner, "up": trial.inner, "down": hidden}
    data, at = bytearray(), {}
    for name in ("input_ln", "qkv", "qkv_b", "o", "post_ln", "gate", "up", "down"):
        values = getattr(w, name)
        data += bytes(-len(data) % ALIGNMENT)
        stored = values if name not in rows else np.take(values.astype(dtype), np.arange(rows[name]) % len(values), 0)
        at[name] = (len(data), stored.nbytes)
        data += np.ascontiguousarray(stored).tobytes()
    buffer = bench.put(np.frombuffer(bytes(data), np.uint8)).buffer

    def vector(name: str) -> BufferSlice:
        start, size = at[name]
        return BufferSlice(buffer, start, size)

    def matrix(name: str) -> Matrix:
        columns, n = getattr(w, name).shape[1], rows[name]
        stride = columns * dtype.itemsize
        return Matrix(
            rows=n, columns=columns, format=trial.format, row_stride=stride, slices=(MatrixSlice(vector(name), 0, n),)
        )

    named: dict[str, Any] = {name: matrix(name) if name in rows else vector(name) for name in at}
    return PlacedLayer(**named)


def _weights(values: NDArray[Any], rows: int) -> Weights:
    return Weights(values.astype(np.float32), rows)
