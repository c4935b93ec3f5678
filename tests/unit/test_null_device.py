"""The device without hardware: what it records, the bytes that it moves, and that it refuses what the others refuse."""

from __future__ import annotations

import dataclasses

import pytest

from xinfer import gpu
from xinfer.errors import DeviceError, OutOfMemoryError
from xinfer.gpu.api import Buffer, Device, Kernel, KernelCode, Recording
from xinfer.gpu.null import INFO, NullDevice

CODE = KernelCode(id="k", spirv=b"", n_buffers=2, n_constants=3, workgroup=(64, 1, 1))


def test_it_is_a_device() -> None:
    device: Device = NullDevice()
    assert device.info.api == "null"
    device.close()


def test_nobody_gets_it_by_name() -> None:
    """It computes nothing: what a model says on it is no answer."""
    with pytest.raises(DeviceError, match="no device is called 'null'"):
        gpu.open_device("null")


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("cpu", "the CPU runs the reference itself"),
        ("vulkan:\N{SUPERSCRIPT TWO}", "is no index"),
        ("vulkan:" + "1" * 5000, "is no index"),
        ("vulkan:", "is no index"),
    ],
)
def test_selectors_that_name_nothing(selector: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        gpu.choose_device(selector)


def test_it_is_never_lost_and_says_nothing() -> None:
    with NullDevice() as device:
        assert not device.removed_reason().lost
        assert device.drain_debug_messages() == []


def test_it_notes_what_is_recorded() -> None:
    with NullDevice() as device:
        x, y = device.create_buffer(1024, label="x"), device.create_buffer(512, label="y")
        kernel = device.create_kernel(CODE)
        recording = device.create_recording("step")
        recording.dispatch(kernel, [x[256:768], y], [1, 2, 0xFFFFFFFF], (4, 5, 6), "first")
        recording.segment("rest")
        recording.barrier()
        recording.timestamp("t")
        recording.copy(x[:4], y[4:8])
        recording.fill(y[8:16], 7)
        recording.finish()
        assert recording.segments == ("", "rest")
        assert [(op.kind, op.segment, op.label) for op in recording.ops] == [
            ("dispatch", "", "first"),
            ("barrier", "rest", ""),
            ("timestamp", "rest", "t"),
            ("copy", "rest", ""),
            ("fill", "rest", ""),
        ]
        dispatch = recording.ops[0]
        assert dispatch.kernel is CODE
        assert [(part.buffer.label, part.offset, part.size) for part in dispatch.parts] == [
            ("x", 256, 512),
            ("y", 0, 512),
        ]
        assert dispatch.constants == bytes([1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255])
        assert dispatch.groups == (4, 5, 6)
        assert device.timestamps(recording) == [("t", 0.0)]


def test_it_moves_bytes_when_submitted() -> None:
    with NullDevice() as device:
        x, y = device.create_buffer(16), device.create_buffer(16, "readback")
        recording = device.create_recording("r")
        recording.segment("copy")
        recording.copy(x[:8], y[4:12])
        recording.segment("fill")
        recording.fill(y[12:], 0x01020304)
        recording.finish()
        device.upload(x, bytes(range(16)))
        ticket = device.submit(recording, ["copy"])
        device.wait(ticket)
        assert device.poll(ticket)
        assert y.read() == bytes(4) + bytes(range(8)) + bytes(4)
        device.submit(recording)
        assert y.read(12) == bytes([4, 3, 2, 1])
        assert [names for _, names in device.submitted] == [("copy",), ("copy", "fill")]
        stage = device.stage(8)
        stage.view[:] = b"abcdefgh"
        stage.send([(0, x[12:16]), (6, x[:2])])
        assert device.download(x) == b"gh" + bytes(range(2, 12)) + b"abcd"
        with pytest.raises(ValueError, match="at most"):
            device.stage(device.stage_bytes + 1)
        device.mapped(y[:2])[:] = b"yy"
        assert y.read(0, 3) == b"yy" + bytes(1)
        with pytest.raises(DeviceError, match="device memory"):
            device.mapped(x)


def test_it_refuses_what_a_real_device_refuses() -> None:
    device = NullDevice()
    x = device.create_buffer(1024, label="x")
    kernel = device.create_kernel(CODE)
    recording = device.create_recording("r")
    for buffers, constants, groups in (
        ([x], [1, 2, 3], (1, 1, 1)),
        ([x, x], [1, 2], (1, 1, 1)),
        ([x, x], [1, 2, 3], (0, 1, 1)),
        ([x, x[4:]], [1, 2, 3], (1, 1, 1)),
    ):
        with pytest.raises(ValueError, match=r"takes|workgroups|offset"):
            recording.dispatch(kernel, buffers, constants, groups, "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of one size"):
        recording.copy(x[:4], x[8:16])
    with pytest.raises(ValueError, match="multiples of 4"):
        recording.fill(x[1:5], 0)
    with pytest.raises(DeviceError, match="not finished"):
        device.submit(recording)
    recording.copy(x[:4], x[4:8])
    recording.finish()
    with pytest.raises(DeviceError, match="is finished"):
        recording.barrier()
    with pytest.raises(ValueError, match="no segments"):
        device.submit(recording, ["a"])
    with pytest.raises(DeviceError, match="needs wings"):
        device.create_kernel(dataclasses.replace(CODE, needs=frozenset({"wings"})))
    with pytest.raises(ValueError, match="cannot upload 3 bytes into 4"):
        device.upload(x[:4], b"abc")
    x.release()
    with pytest.raises(DeviceError, match="'x' is released"):
        device.submit(recording)
    device.close()
    with pytest.raises(DeviceError, match="is closed"):
        device.create_buffer(4)


def test_it_counts_objects_and_memory() -> None:
    device = NullDevice(dataclasses.replace(INFO, heap_bytes=1000))
    items: list[Buffer | Kernel | Recording] = [device.create_buffer(600), device.create_kernel(CODE)]
    items.append(device.create_recording("r"))
    assert device.live_objects() == {"buffer": 1, "kernel": 1, "recording": 1}
    with pytest.raises(OutOfMemoryError) as caught:
        device.create_buffer(500)
    assert (caught.value.needed, caught.value.free, caught.value.missing) == (500, 400, 100)
    for item in items:
        item.release()
        item.release()
    assert device.live_objects() == {}
    assert device.memory().ours == 0
