"""`xinfer bench`: statistics and counts of work by hand, what is refused, and the report on the CPU."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.conftest import CheckpointFactory
from tests.unit.cli_run import hear_interrupts, run

from xinfer.bench.loops import repeated, spread_of
from xinfer.bench.plot import check_plot, draw
from xinfer.bench.run import Sizes, fitting, room
from xinfer.bench.text import as_text, duration, in_units
from xinfer.bench.work import Work, prompt_work, step_work
from xinfer.errors import RequestError
from xinfer.gpu_model import KVType
from xinfer.gpu_model.layout import WeightsLayout
from xinfer.gpu_model.memory import MemoryPlan, cache_shape
from xinfer.model.synthetic import SyntheticSpec
from xinfer.model.weights import ModelWeights


def test_median_and_quartiles_are_those_of_the_textbook() -> None:
    found = spread_of([0.7, 0.1, 0.3, 0.9, 0.5])
    assert (found.quartile_low, found.median, found.quartile_high) == pytest.approx((0.3, 0.5, 0.7))
    assert found.runs == (0.7, 0.1, 0.3, 0.9, 0.5)
    even = spread_of([4.0, 1.0, 2.0, 3.0])  # a quarter of the way from the first to the last is 1.75
    assert (even.quartile_low, even.median, even.quartile_high) == pytest.approx((1.75, 2.5, 3.25))
    one = spread_of([2.0])
    assert (one.quartile_low, one.median, one.quartile_high) == (2.0, 2.0, 2.0)


def test_a_device_is_warm_although_its_kernels_had_to_be_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them takes longer than warming up, and the device idles meanwhile."""
    clock, work = 0.0, 0.0

    def measure() -> float:
        nonlocal clock, work
        first = work == 0.0
        seconds = 0.02 if work < 1.0 else 0.005  # awake behind a second of work
        work += seconds
        clock += seconds + (5.0 if first else 0.0)
        return seconds

    monkeypatch.setattr("xinfer.bench.loops.time.perf_counter", lambda: clock)
    assert repeated(measure, 3, warm_s=1.5).runs == (0.005, 0.005, 0.005)


def plan(checkpoint: CheckpointFactory, spec: SyntheticSpec, kv: KVType = "f16") -> MemoryPlan:
    with ModelWeights.open(checkpoint(spec)) as weights:
        config = weights.config
        return MemoryPlan(config=config, layout=WeightsLayout(weights), shape=cache_shape(config, kv), rows=64)


def test_work_is_what_it_is_by_hand(checkpoint: CheckpointFactory) -> None:
    spec = SyntheticSpec(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        dtype="float16",
        tie_word_embeddings=True,
    )
    found = plan(checkpoint, spec)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, o, and gate, up and down
    weights = sum(part.size for part in found.layout.layers) + found.layout.table.size
    # Behind 9 others: each layer, the head, and 10 keys and 10 values of 4 heads of 16.
    step = step_work(found, 9)
    assert step.flops == 2 * (3 * layer + 64 * 300) + 3 * (2 * 2 * 10 * 64)
    assert step.n_bytes == weights + 3 * 2 * 2 * 10 * 32
    # 4 tokens see 1 + 2 + 3 + 4 keys; of the last layer 3 of them need keys and values alone.
    prompt = prompt_work(found, 4)
    assert prompt.flops == 2 * (2 * 4 * layer + 3 * 2 * 64 * 32 + layer + 64 * 300) + 4 * 64 * (10 + 10 + 4)
    assert prompt.n_bytes == weights + 3 * 2 * 2 * 4 * 32
    assert plan(checkpoint, spec, "f32").shape.token_bytes == 2 * found.shape.token_bytes
    assert prompt_work(found, 1) == step_work(found, 0)
    assert Work(60, 20).intensity == 3


def test_windows_limit_what_is_seen(checkpoint: CheckpointFactory) -> None:
    with ModelWeights.open(checkpoint("sliding_all")) as weights:
        config = weights.config
        found = MemoryPlan(config=config, layout=WeightsLayout(weights), shape=cache_shape(config, "f16"), rows=64)
    (window,) = set(config.layer_windows)
    assert window is not None
    far, near = step_work(found, 10 * window), step_work(found, window)
    assert far == near
    assert near.flops - step_work(found, 0).flops == 4 * config.q_size * (window - 1) * config.num_hidden_layers


def test_sizes_that_do_not_fit_are_left_out_and_told() -> None:
    asked = Sizes(prompts=(10, 200, 201), contexts=(100, 190), decode_tokens=5, repeats=1)
    sizes, left_out = fitting(asked, 200)
    assert (sizes.prompts, sizes.contexts) == ((10, 200), (100,))
    assert left_out == [
        "prompts of 201 tokens: the model's context ends at 200",
        "decode behind 190 tokens: the model's context ends at 200",
    ]
    assert room(sizes) == 200
    with pytest.raises(RequestError, match="nothing is left to measure"):
        fitting(asked, 9)


