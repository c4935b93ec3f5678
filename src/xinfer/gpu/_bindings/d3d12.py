"""What xinfer uses of Direct3D 12 and DXGI: interface ids, places in vtables, structs and values.

Written by hand, since it is small; tests/unit/test_d3d12_bindings.py compares every line of it with the C headers
(Debian: directx-headers-dev, and mingw-w64-common for DXGI).
"""

from __future__ import annotations

from ctypes import Array, Structure, Union, c_char_p, c_int32, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any
from uuid import UUID

from xinfer.gpu.api import Severity

# The interfaces' ids.
IIDS = {
    "ID3D12CommandAllocator": "6102dee4-af59-4b09-b999-b44d73f09b24",
    "ID3D12CommandQueue": "0ec870a6-5d7e-4c22-8cfc-5baae07616ed",
    "ID3D12Debug": "344488b7-6846-474b-b989-f027448245e0",
    "ID3D12Debug1": "affaa4ca-63fe-4d8e-b8ad-159000af4304",
    "ID3D12Device": "189819f1-1db6-4b57-be54-1821339b85f7",
    "ID3D12DeviceRemovedExtendedData1": "9727a022-cf1d-4dda-9eba-effa653fc506",
    "ID3D12DeviceRemovedExtendedDataSettings": "82bc481c-6b9b-4030-aedb-7ee3d1df1e63",
    "ID3D12Fence": "0a753dcf-c4d8-4b91-adf6-be5a60d95a76",
    "ID3D12GraphicsCommandList": "5b160d0f-ac1b-4185-8ba8-b3ae42a5a455",
    "ID3D12Heap": "6b3b2502-6e51-45b3-90ee-9884265e8df3",
    "ID3D12InfoQueue": "0742a90b-c387-483f-b946-30a7e4e61458",
    "ID3D12PipelineState": "765a30f3-f624-4c6f-a828-ace948622445",
    "ID3D12QueryHeap": "0d9658ae-ed45-469e-a61d-970ec583cab4",
    "ID3D12Resource": "696442be-a72e-4059-bc79-5b5c98040fad",
    "ID3D12RootSignature": "c54a6b66-72df-4ee8-8be5-a946a1429214",
    "IDxcBlob": "8ba5fb08-5195-40e2-ac58-0d989c3a0102",
    "IDxcCompiler3": "228b4687-5a6a-4730-900c-9702b2203f54",
    "IDxcResult": "58346cda-dde7-4497-9461-6f87af5e0659",
    "IDxcVersionInfo2": "fb6904c4-42f0-4b62-9c46-983af7da7c83",
    "IDXGIAdapter1": "29038f61-3839-4626-91fd-086879011a05",
    "IDXGIAdapter3": "645967a4-1392-4310-a798-8053ce3e93fd",
    "IDXGIDevice": "54ec77fa-1377-44e6-8c32-88fd5f44c84c",
    "IDXGIFactory4": "1bc6ea02-ef36-464f-bf0c-21ca39e5168a",
}

# Classes that DxcCreateInstance makes.
CLSIDS = {"DxcCompiler": "73e22d93-e6ce-47f3-b5bf-f0664f39c1b0"}

