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
            +-- DeviceHungError     work has not ended in its time

A message says what was found, what was expected, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LostOp:
    """One recorded op, as the error about a lost device names it."""

    label: str  # "layers.3.down"
    variant: str = ""  # its kernel's id; "" for copies and fills
    shape: str = ""  # workgroups, constants by name, buffers

    def __str__(self) -> str:
        told = ", ".join(part for part in (self.variant, self.shape) if part)
        return f"{self.label} ({told})" if told else self.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What is known about the loss of a device. As text: what noticed it, and the reason."""

    call: str  # what noticed it: "vkQueueSubmit", "the canary", ...
    reason: str  # "VK_ERROR_DEVICE_LOST", "DXGI_ERROR_DEVICE_HUNG", ...; "TIMEOUT" and "GARBAGE" are our own findings
    code: int = 0  # the VkResult or HRESULT; 0 where the driver gave none
    details: tuple[str, ...] = ()  # what the driver adds
    messages: tuple[str, ...] = ()  # the last that the debug layers said
    adapter: str = ""
    driver: str = ""
    work: str = ""  # what ran, or ran last: "decode 259, segment step"
    finished: str = ""  # the last of its ops that is known to have ended
    suspects: tuple[LostOp, ...] = ()  # one of these was running

    def __str__(self) -> str:
        told = f" ({'; '.join(self.details)})" if self.details else ""
        code = f" ({self.code:#010x})" if self.code > 0 else ""  # an HRESULT: people look them up by number
        return f"{self.call} failed: {self.reason}{code}{told}"

    @property
    def where(self) -> str:
        """Adapter, driver, how far the work had come, and what the debug layers said; "" where nothing is known."""
        parts = []
        if self.adapter:
            parts.append(f"It is {self.adapter}, driver {self.driver}.")
        if self.work:
            parts.append(f"It was at {self.work}{f', behind {self.finished}' if self.finished else ''}.")
        if len(self.suspects) == 1:
            parts.append(f"The op that did not end is {self.suspects[0]}.")
        elif self.suspects:
            parts.append(f"Which of its {len(self.suspects)} ops did not end is not known.")
        if self.messages:
            parts.append(f"The debug layers said last: {' | '.join(self.messages)}")
        return " ".join(parts)


class DeviceLostError(DeviceError):
    """The driver gave the device up (a hang, a crash, an unplugged card); it has to be opened again.

    `loss` says what is known about it.
    """

    def __init__(self, message: str = "", loss: Loss | None = None) -> None:
        self.loss = loss or Loss(call=message or "the device", reason="LOST")
        said = message or f"{self.loss}; open the device again"
        super().__init__(f"{said}. {self.loss.where}" if self.loss.where else said)


class DeviceHungError(DeviceLostError):
    """Work has not ended in its time: the device hangs, or has far too much to do. It is to be opened again."""