def test_a_run_on_the_cpu(checkpoint: CheckpointFactory) -> None:
    folder = checkpoint("gqa")
    sizes = ("--prompt", "9, 3,3", "--context", "5,4000", "--decode-tokens", 2, "--repeats", 2)
    report = json.loads(run("bench", folder, "--device", "cpu", *sizes, "--json").stdout)
    assert [(row["kind"], row["tokens"]) for row in report["rows"]] == [("prompt", 3), ("prompt", 9), ("decode", 5)]
    for row in report["rows"]:
        seconds = row["seconds"]
        assert len(seconds["runs"]) == 2
        assert 0 < seconds["quartile_low"] <= seconds["median"] <= seconds["quartile_high"]
        tokens = row["tokens"] if row["kind"] == "prompt" else 1
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds["median"])
    assert report["speeds"] is None
    assert len(report["left_out"]) == 1
    if sys.platform != "win32":
        assert report["memory"]["process_peak"] > 10e6
    text = as_text(report)
    assert "decode behind 5" in text
    assert "Left out: decode behind 4,000 tokens" in text


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--prompt", "1,x"), 2, "expected whole numbers above 0"),
        (("--context", "0"), 2, "expected whole numbers above 0"),
        (("--prompt", "99999999", "--context", "99999999"), 1, "nothing is left to measure"),
        (("--plot", "roof.gif"), 2, "ends with .png or"),
        (("--plot", "roof.png"), 1, "--plot is for GPUs"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], status: int, message: str) -> None:
    assert message in " ".join(run("bench", "--device", "cpu", *arguments, status=status).stderr.split())


def test_a_missing_matplotlib_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"xinfer-llm\[plot\]"):
        check_plot()


@pytest.mark.skipif(sys.platform == "win32", reason="signals are another thing there")
def test_ctrl_c_ends_it(checkpoint: CheckpointFactory) -> None:
    code = """
import sys
from xinfer.bench import run
from xinfer.cli.app import main
measure = run.time_prompt
run.time_prompt = lambda *given, **more: (print("measuring", flush=True), measure(*given, **more))[1]
sys.argv[0] = "xinfer"
main()
"""
    command = [sys.executable, "-c", code, "bench", str(checkpoint("gqa")), "--device", "cpu", "--repeats", "99999"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=hear_interrupts) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n"
        os.kill(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in errors


def example() -> dict[str, Any]:
    """A report of a GPU of 1 TB/s and 10 TFLOP/s."""

    def row(kind: str, tokens: int, flops: float, n_bytes: float, seconds: float) -> dict[str, Any]:
        return {
            "kind": kind,
            "tokens": tokens,
            "flops": flops,
            "bytes": n_bytes,
            "tokens_per_second": tokens / seconds,
            "seconds": {"median": seconds, "quartile_low": seconds, "quartile_high": seconds, "runs": [seconds]},
            "share_of_memory_speed": n_bytes / seconds / 1e12,
            "share_of_matrix_rate": flops / seconds / 1e13,
        }

    return {
        "model": "models/some",
        "device": "vulkan:0 Some GPU",
        "driver": "Some 1.2",
        "parameters": 494_000_000,
        "decode_tokens": 64,
        "repeats": 5,
        "left_out": [],
        "streamed_layers": 0,
        "rows": [row("prompt", 512, 5e11, 1e9, 0.1), row("decode", 128, 1e9, 1e9, 0.002)],
        "memory": {"device_peak": 1_500_000_000, "process_peak": None},
        "speeds": {"memory": 1e12, "bus": 2.5e10, "matrix": 1e13, "matrix_kernel": "linear_coop.f16"},
    }


def test_the_table_says_what_the_shares_are_of() -> None:
    lines = as_text(example()).splitlines()
    assert [lines[3].split(), lines[4].split()] == [
        ["prompt", "of", "512", "100", "ms", "100", "ms", "to", "100", "ms", "5,120", "1%", "50%"],
        ["decode", "behind", "128", "2", "ms", "2", "ms", "to", "2", "ms", "64,000", "50%", "5%"],
    ]
    assert "read memory at 1 TB/s" in as_text(example())
    assert "Most memory taken: 1.50 GB of the device." in lines
    assert [duration(s) for s in (12.34, 0.1234, 0.01234, 0.0001234)] == ["12.3 s", "123 ms", "12.3 ms", "123 us"]
    assert [in_units(n) for n in (4.4e12, 999.0, 1.86e8)] == ["4.4 T", "999 ", "186 M"]


def test_the_picture_is_what_its_name_says() -> None:
    png, svg, again = io.BytesIO(), io.BytesIO(), io.BytesIO()
    draw(example(), png, "png")
    draw(example(), svg, "svg")
    assert png.getvalue().startswith(b"\x89PNG")
    text = svg.getvalue().decode()
    for said in ("matrix products, 10 TFLOP/s", "memory, 1 TB/s", "512: 50%", "128: 50%", "some on vulkan:0 Some GPU"):
        assert f">{said}</text>" in text, said
    draw(example(), again, "svg")
    assert again.getvalue() == svg.getvalue()