# Methods by interface: (place in the vtable, number of arguments beside the object itself).
UNKNOWN = {"QueryInterface": (0, 2), "AddRef": (1, 0), "Release": (2, 0)}
OBJECT = {**UNKNOWN, "SetName": (6, 1)}
ADAPTER = {**UNKNOWN, "CheckInterfaceSupport": (9, 2), "GetDesc1": (10, 1)}
METHODS: dict[str, dict[str, tuple[int, int]]] = {
    "ID3D10Blob": {**UNKNOWN, "GetBufferPointer": (3, 0), "GetBufferSize": (4, 0)},
    "ID3D12CommandAllocator": {**OBJECT, "Reset": (8, 0)},
    "ID3D12CommandQueue": {
        **OBJECT,
        "ExecuteCommandLists": (10, 2),
        "Signal": (14, 2),
        "Wait": (15, 2),
        "GetTimestampFrequency": (16, 1),
    },
    "ID3D12Debug": {**UNKNOWN, "EnableDebugLayer": (3, 0)},
    "ID3D12Debug1": {**UNKNOWN, "EnableDebugLayer": (3, 0), "SetEnableGPUBasedValidation": (4, 1)},
    "ID3D12Device": {
        **OBJECT,
        "CreateCommandQueue": (8, 3),
        "CreateCommandAllocator": (9, 3),
        "CreateComputePipelineState": (11, 3),
        "CreateCommandList": (12, 6),
        "CheckFeatureSupport": (13, 3),
        "CreateRootSignature": (16, 5),
        "CreateCommittedResource": (27, 7),
        "CreateHeap": (28, 3),
        "CreatePlacedResource": (29, 7),
        "CreateFence": (36, 4),
        "GetDeviceRemovedReason": (37, 0),
        "CreateQueryHeap": (39, 3),
    },
    "ID3D12DeviceRemovedExtendedData1": {
        **UNKNOWN,
        "GetPageFaultAllocationOutput": (4, 1),
        "GetAutoBreadcrumbsOutput1": (5, 1),
    },
    "ID3D12DeviceRemovedExtendedDataSettings": {
        **UNKNOWN,
        "SetAutoBreadcrumbsEnablement": (3, 1),
        "SetPageFaultEnablement": (4, 1),
    },
    "ID3D12Fence": {**OBJECT, "GetCompletedValue": (8, 0)},
    "ID3D12GraphicsCommandList": {
        **OBJECT,
        "Close": (9, 0),
        "Reset": (10, 2),
        "Dispatch": (14, 3),
        "CopyBufferRegion": (15, 5),
        "SetPipelineState": (25, 1),
        "ResourceBarrier": (26, 2),
        "SetComputeRootSignature": (29, 1),
        "SetComputeRoot32BitConstants": (35, 4),
        "SetComputeRootShaderResourceView": (39, 2),
        "SetComputeRootUnorderedAccessView": (41, 2),
        "EndQuery": (53, 3),
        "ResolveQueryData": (54, 6),
        "SetMarker": (56, 3),
    },
    "ID3D12Heap": OBJECT,
    "ID3D12InfoQueue": {
        **UNKNOWN,
        "SetMessageCountLimit": (3, 1),
        "ClearStoredMessages": (4, 0),
        "GetMessage": (5, 3),
        "GetNumStoredMessages": (8, 0),
    },
    "ID3D12PipelineState": OBJECT,
    "ID3D12QueryHeap": OBJECT,
    "ID3D12Resource": {**OBJECT, "Map": (8, 3), "Unmap": (9, 2), "GetGPUVirtualAddress": (11, 0)},
    "ID3D12RootSignature": OBJECT,
    "IDxcBlob": {**UNKNOWN, "GetBufferPointer": (3, 0), "GetBufferSize": (4, 0)},
    "IDxcCompiler3": {**UNKNOWN, "Compile": (3, 6)},
    "IDxcResult": {**UNKNOWN, "GetStatus": (3, 1), "GetOutput": (7, 4)},
    "IDxcVersionInfo2": {**UNKNOWN, "GetVersion": (3, 2), "GetCommitInfo": (5, 2)},
    "IDXGIAdapter1": ADAPTER,
    "IDXGIAdapter3": {**ADAPTER, "QueryVideoMemoryInfo": (14, 3)},
    "IDXGIFactory4": {**UNKNOWN, "EnumAdapters1": (12, 2), "EnumWarpAdapter": (27, 2)},
}

S_OK = 0
S_FALSE = 1
E_NOTIMPL = 0x80004001
E_NOINTERFACE = 0x80004002
E_FAIL = 0x80004005
E_OUTOFMEMORY = 0x8007000E
DXGI_ERROR_NOT_FOUND = 0x887A0002
# What GetDeviceRemovedReason may answer, and what other calls answer with once the device is gone.
REMOVED = {
    "DXGI_ERROR_INVALID_CALL": 0x887A0001,
    "DXGI_ERROR_DEVICE_REMOVED": 0x887A0005,
    "DXGI_ERROR_DEVICE_HUNG": 0x887A0006,
    "DXGI_ERROR_DEVICE_RESET": 0x887A0007,
    "DXGI_ERROR_DRIVER_INTERNAL_ERROR": 0x887A0020,
    "D3DDDIERR_DEVICEREMOVED": 0x88760870,
}
# Other codes that may be met, for messages.
FAILURES = {
    "E_NOTIMPL": E_NOTIMPL,
    "E_NOINTERFACE": E_NOINTERFACE,
    "E_FAIL": E_FAIL,
    "E_OUTOFMEMORY": E_OUTOFMEMORY,
    "E_INVALIDARG": 0x80070057,
    "E_ACCESSDENIED": 0x80070005,
    "DXGI_ERROR_NOT_FOUND": DXGI_ERROR_NOT_FOUND,
    "DXGI_ERROR_UNSUPPORTED": 0x887A0004,
    "DXGI_ERROR_SDK_COMPONENT_MISSING": 0x887A002D,
    "D3D12_ERROR_ADAPTER_NOT_FOUND": 0x887E0001,
    "D3D12_ERROR_DRIVER_VERSION_MISMATCH": 0x887E0002,
}

