"""Work that keeps a device busy for about as long as a test wants."""

from __future__ import annotations

from typing import Any

from tests.gpu import tiny_spirv

from xinfer.gpu.api import Device, Ticket

SOFTWARE_TRIPS = 20_000  # software drivers cut off loops that are longer than some 60,000


def start_work(device: Device, groups: int, trips: int) -> tuple[Ticket, list[Any]]:
    """Submit `groups` workgroups whose invocations take `trips` steps; the ticket, and what is to be released."""
    kernel, buffer = device.create_kernel(tiny_spirv.spin()), device.create_buffer(256 * groups)
    recording = device.create_recording("long work")
    recording.timestamp("start")
    recording.dispatch(kernel, [buffer], [trips], (groups, 1, 1), "spin")
    recording.barrier()
    recording.timestamp("end")
    recording.finish()
    return device.submit(recording), [recording, kernel, buffer]


def start_long_work(device: Device, seconds: float = 1.0) -> tuple[Ticket, list[Any]]:
    """Submit work that takes about so long, as far as a first try tells."""
    groups, trips = 200, SOFTWARE_TRIPS
    for _ in range(2):  # the first time also compiles the kernel
        ticket, items = start_work(device, groups, trips)
        device.wait(ticket)
        took = device.timestamps(items[0])[-1][1]
        for item in items:
            item.release()
    factor = max(1, int(seconds / took))
    if device.info.kind == "cpu":
        return start_work(device, groups * factor, trips)
    return start_work(device, groups, trips * factor)
