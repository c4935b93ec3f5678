"""What only Direct3D 12's devices have: lists that are not run twice at once, and bytecode kept on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu import tiny_spirv
from tests.gpu.conftest import PYTHONPATH, missing
from tests.gpu.long_work import start_long_work, start_work

from xinfer import gpu
from xinfer.errors import DeviceError, DeviceLostError
from xinfer.gpu._bindings import d3d12 as d3d
from xinfer.gpu._d3d12 import compiler, recording, seal
from xinfer.gpu._d3d12.dxc import Dxc
from xinfer.gpu._d3d12.queue import Queue
from xinfer.gpu._d3d12.runtime import Runtime
from xinfer.gpu.api import HlslSource, Ticket
from xinfer.gpu.d3d12 import D3D12Device

REQUIRED = "d3d12" in os.environ.get("XINFER_TEST_BACKENDS", "")


@pytest.fixture
def own_device(_environment: None) -> Iterator[D3D12Device]:
    """A device of the test's own; closed and checked afterwards. Where it is not asked for, it may be missing."""
    try:
        device = D3D12Device()
    except DeviceError as error:
        if REQUIRED:
            missing(str(error))
        pytest.skip(f"no Direct3D 12: {str(error).splitlines()[0]}")
    yield device
    device.close()
    assert device.live_objects() == {}