D3D_FEATURE_LEVEL_11_0 = 0xB000
D3D_SHADER_MODEL_6_0 = 0x60
D3D_ROOT_SIGNATURE_VERSION_1 = 1
D3D12_FEATURE_GPU_VIRTUAL_ADDRESS_SUPPORT = 6
D3D12_FEATURE_SHADER_MODEL = 7
D3D12_FEATURE_D3D12_OPTIONS1 = 8
D3D12_FEATURE_ARCHITECTURE1 = 16
D3D12_COMMAND_LIST_TYPE_COMPUTE = 2
D3D12_COMMAND_LIST_TYPE_COPY = 3
D3D12_HEAP_TYPE_DEFAULT = 1
D3D12_HEAP_TYPE_CUSTOM = 4
D3D12_CPU_PAGE_PROPERTY_UNKNOWN = 0
D3D12_CPU_PAGE_PROPERTY_WRITE_COMBINE = 2
D3D12_CPU_PAGE_PROPERTY_WRITE_BACK = 3
D3D12_MEMORY_POOL_UNKNOWN = 0
D3D12_MEMORY_POOL_L0 = 1
D3D12_HEAP_FLAG_NONE = 0
D3D12_HEAP_FLAG_ALLOW_ONLY_BUFFERS = 0xC0
D3D12_DEFAULT_RESOURCE_PLACEMENT_ALIGNMENT = 65_536
D3D12_RESOURCE_DIMENSION_BUFFER = 1
D3D12_TEXTURE_LAYOUT_ROW_MAJOR = 1
D3D12_RESOURCE_FLAG_ALLOW_UNORDERED_ACCESS = 0x4
D3D12_RESOURCE_STATE_COMMON = 0
D3D12_RESOURCE_STATE_UNORDERED_ACCESS = 0x8
D3D12_RESOURCE_STATE_NON_PIXEL_SHADER_RESOURCE = 0x40
D3D12_RESOURCE_STATE_COPY_DEST = 0x400
D3D12_RESOURCE_STATE_COPY_SOURCE = 0x800
D3D12_RESOURCE_BARRIER_TYPE_TRANSITION = 0
D3D12_RESOURCE_BARRIER_TYPE_UAV = 2
D3D12_RESOURCE_BARRIER_ALL_SUBRESOURCES = 0xFFFFFFFF
D3D12_ROOT_PARAMETER_TYPE_32BIT_CONSTANTS = 1
D3D12_ROOT_PARAMETER_TYPE_SRV = 3
D3D12_ROOT_PARAMETER_TYPE_UAV = 4
D3D12_QUERY_HEAP_TYPE_TIMESTAMP = 1
D3D12_QUERY_TYPE_TIMESTAMP = 2
D3D12_DRED_ENABLEMENT_FORCED_ON = 2
DXGI_ADAPTER_FLAG_SOFTWARE = 2
DXGI_MEMORY_SEGMENT_GROUP_LOCAL = 0

# D3D12_MESSAGE_SEVERITY, in its order.
SEVERITIES: tuple[Severity, ...] = ("corruption", "error", "warning", "info", "message")
# D3D12_AUTO_BREADCRUMB_OP, as far as compute work brings them about.
BREADCRUMB_OPS = {
    0: "SETMARKER",
    6: "DISPATCH",
    7: "COPYBUFFERREGION",
    15: "RESOURCEBARRIER",
    18: "RESOLVEQUERYDATA",
    19: "BEGINSUBMISSION",
    20: "ENDSUBMISSION",
}


def iid(interface: str) -> Array[c_uint8]:
    """An interface's id as a GUID in memory."""
    return (c_uint8 * 16)(*UUID(IIDS[interface]).bytes_le)


