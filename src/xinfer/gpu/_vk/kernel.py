"""Kernels: compute pipelines, and the layouts that they share."""

from __future__ import annotations

import threading
from ctypes import POINTER, byref, c_char, c_uint32, c_uint64, cast

from xinfer.errors import DeviceError
from xinfer.gpu import _checks
from xinfer.gpu._bindings import vulkan as vk
from xinfer.gpu._kernel import NativeKernel
from xinfer.gpu._vk.core import Core, Handle
from xinfer.gpu._vk.memory import BufferOwner
from xinfer.gpu.api import KernelCode
from xinfer.gpu.native import chain

SPIRV_MAGIC = 0x07230203


class Layouts:
    """Set layouts by number of buffers, pipeline layouts by number of buffers and constants: made when first needed."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._sets: dict[int, Handle] = {}
        self._pipelines: dict[tuple[int, int], Handle] = {}
        self._lock = threading.RLock()

    def sets(self, n_buffers: int) -> Handle:
        """Storage buffers at bindings 0 to n - 1."""
        with self._lock:
            if n_buffers not in self._sets:
                bindings = (vk.VkDescriptorSetLayoutBinding * n_buffers)(
                    *[
                        vk.VkDescriptorSetLayoutBinding(
                            binding=i,
                            descriptorType=vk.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER,
                            descriptorCount=1,
                            stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT,
                        )
                        for i in range(n_buffers)
                    ]
                )
                info = vk.VkDescriptorSetLayoutCreateInfo(bindingCount=n_buffers, pBindings=bindings)
                self._sets[n_buffers] = self.core.create("VkDescriptorSetLayout", info, f"{n_buffers} buffers")
            return self._sets[n_buffers]

    def pipeline(self, n_buffers: int, n_constants: int) -> Handle:
        """One set of buffers, and push constants."""
        key = n_buffers, n_constants
        with self._lock:
            if key not in self._pipelines:
                push = vk.VkPushConstantRange(stageFlags=vk.VK_SHADER_STAGE_COMPUTE_BIT, offset=0, size=4 * n_constants)
                info = vk.VkPipelineLayoutCreateInfo(
                    setLayoutCount=1,
                    pSetLayouts=(c_uint64 * 1)(self.sets(n_buffers).value),
                    pushConstantRangeCount=1 if n_constants else 0,
                    pPushConstantRanges=(vk.VkPushConstantRange * 1)(push),
                )
                label = f"{n_buffers} buffers, {n_constants} constants"
                self._pipelines[key] = self.core.create("VkPipelineLayout", info, label)
            return self._pipelines[key]


class VulkanKernel(NativeKernel):
    """A VkPipeline."""

    _handle: Handle

    def __init__(self, owner: BufferOwner, layouts: Layouts, cache: int, code: KernelCode) -> None:
        super().__init__(owner, code)
        core = owner.core
        _checks.check_kernel(code, core.adapter.info)
        self._check_spirv(core, code)
        self.layout = layouts.pipeline(code.n_buffers, code.n_constants)
        words = (c_char * len(code.spirv)).from_buffer_copy(code.spirv)
        info = vk.VkShaderModuleCreateInfo(codeSize=len(code.spirv), pCode=cast(words, POINTER(c_uint32)))
        module = core.create("VkShaderModule", info, code.id)
        try:
            self._handle = self._create_pipeline(core, module, cache)
        finally:
            core.destroy(module)

    @property
    def pipeline(self) -> int:
        """The VkPipeline. Raises DeviceError after release."""
        self.ensure_alive()
        return self._handle.value

    def _create_pipeline(self, core: Core, module: Handle, cache: int) -> Handle:
        code = self.code
        stage = vk.VkPipelineShaderStageCreateInfo(
            stage=vk.VK_SHADER_STAGE_COMPUTE_BIT, module=module.value, pName=code.entry.encode()
        )
        if code.subgroup_size is not None and "subgroup_size_control" in core.features:
            self._require_subgroup_size(core, stage, code.subgroup_size)
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=self.layout.value)
        handle = core.reserve("VkPipeline")
        try:
            result = core.vk.vkCreateComputePipelines(core.device, cache, 1, byref(info), None, byref(handle.slot))
            core.check(result, f"vkCreateComputePipelines for {code.id}")
        except BaseException:
            core.destroy(handle)
            raise
        core.name(handle, code.id)
        return handle

    def _require_subgroup_size(self, core: Core, stage: vk.VkStructure, size: int) -> None:
        stages = core.adapter.extra["subgroup_size"].requiredSubgroupSizeStages
        if stages & vk.VK_SHADER_STAGE_COMPUTE_BIT:
            chain(stage, vk.VkPipelineShaderStageRequiredSubgroupSizeCreateInfo(requiredSubgroupSize=size))
        if "full_subgroups" in core.features and self.code.workgroup[0] % size == 0:
            stage.flags |= vk.VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT

    @staticmethod
    def _check_spirv(core: Core, code: KernelCode) -> None:
        words = code.spirv[:8]
        if len(code.spirv) < 20 or len(code.spirv) % 4 or int.from_bytes(words[:4], "little") != SPIRV_MAGIC:
            raise DeviceError(f"kernel {code.id!r}: its {len(code.spirv)} bytes are no SPIR-V; build the shaders again")
        found, newest = (words[6], words[5]), newest_spirv(core)
        if found > newest:
            raise DeviceError(
                f"kernel {code.id!r} is SPIR-V {found[0]}.{found[1]}, {core.adapter.info.name} takes at most "
                f"{newest[0]}.{newest[1]}; use a plainer variant, or a newer driver"
            )


def newest_spirv(core: Core) -> tuple[int, int]:
    """The newest SPIR-V version that the device takes."""
    by_version = {(1, 1): (1, 3), (1, 2): (1, 5)}
    newest = by_version.get(core.adapter.version, (1, 6))
    return max(newest, (1, 4)) if "spirv_1_4" in core.features else newest
