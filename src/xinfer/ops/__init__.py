"""The network's operations on a GPU: each checks shapes, chooses a kernel variant and records its dispatches.

One function an op, under the name of its reference in `xinfer.model.reference` where there is one. They record and do
not run: what they are given must live until the recording has run. An op that reads what another wrote needs a
`recording.barrier()` between them; dispatches within an op have theirs.
"""

from xinfer.ops._argmax import argmax, argmax_scratch_bytes
from xinfer.ops._attention import AttentionPlan, attention, attention_candidates, plan_attention, turn_attention
from xinfer.ops._base import (
    BAD_TOKEN,
    FLAG_NOT_FINITE,
    STATE_BYTES,
    UNUSED_POSITION,
    CacheBlocks,
    Format,
    KernelSet,
    Matrix,
    MatrixSlice,
    Recorder,
    Rows,
    RowState,
    WantedKernels,
    row_stride,
)
from xinfer.ops._capacity import Capacity, capacity_of
from xinfer.ops._elementwise import add, can_rope_append, embed, kv_append, rms_norm, rope, rope_append, swiglu
from xinfer.ops._linear import GEMV_ROWS_MAX, can_fuse, gate_up, gemm_candidates, gemv_candidates, linear, norm_linear
from xinfer.ops._packed import (
    PackedRows,
    can_pack,
    can_pack_fused,
    gate_up_packed,
    linear_packed,
    pack_rows,
    packed_bytes,
    packed_candidates,
    parts_bytes,
    sum_parts,
)
from xinfer.ops._sample import PARAM_BYTES, SEEN_IN_PROMPT, SampleParams, can_sample, sample, sample_scratch_bytes
from xinfer.shaders.catalog import ATTENTION_DIM_MAX as HEAD_DIM_MAX
from xinfer.shaders.catalog import BLOCK_TOKENS

__all__ = [
    "BAD_TOKEN",
    "BLOCK_TOKENS",
    "FLAG_NOT_FINITE",
    "GEMV_ROWS_MAX",
    "HEAD_DIM_MAX",
    "PARAM_BYTES",
    "SEEN_IN_PROMPT",
    "STATE_BYTES",
    "UNUSED_POSITION",
    "AttentionPlan",
    "CacheBlocks",
    "Capacity",
    "Format",
    "KernelSet",
    "Matrix",
    "MatrixSlice",
    "PackedRows",
    "Recorder",
    "RowState",
    "Rows",
    "SampleParams",
    "WantedKernels",
    "add",
    "argmax",
    "argmax_scratch_bytes",
    "attention",
    "attention_candidates",
    "can_fuse",
    "can_pack",
    "can_pack_fused",
    "can_rope_append",
    "can_sample",
    "capacity_of",
    "embed",
    "gate_up",
    "gate_up_packed",
    "gemm_candidates",
    "gemv_candidates",
    "kv_append",
    "linear",
    "linear_packed",
    "norm_linear",
    "pack_rows",
    "packed_bytes",
    "packed_candidates",
    "parts_bytes",
    "plan_attention",
    "rms_norm",
    "rope",
    "rope_append",
    "row_stride",
    "sample",
    "sample_scratch_bytes",
    "sum_parts",
    "swiglu",
    "turn_attention",
]
