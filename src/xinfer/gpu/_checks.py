"""What every backend checks before it records or makes anything, so that a mistake shows on all of them; and units."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu.api import MAX_BUFFERS, MAX_CONSTANTS, BufferSlice, DeviceInfo, Groups, KernelCode, MemoryStatus


def format_bytes(count: int) -> str:
    """A size for people."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count} bytes"


def too_little(
    device_name: str, label: str, size: int, status: MemoryStatus, *, free: int | None = None
) -> OutOfMemoryError:
    """What to say where a buffer cannot be made: of the device's memory, or of whatever else a driver takes.

    `free` is told in place of what the status has, where it is less.
    """
    room = status.free if free is None else free
    what = f"{label or 'a buffer'} needs {format_bytes(size)} of {device_name}'s memory"
    left = f"{format_bytes(room)} of {format_bytes(status.budget)} are free"
    if size <= room:
        text = (
            f"{what}, which the driver refused although {left}: the host's own memory is used up, or a limit of this "
            "process is reached (ulimit -v); close other programs, or ask for less"
        )
    else:
        ours, others = format_bytes(status.ours), format_bytes(max(0, status.used - status.ours))
        missing = format_bytes(size - room)
        text = (
            f"{what}, but only {left} ({ours} are in use here, {others} by others): {missing} are missing; free them, "
            "or ask for less"
        )
    return OutOfMemoryError(text, needed=size, free=room)


def check_kernel(code: KernelCode, info: DeviceInfo) -> None:
    """Raise where the device cannot run `code`."""
    missing = sorted(code.needs - info.features)
    if missing:
        raise DeviceError(
            f"kernel {code.id!r} needs {', '.join(missing)}, which {info.name} does not offer; use a plainer variant"
        )
    if not 1 <= code.n_buffers <= MAX_BUFFERS or not 0 <= code.n_constants <= MAX_CONSTANTS:
        raise ValueError(
            f"kernel {code.id!r} has {code.n_buffers} buffers and {code.n_constants} constants; "
            f"1 to {MAX_BUFFERS} and at most {MAX_CONSTANTS} are allowed"
        )
    x, y, z = code.workgroup
    if x * y * z > info.max_workgroup_invocations:
        raise DeviceError(
            f"kernel {code.id!r} has workgroups of {x * y * z} invocations, "
            f"{info.name} allows {info.max_workgroup_invocations}; use a smaller variant"
        )
    size = code.subgroup_size
    if size is None or size == info.subgroup_size_min == info.subgroup_size_max:
        return
    within = info.subgroup_size_min <= size <= info.subgroup_size_max
    if not within or "subgroup_size_control" not in info.features:
        raise DeviceError(
            f"kernel {code.id!r} needs subgroups of {size}, {info.name} has {info.subgroup_size_min} to "
            f"{info.subgroup_size_max}{'' if within else ' only'}; use another variant"
        )


def check_transfer(source: BufferSlice, target: BufferSlice) -> None:
    """Raise ValueError where a transfer is not from an upload buffer to as many bytes of device memory."""
    kinds = source.buffer.kind, target.buffer.kind
    if kinds != ("upload", "device") or source.size != target.size:
        raise ValueError(f"a transfer of {source.size} bytes of {kinds[0]} to {target.size} of {kinds[1]} memory")


def check_dispatch(
    code: KernelCode, info: DeviceInfo, parts: Sequence[BufferSlice], constants: bytes | Sequence[int], groups: Groups
) -> bytes:
    """Raise ValueError where a dispatch does not fit its kernel or the device; the constants' bytes."""
    if len(parts) != code.n_buffers:
        raise ValueError(f"kernel {code.id!r} takes {code.n_buffers} buffers, not {len(parts)}")
    packed = constants if isinstance(constants, bytes) else struct.pack(f"<{len(constants)}I", *constants)
    if len(packed) != 4 * code.n_constants:
        raise ValueError(f"kernel {code.id!r} takes {4 * code.n_constants} bytes of constants, not {len(packed)}")
    if any(not 1 <= count <= most for count, most in zip(groups, info.max_groups, strict=True)):
        raise ValueError(f"{groups} workgroups: {info.name} allows 1 to {info.max_groups}")
    for part in parts:
        if part.offset % info.storage_alignment or not 0 < part.size <= info.max_storage_range:
            raise ValueError(
                f"cannot bind {part.size} bytes from {part.offset} of {part.buffer.label!r}: "
                f"the offset is a multiple of {info.storage_alignment}, the size 1 to {info.max_storage_range}"
            )
    return packed


def check_copy(source: BufferSlice, target: BufferSlice) -> None:
    """Raise ValueError where two slices cannot be copied."""
    if source.size != target.size or source.size == 0:
        raise ValueError(f"cannot copy {source.size} bytes into {target.size}: copies are of one size, at least 1 byte")
    if source.buffer is target.buffer and abs(source.offset - target.offset) < source.size:
        raise ValueError(f"source and target overlap in {source.buffer.label!r}")


def check_fill(target: BufferSlice, value: int) -> None:
    """Raise ValueError where a slice cannot be filled with a u32."""
    if target.offset % 4 or target.size % 4 or target.size == 0:
        raise ValueError(
            f"cannot fill {target.size} bytes from {target.offset}: both are multiples of 4, and not 0 bytes"
        )
    if not 0 <= value < 1 << 32:
        raise ValueError(f"{value} is no u32")


def check_size(size: int, info: DeviceInfo, label: str) -> None:
    """Raise where no buffer of this size can be made."""
    if size < 1:
        raise ValueError(f"buffer {label!r} of {size} bytes: at least 1 is needed")
    if size > info.max_allocation:
        raise DeviceError(
            f"buffer {label!r} of {size} bytes: {info.name} allows {info.max_allocation} in one piece; slice it"
        )
