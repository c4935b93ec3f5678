"""An opened device, and the ledger of COM objects made on it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from ctypes import c_void_p

from xinfer.errors import DeviceError, DeviceLostError, Loss, OutOfMemoryError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12 import debug as debugging
from xinfer.gpu._d3d12.adapter import Adapter
from xinfer.gpu._d3d12.com import Argument, Interface, failed, hresult_name, wide
from xinfer.gpu._d3d12.runtime import Runtime, interface
from xinfer.gpu._trail import HUNG, Trail
from xinfer.gpu.api import DebugMessage, RemovedReason

# A call that answers with one of these tells of a lost device; INVALID_CALL may also be a mistake of ours.
LOST = frozenset(d3d.REMOVED.values()) - {d3d.REMOVED["DXGI_ERROR_INVALID_CALL"]}


class Handle:
    """One COM object, from before it is made until it is given back."""

    __slots__ = ("_interface", "core", "kind", "on_destroy", "slot")

    def __init__(self, core: Core, kind: str, on_destroy: Callable[[], None] | None = None) -> None:
        self.core = core
        self.kind = kind
        self.slot = c_void_p()
        self.on_destroy = on_destroy
        self._interface: Interface | None = None

    @property
    def address(self) -> int:
        """The native pointer; 0 where there is none."""
        return self.slot.value or 0

    def call(self, method: str, *arguments: Argument) -> int:
        """Call a method; its answer as an unsigned 64-bit word."""
        if self._interface is None:
            assert self.slot.value
            self._interface = Interface(self.core.runtime.caller, self.kind, self.slot.value)
        return self._interface.call(method, *arguments)

    def run(self, method: str, *arguments: Argument) -> None:
        """Call a method that answers with an HRESULT, and check that."""
        self.core.check(self.call(method, *arguments), f"{self.kind}::{method}")


class Core:
    """The native device and all that was made on it."""

    def __init__(self, runtime: Runtime, adapter: Adapter, *, debug: bool, mark_ops: bool = False) -> None:
        self.runtime = runtime
        self.adapter = adapter
        self.debug = debug
        self.marks = debug or mark_ops  # ops are marked, for breadcrumbs
        self.lost: Loss | None = None
        self.trail = Trail()
        self.closed = False
        self._reason = RemovedReason("S_OK", 0)
        self._process = os.getpid()
        self._handles: dict[int, Handle] = {}  # by identity, in the order of making
        self._lock = threading.Lock()
        if debug:
            debugging.enable_layer(runtime)
        if self.marks:
            debugging.enable_extended_data(runtime)
        self.device = interface(
            runtime, "ID3D12Device", "D3D12CreateDevice", adapter.address, d3d.D3D_FEATURE_LEVEL_11_0
        )
        self._messages = debugging.Messages(self.device) if debug else None

    def ensure_usable(self) -> None:
        """Raise where the device is closed, lost, or belongs to the parent of this process."""
        if self.lost is not None:
            raise DeviceLostError(loss=self.lost)
        if self.closed:
            raise DeviceError(f"the device {self.adapter.info.name!r} is closed; open it again")
        if self.forked:
            raise DeviceError("the device was opened before this process was forked; open it again in this process")

    @property
    def forked(self) -> bool:
        """Whether this process only inherited the device: it must not touch it."""
        return os.getpid() != self._process

    def check(self, result: int, call: str) -> None:
        """Raise the error that an HRESULT stands for. A failed call of a device that is gone is a lost device."""
        if not failed(result):
            return
        code = result & 0xFFFF_FFFF
        if code in LOST or failed(self.device.call("GetDeviceRemovedReason")):
            self.lose(call, code)
        message = f"{call} failed: {hresult_name(code)}"
        if code == d3d.E_OUTOFMEMORY:
            raise OutOfMemoryError(f"{message}; free memory on the device, or ask for less")
        raise DeviceError(message)

    def lose(self, call: str, code: int) -> None:
        """Note that the device is gone, with what it tells about that, and raise DeviceLostError."""
        if self.lost is None:
            reason = debugging.removed_reason(self.device)
            self._reason = reason if reason.lost else RemovedReason(hresult_name(code), code)
            self.lost = self.loss(call, self._reason)
        raise DeviceLostError(loss=self.lost)

    def loss(self, call: str, reason: RemovedReason) -> Loss:
        """What can be told about a loss that `call` has just noticed."""
        messages = self._messages.recent() if self._messages else []
        return self.trail.loss(
            self.adapter.info,
            call=call,
            reason=reason.name,
            code=reason.code,
            details=reason.details,
            messages=messages,
        )

    def hung(self, work: str) -> Loss:
        """What can be told where work has not ended in its time."""
        return self.loss(work, HUNG)

    def removed_reason(self) -> RemovedReason:
        """See `api.Device.removed_reason`."""
        if not self._reason.lost and not self.closed and not self.forked:
            self._reason = debugging.removed_reason(self.device)
        return self._reason

    def drain_debug_messages(self) -> list[DebugMessage]:
        """See `api.Device.drain_debug_messages`."""
        return self._messages.drain() if self._messages and not self.forked else []

    def create(
        self,
        kind: str,
        method: str,
        *arguments: Argument,
        label: str = "",
        on_destroy: Callable[[], None] | None = None,
    ) -> Handle:
        """Make an object by a method of the device, which takes the interface's id and a place for it in the end."""
        handle = Handle(self, kind, on_destroy)
        with self._lock:
            self._handles[id(handle)] = handle  # before it is filled: an interrupt then leaves nothing unowned
        try:
            self.check(self.device.call(method, *arguments, d3d.iid(kind), handle.slot), method)
            if label and self.debug:
                handle.call("SetName", wide(label))
        except BaseException:
            self.destroy(handle)
            raise
        return handle

    def destroy(self, handle: Handle) -> None:
        """Give back an object that no work in flight uses; the second call does nothing."""
        with self._lock:
            known = self._handles.pop(id(handle), None)
            if known is None or not handle.address:
                return
            handle.call("Release")
            handle.slot.value = None
        if handle.on_destroy:
            handle.on_destroy()  # not under the lock: it may destroy others

    def live_objects(self) -> dict[str, int]:
        """Objects alive, by type."""
        with self._lock:
            counts = Counter(handle.kind for handle in self._handles.values() if handle.address)
        if not self.closed:
            counts["ID3D12Device"] += 1
        return dict(counts)

    def close(self) -> None:
        """Give back what is left, then the device. Nothing may be in flight."""
        if self.closed:
            return
        for handle in reversed(list(self._handles.values())):
            self.destroy(handle)
        if self._messages:
            self._messages.release()
        self.removed_reason()
        self.closed = True
        self.device.release()
        self.adapter.release()

    def abandon(self) -> None:
        """Forget the device without touching it: it is busy beyond patience, or another process's."""
        self.closed = True
