"""A checkpoint's weights on a device: where each tensor lies, and how it gets there.

One allocation a layer, its tensors at fixed offsets in it. Matrices keep the checkpoint's own 16-bit type, float32 ones
become f16; biases and norms are float32. The rows of q, k and v lie behind each other, so that one product makes all
three; gate and up are sliced alike, so that one product can make both.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xinfer.gpu.api import Buffer, BufferKind, BufferSlice, Bytes, Device, DeviceInfo
from xinfer.model.names import LayerWeights, global_tensor_name, layer_shapes, layer_tensor_name
from xinfer.model.reference import round_weights, to_float32
from xinfer.model.weights import ModelWeights
from xinfer.ops import Format, Matrix, MatrixSlice, row_stride

Progress = Callable[[int, int], None]  # bytes read, bytes in all

ALIGNMENT = 256  # of every binding's offset, enough for every device
SLICE_ROWS = 16  # a slice's rows are a multiple of it: with rows of 16 bytes it begins at a multiple of ALIGNMENT
READERS = 4  # threads that read the checkpoint
CONVERT_BYTES = 8 << 20  # float32 bytes that one conversion works on at a time

_FORMATS: dict[str, Format] = {"float16": "f16", "bfloat16": "bf16", "float32": "f16"}
_STORED: dict[Format, str] = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
_DTYPES: dict[Format, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its allocation, and in which form. A vector has one row."""

    name: str  # the checkpoint's
    offset: int
    rows: int
    columns: int
    stride: int  # bytes from row to row
    format: Format

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.rows * self.stride


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one allocation."""

    places: tuple[Place, ...]
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """What the ops are given of one layer."""

    input_ln: BufferSlice  # float32 (hidden,)
    qkv: Matrix  # (q_size + 2 * kv_size, hidden): the rows of q_w, k_w and v_w
    qkv_b: BufferSlice  # float32 (q_size + 2 * kv_size,)
    o: Matrix  # (hidden, q_size)
    post_ln: BufferSlice  # float32 (hidden,)
    gate: Matrix  # (intermediate, hidden)
    up: Matrix  # (intermediate, hidden)
    down: Matrix  # (hidden, intermediate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Which layers stay on the device, and how the others come: the default is that all stay.

    A streamed layer is copied into a slot, which it shares with others, each time before it runs.
    """

    streamed: tuple[int, ...] = ()  # layers, in order
    n_slots: int = 0
    table_on_host: bool = False  # the device reads the few rows of the embedding that it needs over the bus
    pinned: bool = (
        True  # the host keeps streamed layers in memory that the device copies from; else they are read again
    )

    def slot(self, layer: int) -> int:
        """Which slot a streamed layer is copied into."""
        return self.streamed.index(layer) % self.n_slots


RESIDENT = Split()