def clsid(name: str) -> Array[c_uint8]:
    """A class's id as a GUID in memory."""
    return (c_uint8 * 16)(*UUID(CLSIDS[name]).bytes_le)


class D3D12_COMMAND_QUEUE_DESC(Structure):
    _fields_ = [("Type", c_int32), ("Priority", c_int32), ("Flags", c_int32), ("NodeMask", c_uint32)]


class D3D12_HEAP_PROPERTIES(Structure):
    _fields_ = [
        ("Type", c_int32),
        ("CPUPageProperty", c_int32),
        ("MemoryPoolPreference", c_int32),
        ("CreationNodeMask", c_uint32),
        ("VisibleNodeMask", c_uint32),
    ]


class D3D12_HEAP_DESC(Structure):
    _fields_ = [
        ("SizeInBytes", c_uint64),
        ("Properties", D3D12_HEAP_PROPERTIES),
        ("Alignment", c_uint64),
        ("Flags", c_int32),
    ]


class DXGI_SAMPLE_DESC(Structure):
    _fields_ = [("Count", c_uint32), ("Quality", c_uint32)]


class D3D12_RESOURCE_DESC(Structure):
    _fields_ = [
        ("Dimension", c_int32),
        ("Alignment", c_uint64),
        ("Width", c_uint64),
        ("Height", c_uint32),
        ("DepthOrArraySize", c_uint16),
        ("MipLevels", c_uint16),
        ("Format", c_int32),
        ("SampleDesc", DXGI_SAMPLE_DESC),
        ("Layout", c_int32),
        ("Flags", c_int32),
    ]


class D3D12_RESOURCE_TRANSITION_BARRIER(Structure):
    _fields_ = [
        ("pResource", c_void_p),
        ("Subresource", c_uint32),
        ("StateBefore", c_int32),
        ("StateAfter", c_int32),
    ]


class D3D12_RESOURCE_UAV_BARRIER(Structure):
    _fields_ = [("pResource", c_void_p)]


class _Barrier(Union):
    _fields_ = [("Transition", D3D12_RESOURCE_TRANSITION_BARRIER), ("UAV", D3D12_RESOURCE_UAV_BARRIER)]


class D3D12_RESOURCE_BARRIER(Structure):
    _anonymous_ = ("_barrier",)
    _fields_ = [("Type", c_int32), ("Flags", c_int32), ("_barrier", _Barrier)]


class D3D12_ROOT_CONSTANTS(Structure):
    _fields_ = [("ShaderRegister", c_uint32), ("RegisterSpace", c_uint32), ("Num32BitValues", c_uint32)]


class D3D12_ROOT_DESCRIPTOR(Structure):
    _fields_ = [("ShaderRegister", c_uint32), ("RegisterSpace", c_uint32)]


class D3D12_ROOT_DESCRIPTOR_TABLE(Structure):
    _fields_ = [("NumDescriptorRanges", c_uint32), ("pDescriptorRanges", c_void_p)]


class _RootParameter(Union):
    _fields_ = [
        ("DescriptorTable", D3D12_ROOT_DESCRIPTOR_TABLE),
        ("Constants", D3D12_ROOT_CONSTANTS),
        ("Descriptor", D3D12_ROOT_DESCRIPTOR),
    ]


class D3D12_ROOT_PARAMETER(Structure):
    _anonymous_ = ("_parameter",)
    _fields_ = [("ParameterType", c_int32), ("_parameter", _RootParameter), ("ShaderVisibility", c_int32)]


class D3D12_ROOT_SIGNATURE_DESC(Structure):
    _fields_ = [
        ("NumParameters", c_uint32),
        ("pParameters", c_void_p),
        ("NumStaticSamplers", c_uint32),
        ("pStaticSamplers", c_void_p),
        ("Flags", c_int32),
    ]


class D3D12_SHADER_BYTECODE(Structure):
    _fields_ = [("pShaderBytecode", c_void_p), ("BytecodeLength", c_size_t)]


class D3D12_CACHED_PIPELINE_STATE(Structure):
    _fields_ = [("pCachedBlob", c_void_p), ("CachedBlobSizeInBytes", c_size_t)]


class D3D12_COMPUTE_PIPELINE_STATE_DESC(Structure):
    _fields_ = [
        ("pRootSignature", c_void_p),
        ("CS", D3D12_SHADER_BYTECODE),
        ("NodeMask", c_uint32),
        ("CachedPSO", D3D12_CACHED_PIPELINE_STATE),
        ("Flags", c_int32),
    ]


