"""One decode step of a model with streamed layers as a picture: uploads and layers over time, by the device's clock."""

from __future__ import annotations

import threading
from ctypes import c_uint64
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._vk import transfer
from xinfer.gpu.api import BufferSlice
from xinfer.gpu.vulkan import VulkanDevice
from xinfer.gpu_model import QwenModel
from xinfer.gpu_model.forward import Pass
from xinfer.gpu_model.steps import LOAD, STEP

MOST_COPIES = 2048
ROUNDS = 3  # steps in a row, of which the last is shown: the first ones start with empty slots

WIDTH, LEFT, TOP, ROW, GAP = 1000, 90, 46, 34, 14
COLOURS = {"upload": "#3b6fb6", "streamed": "#d1752c", "resident": "#7d8a97"}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in ticks and later in seconds."""

    kind: str  # a key of COLOURS
    label: str
    begin: float
    end: float


class _TimedPass(Pass):
    """A step with a timestamp before and after each layer."""

    def layer(self, i: int, *, cache_only: bool = False) -> None:
        self.recording.timestamp(f"begin {i}")
        super().layer(i, cache_only=cache_only)
        self.recording.barrier()
        self.recording.timestamp(f"end {i}")


class CopyClock:
    """Two timestamps around every copy into buffers whose label begins with `into`, while it is entered."""

    def __init__(self, device: VulkanDevice, *, into: str = "slot") -> None:
        self.device = device
        self._into = into
        self._lock = threading.Lock()
        self.labels: list[str] = []  # of what was copied, in order
        core = device.core
        info = vk.VkQueryPoolCreateInfo(queryType=vk.VK_QUERY_TYPE_TIMESTAMP, queryCount=2 * MOST_COPIES)
        self._pool = core.create("VkQueryPool", info, "copies")
        self._commands = core.command_pool(device._queue.family, "reset of queries")  # copy engines cannot reset them
        buffers = core.command_buffers(self._commands, 1)
        core.begin(buffers[0], vk.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        core.vk.vkCmdResetQueryPool(buffers[0], self._pool.value, 0, 2 * MOST_COPIES)
        core.check(core.vk.vkEndCommandBuffer(buffers[0]), "vkEndCommandBuffer")
        device._queue.wait(device._queue.submit(buffers), 10)

    def __enter__(self) -> CopyClock:
        self._plain: Any = transfer.Chunk.copy
        native = self.device.core.vk
        bottom = vk.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT

        def copy(chunk: transfer.Chunk, source: BufferSlice, target: BufferSlice) -> None:
            with self._lock:
                n = len(self.labels)
                timed = n < MOST_COPIES and target.buffer.label.startswith(self._into)
                if timed:
                    self.labels.append(source.buffer.label)
            if not timed:
                self._plain(chunk, source, target)
                return
            native.vkCmdWriteTimestamp(chunk.commands[0], bottom, self._pool.value, 2 * n)
            self._plain(chunk, source, target)
            chunk.barrier()
            native.vkCmdWriteTimestamp(chunk.commands[0], bottom, self._pool.value, 2 * n + 1)

        transfer.Chunk.copy = copy  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        transfer.Chunk.copy = self._plain  # type: ignore[method-assign]
        self.device.flush_uploads()
        self.device.core.destroy(self._pool)
        self.device.core.destroy(self._commands)

    def spans(self) -> list[Span]:
        """Every copy, in ticks."""
        n, core = 2 * len(self.labels), self.device.core
        values = (c_uint64 * n)()
        flags = vk.VK_QUERY_RESULT_64_BIT | vk.VK_QUERY_RESULT_WAIT_BIT
        call = "vkGetQueryPoolResults"
        core.check(getattr(core.vk, call)(core.device, self._pool.value, 0, n, 8 * n, values, 8, flags), call)
        return [Span("upload", label, values[2 * i], values[2 * i + 1]) for i, label in enumerate(self.labels)]


def record(model: QwenModel) -> list[Span]:
    """The last of some steps: its layers and every copy that falls into it, in seconds from its begin."""
    device, steps = model.device, model.steps
    assert isinstance(device, VulkanDevice), "the timeline is Vulkan's"
    split = model.plan.split
    cache = model.make_cache(64)
    cache.reserve(1)
    model.claim(None)
    recording = device.create_recording("timeline")
    try:
        recording.segment(LOAD)
        steps.record_load(recording, steps.one, 1)
        recording.segment(STEP)
        step = _TimedPass(steps.network(), steps.one, 1, recording)
        recording.timestamp("step")
        step.embed()
        steps.record_layers(step, STEP)
        step.head(steps.logits)
        recording.timestamp("end of the step")
        recording.finish()
        with CopyClock(device) as clock:
            for _ in range(ROUNDS):
                steps.stage_one(0, cache, position=0)
                ticket = steps.submit(recording)
            steps.wait(ticket)
            copies = clock.spans()
        stamps = recording.queries.read()
    finally:
        recording.release()
    ticks = dict(stamps)
    start, stop = ticks["step"], ticks["end of the step"]
    layers = [
        Span("streamed" if i in split.streamed else "resident", f"layer {i}", ticks[f"begin {i}"], ticks[f"end {i}"])
        for i in range(model.config.num_hidden_layers)
    ]
    second = device.core.adapter.limits.timestampPeriod * 1e-9
    return [
        Span(span.kind, span.label, (max(span.begin, start) - start) * second, (min(span.end, stop) - start) * second)
        for span in (*copies, *layers, Span("step", "step", start, stop))
        if span.end > start and span.begin < stop
    ]


def shares(spans: list[Span]) -> dict[str, float]:
    """Seconds of the step, and which share of it the bus is busy; which share of the layers' time is hidden by it."""
    step = next(span for span in spans if span.kind == "step")
    uploads = [span for span in spans if span.kind == "upload"]
    layers = [span for span in spans if span.kind in ("streamed", "resident")]
    computing = sum(span.end - span.begin for span in layers)
    hidden = sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a in layers for b in uploads)
    return {
        "seconds": step.end,
        "bus_busy": sum(span.end - span.begin for span in uploads) / step.end,
        "compute_seconds": computing,
        "compute_hidden": hidden / computing if computing else 0.0,
    }