class WeightsLayout:
    """Where every tensor of a checkpoint will lie. Nothing is allocated or read."""

    def __init__(self, weights: ModelWeights) -> None:
        self.config = weights.config
        self._stored = {name: info.dtype for name, info in weights.tensors.items()}
        self.layers = tuple(self._layer(i) for i in range(self.config.num_hidden_layers))
        self.table = self._globals("embed", "norm")
        self.head = None if weights.lm_head_is_embed else self._globals("lm_head")

    def nbytes(self, split: Split = RESIDENT) -> int:
        """Bytes of all allocations on the device."""
        rest = ([] if split.table_on_host else [self.table]) + ([] if self.head is None else [self.head])
        kept = [layout for i, layout in enumerate(self.layers) if i not in split.streamed]
        return sum(layout.size for layout in (*kept, *rest)) + split.n_slots * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes that any layer fits into."""
        return max(layout.size for layout in self.layers)

    def _format(self, names: Sequence[str]) -> Format:
        """The form of matrices that must be alike: their own, and float32 where they are not."""
        stored = {self._stored[name] for name in names}
        return _FORMATS[stored.pop()] if len(stored) == 1 else "f32"

    def _layer(self, i: int) -> Layout:
        shapes = layer_shapes(self.config)
        places: list[Place] = []
        end = 0
        for group in (("input_ln",), ("q_w", "k_w", "v_w"), ("q_b", "k_b", "v_b"), ("o_w",), ("post_ln",)):
            end = self._place(places, i, group, shapes, end)
        gate_up = self._format([layer_tensor_name(i, field) for field in ("gate_w", "up_w")])
        for group in (("gate_w",), ("up_w",), ("down_w",)):
            end = self._place(places, i, group, shapes, end, gate_up if group != ("down_w",) else None)
        return Layout(tuple(places), _round_up(end, ALIGNMENT))

    def _place(
        self,
        places: list[Place],
        layer: int,
        group: tuple[str, ...],
        shapes: LayerWeights[tuple[int, ...]],
        end: int,
        form: Format | None = None,
    ) -> int:
        """Place tensors behind each other without a gap; where they end."""
        names = [layer_tensor_name(layer, field) for field in group]
        form = form or self._format(names)
        end = _round_up(end, ALIGNMENT)
        for field, name in zip(group, names, strict=True):
            places.append(_placed(name, getattr(shapes, field), form, end))
            end = places[-1].end
        return end

    def _globals(self, *wanted: str) -> Layout:
        places: list[Place] = []
        end = 0
        for field in wanted:
            name = global_tensor_name(field)
            vocab_by_hidden = (self.config.vocab_size, self.config.hidden_size)
            shape = vocab_by_hidden if field != "norm" else (self.config.hidden_size,)
            places.append(_placed(name, shape, self._format([name]), _round_up(end, ALIGNMENT)))
            end = places[-1].end
        return Layout(tuple(places), _round_up(end, ALIGNMENT))


def _placed(name: str, shape: tuple[int, ...], form: Format, offset: int) -> Place:
    if len(shape) == 1:
        return Place(name, offset, 1, shape[0], 4 * shape[0], "f32")
    rows, columns = shape
    return Place(name, offset, rows, columns, row_stride(columns, form), form)


class DeviceWeights:
    """The weights of a model, in device memory or on their way to it.

    `layers` says where each layer lies when it runs; a streamed one has to be sent there before: `send`.

    Raises:
        WeightsError: the checkpoint cannot be read, or has values beyond the range of f16; the tensor is named.
        OutOfMemoryError: the device has too little memory.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        layout: WeightsLayout,
        progress: Progress | None = None,
        *,
        split: Split = RESIDENT,
    ) -> None:
        self.split = split
        self.bytes_sent = 0  # of streamed layers, since the beginning
        self._device = device
        self._layout = layout
        with ExitStack() as held:
            self._allocate(held)
            self._source = None if split.pinned or not split.streamed else held.enter_context(weights.reopen())
            _Loader(device, weights, progress).load(self._jobs())
            self._held = held.pop_all()
        info, table, head = device.info, layout.table, layout.head
        self.embed = _matrix(info, self._table, table.places[:1])
        self.norm = _vector(self._table, table.places[1:])
        self.head = self.embed if head is None or self._head is None else _matrix(info, self._head, head.places)
        self.layers = tuple(
            _device_layer(info, buffer, part, i)
            for i, (buffer, part) in enumerate(zip(self._buffers, layout.layers, strict=True))
        )

    def _allocate(self, held: ExitStack) -> None:
        split, layout = self.split, self._layout

        def buffer(size: int, label: str, kind: BufferKind = "device") -> Buffer:
            made = self._device.create_buffer(size, kind, label)
            held.callback(made.release)
            return made

        self._table = buffer(layout.table.size, "embedding", "upload" if split.table_on_host else "device")
        self._head = None if layout.head is None else buffer(layout.head.size, "LM head")
        slots = [buffer(layout.slot_bytes, f"slot {i}") for i in range(split.n_slots)]
        self._buffers: list[Buffer] = []  # where each layer lies when it runs
        self._pinned: dict[int, Buffer] = {}
        for i, part in enumerate(layout.layers):
            if i not in split.streamed:
                self._buffers.append(buffer(part.size, f"layer {i}"))
                continue
            self._buffers.append(slots[split.slot(i)])
            if split.pinned:
                self._pinned[i] = buffer(part.size, f"layer {i}, host", "upload")

    def _jobs(self) -> list[tuple[Place, Buffer]]:
        """What is read at the beginning, and where to."""
        layout, jobs = self._layout, [(place, self._table) for place in self._layout.table.places]
        if layout.head is not None and self._head is not None:
            jobs += [(place, self._head) for place in layout.head.places]
        for i, part in enumerate(layout.layers):
            if i not in self.split.streamed or self.split.pinned:
                jobs += [(place, self._pinned.get(i, self._buffers[i])) for place in part.places]
        return jobs

    def send(self, i: int) -> None:
        """Let layer i be copied into its slot, behind the submitted work that uses the slot."""
        size = self._layout.layers[i].size
        if self._source is None:
            self._device.transfer(self._pinned[i][:size], self._buffers[i][:size])
        else:
            jobs = [(place, self._buffers[i]) for place in self._layout.layers[i].places]
            _Loader(self._device, self._source, None).load(jobs, flush=False)
        self.bytes_sent += size

    def release(self) -> None:
        """Give the memory back; may be called twice."""
        self._held.close()


