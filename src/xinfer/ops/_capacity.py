"""How much work keeps a device busy: what the ops choose their kernels by where `xinfer tune` has not been run.

This is the one place where devices are told apart by kind and subgroup size; whether a kernel runs at all is a matter
of features (`KernelSet.usable`). No vendor has a row of its own yet: what is known was measured on an NVIDIA H200, and
nothing is known that would set an AMD or Intel GPU apart from it but its size and its subgroups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xinfer.gpu.api import DeviceInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fills a device. The numbers of kernels on matrix cores are in `_packed.py`, beside those kernels."""

    lanes: int  # with loads in flight
    set_lanes: int = 32  # the fewest that share a row: a subgroup
    groups: int  # workgroups of attention, of 512 lanes,
    small_groups: int  # or of fewer,
    prefill_groups: int  # or where there are many query rows


# An H200: 132 multiprocessors of 2,048 lanes; one workgroup of 512 lanes, or four of 256, on each. More splits of the
# keys only make more to be put together (`xinfer tune`, benchmarks/LOG.md).
DISCRETE = Capacity(lanes=100_000, groups=132, small_groups=528, prefill_groups=256)
# Not measured: an eighth, as the GPUs within processors have 4,000 to 16,000 lanes.
INTEGRATED = Capacity(lanes=12_500, groups=16, small_groups=66, prefill_groups=32)
# A driver that computes on the CPU runs a few workgroups at a time; how lanes share rows makes no difference to it.
SOFTWARE = Capacity(lanes=100_000, groups=8, small_groups=8, prefill_groups=8)


def capacity_of(info: DeviceInfo) -> Capacity:
    """The rule: by kind, and a row is shared by no fewer lanes than a subgroup has (64 with some of AMD's drivers)."""
    if info.kind == "cpu":
        return SOFTWARE
    kind = INTEGRATED if info.kind == "integrated" else DISCRETE
    return replace(kind, set_lanes=max(kind.set_lanes, info.subgroup_size_default))
