"""GPUs: buffers, kernels and recordings, behind one interface for every graphics API.

`open_device` takes a selector: "vulkan", "vulkan:1", "d3d12", part of an adapter's name, or "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from types import ModuleType

from xinfer.errors import DeviceError
from xinfer.gpu import _probe, api, d3d12, vulkan

__all__ = [
    "BACKENDS",
    "automatic",
    "best",
    "choose_device",
    "diagnose",
    "drivers_loading",
    "kind_name",
    "list_devices",
    "open_device",
]

# By name, in the order in which "auto" and names of adapters look at them.
BACKENDS: dict[str, ModuleType] = {"vulkan": vulkan, "d3d12": d3d12}
INDEX_DIGITS = 6  # more than any machine has adapters
BY_PREFERENCE: tuple[api.DeviceKind, ...] = ("discrete", "integrated", "virtual", "other")


def list_devices() -> list[api.DeviceInfo]:
    """Every adapter of every backend; [] where there is none."""
    devices: list[api.DeviceInfo] = []
    for backend in BACKENDS.values():
        try:
            devices += backend.list_devices()
        except DeviceError:
            continue  # `diagnose` says why
    return devices


def diagnose() -> dict[str, list[str]]:
    """Why each backend shows no GPU, and what to do; a backend that shows one is left out."""
    reasons = {name: backend.diagnose() for name, backend in BACKENDS.items()}
    return {name: lines for name, lines in reasons.items() if lines}


def driver_notes() -> list[str]:
    """What is wrong with drivers that the environment names, although others show a GPU: `diagnose` is silent then."""
    told = [line for lines in diagnose().values() for line in lines]
    return [fault for fault in _probe.driver_file_faults() if fault not in told]


def why_no_gpu() -> str:
    """Why "auto" takes no GPU, in a clause: the first reason of each API."""
    return "; ".join(lines[0] for lines in diagnose().values()) or "none of the adapters is a GPU of its own"


def parse_selector(selector: str) -> tuple[str, int | None]:
    """An API and the index behind it, if there is one; or another selector in small letters.

    Raises DeviceError for a form that can mean nothing. Whether there is such an adapter is not looked at.
    """
    wanted = selector.strip().lower()
    name, colon, number = wanted.partition(":")
    if not wanted:
        raise DeviceError("the name of the device is empty; expected auto, cpu, vulkan or part of an adapter's name")
    if name not in BACKENDS or not colon:
        return wanted, None
    if not (number.isascii() and number.isdigit() and len(number) < INDEX_DIGITS):
        raise DeviceError(f"{number!r} is no index; a device is selected as {name}, {name}:0, {name}:1, ...")
    return name, int(number)


def choose_device(selector: str) -> api.DeviceInfo | None:
    """The adapter that `selector` means; None where "auto" finds no GPU, but at most a software driver.

    Raises DeviceError where a selector other than "auto" fits no adapter.
    """
    wanted, index = parse_selector(selector)
    if wanted in BACKENDS:
        return _choose_from(wanted, index)
    if wanted == "cpu":
        raise DeviceError("the CPU runs the reference itself: there is nothing to hold against it; name a GPU")
    devices = list_devices()
    if wanted == "auto":
        return automatic(devices)
    devices = [device for device in devices if wanted in device.name.lower()]
    if not devices:
        raise DeviceError(f"no device is called {selector!r}; {_what_there_is()}")
    return best(devices)


def automatic(devices: list[api.DeviceInfo]) -> api.DeviceInfo | None:
    """The one that "auto" takes: neither a software driver nor an API that another one stands in for."""
    return best([device for device in devices if device.kind in BY_PREFERENCE and not device.emulated])


def best(devices: list[api.DeviceInfo]) -> api.DeviceInfo | None:
    """The first of the kind that is liked most; None out of none."""
    order = [*BY_PREFERENCE, "cpu"]
    return min(devices, key=lambda device: order.index(device.kind), default=None)


def kind_name(kind: str) -> str:
    """A `DeviceInfo.kind` as people are told it: "cpu" is a software driver, and not what --device cpu means."""
    return "software" if kind == "cpu" else kind


def open_device(selector: str, *, debug: bool = False, mark_ops: bool = False) -> api.Device | None:
    """Open the adapter that `selector` means; None where "auto" finds no GPU.

    `debug` needs the validation layers. With `mark_ops` the device notes every op that has ended, so that an error
    about its loss can name the one that has not; it is slower then.

    Raises DeviceError where there is no such adapter, or it cannot be opened.
    """
    with drivers_loading(selector):
        info = choose_device(selector)
        if info is None:
            return None
        device: api.Device = BACKENDS[info.api].open_device(info.index, debug=debug, mark_ops=mark_ops)
        return device


@contextmanager
def drivers_loading(selector: str) -> Iterator[None]:
    """Load the Vulkan drivers, in a thread, and keep them: who opens a device within waits for what is left of it.

    Drivers go with the last device that uses them, and take up to half a second to come back; Direct3D 12's stay.
    Nothing is loaded where `selector` needs none of them.
    """
    if parse_selector(selector)[0] in ("cpu", "d3d12"):
        yield
        return
    held: list[Callable[[], None]] = []

    def load() -> None:
        with suppress(DeviceError):  # it is told where a device is asked for
            held.append(vulkan.hold_driver())

    thread = Thread(target=load, name="xinfer-drivers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        for give_back in held:
            give_back()


def _choose_from(name: str, index: int | None) -> api.DeviceInfo:
    try:
        devices = BACKENDS[name].list_devices()
    except DeviceError as error:
        reasons = "; ".join(BACKENDS[name].diagnose())
        raise DeviceError(f"{name} is not to be had: {reasons or error}") from error
    if index is not None:
        devices = [device for device in devices if device.index == index]
    chosen = best(devices)
    if chosen is None:
        wanted = name if index is None else f"{name}:{index}"
        raise DeviceError(f"there is no device {wanted}; {_what_there_is()}")
    return chosen


def _what_there_is() -> str:
    names = [f"{device.api}:{device.index} ({device.name})" for device in list_devices()]
    if names:
        return f"there are: {', '.join(names)}"
    reasons = [line for lines in diagnose().values() for line in lines]
    return f"there is none: {'; '.join(reasons)}"
