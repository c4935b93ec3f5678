"""The Vulkan backend: adapters are listed, and one is opened as a `VulkanDevice`."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_void_p

from xinfer.errors import DeviceError
from xinfer.gpu import _checks, _probe, native
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._device import NativeDevice
from xinfer.gpu._trail import MARKER
from xinfer.gpu._vk.adapter import Adapter, QueueFamily, list_adapters
from xinfer.gpu._vk.cache import PipelineCache
from xinfer.gpu._vk.core import Core
from xinfer.gpu._vk.features import Version
from xinfer.gpu._vk.instance import NEWEST, Instance
from xinfer.gpu._vk.kernel import Layouts, VulkanKernel
from xinfer.gpu._vk.memory import Allocator, BufferOwner, VulkanBuffer, as_slice
from xinfer.gpu._vk.pinned import Pinning
from xinfer.gpu._vk.queue import FenceQueue, Queue, TimelineQueue
from xinfer.gpu._vk.recording import VulkanRecording
from xinfer.gpu._vk.transfer import Transfers
from xinfer.gpu.api import (
    Bindable,
    BufferKind,
    BufferSlice,
    DebugMessage,
    Device,
    DeviceInfo,
    KernelCode,
    Recording,
    RemovedReason,
    Ticket,
)

HOW_TO_GET_LOADER = {
    "linux": "install it (Debian, Ubuntu: libvulkan1; Fedora: vulkan-loader; Arch: vulkan-icd-loader)",
    "win32": "vulkan-1.dll comes with the graphics driver; install the vendor's newest",
    "darwin": "install MoltenVK (brew install molten-vk) or the Vulkan SDK",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VulkanOptions:
    """What tests force, to walk paths that the driver at hand would not need."""

    newest: Version = NEWEST  # Vulkan version not to go beyond
    without: frozenset[str] = frozenset()  # features to leave alone
    direct: bool | None = None  # write device memory in place; None: on integrated and software devices
    second_clock: bool = False  # uploads as if there were a transfer queue
    imports: bool | None = None  # pages of this process for uploads; None: where that is faster, not where direct


def list_devices() -> list[DeviceInfo]:
    """The adapters that Vulkan shows. Raises DeviceError where there is no loader or no driver."""
    instance = Instance()
    try:
        return [adapter.info for adapter in list_adapters(instance)]
    finally:
        instance.close()


def hold_driver() -> Callable[[], None]:
    """Load the drivers, which stay in memory until what is returned is called. Raises DeviceError as `list_devices`."""
    return Instance().close


def open_device(index: int, *, debug: bool = False, mark_ops: bool = False) -> Device:
    """Open the adapter with this index. Raises DeviceError where there is none."""
    return VulkanDevice(index, debug=debug, mark_ops=mark_ops)


class VulkanDevice(NativeDevice, BufferOwner):
    """See `api.Device`."""

    core: Core
    _queue: Queue
    _transfer_queue: Queue
    _transfers: Transfers

    def __init__(
        self, index: int = 0, *, debug: bool = False, mark_ops: bool = False, options: VulkanOptions | None = None
    ) -> None:
        super().__init__()
        options = options or VulkanOptions()
        self._instance = Instance(debug=debug, newest=options.newest)
        try:
            self._open(index, options)
            self._make_markers(each_op=mark_ops)
        except BaseException:
            if hasattr(self, "core"):
                self.core.close()
            self._instance.close()
            raise

    def _open(self, index: int, options: VulkanOptions) -> None:
        adapter = _find(list_adapters(self._instance), index)
        adapter.restrict(options.without)
        self.info: DeviceInfo = adapter.info
        compute, transfer = _choose_families(adapter.families)
        if "transfer_queue" not in self.info.features or "timeline" not in self.info.features:
            transfer = None  # without timelines queues could wait for each other by binary semaphores only
        families = [compute] if transfer is None else [compute, transfer]
        self.core = Core(adapter, adapter.info.features, families)
        self.families = [family.index for family in families]
        self._recent: deque[tuple[int, weakref.ref[VulkanRecording]]] = deque(maxlen=64)
        self._queue, self._transfer_queue = self._make_queues(compute, transfer, second_clock=options.second_clock)
        direct, imports = options.direct, options.imports
        if direct is None:
            direct = self.info.kind in ("integrated", "cpu")
        self.allocator = Allocator(self.core, direct=direct)
        self.pinning = Pinning(self.core, wanted=False if direct and imports is None else imports)
        self._layouts = Layouts(self.core)
        self._cache = PipelineCache(self.core)
        self._transfers = Transfers(self, self._queue, self._transfer_queue)

    def _make_markers(self, *, each_op: bool) -> None:
        self.markers = VulkanBuffer(self, MARKER.size, "readback", "markers")
        self.markers.write(bytes(MARKER.size))
        view = self.markers.view(0, MARKER.size)
        self.core.trail.read, self.core.trail.each_op = lambda: bytes(view), each_op

    def _make_queues(
        self, compute: QueueFamily, transfer: QueueFamily | None, *, second_clock: bool
    ) -> tuple[Queue, Queue]:
        if "timeline" not in self.info.features:
            queue = FenceQueue(self.core, compute)
            return queue, queue
        first = TimelineQueue(self.core, compute)
        if transfer:
            return first, TimelineQueue(self.core, transfer)
        if not second_clock:
            return first, first
        only_transfers = dataclasses.replace(compute, flags=vk.VK_QUEUE_TRANSFER_BIT)
        return first, TimelineQueue(self.core, only_transfers, first.lock)

    def create_buffer(self, size: int, kind: BufferKind = "device", label: str = "") -> VulkanBuffer:
        """New memory, its content undefined. Raises OutOfMemoryError before the driver would."""
        self.core.ensure_usable()
        _checks.check_size(size, self.info, label)
        self.collect()
        return VulkanBuffer(self, size, kind, label)

    def create_kernel(self, code: KernelCode) -> VulkanKernel:
        """Compile a shader. Raises DeviceError where the device lacks what it needs."""
        self.core.ensure_usable()
        kernel = VulkanKernel(self, self._layouts, self._cache.handle, code)
        self._cache.changed = True
        return kernel

    def create_recording(self, label: str) -> VulkanRecording:
        """An empty recording."""
        self.core.ensure_usable()
        return VulkanRecording(self, self._layouts, self._queue, label)

    def submit(self, recording: Recording, segments: Sequence[str] | None = None) -> Ticket:
        """Queue a finished recording, or some of its segments; uploads made before come first."""
        if not isinstance(recording, VulkanRecording):
            raise TypeError(f"expected a Vulkan recording, got {type(recording).__name__}")
        self.core.ensure_usable()
        parts = recording.choose(segments)
        commands = recording.commands
        if len(parts) != len(commands):
            commands = (c_void_p * len(parts))(*[part.command_buffer for part in parts])
        self._transfers.kick()
        waits = self._transfers.waits_for(parts)
        if self._trash:
            self.collect()
        value = 0
        try:
            value = self._queue.submit(commands, waits)
        finally:
            for part in parts:
                part.last_value = value or self._queue.submitted
        self._recent.append((value, weakref.ref(recording)))
        return Ticket(value, recording.label)

    def _progress(self, ticket: Ticket) -> str:
        """How far a submission has come, as far as its timestamps tell."""
        if self.info.kind == "cpu":  # lavapipe answers such questions only when it is idle
            return ""
        recording = next((reference() for value, reference in self._recent if value == ticket.value), None)
        label = recording.queries.last_finished() if recording else None
        return f", the last that it finished was {label!r}" if label else ""

    def _slice(self, item: Bindable) -> BufferSlice:
        return as_slice(item)

    def timestamps(self, recording: Recording) -> list[tuple[str, float]]:
        """(label, seconds since the recording's first timestamp) of the last run, which has been waited for."""
        if not isinstance(recording, VulkanRecording):
            raise TypeError(f"expected a Vulkan recording, got {type(recording).__name__}")
        self.core.ensure_usable()
        ticks = recording.queries.read()
        period = self.core.adapter.limits.timestampPeriod * 1e-9
        return [(label, (tick - ticks[0][1]) * period) for label, tick in ticks]

    def live_objects(self) -> dict[str, int]:
        """Native objects alive by type, those at zero left out: {} once everything is released."""
        counts = self.core.live_objects()
        if self._instance.handle is not None:
            counts["VkInstance"] = 1
        return counts

    def drain_debug_messages(self) -> list[DebugMessage]:
        """What the validation layers said since the last call; empty without `debug`."""
        return self._instance.messages.drain() if self._instance.messages else []

    def removed_reason(self) -> RemovedReason:
        """VK_ERROR_DEVICE_LOST once a call answered with it, and what VK_EXT_device_fault tells; else VK_SUCCESS."""
        if self.core.lost is None:
            return RemovedReason("VK_SUCCESS", vk.VK_SUCCESS)
        return RemovedReason("VK_ERROR_DEVICE_LOST", vk.VK_ERROR_DEVICE_LOST, self.core.fault)

    def _save(self) -> None:
        self._cache.save()

    def _closed(self) -> None:
        self._instance.close()

    def _abandoned(self) -> None:
        self._instance.abandon()


def _find(adapters: list[Adapter], index: int) -> Adapter:
    for adapter in adapters:
        if adapter.info.index == index:
            return adapter
    found = ", ".join(f"vulkan:{a.info.index} ({a.info.name})" for a in adapters) or "none"
    raise DeviceError(f"no Vulkan device has the index {index}; there are: {found}")


def _choose_families(families: list[QueueFamily]) -> tuple[QueueFamily, QueueFamily | None]:
    """A family for compute, rather one that does no graphics, and one that does nothing but transfers."""
    graphics, compute = vk.VK_QUEUE_GRAPHICS_BIT, vk.VK_QUEUE_COMPUTE_BIT
    able = [family for family in families if family.flags & compute]
    main = next((family for family in able if not family.flags & graphics), able[0])
    apart = [family for family in families if family.only_transfers]
    return main, apart[0] if apart else None


def diagnose() -> list[str]:
    """Why Vulkan shows no GPU here, and what to do about it; [] where it shows one."""
    try:
        native.load_vulkan()
    except DeviceError:
        return ["there is no Vulkan loader: " + HOW_TO_GET_LOADER.get(_probe.platform(), HOW_TO_GET_LOADER["linux"])]
    try:
        devices = list_devices()
    except DeviceError as error:
        # What the loader says of a file that it cannot use, memory that is full, would only mislead.
        said = [] if _probe.driver_file_faults() else [f"the Vulkan loader shows no driver ({error})"]
        return [*said, *_driver_hints()]
    if any(device.kind != "cpu" for device in devices):
        return []
    if not devices:
        return ["no Vulkan driver offers a device with Vulkan 1.1 and compute", *_driver_hints()]
    names = ", ".join(device.name for device in devices)
    return [f"there is only a software driver ({names}); it is used when asked for by name", *_driver_hints()]


def _driver_hints() -> list[str]:
    hints = _probe.driver_file_faults() or [
        f"{name}={value} lets Vulkan see these drivers only; unset it to use all that are installed"
        for name, value in _probe.driver_variables()
    ]
    if _probe.is_wsl():
        hints.append(
            "this is WSL: Vulkan needs Mesa's dzn driver there (mesa-vulkan-drivers) and an up-to-date Windows driver; "
            "running xinfer under Windows itself is the surer way"
        )
    closed = [path for path, allowed in _probe.render_nodes() if not allowed]
    if closed:
        hints.append(
            f"no permission on {', '.join(closed)}: add this user to the group that owns it "
            "(sudo usermod -aG render $USER) and log in again"
        )
    elif _probe.platform() == "linux" and not _probe.render_nodes() and not _probe.has_nvidia_kernel_driver():
        hints.append(
            "the kernel shows no GPU: /dev/dri/renderD* does not exist (in a container, pass --device /dev/dri)"
        )
    if _probe.has_nvidia_kernel_driver():
        hints.append(
            "NVIDIA's kernel driver is loaded, but its Vulkan driver is not found: install the full driver package, "
            "or in a container set NVIDIA_DRIVER_CAPABILITIES=all"
        )
    return hints