class D3D12_QUERY_HEAP_DESC(Structure):
    _fields_ = [("Type", c_int32), ("Count", c_uint32), ("NodeMask", c_uint32)]


class D3D12_FEATURE_DATA_GPU_VIRTUAL_ADDRESS_SUPPORT(Structure):
    _fields_ = [("MaxGPUVirtualAddressBitsPerResource", c_uint32), ("MaxGPUVirtualAddressBitsPerProcess", c_uint32)]


class D3D12_FEATURE_DATA_D3D12_OPTIONS1(Structure):
    _fields_ = [
        ("WaveOps", c_int32),
        ("WaveLaneCountMin", c_uint32),
        ("WaveLaneCountMax", c_uint32),
        ("TotalLaneCount", c_uint32),
        ("ExpandedComputeResourceStates", c_int32),
        ("Int64ShaderOps", c_int32),
    ]


class D3D12_FEATURE_DATA_ARCHITECTURE1(Structure):
    _fields_ = [
        ("NodeIndex", c_uint32),
        ("TileBasedRenderer", c_int32),
        ("UMA", c_int32),
        ("CacheCoherentUMA", c_int32),
        ("IsolatedMMU", c_int32),
    ]


class D3D12_MESSAGE(Structure):
    _fields_ = [
        ("Category", c_int32),
        ("Severity", c_int32),
        ("ID", c_int32),
        ("pDescription", c_void_p),
        ("DescriptionByteLength", c_size_t),
    ]


class D3D12_DRED_BREADCRUMB_CONTEXT(Structure):
    _fields_ = [("BreadcrumbIndex", c_uint32), ("pContextString", c_void_p)]


class D3D12_AUTO_BREADCRUMB_NODE1(Structure):
    _fields_ = [
        ("pCommandListDebugNameA", c_char_p),
        ("pCommandListDebugNameW", c_void_p),
        ("pCommandQueueDebugNameA", c_char_p),
        ("pCommandQueueDebugNameW", c_void_p),
        ("pCommandList", c_void_p),
        ("pCommandQueue", c_void_p),
        ("BreadcrumbCount", c_uint32),
        ("pLastBreadcrumbValue", c_void_p),
        ("pCommandHistory", c_void_p),
        ("pNext", c_void_p),
        ("BreadcrumbContextsCount", c_uint32),
        ("pBreadcrumbContexts", c_void_p),
    ]


class D3D12_DRED_AUTO_BREADCRUMBS_OUTPUT1(Structure):
    _fields_ = [("pHeadAutoBreadcrumbNode", c_void_p)]


class D3D12_DRED_ALLOCATION_NODE(Structure):
    _fields_ = [
        ("ObjectNameA", c_char_p),
        ("ObjectNameW", c_void_p),
        ("AllocationType", c_int32),
        ("pNext", c_void_p),
    ]


class D3D12_DRED_PAGE_FAULT_OUTPUT(Structure):
    _fields_ = [
        ("PageFaultVA", c_uint64),
        ("pHeadExistingAllocationNode", c_void_p),
        ("pHeadRecentFreedAllocationNode", c_void_p),
    ]


class LUID(Structure):
    _fields_ = [("LowPart", c_uint32), ("HighPart", c_int32)]


class DXGI_ADAPTER_DESC1(Structure):
    _fields_ = [
        ("Description", c_uint16 * 128),
        ("VendorId", c_uint32),
        ("DeviceId", c_uint32),
        ("SubSysId", c_uint32),
        ("Revision", c_uint32),
        ("DedicatedVideoMemory", c_size_t),
        ("DedicatedSystemMemory", c_size_t),
        ("SharedSystemMemory", c_size_t),
        ("AdapterLuid", LUID),
        ("Flags", c_uint32),
    ]


class DXGI_QUERY_VIDEO_MEMORY_INFO(Structure):
    _fields_ = [
        ("Budget", c_uint64),
        ("CurrentUsage", c_uint64),
        ("AvailableForReservation", c_uint64),
        ("CurrentReservation", c_uint64),
    ]


def structs() -> dict[str, Any]:
    """Every struct here by its C name."""
    return {
        name: kind
        for name, kind in globals().items()
        if isinstance(kind, type) and issubclass(kind, Structure) and kind is not Structure
    }
