"""The optional features that the engine knows, by the names that `DeviceInfo.features` uses."""

from __future__ import annotations

from dataclasses import dataclass

from xinfer.gpu._bindings import vulkan as vk

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Feature:
    """One name: the extension that brings it, the version that has it without, the members that switch it on."""

    name: str
    extension: str | None = None
    core: Version | None = None
    struct: type[vk.VkStructure] | None = None
    members: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()  # other extensions that it needs below the version that has them


FEATURES = (
    Feature("int16", None, (1, 0), vk.VkPhysicalDeviceFeatures, ("shaderInt16",)),
    Feature("storage16", None, (1, 1), vk.VkPhysicalDevice16BitStorageFeatures, ("storageBuffer16BitAccess",)),
    Feature(
        "storage8", "VK_KHR_8bit_storage", (1, 2), vk.VkPhysicalDevice8BitStorageFeatures, ("storageBuffer8BitAccess",)
    ),
    Feature(
        "float16",
        "VK_KHR_shader_float16_int8",
        (1, 2),
        vk.VkPhysicalDeviceShaderFloat16Int8Features,
        ("shaderFloat16",),
    ),
    Feature(
        "int8", "VK_KHR_shader_float16_int8", (1, 2), vk.VkPhysicalDeviceShaderFloat16Int8Features, ("shaderInt8",)
    ),
    Feature(
        "bfloat16",
        "VK_KHR_shader_bfloat16",
        None,
        vk.VkPhysicalDeviceShaderBfloat16FeaturesKHR,
        ("shaderBFloat16Type",),
    ),
    Feature(
        "bfloat16_matrix",
        "VK_KHR_shader_bfloat16",
        None,
        vk.VkPhysicalDeviceShaderBfloat16FeaturesKHR,
        ("shaderBFloat16CooperativeMatrix",),
    ),
    Feature(
        "integer_dot_product",
        "VK_KHR_shader_integer_dot_product",
        (1, 3),
        vk.VkPhysicalDeviceShaderIntegerDotProductFeatures,
        ("shaderIntegerDotProduct",),
    ),
    Feature(
        "subgroup_extended_types",
        "VK_KHR_shader_subgroup_extended_types",
        (1, 2),
        vk.VkPhysicalDeviceShaderSubgroupExtendedTypesFeatures,
        ("shaderSubgroupExtendedTypes",),
    ),
    Feature(
        "subgroup_size_control",
        "VK_EXT_subgroup_size_control",
        (1, 3),
        vk.VkPhysicalDeviceSubgroupSizeControlFeatures,
        ("subgroupSizeControl",),
    ),
    Feature(
        "full_subgroups",
        "VK_EXT_subgroup_size_control",
        (1, 3),
        vk.VkPhysicalDeviceSubgroupSizeControlFeatures,
        ("computeFullSubgroups",),
    ),
    Feature(
        "timeline",
        "VK_KHR_timeline_semaphore",
        (1, 2),
        vk.VkPhysicalDeviceTimelineSemaphoreFeatures,
        ("timelineSemaphore",),
    ),
    Feature(
        "memory_model",
        "VK_KHR_vulkan_memory_model",
        (1, 2),
        vk.VkPhysicalDeviceVulkanMemoryModelFeatures,
        ("vulkanMemoryModel", "vulkanMemoryModelDeviceScope"),
    ),
    Feature(
        "coop_matrix",
        "VK_KHR_cooperative_matrix",
        None,
        vk.VkPhysicalDeviceCooperativeMatrixFeaturesKHR,
        ("cooperativeMatrix",),
        ("VK_KHR_vulkan_memory_model",),
    ),
    Feature(
        "nv_coop_matrix2",
        "VK_NV_cooperative_matrix2",
        None,
        vk.VkPhysicalDeviceCooperativeMatrix2FeaturesNV,
        (
            "cooperativeMatrixWorkgroupScope",
            "cooperativeMatrixFlexibleDimensions",
            "cooperativeMatrixReductions",
            "cooperativeMatrixConversions",
            "cooperativeMatrixPerElementOperations",
            "cooperativeMatrixTensorAddressing",
            "cooperativeMatrixBlockLoads",
        ),
        ("VK_KHR_cooperative_matrix",),
    ),
    Feature("device_fault", "VK_EXT_device_fault", None, vk.VkPhysicalDeviceFaultFeaturesEXT, ("deviceFault",)),
    Feature("memory_budget", "VK_EXT_memory_budget"),
    Feature("external_memory_host", "VK_EXT_external_memory_host"),
    Feature("spirv_1_4", "VK_KHR_spirv_1_4", (1, 2), requires=("VK_KHR_shader_float_controls",)),
)

# Subgroup operations come by property, not by feature.
SUBGROUP_OPERATIONS = {
    "subgroup_basic": vk.VK_SUBGROUP_FEATURE_BASIC_BIT,
    "subgroup_vote": vk.VK_SUBGROUP_FEATURE_VOTE_BIT,
    "subgroup_arithmetic": vk.VK_SUBGROUP_FEATURE_ARITHMETIC_BIT,
    "subgroup_ballot": vk.VK_SUBGROUP_FEATURE_BALLOT_BIT,
    "subgroup_shuffle": vk.VK_SUBGROUP_FEATURE_SHUFFLE_BIT,
}


def available(feature: Feature, extensions: frozenset[str], version: Version) -> bool:
    """Whether the device lists what the feature comes with; its members are asked for afterwards."""
    if feature.core and version >= feature.core:
        return True
    return feature.extension in extensions and all(
        name in extensions or version >= core_version(name) for name in feature.requires
    )


def core_version(extension: str) -> Version:
    """The Vulkan version that has `extension` built in."""
    for feature in FEATURES:
        if feature.extension == extension and feature.core:
            return feature.core
    return {"VK_KHR_shader_float_controls": (1, 2)}.get(extension, (99, 0))


def extensions_for(names: frozenset[str], extensions: frozenset[str], version: Version) -> list[str]:
    """The device extensions to switch on for these features."""
    wanted: set[str] = set()
    for feature in FEATURES:
        if feature.name in names:
            wanted.update(name for name in (feature.extension, *feature.requires) if name)
    return sorted(name for name in wanted if name in extensions and version < core_version(name))
