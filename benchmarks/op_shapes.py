"""Times every variant of the decode ops at Qwen2's own shapes: what the choosing rules in `xinfer.ops` rest on.

    python benchmarks/op_shapes.py [--device vulkan] [--ops gemv attention gemm empty] [--models 0.5B 1.5B 7B]

One recording a variant holds many dispatches with a barrier after each, over copies of the weights that together
exceed any cache; the figure is the median of repeats, per dispatch. Results are compared with the plain variant's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xinfer import gpu, ops
from xinfer.gpu.api import Bindable, Buffer, BufferSlice, Device
from xinfer.ops._linear import gemm_candidates, gemv_candidates
from xinfer.shaders.catalog import variants

DISPATCHES, REPEATS = 100, 7
WORKING_SET = 400 << 20  # bytes; the largest caches hold some 100 MB
RANDOM_BYTES = 16 << 20


@dataclass(frozen=True)
class Model:
    """The numbers of qwen2.md that shapes follow from."""

    hidden: int
    heads: int
    kv_heads: int
    dim: int
    intermediate: int
    vocabulary: int


MODELS = {
    "0.5B": Model(896, 14, 2, 64, 4864, 151_936),
    "1.5B": Model(1536, 12, 2, 128, 8960, 151_936),
    "7B": Model(3584, 28, 4, 128, 18_944, 152_064),
}


class Lab:
    """A device, its kernels, and buffers full of random numbers."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.kernels = ops.KernelSet(device)
        rng = np.random.default_rng(0)
        self.random16 = rng.standard_normal(RANDOM_BYTES // 2, np.float32).astype(np.float16)
        self.random32 = rng.standard_normal(1 << 20, np.float32)
        self.buffers: list[Buffer] = []

    def buffer(self, size: int, content: NDArray[np.generic] | None = None) -> BufferSlice:
        """A device buffer, filled with `content` again and again."""
        buffer = self.device.create_buffer(size, "device", "bench")
        self.buffers.append(buffer)
        if content is not None:
            data = content.tobytes()
            for at in range(0, size, len(data)):
                piece = min(len(data), size - at)
                self.device.upload(buffer[at : at + piece], data[:piece])
            self.device.flush_uploads()
        return buffer[0:size]

    def clear(self) -> None:
        """Give the buffers back."""
        for buffer in self.buffers:
            buffer.release()
        self.buffers.clear()

    def time(self, record: Callable[[ops.Recorder, int], None]) -> float:
        """Median seconds of one `record(recorder, number)`, a barrier after each included."""
        recording = self.device.create_recording("bench")
        on = ops.Recorder(recording, self.kernels)
        for number in range(4):  # warm up: first use may compile
            record(on, number)
            recording.barrier()
        recording.timestamp("begin")
        for number in range(DISPATCHES):
            record(on, number)
            recording.barrier()
        recording.timestamp("end")
        recording.finish()
        seconds = []
        for _ in range(REPEATS):
            self.device.wait(self.device.submit(recording), timeout_s=120)
            (_, begin), (_, end) = self.device.timestamps(recording)
            seconds.append((end - begin) / DISPATCHES)
        recording.release()
        return statistics.median(seconds)


def report(name: str, variant: str, seconds: float, n_bytes: int, error: float | None = None) -> None:
    """One line."""
    off = "" if error is None else f"  off by {error:.1e}"
    print(f"{name:34} {variant:44} {seconds * 1e6:9.2f} us {n_bytes / seconds / 1e9:8.0f} GB/s{off}", flush=True)


def matrices(lab: Lab, rows: int, columns: int) -> list[ops.Matrix]:
    """Copies of one random f16 matrix, many enough that none stays in a cache."""
    stride = ops.row_stride(columns, "f16")
    copies = min(max(WORKING_SET // (rows * stride), 1) + 1, 64)
    return [
        ops.Matrix(
            rows=rows,
            columns=columns,
            format="f16",
            row_stride=stride,
            slices=(ops.MatrixSlice(lab.buffer(rows * stride, lab.random16), 0, rows),),
        )
        for _ in range(copies)
    ]


def relative_error(lab: Lab, found: Bindable, expected: NDArray[np.float32]) -> float:
    """L2 of the difference over L2 of what is expected."""
    got = np.frombuffer(lab.device.download(found), np.float32)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def run_once(lab: Lab, record: Callable[[ops.Recorder], None]) -> None:
    """Record, submit, wait."""
    recording = lab.device.create_recording("check")
    record(ops.Recorder(recording, lab.kernels))
    recording.finish()
    lab.device.wait(lab.device.submit(recording), timeout_s=120)
    recording.release()


def gemv_shapes(model: Model) -> Iterator[tuple[str, int, int, bool, bool]]:
    """(name, rows, columns, normed, gated) of a decode step's products."""
    qkv = (model.heads + 2 * model.kv_heads) * model.dim
    yield "qkv", qkv, model.hidden, True, False
    yield "o", model.hidden, model.heads * model.dim, False, False
    yield "gate+up", model.intermediate, model.hidden, True, True
    yield "down", model.hidden, model.intermediate, False, False
    yield "head", model.vocabulary, model.hidden, True, False


def bench_gemv(lab: Lab, name: str, model: Model, x_rows: int) -> None:
    """Every GEMV variant that fits each product; the first is the one that the rule picks."""
    for part, rows, columns, normed, gated in gemv_shapes(model):
        if x_rows > 1 and gated:
            continue
        normed = normed and x_rows == 1
        weights = matrices(lab, rows, columns)
        ups = matrices(lab, rows, columns) if gated else weights
        x = ops.Rows.dense(lab.buffer(4 * x_rows * columns, lab.random32), x_rows, columns)
        out = ops.Rows.dense(lab.buffer(4 * x_rows * rows), x_rows, rows)
        scale = lab.buffer(4 * columns, lab.random32)

        def record(on: ops.Recorder, number: int, variant: str) -> None:
            w, up = weights[number % len(weights)], ups[(number + 1) % len(ups)]  # noqa: B023
            if gated:  # noqa: B023
                norm = (scale, 1e-6)  # noqa: B023
                ops.gate_up(on, x, w, up, out, norm=norm, label=part, variant=variant)  # noqa: B023
            elif normed:  # noqa: B023
                ops.norm_linear(on, x, scale, w, out, eps=1e-6, label=part, variant=variant)  # noqa: B023
            else:
                ops.linear(on, x, w, out, label=part, variant=variant)  # noqa: B023

        expected: NDArray[np.float32] | None = None
        for variant in gemv_candidates(weights[0], x, norm=normed, swiglu=gated):
            if variant.endswith("plain") or not lab.kernels.usable(variant):
                continue
            run_once(lab, lambda on, variant=variant: record(on, 0, variant))  # type: ignore[misc]
            if expected is None:
                expected = np.frombuffer(lab.device.download(out.place), np.float32)
            error = relative_error(lab, out.place, expected)
            seconds = lab.time(lambda on, number, variant=variant: record(on, number, variant))  # type: ignore[misc]
            n_bytes = rows * weights[0].row_stride * (2 if gated else 1)
            report(f"{name} {part} {rows}x{columns} T={x_rows}", variant, seconds, n_bytes, error)
        lab.clear()


def bench_gemm(lab: Lab, name: str, model: Model, x_rows: int) -> None:
    """Every GEMM variant on gate and down, in TFLOP/s as well."""
    for part, rows, columns in (
        ("gate", model.intermediate, model.hidden),
        ("down", model.hidden, model.intermediate),
    ):
        weights = matrices(lab, rows, columns)[:8]
        x = ops.Rows.dense(lab.buffer(4 * x_rows * columns, lab.random32), x_rows, columns)
        out = ops.Rows.dense(lab.buffer(4 * x_rows * rows), x_rows, rows)
        for variant in gemm_candidates(weights[0], x_rows):
            if not lab.kernels.usable(variant):
                continue

            def record(on: ops.Recorder, number: int, variant: str = variant) -> None:
                w = weights[number % len(weights)]  # noqa: B023
                ops.linear(on, x, w, out, label=part, variant=variant)  # noqa: B023

            seconds = lab.time(record)
            flops = 2.0 * x_rows * rows * columns / seconds / 1e12
            print(f"{name} {part} T={x_rows} {variant:36} {seconds * 1e6:9.1f} us {flops:7.1f} TFLOP/s", flush=True)
        lab.clear()


def bench_attention(lab: Lab, name: str, model: Model, keys: int) -> None:
    """The decode kernels over one sequence of so many keys, at several numbers of splits."""
    n_blocks = keys // ops.BLOCK_TOKENS + 1
    size = 2 * n_blocks * ops.BLOCK_TOKENS * model.kv_heads * model.dim
    copies = min(max(WORKING_SET // (2 * size), 1) + 1, 16)
    table = lab.buffer(4 * n_blocks, np.random.default_rng(1).permutation(n_blocks).astype(np.uint32))
    caches = [
        ops.CacheBlocks(
            k=lab.buffer(size, lab.random16),
            v=lab.buffer(size, lab.random16),
            table=table,
            table_stride=n_blocks,
            n_kv_heads=model.kv_heads,
            head_dim=model.dim,
            format="f16",
        )
        for _ in range(copies)
    ]
    width = model.heads * model.dim
    q = ops.Rows.dense(lab.buffer(4 * width, lab.random32), 1, width)
    out = ops.Rows.dense(lab.buffer(4 * width), 1, width)
    state = lab.buffer(ops.STATE_BYTES, np.frombuffer(ops.RowState(token=0, position=keys - 1).pack(), np.uint32))
    forms = [variant.id for variant in variants().values() if variant.id.startswith("attention.f16.decode")]
    for variant in forms:
        for n_splits in (None, 16, 32, 64, 128, 256):
            if not lab.kernels.usable(variant):
                continue
            on = ops.Recorder(lab.device.create_recording("plan"), lab.kernels)
            plan = ops.plan_attention(
                on,
                caches[0],
                n_heads=model.heads,
                n_rows=1,
                max_keys=max(keys, 32_768),
                variant=variant,
                n_splits=n_splits,
            )
            on.recording.release()
            scratch = lab.buffer(max(plan.scratch_bytes, 4), np.zeros(1 << 16, np.uint32))

            def record(on: ops.Recorder, number: int, plan: ops.AttentionPlan = plan) -> None:
                cache = caches[number % len(caches)]
                ops.attention(on, plan, state, q, cache, out, scratch=scratch, label="attn")  # noqa: B023

            seconds = lab.time(record)
            report(f"{name} attention {keys} keys", f"{variant} splits {plan.n_splits}", seconds, 2 * size)
    lab.clear()


def bench_empty(lab: Lab) -> None:
    """A dispatch that does next to nothing: what each one costs."""
    x = ops.Rows.dense(lab.buffer(4 * 64, lab.random32), 1, 64)
    y = ops.Rows.dense(lab.buffer(4 * 64, lab.random32), 1, 64)
    report("dispatch and barrier", "add.plain", lab.time(lambda on, _: ops.add(on, x, y, label="add")), 512)
    lab.clear()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Time the variants of the decode ops at Qwen2's shapes.")
    parser.add_argument("--device", default="vulkan")
    parser.add_argument("--ops", nargs="+", default=["empty", "gemv", "attention", "gemm"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="rows of activations of a GEMV")
    parser.add_argument("--keys", nargs="+", type=int, default=[128, 4096, 32_768])
    arguments = parser.parse_args()
    device = gpu.open_device(arguments.device)
    if device is None:
        print("error: no GPU", file=sys.stderr)
        return 1
    with device:
        print(f"{device.info.name}, {device.info.driver} {device.info.driver_version}")
        lab = Lab(device)
        if "empty" in arguments.ops:
            bench_empty(lab)
        for name in arguments.models:
            if "gemv" in arguments.ops:
                for x_rows in arguments.rows:
                    bench_gemv(lab, name, MODELS[name], x_rows)
            if "attention" in arguments.ops:
                for keys in arguments.keys:
                    bench_attention(lab, name, MODELS[name], keys)
            if "gemm" in arguments.ops:
                for x_rows in (512, 4096):
                    bench_gemm(lab, name, MODELS[name], x_rows)
        lab.kernels.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
