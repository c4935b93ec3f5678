"""Devices that are lost, hang, or forget in silence, at every op and call: the answer is that of an undisturbed run.

`faults.py` makes the devices. The whole count of faults is for `make soak`; a tenth of it runs always.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.conftest import CheckpointFactory
from tests.gpu.faults import Fault, Kind, Plan, planned, spread

import build_shaders
from xinfer import LLM, gpu, recovery
from xinfer.errors import DeviceHungError, DeviceLostError, NumericalError
from xinfer.gpu.api import Device
from xinfer.gpu_model import QwenModel, model
from xinfer.gpu_model.canary import _close
from xinfer.model.synthetic import SyntheticSpec
from xinfer.quarantine import PATH_VARIABLE, Quarantine

ROOT = Path(__file__).resolve().parents[2]
TINY = SyntheticSpec(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, dtype="float16")
KINDS: tuple[Kind, ...] = ("lost", "hung", "garbage")
FAULTS, FEW = 200, 20
PATIENCE_S = 60  # for one fault and its recovery; a second, as a rule
LONG = "Fourteen boats. " * 8

Task = Callable[[LLM], list[tuple[int, ...]]]


SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "repetition_penalty": 1.2, "presence_penalty": 0.5}


def greedy(llm: LLM) -> list[tuple[int, ...]]:
    values: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0, "ignore_eos": True, "max_tokens": 12}
    return [llm.generate(LONG, **values).token_ids, llm.generate("the sea", **values).token_ids]


def sampled(llm: LLM) -> list[tuple[int, ...]]:
    return [llm.generate("the sea", seed=3, max_tokens=12, **SAMPLED).token_ids]


def conversation(llm: LLM) -> list[tuple[int, ...]]:
    """Two at a time, whose caches live from turn to turn."""
    talks = [llm.conversation(system=system) for system in ("Answer.", "Ask.")]
    answers = []
    for text in ("Who?", "And where?"):
        for talk in talks:
            stream = talk.send(text, temperature=0.9, seed=5, ignore_eos=True, max_tokens=6)
            answers.append(tuple(chunk.sampled.token for chunk in stream))
    return answers


TASKS: tuple[Task, ...] = (greedy, sampled, conversation)


@dataclass(frozen=True)
class Undisturbed:
    """What a task answers, what it asks of a device, and the ops that it submits, in order."""

    answer: list[tuple[int, ...]]
    events: tuple[str, ...]
    loading: int  # events before the first token
    ops: tuple[str, ...]


def resident(llm: LLM) -> QwenModel:
    """The model on the device that it is on now."""
    found = llm._loaded.loaded.model
    assert isinstance(found, QwenModel)
    return found


@pytest.fixture(scope="module")
def folder(shared_device: Device, checkpoint: CheckpointFactory) -> Path:
    """`shared_device` skips or fails where there is none."""
    if shared_device.info.api != "vulkan":
        pytest.skip("the faults are Vulkan's")
    build_shaders.build()
    return checkpoint(TINY)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[Task, Undisturbed]:
    found = {}
    for task in TASKS:
        with pytest.MonkeyPatch.context() as patch, planned(patch) as plan, LLM(folder, device="vulkan") as llm:
            loading = len(plan.events)
            answer = task(llm)
            recordings: Any = resident(llm).steps._recordings.values()
            ops = [op.label for made in recordings for _, ops in made._notes.segments for op in ops if op.code]
            found[task] = Undisturbed(answer, tuple(plan.events), loading, tuple(dict.fromkeys(ops)))
    return found


@pytest.fixture
def quarantine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Quarantine:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "quarantine.json"))
    return Quarantine()


def endure(
    folder: Path, plan: Plan, task: Task, fault: Fault, answer: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> bool:
    """Run a task with one fault; whether it struck. The answer is the undisturbed run's, and the user is told once."""
    caplog.clear()
    began = time.monotonic()
    plan.fault = fault
    with LLM(folder, device="vulkan", canary=fault.kind == "garbage") as llm:
        assert task(llm) == answer, fault
    assert time.monotonic() - began < PATIENCE_S, fault
    told = [record.getMessage() for record in caplog.records if "was lost" in record.getMessage()]
    # Garbage may be written over before anyone reads it.
    assert len(told) == plan.struck or (fault.kind == "garbage" and not told), fault
    assert len(plan.devices) == 1 + len(told), fault
    return plan.struck > 0


