"""What Direct3D 12 says about mistakes and losses: the debug layer, its messages, and device removed extended data."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_size_t, c_uint32, create_string_buffer
from typing import Any

from xinfer.errors import DeviceError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.com import Interface, failed, hresult_name, read_wide
from xinfer.gpu._d3d12.runtime import Runtime, interface
from xinfer.gpu.api import DebugMessage, RemovedReason

MESSAGES_KEPT = 1000
NODES_SHOWN = 8  # of breadcrumbs and allocations: the lists may be long, and damaged
HOW_TO_GET_LAYER = (
    'debug needs the Direct3D 12 debug layer, which is not installed: add the optional feature "Graphics Tools" '
    "(Settings, System, Optional features)"
)


def enable_layer(runtime: Runtime) -> None:
    """Switch on the debug layer with GPU-based validation; before a device is made.

    vkd3d has none. Raises DeviceError where Windows lacks the layer.
    """
    try:
        layer = interface(runtime, "ID3D12Debug", "D3D12GetDebugInterface")
    except DeviceError as error:
        if runtime.windows:
            raise DeviceError(f"{HOW_TO_GET_LAYER} ({error})") from error
        return
    layer.call("EnableDebugLayer")
    finer = layer.query("ID3D12Debug1")
    if finer:
        finer.call("SetEnableGPUBasedValidation", 1)
        finer.release()
    layer.release()


def enable_extended_data(runtime: Runtime) -> None:
    """Switch on breadcrumbs and page faults, where there are any; before a device is made."""
    try:
        settings = interface(runtime, "ID3D12DeviceRemovedExtendedDataSettings", "D3D12GetDebugInterface")
    except DeviceError:
        return  # vkd3d, and Windows before 10.0.18362
    settings.call("SetAutoBreadcrumbsEnablement", d3d.D3D12_DRED_ENABLEMENT_FORCED_ON)
    settings.call("SetPageFaultEnablement", d3d.D3D12_DRED_ENABLEMENT_FORCED_ON)
    settings.release()


class Messages:
    """The debug layer's messages; there are none where the device has no ID3D12InfoQueue."""

    def __init__(self, device: Interface) -> None:
        self._kept: list[DebugMessage] = []  # shown with a loss, and not drained yet
        self._queue = device.query("ID3D12InfoQueue")
        if self._queue:
            self._queue.call("SetMessageCountLimit", MESSAGES_KEPT)

    def drain(self) -> list[DebugMessage]:
        """The messages since the last call."""
        kept, self._kept = self._kept, []
        return kept + self._take()

    def recent(self) -> list[DebugMessage]:
        """The same, and they stay."""
        self._kept += self._take()
        return self._kept

    def _take(self) -> list[DebugMessage]:
        if self._queue is None:
            return []
        count = self._queue.call("GetNumStoredMessages")
        found = [message for i in range(count) if (message := self._get(self._queue, i)) is not None]
        self._queue.call("ClearStoredMessages")
        return found

    def release(self) -> None:
        """Give the queue back; may be called twice."""
        queue, self._queue = self._queue, None
        if queue:
            queue.release()

    @staticmethod
    def _get(queue: Interface, index: int) -> DebugMessage | None:
        size = c_size_t()
        if failed(queue.call("GetMessage", index, None, size)) or size.value < ctypes.sizeof(d3d.D3D12_MESSAGE):
            return None
        memory = create_string_buffer(size.value)
        if failed(queue.call("GetMessage", index, memory, size)):
            return None
        message = d3d.D3D12_MESSAGE.from_buffer(memory)
        known = 0 <= message.Severity < len(d3d.SEVERITIES)
        text = ctypes.string_at(message.pDescription, message.DescriptionByteLength) if message.pDescription else b""
        return DebugMessage(
            d3d.SEVERITIES[message.Severity] if known else "message",
            str(message.ID),
            text.rstrip(b"\0").decode(errors="replace"),
        )


def removed_reason(device: Interface) -> RemovedReason:
    """What GetDeviceRemovedReason answers, with extended data where the device is gone and there is any."""
    code = device.call("GetDeviceRemovedReason") & 0xFFFF_FFFF
    if not failed(code):
        return RemovedReason("S_OK", 0)
    return RemovedReason(hresult_name(code), code, extended_data(device))


def extended_data(device: Interface) -> tuple[str, ...]:
    """DRED: the command lists that did not come to their end, and what lies or lay at an address that faulted."""
    data = device.query("ID3D12DeviceRemovedExtendedData1")
    if data is None:
        return ()
    try:
        return (*_breadcrumbs(data), *_page_fault(data))
    finally:
        data.release()


def _breadcrumbs(data: Interface) -> Iterator[str]:
    output = d3d.D3D12_DRED_AUTO_BREADCRUMBS_OUTPUT1()
    if failed(data.call("GetAutoBreadcrumbsOutput1", output)):
        return
    for node in _nodes(output.pHeadAutoBreadcrumbNode, d3d.D3D12_AUTO_BREADCRUMB_NODE1):
        done = c_uint32.from_address(node.pLastBreadcrumbValue).value if node.pLastBreadcrumbValue else 0
        if not 0 <= done < node.BreadcrumbCount:
            continue  # it came to its end
        name = _name(node.pCommandListDebugNameA, node.pCommandListDebugNameW) or "a command list"
        yield f"{name} stopped after {done} of {node.BreadcrumbCount} commands, at {_where(node, done)}"


def _where(node: Any, index: int) -> str:
    """The command at `index` in a list's history, and the last marker before it: the label of an op."""
    number = c_uint32.from_address(node.pCommandHistory + 4 * index).value if node.pCommandHistory else None
    command = "an unknown command" if number is None else d3d.BREADCRUMB_OPS.get(number, f"command {number}")
    size, label = ctypes.sizeof(d3d.D3D12_DRED_BREADCRUMB_CONTEXT), ""
    for i in range(node.BreadcrumbContextsCount if node.pBreadcrumbContexts else 0):
        context = d3d.D3D12_DRED_BREADCRUMB_CONTEXT.from_address(node.pBreadcrumbContexts + i * size)
        if context.BreadcrumbIndex <= index:
            label = read_wide(context.pContextString)
    return f"{command} of {label!r}" if label else command


def _page_fault(data: Interface) -> Iterator[str]:
    output = d3d.D3D12_DRED_PAGE_FAULT_OUTPUT()
    if failed(data.call("GetPageFaultAllocationOutput", output)) or not output.PageFaultVA:
        return
    yield f"page fault at {output.PageFaultVA:#x}"
    for state, head in (
        ("there", output.pHeadExistingAllocationNode),
        ("freed before", output.pHeadRecentFreedAllocationNode),
    ):
        for node in _nodes(head, d3d.D3D12_DRED_ALLOCATION_NODE):
            yield f"{_name(node.ObjectNameA, node.ObjectNameW) or 'an object without a name'} is {state}"


def _nodes(address: int | None, kind: Any) -> Iterator[Any]:
    for _ in range(NODES_SHOWN):
        if not address:
            return
        node = kind.from_address(address)
        yield node
        address = node.pNext


def _name(narrow: bytes | None, wide: int | None) -> str:
    return narrow.decode(errors="replace") if narrow else read_wide(wide)