def add_one(device: D3D12Device, n: int = 64) -> tuple[recording.D3D12Recording, list[Any]]:
    """A recording that adds 1 to each of n words: [recording, kernel, x, y]."""
    x, y = device.create_buffer(4 * n, label="x"), device.create_buffer(4 * n, label="y")
    device.upload(x, np.ones(n, np.uint32).data)
    device.upload(y, bytes(4 * n))
    kernel = device.create_kernel(tiny_spirv.axpy())
    made = device.create_recording("add one")
    made.dispatch(kernel, [x, y], [n, 1], (-(-n // 64), 1, 1), "add")
    made.finish()
    return made, [y, x, kernel]


def test_it_is_listed_and_never_chosen_by_itself(own_device: D3D12Device) -> None:
    listed = [info for info in gpu.list_devices() if info.api == "d3d12"]
    assert [info.index for info in listed] == [0]
    assert gpu.choose_device("d3d12") == gpu.choose_device("d3d12:0") == listed[0] == own_device.info
    chosen = gpu.choose_device("auto")
    if listed[0].emulated:
        assert chosen is None or chosen.api != "d3d12"
        assert gpu.automatic(listed) is None
    with pytest.raises(DeviceError, match=r"no device d3d12:7; there are: .*d3d12:0"):
        gpu.open_device("d3d12:7")


def test_the_command_line_answers_as_on_the_cpu(own_device: D3D12Device) -> None:
    del own_device  # skips where there is none
    answers = []
    for selector in ("d3d12", "cpu"):
        options = ["--max-tokens", "40", "--temperature", "0", "--device", selector, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "xinfer", "generate", "ROMEO:", *options],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert answers[0]["text"] == answers[1]["text"]
    assert len(answers[0]["token_ids"]) == 40


def test_no_list_runs_twice_at_once(own_device: D3D12Device) -> None:
    """As often as it is submitted, each run has a list that is not in flight; beyond a few, submitting waits."""
    device = own_device
    busy, items = start_long_work(device, 0.5)
    made, things = add_one(device)
    part, runs = made.parts[0], 2 * recording.LISTS_A_SEGMENT
    device.flush_uploads()
    for i in range(runs):
        ticket = device.submit(made)
        assert len(part.lists) == min(i + 1, recording.LISTS_A_SEGMENT) or device.poll(busy)
        in_flight = [item.value for item in part.lists if item.value > device._queue.completed()]
        assert len(in_flight) == len(set(in_flight))
    device.wait(ticket)
    assert set(np.frombuffer(device.download(things[0]), np.uint32)) == {runs}
    part.lists[0].value = device._queue.submitted + 1
    with pytest.raises(AssertionError, match="while it is in flight"):
        device._queue.submit([part.lists[0]])
    part.lists[0].value = 0
    for item in (*items, made, *things):
        item.release()


def test_what_is_released_in_flight_goes_when_the_work_ends(own_device: D3D12Device) -> None:
    device = own_device
    ticket, items = start_work(device, 1, 1)
    device.wait(ticket)
    for item in items:
        item.release()
    before = device.live_objects()
    ticket, items = start_long_work(device)
    for item in items:
        item.release()
    assert not device.poll(ticket)
    kinds = ("ID3D12PipelineState", "ID3D12GraphicsCommandList", "ID3D12QueryHeap")
    during = device.live_objects()
    assert [during[kind] - before.get(kind, 0) for kind in kinds] == [1, 1, 1]
    device.wait(ticket)
    device.collect()
    after = device.live_objects()
    assert all(after.get(kind, 0) == before.get(kind, 0) for kind in kinds)


def test_close_waits_and_afterwards_nothing_works(own_device: D3D12Device) -> None:
    device = own_device
    start_long_work(device, 0.3)
    device.close()
    assert device.live_objects() == {}
    assert device.removed_reason().name == "S_OK"
    for use in (
        lambda: device.create_buffer(4),
        lambda: device.create_recording(""),
        lambda: device.create_kernel(tiny_spirv.axpy()),
        lambda: device.poll(Ticket(1, "")),
        device.memory,
    ):
        with pytest.raises(DeviceError, match="is closed; open it again"):
            use()


def test_a_wait_ends_in_time(own_device: D3D12Device) -> None:
    ticket, _ = start_long_work(own_device, 1.5)
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"'long work' has not ended after 0\.2 s; the device may be hung"):
        own_device.wait(ticket, timeout_s=0.2)
    assert 0.2 <= time.monotonic() - began < 1
    own_device.wait(ticket)


def test_a_lost_device_says_so_from_then_on_and_closes(
    own_device: D3D12Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vkd3d removes no device: the fence is made to say so."""
    device = own_device
    made, _ = add_one(device)
    device.wait(device.submit(made))
    hung = d3d.REMOVED["DXGI_ERROR_DEVICE_HUNG"]
    signal = Queue._signal

    def lost(queue: Queue) -> None:
        signal(queue)  # the work goes on all the same, and what it uses may not be destroyed before it has ended
        while queue.fence.call("GetCompletedValue") < queue.submitted:
            time.sleep(0.001)
        queue.core.check(hung, "ID3D12CommandQueue::Signal")

    monkeypatch.setattr(Queue, "_signal", lost)
    with pytest.raises(DeviceLostError, match="Signal failed: DXGI_ERROR_DEVICE_HUNG"):
        device.submit(made)
    monkeypatch.undo()
    for use in (lambda: device.submit(made), lambda: device.create_buffer(4), device.flush_uploads):
        with pytest.raises(DeviceLostError, match="DXGI_ERROR_DEVICE_HUNG"):
            use()
    assert (device.removed_reason().name, device.removed_reason().lost) == ("DXGI_ERROR_DEVICE_HUNG", True)
    made.release()


def test_bytecode_is_kept_on_disk_and_may_be_damaged(
    own_device: D3D12Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    compiled: list[str] = []
    by_d3d, by_dxc = compiler._d3d_compile, Dxc.compile

    def watch(runtime: Runtime, source: HlslSource, entry: str) -> bytes:
        compiled.append(source.name)
        return by_d3d(runtime, source, entry)

    def watch_dxc(dxc: Dxc, source: HlslSource, entry: str) -> bytes:
        compiled.append(source.name)
        return by_dxc(dxc, source, entry)

    monkeypatch.setattr(compiler, "_d3d_compile", watch)
    monkeypatch.setattr(Dxc, "compile", watch_dxc)
    code = tiny_spirv.axpy()
    for _ in range(2):
        own_device.create_kernel(code).release()
    assert compiled == ["axpy.hlsl"]
    (path,) = tmp_path.rglob("*.bin")
    whole = path.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"x" * len(whole)):
        path.write_bytes(damaged)
        made, things = add_one(own_device)
        own_device.wait(own_device.submit(made))
        assert set(np.frombuffer(own_device.download(things[0]), np.uint32)) == {1}
        assert path.read_bytes() == whole
        for item in (made, *things):
            item.release()
    assert compiled.count("axpy.hlsl") == 6


def test_a_shader_that_does_not_compile_says_what_the_compiler_said(own_device: D3D12Device) -> None:
    source = HlslSource(name="broken.hlsl", text="[numthreads(1, 1, 1)] void main() { nothing_of_this_name(); }")
    with pytest.raises(DeviceError, match=r"(?s)cannot compile broken\.hlsl.*nothing_of_this_name.*variant"):
        own_device.core.adapter.compiler.compile(source, "main")


def test_a_digest_is_the_one_that_d3dcompile_writes(own_device: D3D12Device) -> None:
    """For every length of the last block: names of the entry point make it longer."""
    runtime, rests = own_device.core.runtime, set()
    for n in range(1, 70):
        name = "x" * n
        text = f"RWStructuredBuffer<uint> {name} : register(u0); [numthreads(1, 1, 1)] void main() {{ {name}[0] = 1; }}"
        code = compiler._d3d_compile(runtime, HlslSource(name="x.hlsl", text=text), "main")
        assert seal.digest(code) == code[seal.DIGEST]
        rests.add(len(code) % 64)
    assert rests >= {0, 8, 48, 56}  # of either way to fill the last block


def test_threads_share_a_device(own_device: D3D12Device) -> None:
    device, n, failures = own_device, 2000, []
    kernel = device.create_kernel(tiny_spirv.axpy())

    def work(seed: int) -> None:
        try:
            x, y = device.create_buffer(4 * n), device.create_buffer(4 * n)
            made = device.create_recording(f"thread {seed}")
            made.dispatch(kernel, [x, y], [n, 3], (-(-n // 64), 1, 1), "axpy")
            made.finish()
            for i in range(10):
                data = np.random.default_rng([seed, i]).integers(0, 1 << 32, n, dtype=np.uint32)
                device.upload(x, data.data)
                device.upload(y, data.data)
                device.wait(device.submit(made))
                np.testing.assert_array_equal(np.frombuffer(device.download(y), np.uint32), data * np.uint32(4))
            for item in (made, x, y):
                item.release()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    kernel.release()
