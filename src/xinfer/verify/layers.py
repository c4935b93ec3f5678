"""Judges the phases of one layer: each by the reference, on what the device itself gave to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xinfer.kv_cache import KVCache
from xinfer.model.reference import rope_tables
from xinfer.ops._attention import has_half_weights
from xinfer.ops._packed import SUM_PARTS
from xinfer.trials import expected
from xinfer.trials.attention import AttentionTrial, TurnTrial
from xinfer.trials.base import Trial
from xinfer.trials.cache import AppendTrial
from xinfer.trials.judge import Array, Expected
from xinfer.trials.linear import LinearTrial, PackTrial, SumTrial, check_packed, unpack
from xinfer.trials.rows import NormTrial, RopeTrial, SwigluTrial
from xinfer.verify.findings import Finding, Found, finding
from xinfer.verify.oracle import OracleLayer
from xinfer.verify.watch import WatchedPass, cached_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the rows of a pass stand: `n` real ones from position `start` of a sequence on."""

    case: str
    cache: KVCache
    start: int
    n: int

    @property
    def end(self) -> int:
        """The first position behind them."""
        return self.start + self.n


class LayerJudge:
    """Called after every phase of layer i. Keeps what the device made, as the next phase's input."""

    def __init__(self, i: int, w: OracleLayer, at: Placement, x: Array, emit: Callable[[Finding], None]) -> None:
        self.run: WatchedPass  # set once the pass is there
        self.keys = self.values = np.empty((0, 0, 0), np.float32)  # of every position up to the last row's
        self._i = i
        self._w = w
        self._at = at
        self._emit = emit
        self._x = x  # (rows, hidden), padding rows too, as all that follows
        self._seen: set[str] = set()
        self._operand = x  # what the next product reads, before it was packed
        self._packed: Array | None = None  # and after
        self._qkv = self._attn = self._gate = self._up = x

    def __call__(self, label: str, used: tuple[str, ...]) -> None:
        """Judge the phase that has run."""
        kind = label.rpartition(".")[2]
        if kind not in JUDGES:
            raise LookupError(
                f"no judge for the phase {label!r}: say in verify/layers.py what the reference makes of it"
            )
        JUDGES[kind](self, kind, used)
        self._seen.add(kind.removesuffix("_pack"))

    @property
    def x(self) -> Array:
        """The layer's output so far, (rows, hidden)."""
        return self._x

    def _say(self, op: str, used: tuple[str, ...], found: list[Found], trials: Callable[[], list[Trial]]) -> None:
        self._emit(finding(self._at.case, self._i, op, used, found, trials))

    def _norm(self, kind: str, used: tuple[str, ...]) -> None:
        weight, eps = (self._w.input_ln if kind == "input_ln" else self._w.post_ln), self._eps
        x, n = self._x, self._at.n
        h = self.run.read(self.run.h)
        self._say(
            *(kind, used, [("norm", h[:n], expected.rms_norm(x[:n], weight, eps=eps))]),
            lambda: [NormTrial(x=x[:n], weight=weight, eps=eps)],
        )
        self._operand = h

    def _pack(self, kind: str, used: tuple[str, ...]) -> None:
        self._judge_packed(kind, used, PackTrial(x=self._operand, exact=self.run.network.exact))

    def _norm_pack(self, kind: str, used: tuple[str, ...]) -> None:
        weight = self._w.input_ln if kind == "input_ln_pack" else self._w.post_ln
        self._judge_packed(kind, used, PackTrial(x=self._x, exact=self.run.network.exact, norm=(weight, self._eps)))

    def _swiglu_pack(self, kind: str, used: tuple[str, ...]) -> None:
        self._judge_packed(kind, used, PackTrial(x=self._gate, exact=self.run.network.exact, up=self._up))

    def _judge_packed(self, kind: str, used: tuple[str, ...], trial: PackTrial) -> None:
        packed, words = self.run.read_packed(trial.x.shape[1])
        wanted = trial.expected()
        found = [(check.what, check.found, check.expected) for check in check_packed("", wanted, words, packed)]
        self._say(kind, used, found, lambda: [trial])
        self._operand, self._packed = wanted.values, unpack(words, packed)

    def _given(self) -> Array:
        """What a product's kernel read, the real rows."""
        return (self._operand if self._packed is None else self._packed)[: self._at.n]

    def _project(self, kind: str, used: tuple[str, ...]) -> None:
        w, b, eps, n = self._w.qkv, self._w.qkv_b, self._eps, self._at.n
        x, h, norm = self._x[:n], self._operand[:n], self._w.input_ln
        qkv = self.run.read(self.run.qkv)
        if "input_ln" in self._seen:
            wanted = expected.linear(self._given(), w.weights, bias=b)
        else:
            wanted = expected.norm_linear(x, norm, w.weights, eps=eps, bias=b)
        fused = "input_ln" not in self._seen

        def trials() -> list[Trial]:
            if not fused:
                return [LinearTrial(x=h, w=w.values, format=w.format, bias=b), *_sums(used, qkv[:n])]
            normed = expected.rms_norm(x, norm, eps=eps).values
            return [
                LinearTrial(x=x, w=w.values, format=w.format, bias=b, norm=(norm, eps)),
                NormTrial(x=x, weight=norm, eps=eps),
                LinearTrial(x=normed, w=w.values, format=w.format, bias=b),
            ]

        self._say(kind, used, self._split(qkv[:n], wanted), trials)
        self._qkv, self._packed = qkv, None

    def _split(self, qkv: Array, wanted: Expected) -> list[Found]:
        q, k, v = self._columns
        tolerance = np.broadcast_to(wanted.tolerance, wanted.values.shape)
        return [
            (name, qkv[:, part], Expected(wanted.values[:, part], tolerance[:, part]))
            for name, part in (("q", q), ("k", k), ("v", v))
        ]

    def _rope(self, kind: str, used: tuple[str, ...]) -> None:
        q, k, _ = self._columns
        qk, n = slice(q.start, k.stop), self._at.n
        before, qkv = self._qkv[:n, qk], self.run.read(self.run.qkv)
        cos, sin = self._turns()
        positions = np.arange(self._at.start, self._at.end)
        wanted = expected.rope(before, cos[positions], sin[positions])
        self._say(
            *(kind, used, [("q and k", qkv[:n, qk], wanted)]),
            lambda: [RopeTrial(x=before, positions=positions, cos=cos, sin=sin)],
        )
        self._qkv = qkv

    def _append(self, kind: str, used: tuple[str, ...]) -> None:
        at, config = self._at, self.run.config
        before = self._qkv[: at.n]
        q, k, v = (before[:, part] for part in self._columns)
        cache_format = self.run.network.cache(self._i).format
        self.keys, self.values = cached_rows(self.run.network, self._i, at.cache, at.end)
        cos, sin = self._turns()
        positions = np.arange(at.start, at.end)
        fused = "rope" not in self._seen
        turned = expected.rope(k, cos[positions], sin[positions]) if fused else expected.exact(k)
        wanted_k, wanted_v = (expected.cached(part, cache_format) for part in (turned, expected.exact(v)))
        found: list[Found] = [
            ("keys", self.keys[at.start :].reshape(k.shape), wanted_k),
            ("values", self.values[at.start :].reshape(v.shape), wanted_v),
        ]
        n_kv = config.num_key_value_heads
        alone = AppendTrial(k=k, v=v, positions=positions, n_kv_heads=n_kv, format=cache_format)
        if fused:
            self._qkv = self.run.read(self.run.qkv)
            wanted_q = expected.rope(q, cos[positions], sin[positions])
            found.append(("queries", self._qkv[: at.n, self._columns[0]], wanted_q))
            whole = AppendTrial(
                k=k, v=v, positions=positions, n_kv_heads=n_kv, format=cache_format, q=q, cos=cos, sin=sin
            )
            turn = RopeTrial(x=np.concatenate([q, k], axis=1), positions=positions, cos=cos, sin=sin)
            self._say(kind, used, found, lambda: [whole, turn, alone])
        else:
            self._say(kind, used, found, lambda: [alone])

    def _attention(self, kind: str, used: tuple[str, ...]) -> None:
        if "append" not in self._seen:
            self._turned_attention(kind, used)
            return
        at, config = self._at, self.run.config
        q = self._qkv[: at.n, self._columns[0]].reshape(at.n, config.num_attention_heads, config.head_dim)
        attn = self.run.read(self.run.attn)
        half = any(has_half_weights(name) for name in used)
        options: dict[str, Any] = {"start": at.start, "window": self._window, "half_weights": half}
        wanted = expected.attention(q, self.keys, self.values, **options)
        trial = AttentionTrial(q=q, k=self.keys, v=self.values, **self._attention_options)
        self._say(kind, used, [("attention", attn[: at.n], wanted)], lambda: [trial])
        self._attn = self._operand = attn

    def _turned_attention(self, kind: str, used: tuple[str, ...]) -> None:
        """One kernel has done rope, kv_append and attention for the one row there is."""
        at, config = self._at, self.run.config
        assert at.n == 1
        q, k, v = (self._qkv[:1, part] for part in self._columns)
        self.keys, self.values = cached_rows(self.run.network, self._i, at.cache, at.end)
        cos, sin = self._turns()
        own_cos, own_sin = cos[at.start :], sin[at.start :]
        cache_format, heads = self.run.network.cache(self._i).format, q.reshape(1, -1, config.head_dim)
        attn, turned_k = self.run.read(self.run.attn), expected.rope(k, own_cos, own_sin)
        found: list[Found] = [
            (
                "keys",
                self.keys[at.start :].reshape(k.shape),
                expected.cached(turned_k, cache_format),
            ),
            ("values", self.values[at.start :].reshape(v.shape), expected.cached(expected.exact(v), cache_format)),
            (
                *("attention", attn[:1]),
                expected.turned_attention(
                    heads, own_cos, own_sin, self.keys, self.values, start=at.start, window=self._window
                ),
            ),
        ]
        earlier: dict[str, Any] = {"k": self.keys[: at.start], "v": self.values[: at.start]}
        whole: dict[str, Any] = {"k": self.keys, "v": self.values}
        turned = expected.rope(q, own_cos, own_sin).values.reshape(heads.shape)
        new_k, new_v = (part.reshape(-1, config.head_dim) for part in (k, v))
        fresh: dict[str, Any] = {"new_k": new_k, "new_v": new_v, "cos": cos, "sin": sin}
        append = AppendTrial(
            k=k, v=v, positions=np.array([at.start]), n_kv_heads=len(new_k), format=cache_format, q=q, cos=cos, sin=sin
        )
        self._say(
            *(kind, used, found),
            lambda: [
                TurnTrial(q=heads[0], **fresh, **earlier, **self._attention_options),
                append,
                AttentionTrial(q=turned, **whole, **self._attention_options),
            ],
        )
        self._attn = self._operand = attn

    @property
    def _window(self) -> int | None:
        return self.run.config.layer_windows[self._i]

    @property
    def _attention_options(self) -> dict[str, Any]:
        """What attention's trials are told besides their numbers."""
        network = self.run.network
        return {
            "format": network.cache(self._i).format,
            "window": self._window,
            "max_keys": network.max_keys,
        }

    def _add_product(self, kind: str, used: tuple[str, ...]) -> None:
        w = self._w.o if kind == "o" else self._w.down
        n = self._at.n
        before, operand = self._x[:n], self._operand[:n]
        x = self.run.read(self.run.x)
        wanted = expected.linear(self._given(), w.weights, before=before)
        self._say(
            *(kind, used, [("sum with the residual", x[:n], wanted)]),
            lambda: [LinearTrial(x=operand, w=w.values, format=w.format, before=before), *_sums(used, x[:n])],
        )
        self._x, self._packed = x, None

    def _gate_and_up(self, kind: str, used: tuple[str, ...]) -> None:
        n, h, gate_w, up_w = self._at.n, self._operand[: self._at.n], self._w.gate, self._w.up
        gate, up = self.run.read(self.run.gate), self.run.read(self.run.up)
        given = self._given()
        found: list[Found] = [
            ("gate", gate[:n], expected.linear(given, gate_w.weights)),
            ("up", up[:n], expected.linear(given, up_w.weights)),
        ]
        self._say(
            *(kind, used, found),
            lambda: [LinearTrial(x=h, w=w.values, format=w.format) for w in (gate_w, up_w)],
        )
        self._gate, self._up, self._packed = gate, up, None

    def _swiglu(self, kind: str, used: tuple[str, ...]) -> None:
        n, eps, norm = self._at.n, self._eps, self._w.post_ln
        gate_w, up_w, x = self._w.gate, self._w.up, self._x[: self._at.n]
        gate, up = self._gate[:n], self._up[:n]
        mixed = self.run.read(self.run.gate)
        normed = "post_ln" in self._seen
        if "gate_up" in self._seen:
            wanted = expected.swiglu(gate, up)
        elif normed:  # on packed rows
            wanted = expected.gate_up(self._given(), gate_w.weights, up_w.weights)
        else:
            wanted = expected.gate_up(x, gate_w.weights, up_w.weights, norm=(norm, eps))
        fused, given = "gate_up" not in self._seen, self._operand[:n]

        def trials() -> list[Trial]:
            if not fused:
                return [SwigluTrial(gate=gate, up=up)]
            if normed:
                return [LinearTrial(x=given, w=gate_w.values, format=gate_w.format, up=up_w.values)]
            h = expected.rms_norm(x, norm, eps=eps).values
            products = [expected.linear(h, w.weights).values for w in (gate_w, up_w)]
            return [
                LinearTrial(x=x, w=gate_w.values, format=gate_w.format, norm=(norm, eps), up=up_w.values),
                NormTrial(x=x, weight=norm, eps=eps),
                *(LinearTrial(x=h, w=w.values, format=w.format) for w in (gate_w, up_w)),
                SwigluTrial(gate=products[0], up=products[1]),
            ]

        self._say(kind, used, [("gated", mixed[:n], wanted)], trials)
        self._operand, self._packed = mixed, None

    @property
    def _eps(self) -> float:
        return self.run.config.rms_norm_eps

    @property
    def _columns(self) -> tuple[slice, slice, slice]:
        """Where q, k and v lie in a row."""
        q, kv = self.run.config.q_size, self.run.config.kv_size
        return slice(0, q), slice(q, q + kv), slice(q + kv, q + 2 * kv)

    def _turns(self) -> tuple[Array, Array]:
        return rope_tables(self.run.config, np.arange(self._at.end))


JUDGES: dict[str, Callable[[LayerJudge, str, tuple[str, ...]], None]] = {
    "input_ln": LayerJudge._norm,
    "input_ln_pack": LayerJudge._norm_pack,
    "qkv": LayerJudge._project,
    "rope": LayerJudge._rope,
    "append": LayerJudge._append,
    "attn": LayerJudge._attention,
    "o": LayerJudge._add_product,
    "post_ln": LayerJudge._norm,
    "post_ln_pack": LayerJudge._norm_pack,
    "gate_up": LayerJudge._gate_and_up,
    "swiglu": LayerJudge._swiglu,
    "swiglu_pack": LayerJudge._swiglu_pack,
    "down": LayerJudge._add_product,
    "pack": LayerJudge._pack,
}


def _sums(used: tuple[str, ...], made: Array) -> list[Trial]:
    """Where a product's sums were divided, what puts parts together is tried as well, on numbers of its size."""
    if SUM_PARTS not in used:
        return []
    return [SumTrial(parts=np.stack([made, -2 * made, made[::-1]]))]
