"""Every error that xinfer raises on purpose.

The tree::

    XinferError
    +-- RequestError            a prompt, sampling value or argument that cannot be used
    |   +-- ContextLengthError  the prompt does not fit into the context
    +-- ModelNotFoundError      no such folder, or the hub could not give it
    +-- CheckpointError         the checkpoint on disk cannot be used
    |   +-- ConfigError         config.json or generation_config.json
    |   +-- WeightsError        the tensors: missing, surplus, misshapen, truncated, pickled
    |   +-- TokenizerError      tokenizer.json or tokenizer_config.json
    |   +-- ChatTemplateError   the chat template: absent, broken, or refusing the messages
    +-- NumericalError          NaN or Inf where a number was expected
    +-- DeviceError             no such device, or it cannot be used
        +-- OutOfMemoryError    the device has too little memory left
        +-- DeviceLostError     the driver gave the device up; open it again

A message says what was found, what was expected, and what to do.
"""

from __future__ import annotations


class XinferError(Exception):
    """Base of every error that xinfer raises on purpose.

    Control characters and half characters, which a broken file or a file's name may bring into a message, stand in it
    as their escapes: it can always be printed, and steers no terminal.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__("".join(map(_visible, message)))


def _visible(char: str) -> str:
    return char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode("ascii")


class RequestError(XinferError):
    """A prompt, sampling value or argument that cannot be used."""


class ContextLengthError(RequestError):
    """The prompt does not fit into the context."""


class ModelNotFoundError(XinferError):
    """No such model folder, or the hub could not give it."""


class CheckpointError(XinferError):
    """A checkpoint on disk that cannot be used."""


class ConfigError(CheckpointError):
    """A config.json or generation_config.json that is broken or asks for something unsupported."""


class WeightsError(CheckpointError):
    """Tensors that are missing, surplus, misshapen, truncated or in a refused format."""


class TokenizerError(CheckpointError):
    """A tokenizer.json or tokenizer_config.json that cannot be used."""


class ChatTemplateError(CheckpointError):
    """A chat template that is absent or broken, or that refuses the messages given to it."""


class NumericalError(XinferError):
    """NaN or Inf where a number was expected."""


class DeviceError(XinferError):
    """A device that does not exist or cannot be used."""


class OutOfMemoryError(DeviceError):
    """The device has too little memory left for what was asked.

    `needed` and `free` are bytes; `missing` is their difference.
    """

    def __init__(self, message: str, *, needed: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free

    @property
    def missing(self) -> int:
        """Bytes that would have to be freed first."""
        return max(0, self.needed - self.free)


class DeviceLostError(DeviceError):
    """The driver gave the device up (a hang, a crash, an unplugged card); it has to be opened again."""
