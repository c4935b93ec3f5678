"""Kernels: compute pipelines, and the root signatures that they share."""

from __future__ import annotations

import ctypes
import threading
from ctypes import addressof, c_void_p, create_string_buffer

from xinfer.errors import DeviceError
from xinfer.gpu import _checks
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12.com import failed, hresult_name
from xinfer.gpu._d3d12.compiler import take_blob
from xinfer.gpu._d3d12.core import Core, Handle
from xinfer.gpu._d3d12.memory import BufferOwner
from xinfer.gpu._kernel import NativeKernel
from xinfer.gpu.api import KernelCode


class RootSignatures:
    """By what they bind, made when first needed: constants b0, then for each buffer u or t with its number."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._made: dict[tuple[int, int, frozenset[int]], Handle] = {}
        self._lock = threading.Lock()

    def get(self, n_buffers: int, n_constants: int, views: frozenset[int]) -> Handle:
        """The one for so many buffers, of which `views` are read-only, and dwords of constants."""
        key = n_buffers, n_constants, views
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(n_buffers, n_constants, views)
            return self._made[key]

    def _make(self, n_buffers: int, n_constants: int, views: frozenset[int]) -> Handle:
        parameters = []
        if n_constants:
            constants = d3d.D3D12_ROOT_CONSTANTS(ShaderRegister=0, Num32BitValues=n_constants)
            kind = d3d.D3D12_ROOT_PARAMETER_TYPE_32BIT_CONSTANTS
            parameters.append(d3d.D3D12_ROOT_PARAMETER(ParameterType=kind, Constants=constants))
        for i in range(n_buffers):
            descriptor = d3d.D3D12_ROOT_DESCRIPTOR(ShaderRegister=i)
            kind = d3d.D3D12_ROOT_PARAMETER_TYPE_SRV if i in views else d3d.D3D12_ROOT_PARAMETER_TYPE_UAV
            parameters.append(d3d.D3D12_ROOT_PARAMETER(ParameterType=kind, Descriptor=descriptor))
        array = (d3d.D3D12_ROOT_PARAMETER * len(parameters))(*parameters)
        desc = d3d.D3D12_ROOT_SIGNATURE_DESC(NumParameters=len(parameters), pParameters=addressof(array))
        data = create_string_buffer(self._serialize(desc))
        label = f"{n_buffers} buffers, {n_constants} constants"
        size = ctypes.sizeof(data) - 1
        return self.core.create("ID3D12RootSignature", "CreateRootSignature", 0, data, size, label=label)

    def _serialize(self, desc: d3d.D3D12_ROOT_SIGNATURE_DESC) -> bytes:
        data, errors = c_void_p(), c_void_p()
        call, version = "D3D12SerializeRootSignature", d3d.D3D_ROOT_SIGNATURE_VERSION_1
        result = self.core.runtime.call(call, desc, version, data, errors)
        said = take_blob(self.core.runtime, errors).decode(errors="replace")
        if failed(result):
            raise DeviceError(f"{call} failed: {hresult_name(result)} {said}")
        return take_blob(self.core.runtime, data)


class D3D12Kernel(NativeKernel):
    """An ID3D12PipelineState."""

    _handle: Handle

    def __init__(self, owner: BufferOwner, signatures: RootSignatures, code: KernelCode) -> None:
        super().__init__(owner, code)
        core = owner.core
        _checks.check_kernel(code, core.adapter.info)
        if code.hlsl is None:
            raise DeviceError(f"kernel {code.id!r} is written for Vulkan only; use another variant")
        self.views = code.hlsl.views
        self.signature = signatures.get(code.n_buffers, code.n_constants, code.hlsl.views)
        bytecode = create_string_buffer(core.adapter.compiler.compile(code.hlsl, code.entry))
        desc = d3d.D3D12_COMPUTE_PIPELINE_STATE_DESC(
            pRootSignature=self.signature.address,
            CS=d3d.D3D12_SHADER_BYTECODE(addressof(bytecode), ctypes.sizeof(bytecode) - 1),
        )
        self._handle = core.create("ID3D12PipelineState", "CreateComputePipelineState", desc, label=code.id)

    @property
    def pipeline(self) -> int:
        """The ID3D12PipelineState."""
        return self._handle.address
