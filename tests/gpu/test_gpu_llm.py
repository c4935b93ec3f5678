"""`LLM` on a device: the same text as on the CPU, several threads, Ctrl-C, and calls without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import CheckpointFactory
from tests.gpu.conftest import PYTHONPATH

import build_shaders
from xinfer import LLM, gpu
from xinfer.checkpoint import Checkpoint
from xinfer.errors import ContextLengthError, DeviceError, NumericalError, RequestError
from xinfer.gpu.api import Device, Kernel, KernelCode
from xinfer.gpu_model import ModelOptions, QwenModel
from xinfer.model.reference import ReferenceModel
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights

ROOT = Path(__file__).resolve().parents[2]
GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0, "ignore_eos": True}
TINY = SyntheticSpec(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, dtype="float16")


@pytest.fixture(scope="module")
def llm(shared_device: Device, checkpoint: CheckpointFactory) -> Iterator[LLM]:
    """On a device of its own; `shared_device` skips or fails where there is none."""
    build_shaders.build()
    with LLM(checkpoint("f16"), device=selector(shared_device)) as made:
        yield made


@pytest.fixture(scope="module")
def cpu_llm(checkpoint: CheckpointFactory) -> Iterator[LLM]:
    with LLM(checkpoint("f16"), device="cpu") as made:
        yield made


def selector(device: Device) -> str:
    """What opens the same adapter once more."""
    return f"{device.info.api}:{device.info.index}"


def demo_folder() -> Path:
    try:
        return Checkpoint(None).folder
    except Exception:  # the demo model is not part of this checkout
        pytest.skip("no demo model")


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["the harbour", "x", "Fourteen boats. " * 12])
def test_greedy_text_is_the_cpus(llm: LLM, cpu_llm: LLM, shared_device: Device, prompt: str) -> None:
    found, expected = (one.generate(prompt, max_tokens=80, **GREEDY) for one in (llm, cpu_llm))
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text
    assert found.stats.device.startswith(selector(shared_device))
    assert expected.stats.device == "cpu"


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "repetition_penalty": 1.2},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.0},
        {"temperature": 0, "logit_bias": {40: 3.0}, "repetition_penalty": 1.0},
        {"temperature": 0.9, "seed": 5, "top_k": 0, "top_p": 1.0},
        {"seed": 7},  # as the checkpoint wants it
        {"temperature": 0, "repetition_penalty": 1.0, "logprobs": 3},
    ],
)
def test_sampled_text_is_the_cpus(llm: LLM, cpu_llm: LLM, values: dict[str, Any]) -> None:
    """The device draws, but where log probabilities are asked for: then the CPU's sampler does, of its logits."""
    found, expected = (one.generate("the sea", max_tokens=30, ignore_eos=True, **values) for one in (llm, cpu_llm))
    assert found.token_ids == expected.token_ids
    if values.get("logprobs"):
        pairs = zip(found.sampled, expected.sampled, strict=True)
        assert all(abs((a.logprob or 0) - (b.logprob or 0)) < 5e-3 for a, b in pairs)


def test_demo_model_200_greedy_tokens_are_the_oracles(device: Device) -> None:
    """With a float32 cache, as the limits of the parity tests are."""
    checkpoint = Checkpoint(demo_folder())
    ids, n_valid = checkpoint.encode("ROMEO."), checkpoint.tokenizer.size
    with (
        ModelWeights.open(checkpoint.folder) as weights,
        QwenModel.load(weights, device, ModelOptions(kv_cache="f32", exact=True)) as model,
    ):
        cache = model.make_cache(400)
        model.extend(ids[:-1], cache) if len(ids) > 1 else None
        chosen = list(model.greedy(ids[-1], cache, limit=200, n_valid=n_valid))
        logits = ReferenceModel(weights).forward([*ids, *chosen])[len(ids) - 1 : -1, :n_valid]
    assert chosen == logits.argmax(axis=1).tolist()