def _device_layer(info: DeviceInfo, buffer: Buffer, layout: Layout, i: int) -> DeviceLayer:
    place = {place.name: place for place in layout.places}
    of = LayerWeights(**{field.name: place[layer_tensor_name(i, field.name)] for field in fields(LayerWeights)})
    return DeviceLayer(
        input_ln=_vector(buffer, [of.input_ln]),
        qkv=_matrix(info, buffer, [of.q_w, of.k_w, of.v_w]),
        qkv_b=_vector(buffer, [of.q_b, of.k_b, of.v_b]),
        o=_matrix(info, buffer, [of.o_w]),
        post_ln=_vector(buffer, [of.post_ln]),
        gate=_matrix(info, buffer, [of.gate_w]),
        up=_matrix(info, buffer, [of.up_w]),
        down=_matrix(info, buffer, [of.down_w]),
    )


def _vector(buffer: Buffer, places: Sequence[Place]) -> BufferSlice:
    return buffer[places[0].offset : places[-1].end]


def _matrix(info: DeviceInfo, buffer: Buffer, places: Sequence[Place]) -> Matrix:
    """One matrix of all rows of these places, in slices that a binding can span."""
    first, n_rows = places[0], sum(place.rows for place in places)
    a_slice = info.max_storage_range // first.stride // SLICE_ROWS * SLICE_ROWS
    slices = []
    for row in range(0, n_rows, a_slice):
        count = min(a_slice, n_rows - row)
        start = first.offset + row * first.stride
        slices.append(MatrixSlice(buffer[start : start + count * first.stride], row, count))
    return Matrix(
        rows=n_rows, columns=first.columns, format=first.format, row_stride=first.stride, slices=tuple(slices)
    )


class _Loader:
    """Reads tensors with several threads, straight into staging where they are stored as the device wants them."""

    def __init__(self, device: Device, weights: ModelWeights, progress: Progress | None) -> None:
        self._device = device
        self._weights = weights
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._stop = threading.Event()

    def load(self, jobs: Sequence[tuple[Place, Buffer]], *, flush: bool = True) -> None:
        """Fill the places; with `flush`, wait until all has arrived. Ctrl-C ends the threads before it is passed on."""
        total = sum(self._weights.tensors[place.name].nbytes for place, _ in jobs)
        with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "xinfer-load") as threads:
            try:
                futures = {threads.submit(self._load_tensor, place, buffer) for place, buffer in jobs}
                while futures:
                    finished, futures = wait(futures, timeout=0.1, return_when=FIRST_EXCEPTION)
                    for future in finished:
                        future.result()
                    if self._progress is not None:
                        self._progress(self._done, total)
                if flush:
                    self._device.flush_uploads()
            except BaseException:
                self._stop.set()
                threads.shutdown(wait=True, cancel_futures=True)
                raise

    def _load_tensor(self, place: Place, buffer: Buffer) -> None:
        info = self._weights.tensors[place.name]
        target = buffer[place.offset : place.end]
        packed = place.stride == place.columns * _DTYPES[place.format].itemsize
        if info.dtype == _STORED[place.format] and packed:
            self._read_straight(place.name, target)
        else:
            self._convert(place, target)

    def _read_straight(self, name: str, target: BufferSlice) -> None:
        offset = 0

        def fill(piece: memoryview) -> None:
            nonlocal offset
            for start in range(0, len(piece), CONVERT_BYTES):
                part = piece[start : start + CONVERT_BYTES]
                self._weights.read_into(name, part, offset=offset)
                offset += len(part)
                self._count(len(part))

        if target.buffer.kind == "device":
            self._device.upload_from(target, fill)
            return
        scratch = memoryview(bytearray(min(CONVERT_BYTES, target.size)))
        for start in range(0, target.size, len(scratch)):
            piece = scratch[: target.size - start]
            fill(piece)
            self._put(target[start : start + len(piece)], piece)

    def _put(self, target: BufferSlice, data: Bytes) -> None:
        """Into device memory, or into the host's own that the device copies from."""
        if target.buffer.kind == "device":
            self._device.upload(target, data)
        else:
            target.buffer.write(data, target.offset)

    def _convert(self, place: Place, target: BufferSlice) -> None:
        info, dtype = self._weights.tensors[place.name], _DTYPES[place.format]
        if len(info.shape) == 1:
            values = to_float32(self._weights.read(place.name))
            self._put(target, values.tobytes())
            self._count(info.nbytes)
            return
        step = max(1, CONVERT_BYTES // (4 * place.columns))
        for row in range(0, place.rows, step):
            stored = self._weights.read_rows(place.name, row, min(row + step, place.rows))
            rounded = round_weights(stored, place.name, "float16") if place.format == "f16" else stored
            padded = np.zeros((len(stored), place.stride // dtype.itemsize), dtype)
            padded[:, : place.columns] = rounded
            self._put(target[row * place.stride : (row + len(stored)) * place.stride], _bytes(padded))
            self._count(stored.nbytes)

    def _count(self, n_bytes: int) -> None:
        if self._stop.is_set():
            raise InterruptedError("loading was given up")
        with self._lock:
            self._done += n_bytes


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
