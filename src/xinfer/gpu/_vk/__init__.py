"""The parts of the Vulkan backend; `xinfer.gpu.vulkan` puts them together."""