def test_with_a_float32_cache_the_gpu_writes_what_the_cpu_writes(shared_device: Device) -> None:
    """200 greedy tokens, text to text, behind a prompt with a near-tie that an f16 cache decides otherwise."""
    with (
        LLM(demo_folder(), device=selector(shared_device), kv_cache="f32", exact=True) as found,
        LLM(demo_folder(), device="cpu") as expected,
    ):
        texts = [llm.generate("To be, or not to be", max_tokens=200, **GREEDY).text for llm in (found, expected)]
    assert texts[0] == texts[1]


def test_kernels_are_counted_before_they_are_made(
    shared_device: Device, monkeypatch: pytest.MonkeyPatch, checkpoint: CheckpointFactory
) -> None:
    """A driver may take seconds for each: whoever waits is told how many there are, and none is made untold."""
    create, events = type(shared_device).create_kernel, list[Any]()

    def noted(device: Device, code: KernelCode) -> Kernel:
        events.append(code.id)
        return create(device, code)

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "compile":
            events.append((done, total))

    monkeypatch.setattr(type(shared_device), "create_kernel", noted)
    with LLM(checkpoint("f16"), device=selector(shared_device), progress=progress) as made:
        made.generate("the harbour", max_tokens=3, **GREEDY)
        before = len(events)
        made.generate("the harbour", max_tokens=3, **GREEDY)
        assert len(events) == before
    rounds = 0
    while events:
        (none, total), kernels, told = events[0], events[1 : events[0][1] * 2 : 2], events[2 : events[0][1] * 2 + 1 : 2]
        assert none == 0
        assert all(isinstance(kernel, str) for kernel in kernels)
        assert told == [(done, total) for done in range(1, total + 1)]
        events, rounds = events[2 * total + 1 :], rounds + 1
    assert rounds >= 2  # the prompt's kernels, and a step's


