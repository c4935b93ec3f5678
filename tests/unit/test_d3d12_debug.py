"""The debug layer and removed devices on made-up COM objects: what vkd3d lacks, and no test may bring about."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint32

import pytest
from tests.unit.fake_com import FakeObject, FakeRuntime, device, fill, give

from xinfer.errors import DeviceError, DeviceLostError, OutOfMemoryError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.adapter import Adapter
from xinfer.gpu._d3d12.com import wide
from xinfer.gpu._d3d12.compiler import Compiler
from xinfer.gpu._d3d12.core import Core
from xinfer.gpu._d3d12.queue import GONE, Queue
from xinfer.gpu.api import DebugMessage, RemovedReason
from xinfer.gpu.null import INFO

TEN = [
    DebugMessage("corruption", "1", "the list is corrupt"),
    DebugMessage("error", "547", "a command list is still in flight"),
    DebugMessage("warning", "820", "clear value"),
    DebugMessage("info", "2", "a device was made"),
    DebugMessage("message", "3", "hello"),
    DebugMessage("error", "921", "GPU-based validation: out of bounds at byte 4096"),
    DebugMessage("warning", "1328", "deprecated"),
    DebugMessage("error", "547", "and once more"),
    DebugMessage("info", "9", "größer"),
    DebugMessage("corruption", "10", ""),
]


class FakeInfoQueue(FakeObject):
    """An ID3D12InfoQueue that holds messages."""

    def __init__(self, messages: list[DebugMessage]) -> None:
        self.messages = list(messages)
        super().__init__(
            "ID3D12InfoQueue",
            {
                "SetMessageCountLimit": lambda _limit: d3d.S_OK,
                "GetNumStoredMessages": lambda: len(self.messages),
                "GetMessage": self._get,
                "ClearStoredMessages": self._clear,
            },
        )

    def _get(self, index: int, memory: int, size: int) -> int:
        message = self.messages[index]
        text = message.text.encode() + b"\0"
        needed, header = ctypes.sizeof(d3d.D3D12_MESSAGE) + len(text), ctypes.sizeof(d3d.D3D12_MESSAGE)
        room = c_size_t.from_address(size)
        if not memory:
            room.value = needed
            return d3d.S_FALSE
        if room.value < needed:
            return d3d.FAILURES["E_INVALIDARG"]
        severity = d3d.SEVERITIES.index(message.severity)
        ctypes.memmove(memory + header, text, len(text))
        return fill(memory, d3d.D3D12_MESSAGE(0, severity, int(message.id), memory + header, len(text)))

    def _clear(self) -> int:
        self.messages.clear()
        return d3d.S_OK


def debug_interfaces() -> dict[str, FakeObject]:
    finer = FakeObject("ID3D12Debug1", {"EnableDebugLayer": lambda: 0, "SetEnableGPUBasedValidation": lambda _on: 0})
    settings = {"SetAutoBreadcrumbsEnablement": lambda _on: 0, "SetPageFaultEnablement": lambda _on: 0}
    return {
        "finer": finer,
        "layer": FakeObject("ID3D12Debug", {"EnableDebugLayer": lambda: 0}, interfaces=[finer]),
        "dred": FakeObject("ID3D12DeviceRemovedExtendedDataSettings", settings),
    }


def runtime_for(
    made: FakeObject, debugging: dict[str, FakeObject] | None = None, *, windows: bool = True
) -> FakeRuntime:
    by_iid = {bytes(d3d.iid(item.kind)): item for item in (debugging or {}).values()}

    def debug_interface(iid: int, slot: int) -> int:
        found = by_iid.get(ctypes.string_at(iid, 16))
        return give(slot, found) if found else d3d.E_NOTIMPL

    return FakeRuntime(
        {
            "D3D12CreateDevice": lambda _adapter, _level, _iid, slot: give(slot, made),
            "D3D12GetDebugInterface": debug_interface,
        },
        windows=windows,
    )


def core_on(runtime: FakeRuntime, *, debug: bool) -> Core:
    return Core(runtime, Adapter(INFO, Compiler(runtime)), debug=debug)


def core_of(made: FakeObject, **options: bool) -> Core:
    debug = options.pop("debug", False)
    return core_on(runtime_for(made, debug_interfaces(), **options), debug=debug)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_of_every_severity_are_drained_once_and_in_order() -> None:
    queue = FakeInfoQueue(TEN)
    core = core_of(device(d3d.S_OK, queue), debug=True)
    assert core.drain_debug_messages() == TEN
    assert core.drain_debug_messages() == []
    queue.messages += TEN[:2]
    assert core.drain_debug_messages() == TEN[:2]
    core.close()
    assert queue.references == 1  # the one it was made with
    assert str(TEN[1]) == "error 547: a command list is still in flight"


def test_without_debug_nothing_is_asked() -> None:
    queue = FakeInfoQueue(TEN)
    core = core_of(device(d3d.S_OK, queue))
    assert core.drain_debug_messages() == []
    assert queue.calls == []
    core.close()


def test_a_device_without_an_info_queue_has_no_messages() -> None:
    core = core_of(device(), debug=True)
    assert core.drain_debug_messages() == []
    core.close()


def test_debug_switches_on_layer_gpu_validation_and_extended_data() -> None:
    debugging = debug_interfaces()
    core_on(runtime_for(device(), debugging), debug=True).close()
    assert debugging["layer"].called("EnableDebugLayer") == [()]
    assert debugging["finer"].called("SetEnableGPUBasedValidation") == [(1,)]
    on = (d3d.D3D12_DRED_ENABLEMENT_FORCED_ON,)
    assert debugging["dred"].called("SetAutoBreadcrumbsEnablement") == [on]
    assert debugging["dred"].called("SetPageFaultEnablement") == [on]
    assert [item.references for item in debugging.values()] == [1, 0, 0]


def test_a_missing_layer_is_an_error_on_windows_only() -> None:
    with pytest.raises(DeviceError, match=r"Graphics Tools.*E_NOTIMPL"):
        core_on(runtime_for(device()), debug=True)
    core_on(runtime_for(device(), windows=False), debug=True).close()


# --- loss -------------------------------------------------------------------------------------------------------------


def test_a_healthy_device() -> None:
    core = core_of(device())
    assert core.removed_reason() == RemovedReason("S_OK", 0)
    assert not core.removed_reason().lost
    core.check(d3d.S_OK, "X")
    core.check(d3d.S_FALSE, "X")
    core.close()
    assert core.removed_reason() == RemovedReason("S_OK", 0)


@pytest.mark.parametrize("name", d3d.REMOVED)
def test_every_reason_has_its_name(name: str) -> None:
    code = d3d.REMOVED[name]
    core = core_of(device(code))
    assert core.removed_reason() == RemovedReason(name, code)
    assert core.removed_reason().lost
    with pytest.raises(DeviceLostError, match=rf"Signal failed: {name} \({code:#x}\); open the device again"):
        core.check(d3d.REMOVED["DXGI_ERROR_DEVICE_REMOVED"], "Signal")
    with pytest.raises(DeviceLostError, match=name):
        core.ensure_usable()
    core.close()
    assert core.removed_reason().name == name


@pytest.mark.parametrize("name", set(d3d.REMOVED) - {"DXGI_ERROR_INVALID_CALL"})
def test_a_call_may_know_of_a_loss_before_the_device_does(name: str) -> None:
    core = core_of(device())
    with pytest.raises(DeviceLostError, match=name):
        core.check(d3d.REMOVED[name], "Close")
    assert core.removed_reason() == RemovedReason(name, d3d.REMOVED[name])


def test_a_reason_without_a_name_is_a_number() -> None:
    assert str(core_of(device(0x887A0042)).removed_reason()) == "HRESULT 0x887a0042 (0x887a0042)"


def test_failures_of_a_healthy_device_are_no_loss() -> None:
    core = core_of(device())
    with pytest.raises(DeviceError, match="Map failed: E_INVALIDARG") as error:
        core.check(d3d.FAILURES["E_INVALIDARG"], "Map")
    assert not isinstance(error.value, DeviceLostError)
    with pytest.raises(OutOfMemoryError, match="E_OUTOFMEMORY"):
        core.check(d3d.E_OUTOFMEMORY, "CreateCommittedResource")
    core.ensure_usable()


def test_any_failure_of_a_removed_device_is_a_loss() -> None:
    core = core_of(device(d3d.REMOVED["DXGI_ERROR_DEVICE_HUNG"]))
    with pytest.raises(DeviceLostError, match="DXGI_ERROR_DEVICE_HUNG"):
        core.check(d3d.E_OUTOFMEMORY, "CreateCommittedResource")


def test_a_fence_at_its_end_is_a_loss() -> None:
    reason = [d3d.S_OK]
    fence = FakeObject("ID3D12Fence", {"GetCompletedValue": lambda: GONE})
    queue = FakeObject("ID3D12CommandQueue", {"Signal": lambda _fence, _value: d3d.S_OK})
    made = device(
        CreateFence=lambda _value, _flags, _iid, slot: give(slot, fence),
        CreateCommandQueue=lambda _desc, _iid, slot: give(slot, queue),
        GetDeviceRemovedReason=lambda: reason[0],
    )
    clock = Queue(core_of(made), d3d.D3D12_COMMAND_LIST_TYPE_COMPUTE, "compute")
    clock.submit([])
    reason[0] = d3d.REMOVED["DXGI_ERROR_DEVICE_RESET"]
    with pytest.raises(DeviceLostError, match="GetCompletedValue failed: DXGI_ERROR_DEVICE_RESET"):
        clock.wait(1, 5.0)
    with pytest.raises(DeviceLostError, match="DXGI_ERROR_DEVICE_RESET"):
        clock.wait(1, 5.0)


# --- extended data ----------------------------------------------------------------------------------------------------


def dred() -> tuple[FakeObject, list[object]]:
    """Two lists, one of which stopped at its second dispatch; a fault in a buffer that was freed."""
    kept: list[object] = []

    def keep(item: object) -> int:
        kept.append(item)
        return ctypes.addressof(item)  # type: ignore[arg-type]

    history = (c_uint32 * 6)(19, 6, 15, 6, 15, 20)
    contexts = (d3d.D3D12_DRED_BREADCRUMB_CONTEXT * 2)(
        d3d.D3D12_DRED_BREADCRUMB_CONTEXT(1, keep(wide("layers.0.q"))),
        d3d.D3D12_DRED_BREADCRUMB_CONTEXT(3, keep(wide("layers.0.attn"))),
    )
    ended = d3d.D3D12_AUTO_BREADCRUMB_NODE1(
        pCommandListDebugNameA=b"upload",
        BreadcrumbCount=6,
        pLastBreadcrumbValue=keep(c_uint32(6)),
        pCommandHistory=keep(history),
    )
    stopped = d3d.D3D12_AUTO_BREADCRUMB_NODE1(
        pCommandListDebugNameW=keep(wide("decode/0")),
        BreadcrumbCount=6,
        pLastBreadcrumbValue=keep(c_uint32(3)),
        pCommandHistory=ctypes.addressof(history),
        pNext=keep(ended),
        BreadcrumbContextsCount=2,
        pBreadcrumbContexts=keep(contexts),
    )
    freed = d3d.D3D12_DRED_ALLOCATION_NODE(ObjectNameA=b"KV cache")
    fault = d3d.D3D12_DRED_PAGE_FAULT_OUTPUT(0xDEAD0000, None, keep(freed))
    crumbs = d3d.D3D12_DRED_AUTO_BREADCRUMBS_OUTPUT1(keep(stopped))
    data = FakeObject(
        "ID3D12DeviceRemovedExtendedData1",
        {
            "GetAutoBreadcrumbsOutput1": lambda target: fill(target, crumbs),
            "GetPageFaultAllocationOutput": lambda target: fill(target, fault),
        },
    )
    return data, kept


def test_breadcrumbs_name_the_op_and_a_fault_its_buffer() -> None:
    data, kept = dred()
    core = core_of(device(d3d.REMOVED["DXGI_ERROR_DEVICE_HUNG"], data))
    reason = core.removed_reason()
    assert reason.details == (
        "decode/0 stopped after 3 of 6 commands, at DISPATCH of 'layers.0.attn'",
        "page fault at 0xdead0000",
        "KV cache is freed before",
    )
    assert str(reason).startswith("DXGI_ERROR_DEVICE_HUNG (0x887a0006); decode/0 stopped")
    with pytest.raises(DeviceLostError, match=r"Signal failed: DXGI_ERROR_DEVICE_HUNG.*of 'layers\.0\.attn'"):
        core.check(d3d.REMOVED["DXGI_ERROR_DEVICE_REMOVED"], "Signal")
    assert data.references == 1
    assert kept


def test_a_list_of_nodes_that_goes_round_ends() -> None:
    node = d3d.D3D12_AUTO_BREADCRUMB_NODE1(BreadcrumbCount=1)
    node.pNext = ctypes.addressof(node)
    crumbs = d3d.D3D12_DRED_AUTO_BREADCRUMBS_OUTPUT1(ctypes.addressof(node))
    data = FakeObject(
        "ID3D12DeviceRemovedExtendedData1",
        {
            "GetAutoBreadcrumbsOutput1": lambda target: fill(target, crumbs),
            "GetPageFaultAllocationOutput": lambda _target: d3d.E_FAIL,
        },
    )
    details = core_of(device(d3d.REMOVED["DXGI_ERROR_DEVICE_HUNG"], data)).removed_reason().details
    assert set(details) == {"a command list stopped after 0 of 1 commands, at an unknown command"}
