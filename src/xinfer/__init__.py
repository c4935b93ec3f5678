"""xinfer: Qwen2-family language models on any GPU, without CUDA or ROCm.

    from xinfer import LLM
    print(LLM("Qwen/Qwen2.5-0.5B-Instruct").chat("Why is the sky blue?").text)

Names are imported when they are first used, so that `import xinfer` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from xinfer._version import __version__

if TYPE_CHECKING:
    from xinfer.errors import (
        ChatTemplateError,
        CheckpointError,
        ConfigError,
        ContextLengthError,
        DeviceError,
        DeviceLostError,
        ModelNotFoundError,
        NumericalError,
        OutOfMemoryError,
        RequestError,
        TokenizerError,
        WeightsError,
        XinferError,
    )
    from xinfer.gpu_model import ModelOptions
    from xinfer.llm import LLM, Chunk, Completion, Conversation
    from xinfer.sampling import SamplingParams

_HOME = {
    "LLM": "xinfer.llm",
    "Chunk": "xinfer.llm",
    "Completion": "xinfer.llm",
    "Conversation": "xinfer.llm",
    "ModelOptions": "xinfer.gpu_model",
    "SamplingParams": "xinfer.sampling",
}

__all__ = [
    "LLM",
    "ChatTemplateError",
    "CheckpointError",
    "Chunk",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "Conversation",
    "DeviceError",
    "DeviceLostError",
    "ModelNotFoundError",
    "ModelOptions",
    "NumericalError",
    "OutOfMemoryError",
    "RequestError",
    "SamplingParams",
    "TokenizerError",
    "WeightsError",
    "XinferError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME.get(name, "xinfer.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
