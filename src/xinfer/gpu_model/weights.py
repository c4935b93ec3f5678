"""A checkpoint's weights on a device, or on their way to it: what the ops are given, and how streamed layers come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace

from xinfer.errors import OutOfMemoryError
from xinfer.gpu.api import Buffer, BufferKind, BufferSlice, Device, DeviceInfo
from xinfer.gpu_model.layout import RESIDENT, SLOTS, Layout, Place, Split, WeightsLayout
from xinfer.gpu_model.loading import Job, Loader, Progress
from xinfer.model.memory import available_memory
from xinfer.model.names import LayerWeights, layer_tensor_name
from xinfer.model.weights import ModelWeights
from xinfer.ops import Matrix, MatrixSlice

SLICE_ROWS = 16  # a slice's rows are a multiple of it: with rows of 16 bytes it begins at a multiple of ALIGNMENT


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


class DeviceWeights:
    """The weights of a model, in device memory or on their way to it.

    `layers` says where each layer lies when it runs; a streamed one has to be sent there before: `send`. Until `load`
    the memory holds whatever it held.

    Raises:
        OutOfMemoryError: the device has too little memory.
    """

    def __init__(
        self, device: Device, weights: ModelWeights, layout: WeightsLayout, *, split: Split = RESIDENT
    ) -> None:
        self.split = split
        self.bytes_sent = 0  # of streamed layers, since the beginning
        self._device = device
        self._layout = layout
        with ExitStack() as held:
            self._allocate(held)
            self._source: ModelWeights | None = None  # of streamed layers that the host does not keep
            if split.streamed and not split.pinned:
                self._source = held.enter_context(weights.reopen())
                self._again = held.enter_context(Loader(device, self._source))
            self._held = held.pop_all()
        info, table, head = device.info, layout.table, layout.head
        self.embed = _matrix(info, self._table, table.places[:1])
        self.norm = _vector(self._table, table.places[1:])
        self.head = self.embed if head is None or self._head is None else _matrix(info, self._head, head.places)
        self.layers = self._views()

    def load(self, weights: ModelWeights, progress: Progress | None = None) -> None:
        """Read everything but the layers that are read again for each step.

        Raises:
            WeightsError: the checkpoint cannot be read, or has values beyond the range of f16; the tensor is named.
        """
        with Loader(self._device, weights) as loader:
            loader.load(self._jobs(), progress=progress)

    def _views(self) -> tuple[DeviceLayer, ...]:
        parts = zip(self.buffers, self._layout.layers, strict=True)
        return tuple(_device_layer(self._device.info, buffer, part, i) for i, (buffer, part) in enumerate(parts))

    def _allocate(self, held: ExitStack) -> None:
        split, layout = self.split, self._layout

        def buffer(size: int, label: str, kind: BufferKind = "device") -> Buffer:
            made = self._device.create_buffer(size, kind, label)
            held.callback(made.release)
            return made

        self._table = buffer(layout.table.size, "embedding", "upload" if split.table_on_host else "device")
        self._head = None if layout.head is None else buffer(layout.head.size, "LM head")
        self._slots = [buffer(layout.slot_bytes, f"slot {i}") for i in range(split.n_slots)]
        self.buffers: list[Buffer] = []  # where each layer lies when it runs
        self._pinned: dict[int, Buffer] = {}
        for i, part in enumerate(layout.layers):
            if i not in split.streamed:
                self.buffers.append(buffer(part.size, f"layer {i}"))
                continue
            self.buffers.append(self._slots[split.slot(i)])
            if split.pinned:
                self._pinned[i] = buffer(part.size, f"layer {i}, host", "upload")

    def _jobs(self) -> list[Job]:
        """What is read at the beginning, and where to."""
        layout, jobs = self._layout, _jobs(self._layout.table, self._table)
        if layout.head is not None and self._head is not None:
            jobs += _jobs(layout.head, self._head)
        for i, part in enumerate(layout.layers):
            if i not in self.split.streamed or self.split.pinned:
                jobs += _jobs(part, self._pinned.get(i, self.buffers[i]))
        return jobs

    @property
    def on_device(self) -> tuple[Buffer, ...]:
        """Every allocation of device memory: the layers', or the slots that they share, and the rest."""
        others = (self._table, *([] if self._head is None else [self._head]))
        return tuple(dict.fromkeys(b for b in (*self.buffers, *others) if b.kind == "device"))

    def send(self, i: int) -> None:
        """Let layer i be copied into its slot, behind the submitted work that uses the slot.

        Raises:
            WeightsError: it is read from a file that has changed, or cannot be read.
        """
        self._bring(i, self.buffers[i])
        self.bytes_sent += self._layout.layers[i].size

    def _bring(self, i: int, target: Buffer) -> None:
        size = self._layout.layers[i].size
        if self._source is None:
            self._device.transfer(self._pinned[i][:size], target[:size])
        else:
            self._again.load(_jobs(self._layout.layers[i], target), flush=False)
            self._source.check_unchanged()  # behind the reading, so that nothing changed goes unnoticed

    def move_out(self, chosen: Sequence[int]) -> int:
        """Stream these layers, too, from now on; bytes of device memory that this freed.

        The host gets the very bytes that the device has, unless streamed layers are read from the disk. Where there are
        no slots yet, the memory of the layers themselves becomes the slots. What was recorded before must not run any
        more.
        """
        layout, own = self._layout, [self.buffers[i] for i in chosen]
        if self.split.pinned:
            self._pinned.update(self._copied_out(chosen))
        fitting = [buffer for buffer in own if buffer.size == layout.slot_bytes]
        new_slots = fitting[: max(0, SLOTS - len(self._slots))]
        if not (self._slots or new_slots):
            new_slots = [self._device.create_buffer(layout.slot_bytes, "device", "slot 0")]
            self._held.callback(new_slots[0].release)
        self._slots += new_slots
        self._stream(tuple(sorted((*self.split.streamed, *chosen))))
        freed = [buffer for buffer in own if buffer not in new_slots]
        for buffer in freed:
            buffer.release()
        return sum(buffer.size for buffer in freed)

    def _stream(self, streamed: tuple[int, ...]) -> None:
        """Let these layers, and no others, come through the slots from now on."""
        self.split = replace(self.split, streamed=streamed, n_slots=len(self._slots))
        for i in streamed:
            self.buffers[i] = self._slots[self.split.slot(i)]
        self.layers = self._views()

    def move_back(self, chosen: Sequence[int]) -> None:
        """Let these streamed layers stay on the device again, or none where that has too little memory.

        Slots that the others do not need become the memory of some of them. What was recorded before must not run any
        more.
        """
        layout, left = self._layout, tuple(i for i in self.split.streamed if i not in chosen)
        homes = dict(zip(chosen, self._slots[len(left) :], strict=False))
        with ExitStack() as made:
            for i in chosen[len(homes) :]:
                homes[i] = self._device.create_buffer(layout.layers[i].size, "device", f"layer {i}")
                made.callback(homes[i].release)
            for i, home in homes.items():
                self._bring(i, home)
            self._device.flush_uploads()
            self._held.push(made.pop_all())
        for i, home in homes.items():
            self.buffers[i] = home
            if self.split.pinned:
                self._pinned.pop(i).release()
        del self._slots[len(left) :]
        self._stream(left)

    def _copied_out(self, chosen: Sequence[int]) -> dict[int, Buffer]:
        """These layers in the host's memory: all of them, or none where that is too little."""
        copies: dict[int, Buffer] = {}
        needed, free = sum(self._layout.layers[i].size for i in chosen), available_memory()
        if needed > free:  # the system would end the process rather than refuse
            raise OutOfMemoryError(
                f"the host has {free:,} bytes of memory left, and {needed:,} are needed for layers",
                needed=needed,
                free=free,
            )
        with ExitStack() as made:
            for i in chosen:
                size = self._layout.layers[i].size
                copies[i] = self._device.create_buffer(size, "upload", f"layer {i}, host")
                made.callback(copies[i].release)
                step = self._device.stage_bytes
                for start in range(0, size, step):
                    part = self.buffers[i][start : min(start + step, size)]
                    copies[i].write(self._device.download(part), start)
            self._held.push(made.pop_all())
        return copies

    def release(self) -> None:
        """Give the memory back; may be called twice."""
        self._held.close()


def _jobs(layout: Layout, buffer: Buffer) -> list[Job]:
    return [(place, buffer) for place in layout.places]


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