def draw(spans: list[Span], title: str) -> str:
    """An SVG: a row of copies and a row of layers, time from left to right."""
    end = next(span for span in spans if span.kind == "step").end
    scale = (WIDTH - LEFT - 10) / end
    bottom = TOP + 2 * ROW + GAP
    size = f'width="{WIDTH}" height="{bottom + 62}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="13">',
        f'<rect {size} fill="#ffffff"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
    ]
    for name, y in (("bus", TOP), ("layers", TOP + ROW + GAP)):
        parts.append(f'<text x="10" y="{y + ROW / 2 + 5}">{name}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{end * scale:.1f}" height="{ROW}" fill="#eef0f2"/>')
    for span in spans:
        if span.kind not in COLOURS:
            continue
        y = TOP if span.kind == "upload" else TOP + ROW + GAP
        width = max(0.6, (span.end - span.begin) * scale - 0.4)
        parts.append(
            f'<rect x="{LEFT + span.begin * scale:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" '
            f'fill="{COLOURS[span.kind]}"><title>{escape(span.label)}: {1e3 * (span.end - span.begin):.2f} ms</title>'
            "</rect>"
        )
    for i in range(6):
        x = LEFT + i * end / 5 * scale
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{1e3 * i * end / 5:.1f} ms</text>')
    x = LEFT
    for kind, text in (("upload", "a layer is copied"), ("streamed", "it runs"), ("resident", "a resident layer runs")):
        parts.append(f'<rect x="{x}" y="{bottom + 36}" width="12" height="12" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 18}" y="{bottom + 47}">{text}</text>')
        x += 190
    return "\n".join([*parts, "</svg>\n"])


def write(spans: list[Span], path: Path, title: str) -> Path:
    """Write the picture of a step."""
    found = shares(spans)
    share = f"bus busy {found['bus_busy']:.0%}, {found['compute_hidden']:.0%} of the layers' time hidden behind copies"
    path.write_text(draw(spans, f"{title}: a token in {1e3 * found['seconds']:.1f} ms; {share}"))
    return path
