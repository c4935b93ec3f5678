"""What a model takes of a device's memory, asked for before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from xinfer import ops
from xinfer.errors import OutOfMemoryError
from xinfer.gpu.api import Device, DeviceInfo
from xinfer.gpu_model.forward import widths, workspace_bytes
from xinfer.gpu_model.weights import WeightsLayout
from xinfer.kv_cache import FIRST_TOKENS, CacheShape
from xinfer.model.config import Qwen2Config

STAGING_BYTES = 96 << 20  # what uploads, kernels and tables take besides
MOST_ROWS = 1024  # of one chunk of a prompt
MOST_ROWS_SMALL = 512  # on devices that are not discrete


def cache_shape(config: Qwen2Config, kv_type: str) -> CacheShape:
    """What a token takes in the cache."""
    return CacheShape(
        n_layers=config.num_hidden_layers,
        token_bytes=config.kv_size * (2 if kv_type == "f16" else 4),
        block_tokens=ops.BLOCK_TOKENS,
    )


def max_rows(info: DeviceInfo, config: Qwen2Config, context: int) -> int:
    """Rows of activations that a prefill works on at most: bindings must span them."""
    most = MOST_ROWS if info.kind == "discrete" else MOST_ROWS_SMALL
    bindable = info.max_storage_range // (4 * max(widths(config).values()))
    return max(1, min(most, bindable, context))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The parts of what a model takes, in bytes."""

    config: Qwen2Config
    layout: WeightsLayout
    shape: CacheShape
    rows: int

    @property
    def workspace(self) -> int:
        """Activations, tables and staging; not the weights, nor the cache."""
        logits = 4 * self.config.vocab_size
        return workspace_bytes(self.config, self.rows) + workspace_bytes(self.config, 1) + logits + STAGING_BYTES

    def cache(self, context: int) -> int:
        """The KV cache and the rotary tables of one sequence."""
        return self.shape.total_bytes(self.shape.blocks_for(context)) + 4 * self.config.head_dim * context

    def check(self, device: Device, context: int | None) -> None:
        """Raise OutOfMemoryError where the device has too little memory for weights, workspace and `context` tokens."""
        status = device.memory()
        asked = min(context or FIRST_TOKENS, self.config.max_context)
        fixed = self.layout.nbytes + self.workspace
        needed = fixed + self.cache(asked)
        if needed <= status.free:
            return
        fits = min(self._largest_context(status.free - fixed), self.config.max_context)
        advice = (
            f"a context of {fits:,} tokens would fit: --context {fits}"
            if fits >= FIRST_TOKENS
            else "no context would fit: use a smaller model, another device, or --device cpu"
        )
        raise OutOfMemoryError(
            f"{device.info.name} has {_size(status.free)} of {_size(status.budget)} free, and {_size(needed)} are "
            f"needed: {_size(self.layout.nbytes)} for the weights, {_size(self.cache(asked))} for a KV cache of "
            f"{asked:,} tokens and {_size(self.workspace)} to work in; {_size(needed - status.free)} are missing; "
            f"{advice}",
            needed=needed,
            free=status.free,
        )

    def _largest_context(self, free: int) -> int:
        """Tokens whose cache fits into `free` bytes, in whole blocks."""
        a_block = self.cache(self.shape.block_tokens)
        return max(0, free // a_block) * self.shape.block_tokens


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:,.1f} MB"