def test_streamed_layers_give_the_same_text(shared_device: Device) -> None:
    device = selector(shared_device)
    with LLM(demo_folder(), device=device) as whole, LLM(demo_folder(), device=device, mode="streaming") as parts:
        assert whole.streaming is None
        assert parts.streaming is not None
        assert parts.streaming.startswith("2 of 6 layers are streamed, ")
        texts = [llm.generate("ROMEO:", max_tokens=20, **GREEDY).text for llm in (whole, parts)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "paged"}, "mode='paged'; expected one of auto, resident, streaming"),
        ({"vram_budget": 0}, "vram_budget=0; expected a whole number of bytes, 1 or more"),
    ],
)
def test_memory_options_are_checked(option: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(demo_folder(), device="cpu", **option)


def test_a_type_of_cache_that_there_is_not_is_refused() -> None:
    with pytest.raises(RequestError, match="kv_cache='int8'; expected one of f16, f32"):
        LLM(demo_folder(), device="cpu", kv_cache="int8")  # type: ignore[arg-type]


def test_demo_model_through_llm(shared_device: Device) -> None:
    """With the f16 cache that LLM uses; what differs must be as good as a tie for the oracle."""
    folder = demo_folder()
    with LLM(folder, device=selector(shared_device)) as llm:
        answer = llm.generate("To be, or not to be", max_tokens=80, **GREEDY)
    with ModelWeights.open(folder) as weights:
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        logits = ReferenceModel(weights).forward(ids)[len(answer.prompt_token_ids) - 1 : -1]
    logits = logits[:, : Checkpoint(folder).tokenizer.size]
    behind = logits.max(axis=1) - logits[np.arange(80), list(answer.token_ids)]
    assert behind.max() < 1e-3 * np.sqrt(np.mean(logits**2))
    assert np.count_nonzero(behind) <= 2


def test_a_conversation_keeps_its_cache_on_the_device(llm: LLM, cpu_llm: LLM) -> None:
    talks = [one.conversation(system="Answer.") for one in (llm, cpu_llm)]
    for text in ("Who?", "And where?", "When?"):
        streams = [talk.send(text, max_tokens=12, **GREEDY) for talk in talks]
        answers = [[chunk.sampled.token for chunk in stream] for stream in streams]
        assert answers[0] == answers[1]
        stats = [stream.completion.stats for stream in streams]
        assert stats[0].cached_tokens == stats[1].cached_tokens
    assert stats[0].cached_tokens > 30


def test_a_stop_id_ends_an_answer_with_steps_in_flight(llm: LLM) -> None:
    whole = llm.generate("the sea", max_tokens=40, **GREEDY)
    stop = whole.token_ids[20]
    first = whole.token_ids.index(stop)
    for _ in range(3):
        answer = llm.generate("the sea", max_tokens=40, stop_token_ids=[stop], **GREEDY)
        assert answer.token_ids == whole.token_ids[: first + 1]
        assert answer.finish_reason == "stop"
    assert llm.generate("the sea", max_tokens=40, **GREEDY).token_ids == whole.token_ids


def test_the_contexts_end(shared_device: Device, checkpoint: CheckpointFactory) -> None:
    build_shaders.build()
    with LLM(checkpoint("f16"), device=selector(shared_device), context=12) as llm:
        answer = llm.generate(list(range(5, 13)), **GREEDY)
        assert (len(answer.token_ids), answer.finish_reason) == (4, "context")
        with pytest.raises(ContextLengthError, match="12 tokens and the context holds 12"):
            llm.generate(list(range(12)))


def test_holes_in_the_vocabulary_are_never_chosen(llm: LLM) -> None:
    """A hole below the last valid id, which a bias forbids."""
    free = llm.generate("the sea", max_tokens=10, **GREEDY).token_ids
    invalid = llm._invalid_ids.copy()
    invalid[free[0]] = True
    patched = pytest.MonkeyPatch()
    patched.setattr(llm, "_invalid_ids", invalid)
    try:
        answer = llm.generate("the sea", max_tokens=10, **GREEDY)
    finally:
        patched.undo()
    assert free[0] not in answer.token_ids


def test_a_bad_number_is_an_error_that_names_its_op(shared_device: Device, own_checkpoint: CheckpointFactory) -> None:
    from safetensors.numpy import load_file, save_file

    folder = own_checkpoint("f16")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = np.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with LLM(folder, device=selector(shared_device)) as llm:
        for values in (GREEDY, {"seed": 1}):
            with pytest.raises(NumericalError, match="op down of layer 1"):
                llm.generate("the sea", max_tokens=3, **values)


# --- devices ----------------------------------------------------------------------------------------------------------


def test_auto_takes_a_gpu_and_never_a_software_driver(
    shared_device: Device, checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {info.kind for info in gpu.list_devices()}
    with LLM(checkpoint("f16"), device="auto") as llm:
        assert (llm.device == "cpu") == (kinds <= {"cpu"})
    monkeypatch.setattr(gpu, "list_devices", list)
    with LLM(checkpoint("f16"), device="auto") as llm:
        assert llm.device == "cpu"


def test_a_device_is_selected_by_api_index_or_name(shared_device: Device, checkpoint: CheckpointFactory) -> None:
    info = shared_device.info
    for selector in (f"{info.api}:{info.index}", info.name[:6].upper()):
        with LLM(checkpoint("f16"), device=selector) as llm:
            assert llm.device.startswith(f"{info.api}:{info.index} {info.name}")
    with pytest.raises(DeviceError, match="quantum"):
        LLM(checkpoint("f16"), device="quantum")


def test_a_closed_model_says_so(shared_device: Device, checkpoint: CheckpointFactory) -> None:
    llm = LLM(checkpoint("f16"), device=selector(shared_device))
    stream = llm.stream("x", max_tokens=20, **GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RequestError, match="closed"):
        next(stream)


# --- threads, Ctrl-C, endurance ---------------------------------------------------------------------------------------


def test_threads_on_one_model_get_what_each_would_get_alone(llm: LLM) -> None:
    """Greedy and sampled, short and long, all at once: two threads would hide what four show."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("the sea", {**GREEDY, "max_tokens": 40}),
        ("Fourteen boats. " * 30, {**GREEDY, "max_tokens": 20}),
        ("a stove", {"seed": 3, "temperature": 1.0, "max_tokens": 25}),
        ("x", {**GREEDY, "max_tokens": 50}),
    ]
    alone = [llm.generate(prompt, **values).token_ids for prompt, values in calls]
    together: dict[int, tuple[int, ...]] = {}

    def work(n: int) -> None:
        together[n] = llm.generate(calls[n][0], **calls[n][1]).token_ids

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert [together[n] for n in range(len(calls))] == alone
        together.clear()


INTERRUPTED = """
import sys, time
from xinfer import LLM

phase, folder, selector = sys.argv[1:]
greedy = dict(temperature=0, repetition_penalty=1.0, ignore_eos=True, max_tokens=30)

def progress(stage, done, total):
    if stage == phase == "load":
        print("now", flush=True)
        time.sleep(10)

def long_work():
    if phase == "load":
        LLM(folder, device=selector, progress=progress)
    elif phase == "prefill":
        print("now", flush=True)
        for _ in range(1000):  # one takes 0.2 s on a fast machine
            llm.generate(list(range(5, 300)) * 6, **{**greedy, "max_tokens": 1})
    else:
        print("now", flush=True)
        for _ in range(100):
            llm.generate("the sea", **{**greedy, "max_tokens": 1900})

if phase != "load":
    llm = LLM(folder, device=selector)
    before = llm.generate("the sea", **greedy).token_ids
try:
    long_work()
    print("was not interrupted", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
if phase == "load":
    llm = LLM(folder, device=selector)
    before = llm.generate("the sea", **greedy).token_ids
assert llm.generate("the sea", **greedy).token_ids == before
device = llm._loaded.device
llm.close()
assert device.live_objects() == {}, device.live_objects()
print("clean", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent in another way there")
@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_ctrl_c(shared_device: Device, checkpoint: CheckpointFactory, phase: str) -> None:
    """It is heard within a second, wherever it comes, and the model goes on to be of use."""
    build_shaders.build()
    folder = checkpoint("f16")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", INTERRUPTED, phase, str(folder), selector(shared_device)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's & may have had it ignored
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        time.sleep(0.3)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - began < 5
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (output, errors, process.returncode) == ("clean\n", "", 0)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def endure(shared_device: Device, folder: Path, n_calls: int) -> None:
    """Calls on one model: native objects stay, memory too, but for what the allocator keeps (1 MiB a 1,000 calls)."""
    with LLM(folder, device=selector(shared_device), context=200) as llm:
        device = llm._loaded.device
        assert device is not None
        expected = {n: llm.generate([5, 6, 7 + n], max_tokens=4, **GREEDY).token_ids for n in range(5)}
        for n in range(60):  # every recording is made, and every cache of Python's own is warm
            llm.generate([5, 6, 7 + n % 5], max_tokens=4, **GREEDY)
            llm.generate([5, 6, 7], max_tokens=2, seed=n)
        objects, memory, ours = device.live_objects(), resident_bytes(), device.memory().ours
        for n in range(n_calls):
            assert llm.generate([5, 6, 7 + n % 5], max_tokens=4, **GREEDY).token_ids == expected[n % 5]
            if n % 10 == 0:
                llm.generate([5, 6, 7], max_tokens=2, seed=n)
            if n % 15 == 0:
                next(llm.stream([5, 6, 7], max_tokens=9, **GREEDY))  # dropped with steps in flight
        assert device.live_objects() == objects
        assert device.memory().ours == ours
        grown = resident_bytes() - memory
        assert grown < (1 << 20) + n_calls * (1 << 20) // 1000, f"{grown / 2**20:.1f} MiB more after {n_calls} calls"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_many_calls_leave_nothing(shared_device: Device, checkpoint: CheckpointFactory) -> None:
    build_shaders.build()
    endure(shared_device, checkpoint(TINY), 300)


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_ten_thousand_calls_leave_nothing(shared_device: Device, checkpoint: CheckpointFactory) -> None:
    build_shaders.build()
    endure(shared_device, checkpoint(TINY), 10_000)