def every_fault(undisturbed: dict[Task, Undisturbed]) -> list[tuple[Task, Fault]]:
    """Each kind at each op of each task, first and later, and at each call while loading and generating."""
    faults: list[tuple[Task, Fault]] = []
    for task, run in undisturbed.items():
        for kind, op, skip in itertools.product(KINDS, run.ops, (0, 3)):
            faults.append((task, Fault(kind, op=op, skip=skip)))
        for kind, event in itertools.product(KINDS, range(len(run.events))):
            faults.append((task, Fault(kind, event=event)))
    return faults


def at_every_op(undisturbed: dict[Task, Undisturbed]) -> list[tuple[Task, Fault]]:
    """One of each op of a greedy answer's steps and prompts, in each kind."""
    return [(greedy, Fault(kind, op=op)) for kind in KINDS for op in undisturbed[greedy].ops]


def endure_all(
    chosen: list[tuple[Task, Fault]],
    folder: Path,
    undisturbed: dict[Task, Undisturbed],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> int:
    struck = 0
    for task, fault in chosen:
        with planned(monkeypatch) as plan:
            struck += endure(folder, plan, task, fault, undisturbed[task].answer, caplog)
    return struck


def test_faults_are_recovered_from(
    folder: Path,
    undisturbed: dict[Task, Undisturbed],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chosen = spread(at_every_op(undisturbed), FEW // 2, 1) + spread(every_fault(undisturbed), FEW // 2, 2)
    struck = endure_all(chosen, folder, undisturbed, monkeypatch, caplog)
    assert struck >= FEW - 4  # some are at an op that did not come again, or at a call that came no more


@pytest.mark.soak
def test_200_faults_are_recovered_from(
    folder: Path,
    undisturbed: dict[Task, Undisturbed],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At every op of a decode step and of a prompt, in every kind; the rest at random, half of it while loading."""
    chosen = at_every_op(undisturbed)
    loading = [case for case in every_fault(undisturbed) if (case[1].event or 10**9) < undisturbed[case[0]].loading]
    chosen += spread(loading, (FAULTS - len(chosen)) // 2, 3)
    chosen += spread(every_fault(undisturbed), FAULTS - len(chosen), 4)
    assert len(chosen) == FAULTS
    before = resident_bytes()
    struck = endure_all(chosen, folder, undisturbed, monkeypatch, caplog)
    assert struck >= 0.9 * FAULTS
    assert resident_bytes() - before < 256 << 20  # hung devices are let go of with what they hold


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- the same fault again and again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lost", "hung"])
@pytest.mark.parametrize("op", ["layers.0.down", "layers.1.qkv", "embed"])
def test_the_third_loss_at_an_op_ends_it_and_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, quarantine: Quarantine, kind: Kind, op: str
) -> None:
    with planned(monkeypatch) as plan:
        plan.fault = Fault(kind, op=op, times=3)
        with LLM(folder, device="vulkan") as llm:
            llm_info = gpu.choose_device("vulkan")
            assert llm_info is not None
            with pytest.raises(DeviceLostError, match=f"lost 3 times at {op}") as caught:
                sampled(llm)
            loss = caught.value.loss
            (suspect,) = loss.suspects
            assert (suspect.label, len(plan.devices)) == (op, 3)
            assert isinstance(caught.value, DeviceHungError) == (kind == "hung")
            assert loss.reason == {"lost": "VK_ERROR_DEVICE_LOST", "hung": "TIMEOUT"}[kind]
            assert "workgroups" in suspect.shape
            assert suspect.variant.startswith(
                {"embed": "embed.", "qkv": "linear_", "down": "linear_"}[op.split(".")[-1]]
            )
            for part in (suspect.label, suspect.variant, suspect.shape, loss.reason, loss.adapter, loss.driver):
                assert part
                assert part in str(caught.value)
            assert loss.finished
            entries = quarantine.entries_for(llm_info)
            assert [(entry.variant, entry.outcome) for entry in entries] == [(suspect.variant, kind)]


def test_the_next_call_goes_on_with_another_variant(
    folder: Path,
    undisturbed: dict[Task, Undisturbed],
    monkeypatch: pytest.MonkeyPatch,
    quarantine: Quarantine,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with planned(monkeypatch) as plan:
        plan.fault = Fault("lost", op="layers.1.down", times=3)
        with LLM(folder, device="vulkan") as llm:
            with pytest.raises(DeviceLostError, match="is in quarantine now") as caught:
                sampled(llm)
            assert sampled(llm) == undisturbed[sampled].answer
            used = resident(llm).steps.kernels._kernels
            assert caught.value.loss.suspects[0].variant not in used
    assert "in quarantine with" in caplog.text


def test_a_device_that_never_loads_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch) as plan:
        plan.fault, plan.never_loads = Fault("lost"), True
        with pytest.raises(DeviceLostError, match="given up: it was lost 3 times at loading the model"):
            LLM(folder, device="vulkan")
        assert len(plan.devices) == 3


@pytest.mark.parametrize("kind", ["lost", "hung"])
def test_a_fault_while_loading(
    folder: Path,
    undisturbed: dict[Task, Undisturbed],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Kind,
) -> None:
    run = undisturbed[sampled]
    for name in ("flush", "upload block table"):
        with planned(monkeypatch) as plan:
            assert endure(folder, plan, sampled, Fault(kind, event=run.events.index(name)), run.answer, caplog)


def test_losses_wherever_are_too_many_at_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "SAME_OP", 99)
    monkeypatch.setattr(recovery, "IN_ALL", 4)
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan") as llm:
        plan.fault = Fault("lost", op="layers.0.qkv", times=99)
        with pytest.raises(DeviceLostError, match="lost 4 times in 60 minutes"):
            sampled(llm)
    assert caplog.text.count("was lost during") == 3


# --- more than one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_on_one_model(
    folder: Path, undisturbed: dict[Task, Undisturbed], monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Queued greedy steps of one thread are lost in the other's call; both get their tokens."""
    found: dict[Task, list[tuple[int, ...]]] = {}
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan", canary=kind == "garbage") as llm:
        plan.fault = Fault(kind, op="layers.1.attn", skip=9, times=2)

        def work(task: Task) -> None:
            found[task] = task(llm)

        threads = [threading.Thread(target=work, args=(task,)) for task in (greedy, sampled)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert plan.struck == 2
    assert found == {task: undisturbed[task].answer for task in (greedy, sampled)}


def test_the_rebuilt_cache_is_the_same_to_the_last_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of every step, as floats, over a prompt of several chunks and an answer.

    How long a chunk is depends on how fast the one before was: the clock is taken out of that.
    """
    monkeypatch.setattr(model, "CHUNK_SECONDS", 1e9)
    values: dict[str, Any] = {"temperature": 1.0, "seed": 2, "logprobs": 3, "max_tokens": 24, "ignore_eos": True}
    with planned(monkeypatch), LLM(folder, device="vulkan") as llm:
        calm = llm.generate(LONG * 4, **values)
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan") as llm:
        stream = llm.stream(LONG * 4, **values)
        for _ in range(12):
            next(stream)
        plan.fault = Fault("lost", op="layers.0.attn")
        for _ in stream:
            pass
        assert plan.struck == 1
    found = [(step.token, step.logprob) for step in stream.completion.sampled]
    assert found == [(step.token, step.logprob) for step in calm.sampled]


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_layers_are_streamed_again(
    folder: Path, undisturbed: dict[Task, Undisturbed], monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Each is a segment of its own; pinned copies in the host's memory go with the device too."""
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan", mode="streaming", canary=True) as llm:
        assert resident(llm).plan.split.streamed
        plan.fault = Fault(kind, op="layers.1.down", skip=5)
        assert sampled(llm) == undisturbed[sampled].answer
        assert (plan.struck, len(plan.devices)) == (1, 2)


def test_a_stream_that_nobody_reads_on_does_not_matter(
    folder: Path, undisturbed: dict[Task, Undisturbed], monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan") as llm:
        left = llm.stream("x", temperature=0, repetition_penalty=1.0, ignore_eos=True, max_tokens=30)
        next(left)
        plan.fault = Fault("lost", op="layers.0.attn")
        assert greedy(llm) == undisturbed[greedy].answer
        before = len(left.completion.token_ids)
        next(left)  # and it can go on: its steps are queued again
        assert len(left.completion.token_ids) == before + 1


# --- the canary -------------------------------------------------------------------------------------------------------


def poison(device: Any, label: str, *, size: int = 64) -> None:
    """Other bytes at the start of one buffer: a part of a tensor, or the canary's own block of a cache."""
    (buffer,) = (buffer for buffer in device.buffers if buffer.label == label and not buffer.released)
    device.upload(buffer[:size], bytes(n % 199 + 7 for n in range(size)))


@pytest.mark.parametrize(
    ("label", "layer"),
    [
        ("layer 0", "layers.0"),
        ("layer 1", "layers.1"),
        ("KV cache, layer 1", "layers.1"),
        ("embedding", None),
        ("rotary table", "layers.0"),
    ],
)
def test_the_canary_finds_one_poisoned_buffer(
    folder: Path,
    undisturbed: dict[Task, Undisturbed],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    label: str,
    layer: str | None,
) -> None:
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan", canary=True) as llm:
        plan.fault = Fault("garbage")
        poison(plan.devices[0], label, size=64 if label != "rotary table" else 4096)
        assert sampled(llm) == undisturbed[sampled].answer
        assert len(plan.devices) == 2
    assert "the canary failed: GARBAGE" in caplog.text
    assert layer is None or f"the output of {layer} is not what it has to be" in caplog.text


def test_garbage_that_shows_as_nan_is_garbage_all_the_same(
    folder: Path, undisturbed: dict[Task, Undisturbed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentinel for NaN hears of it before the canary: the weights are not to blame."""
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan", canary=True) as llm:
        stream = llm.stream("the sea", seed=3, max_tokens=12, **SAMPLED)
        next(stream)
        plan.fault = Fault("garbage")
        (buffer,) = (buffer for buffer in plan.devices[0].buffers if buffer.label == "layer 1")
        plan.devices[0].upload(buffer[:], b"\xff" * buffer.size)
        for _ in stream:
            pass
        assert [stream.completion.token_ids] == undisturbed[sampled].answer
        assert len(plan.devices) == 2


def test_without_a_canary_poison_goes_unnoticed(
    folder: Path, undisturbed: dict[Task, Undisturbed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above are known to test the canary."""
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan") as llm:
        poison(plan.devices[0], "layer 0")
        assert sampled(llm) != undisturbed[sampled].answer
        assert len(plan.devices) == 1


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38, 0.0])
def test_what_the_canary_takes_for_close(garbage: float) -> None:
    values = np.array([1.0, -100.0, 3.0], np.float32)
    assert _close(values * np.float32(1.001), values)
    assert not _close(np.array([1.0, garbage, 3.0], np.float32), values)
    assert not _close(np.array([garbage] * 3, np.float32), values)


def test_weights_that_are_damaged_are_not_the_devices_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference makes no number of them, either: nothing is lost, and nothing is loaded again."""
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    path = damaged / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][:] = np.nan
    save_file(tensors, path)
    with (
        planned(monkeypatch) as plan,
        pytest.raises(NumericalError, match=r"first in the output of layers\.1: .* the weights are damaged"),
    ):
        LLM(damaged, device="vulkan", canary=True)
    assert len(plan.devices) == 1


def test_the_canary_outlives_a_cache_that_grows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings are made again, and other splits of attention may sum in another order."""
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan", canary=True) as llm:
        before = resident(llm).pool.generation
        llm.generate(list(range(5, 305)) * 3, max_tokens=3, seed=1)
        assert resident(llm).pool.generation > before
        assert len(plan.devices) == 1


@pytest.mark.parametrize("context", [2, 3, 31, 32, 33])
def test_the_canary_fits_into_any_context(folder: Path, monkeypatch: pytest.MonkeyPatch, context: int) -> None:
    """It fills a block of the cache, which may be longer than the context: turned by positions that no token has."""
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan", canary=True, context=context) as llm:
        llm.generate([5], max_tokens=1, seed=1)
        assert len(plan.devices) == 1


# --- a process that is killed -----------------------------------------------------------------------------------------

CHILD = f"""
import sys
from xinfer import LLM
with LLM(sys.argv[1], device="vulkan") as llm:
    for chunk in llm.stream("the sea", seed=3, max_tokens=12, **{SAMPLED}):
        print(chunk.sampled.token, flush=True)
"""


@pytest.fixture
def child(folder: Path, undisturbed: object, tmp_path: Path) -> Callable[[int | None], list[int]]:
    """Run a child until it has printed some tokens, then kill it; None lets it end. What it printed.

    Its folder of caches is its own. The driver's is filled: compiling again would take ten times as long as all else.
    """
    del undisturbed  # it has compiled every kernel
    if (compiled := Path(os.environ["XDG_CACHE_HOME"], "mesa_shader_cache")).exists():
        shutil.copytree(compiled, tmp_path / "cache" / compiled.name)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(kill_after: int | None) -> list[int]:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines: list[str] = []
        try:
            while len(lines) != kill_after and (line := process.stdout.readline()):
                lines.append(line)
        finally:
            process.kill()
            process.wait(PATIENCE_S)
            process.stdout.close()
        assert kill_after is None or process.returncode == -signal.SIGKILL
        return [int(line) for line in lines]

    return run


@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals there")
def test_a_child_that_is_killed_leaves_nothing_behind(
    child: Callable[[int | None], list[int]], undisturbed: dict[Task, Undisturbed], tmp_path: Path
) -> None:
    (answer,) = undisturbed[sampled].answer
    assert child(3) == list(answer[:3])
    assert child(None) == list(answer)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "partial" in path.name]


@pytest.mark.soak
@pytest.mark.skipif(sys.platform == "win32", reason="there are no signals there")
def test_children_killed_at_every_token_leave_nothing_behind(
    child: Callable[[int | None], list[int]], undisturbed: dict[Task, Undisturbed]
) -> None:
    (answer,) = undisturbed[sampled].answer
    for count in range(len(answer)):
        assert child(count) == list(answer[:count])
        assert child(None) == list(answer)


def test_messages_are_logged_as_warnings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings go to stderr where nobody has set up logging."""
    with planned(monkeypatch) as plan, LLM(folder, device="vulkan") as llm:
        plan.fault = Fault("lost", op="layers.0.attn")
        sampled(llm)
    (record,) = [record for record in caplog.records if "was lost" in record.getMessage()]
    assert (record.levelno, record.name) == (logging.WARNING, "xinfer")
    assert "it is opened again, the model is loaded again, and the answer goes on" in record.getMessage()
