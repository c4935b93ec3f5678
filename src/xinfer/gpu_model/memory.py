"""What a model takes of a device's memory, asked for before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from xinfer import ops
from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu.api import Device, DeviceInfo, MemoryStatus
from xinfer.gpu_model.drawing import drawing_bytes
from xinfer.gpu_model.forward import widths, workspace_bytes
from xinfer.gpu_model.layout import RESIDENT, SLOTS, Split, WeightsLayout
from xinfer.gpu_model.options import KVType, ModelOptions
from xinfer.kv_cache import FIRST_TOKENS, CacheShape
from xinfer.model.config import Qwen2Config
from xinfer.model.memory import available_memory
from xinfer.model.weights import ModelWeights

SMALL_ROWS, SMALLEST_ROWS = 256, 64  # of a chunk of a prompt, where memory is short
HOST_SHARE = 0.8  # of the host's available memory, for streamed layers
STAGING_BYTES = 96 << 20  # what uploads, kernels and tables take besides
MOST_ROWS = 4096  # of one chunk of a prompt
MANY_ROWS = 1024  # more than so many take at most a share of the device's memory
WORKSPACE_SHARE = 1 / 64
MOST_ROWS_SMALL = 512  # on devices that are not discrete


def cache_shape(config: Qwen2Config, kv_cache: KVType) -> CacheShape:
    """What a token takes in the cache."""
    return CacheShape(
        n_layers=config.num_hidden_layers,
        token_bytes=config.kv_size * (2 if kv_cache == "f16" else 4),
        block_tokens=ops.BLOCK_TOKENS,
    )


def max_rows(info: DeviceInfo, config: Qwen2Config, context: int) -> int:
    """Rows of activations that a prefill works on at most: bindings must span them."""
    most = MOST_ROWS if info.kind == "discrete" else MOST_ROWS_SMALL
    bindable = info.max_storage_range // (4 * max(widths(config).values()))
    while most > MANY_ROWS and workspace_bytes(config, most) > WORKSPACE_SHARE * info.heap_bytes:
        most //= 2
    return max(1, min(most, bindable, context))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a model takes of a device's memory, in bytes."""

    config: Qwen2Config
    layout: WeightsLayout
    shape: CacheShape
    rows: int  # of a chunk of a prompt
    split: Split = RESIDENT

    @property
    def workspace(self) -> int:
        """Activations, tables and staging; not the weights, nor the cache."""
        logits = 4 * self.config.vocab_size + drawing_bytes(self.config.vocab_size)
        return workspace_bytes(self.config, self.rows) + workspace_bytes(self.config, 1) + logits + STAGING_BYTES

    @property
    def weights(self) -> int:
        """The weights that stay, and the slots of those that do not."""
        return self.layout.nbytes(self.split)

    @property
    def on_host(self) -> int:
        """Bytes of the host's memory that are held for the device: streamed layers, and a table that it reads."""
        split = self.split
        kept = self.a_token if split.pinned else 0
        return kept + (self.layout.table.size if split.table_on_host else 0)

    @property
    def a_token(self) -> int:
        """Bytes that go over the bus for each token."""
        return sum(self.layout.layers[i].size for i in self.split.streamed)

    @property
    def streaming(self) -> str | None:
        """For people: what is streamed; None where nothing is."""
        return self.chosen if self.split.streamed else None

    @property
    def chosen(self) -> str:
        """For people: which layers stay, and what is taken."""
        split, n_layers = self.split, self.config.num_hidden_layers
        taken = f"{in_bytes(self.needed(None))} on the device"
        if not split.streamed:
            return f"all {n_layers} layers are resident, {taken}"
        from_disk = "" if split.pinned else ", read from the disk each time"
        what = f"{len(split.streamed)} of {n_layers} layers are streamed"
        return f"{what}, {in_bytes(self.a_token)} a token{from_disk}; {taken}"

    def cache(self, context: int) -> int:
        """The KV cache and the rotary tables of one sequence."""
        return self.shape.total_bytes(self.shape.blocks_for(context)) + 4 * self.config.head_dim * context

    def needed(self, context: int | None) -> int:
        """All of it, with a cache for so many tokens, or for a small one."""
        return self.weights + self.workspace + self.cache(self.asked(context))

    def asked(self, context: int | None) -> int:
        """Tokens that a cache is wanted for."""
        return min(context or FIRST_TOKENS, self.config.max_context)

    def largest_context(self, free: int) -> int:
        """Tokens whose cache fits into `free` bytes, in whole blocks."""
        a_block = self.cache(self.shape.block_tokens)
        return max(0, free // a_block) * self.shape.block_tokens


def plan_for(weights: ModelWeights, device: Device, options: ModelOptions, *, split: Split | None = None) -> MemoryPlan:
    """What a checkpoint would take of a device as it is now, within the limit that it has been given.

    Raises:
        OutOfMemoryError: it does not fit; see `choose_plan`. Not where the split is given.
        DeviceError: kernels do not take heads of this size.
    """
    config = weights.config
    if config.head_dim > ops.HEAD_DIM_MAX:
        raise DeviceError(
            f"the model has heads of {config.head_dim} dimensions; kernels take {ops.HEAD_DIM_MAX} at most: use "
            "device='cpu'"
        )
    rows = max_rows(device.info, config, options.context or config.max_context)
    shape = cache_shape(config, options.kv_cache)
    plan = MemoryPlan(config=config, layout=WeightsLayout(weights), shape=shape, rows=rows)
    return choose_plan(plan, device, options) if split is None else replace(plan, split=split)


def choose_plan(plan: MemoryPlan, device: Device, options: ModelOptions) -> MemoryPlan:
    """`plan` where everything fits into what the device has free, else one that streams as few layers as it must.

    Args:
        plan: everything resident.
        device: which is asked how much is free, and has been given the limit.
        options: mode, context and limit; without a context a small cache must fit.

    Raises:
        OutOfMemoryError: not even that fits. It says what is missing, and which context would fit.
    """
    status, context = device.memory(), options.context
    if options.mode != "streaming" and plan.needed(context) <= status.free:
        return plan
    if options.mode == "resident":
        raise _too_little(plan, device, options)
    smallest = plan
    for rows, n_slots in ((plan.rows, SLOTS), (SMALL_ROWS, SLOTS), (SMALL_ROWS, 1), (SMALLEST_ROWS, 1)):
        smallest = _streaming(replace(plan, rows=min(rows, plan.rows)), n_slots, status, context)
        if smallest.needed(context) <= _room(smallest, status):
            return smallest
    raise _too_little(smallest, device, options)


def spread(n_layers: int, n_streamed: int) -> tuple[int, ...]:
    """Which layers are streamed: as far apart as can be, so that one comes while resident ones run."""
    return tuple(i * n_layers // n_streamed for i in range(n_streamed))


def _room(plan: MemoryPlan, status: MemoryStatus) -> int:
    """Bytes for what lies on the device: fewer where what the host keeps for it comes from the same memory."""
    return status.free if status.shared is None else min(status.free, status.shared - plan.on_host)


def _streaming(plan: MemoryPlan, n_slots: int, status: MemoryStatus, context: int | None) -> MemoryPlan:
    """As many layers as fit stay beside the slots; none where not even the slots fit.

    The others are kept in the host's memory where that is enough, and else read again each time.
    """
    n_layers, tied = plan.config.num_hidden_layers, plan.layout.head is None
    n_slots = min(n_slots, n_layers)
    on_host = not tied  # the head of a tied model reads the whole table
    split = Split(streamed=tuple(range(n_layers)), n_slots=n_slots, table_on_host=on_host, pinned=False)
    bare = replace(plan, split=split)
    room = max(0, _room(bare, status) - bare.needed(context)) // plan.layout.slot_bytes
    streamed = spread(n_layers, max(n_slots, n_layers - room))
    read_again = replace(bare, split=replace(split, streamed=streamed))
    kept = replace(bare, split=replace(split, streamed=streamed, pinned=True))
    enough = kept.on_host <= HOST_SHARE * available_memory() and kept.needed(context) <= _room(kept, status)
    return kept if enough else read_again


def _too_little(plan: MemoryPlan, device: Device, options: ModelOptions) -> OutOfMemoryError:
    status, asked, needed = device.memory(), plan.asked(options.context), plan.needed(options.context)
    fits = min(plan.largest_context(status.free - plan.weights - plan.workspace), plan.config.max_context)
    stream = "" if plan.split.streamed else "let layers be streamed (mode 'auto'), or "
    advice = stream + (
        f"take a shorter context, of which {fits:,} tokens would fit: --context {fits}"
        if fits >= FIRST_TOKENS
        else "use a smaller model, another device, or --device cpu, for no context would fit as it is"
    )
    if options.vram_budget is not None:
        enough = f"{-(-needed // 10**6)}MB"  # rounded up, and as the option takes it
        advice = f"the limit is --vram-budget: give it {enough} or more, or leave it out; else {advice}"
    what = f"its embedding, its head and {plan.split.n_slots} of its layers" if plan.split.streamed else "the weights"
    return OutOfMemoryError(
        f"{device.info.name} has {in_bytes(status.free)} of {in_bytes(status.budget)} free, and {in_bytes(needed)} are "
        f"needed: {in_bytes(plan.weights)} for {what}, {in_bytes(plan.cache(asked))} for a KV cache of "
        f"{asked:,} tokens and {in_bytes(plan.workspace)} to work in; {in_bytes(needed - status.free)} are missing; "
        f"{advice}",
        needed=needed,
        free=status.free,
    )


def in_bytes(n_bytes: int) -> str:
    """A size for people, in the units that budgets are given in."""
    if n_bytes < 1e5:
        return f"{n_bytes:,} bytes"
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"
