"""The file of what `xinfer tune` has chosen: what is found in it, and what is passed over."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli_run import run

from xinfer.errors import DeviceError
from xinfer.gpu.null import INFO
from xinfer.gpu_model.tuning import AttentionChoice, Tuning, keys_bucket
from xinfer.tuning_file import LARGEST, TuningFile

SHAPES = {"hidden": 64, "kv_cache": "f16", "exact": False}
OTHER = {**SHAPES, "hidden": 128}
DOWN, ATTENTION = "linear_gemv.f16.t1.l128r1.wave", "attention.f16.tiled64_turn"
CHOSEN = Tuning(
    decode={"down": DOWN},
    attention={512: AttentionChoice(ATTENTION, 4)},
    prompts={64: {"o": "linear_gemm.f16.tile64"}},
)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def kept(tmp_path: Path, said: list[str]) -> TuningFile:
    file = TuningFile(tmp_path / "deep" / "kernels.json", warn=said.append)
    file.keep(INFO, SHAPES, CHOSEN)
    return file


def edit(file: TuningFile, change: Any) -> None:
    assert file.path is not None
    content = json.loads(file.path.read_bytes())
    change(content["entries"][0])
    file.path.write_text(json.dumps(content))


def test_what_is_kept_is_found_again_for_the_same_driver_and_shapes(kept: TuningFile) -> None:
    assert kept.find(INFO, SHAPES) == CHOSEN
    assert not kept.find(INFO, OTHER)
    assert not kept.find(dataclasses.replace(INFO, driver_version="another"), SHAPES)
    assert not kept.find(dataclasses.replace(INFO, device_id=INFO.device_id + 1), SHAPES)
    kept.keep(INFO, OTHER, Tuning(decode={"o": DOWN}))
    kept.keep(INFO, SHAPES, Tuning())
    assert not kept.find(INFO, SHAPES)
    assert kept.find(INFO, OTHER).decode == {"o": DOWN}


def test_variants_that_changed_or_are_unknown_are_passed_over(kept: TuningFile) -> None:
    edit(kept, lambda entry: entry["sources"].update({DOWN: "older"}))
    assert kept.find(INFO, SHAPES) == dataclasses.replace(CHOSEN, decode={})
    edit(kept, lambda entry: entry["tuning"]["attention"].update({"512": ["attention.f16.tomorrows", 4]}))
    assert kept.find(INFO, SHAPES) == Tuning(prompts=CHOSEN.prompts)


def test_forgetting_takes_every_form_of_the_cache_and_leaves_other_models(kept: TuningFile) -> None:
    kept.keep(INFO, {**SHAPES, "kv_cache": "f32", "exact": True}, CHOSEN)
    kept.keep(INFO, OTHER, CHOSEN)
    assert kept.forget(INFO, SHAPES) == 2
    assert kept.forget(INFO, SHAPES) == 0
    assert kept.find(INFO, OTHER) == CHOSEN


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry["tuning"].pop("decode"),
        lambda entry: entry["tuning"].update(decode={"down": 7}),
        lambda entry: entry["tuning"].update(attention={"many": ["x", 1]}),
        lambda entry: entry["tuning"].update(attention={"512": ["x", "1"]}),
        lambda entry: entry["driver"].pop("vendor_id"),
        lambda entry: entry.clear(),
    ],
)
def test_a_broken_file_is_told_once_ignored_and_replaced(kept: TuningFile, said: list[str], change: Any) -> None:
    edit(kept, change)
    assert not kept.find(INFO, SHAPES)
    assert not kept.find(INFO, SHAPES)
    assert len(said) == 1
    assert "1 of the choices" in said[0]
    assert "cannot be understood" in said[0]
    kept.keep(INFO, SHAPES, CHOSEN)
    assert kept.find(INFO, SHAPES) == CHOSEN


def test_an_entry_that_is_not_understood_harms_no_other_and_is_kept(kept: TuningFile) -> None:
    assert kept.path is not None
    kept.keep(INFO, OTHER, Tuning(decode={"o": DOWN}))
    edit(kept, lambda entry: entry.update(tuning={"a later": "form"}))
    strange = json.loads(kept.path.read_bytes())["entries"][0]
    assert kept.find(INFO, OTHER).decode == {"o": DOWN}
    kept.keep(INFO, SHAPES, CHOSEN)
    assert (kept.find(INFO, SHAPES), kept.find(INFO, OTHER).decode) == (CHOSEN, {"o": DOWN})
    assert kept.forget(INFO, OTHER) == 1
    assert strange in json.loads(kept.path.read_bytes())["entries"]


def test_a_file_that_is_not_understood_is_kept_under_another_name(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "k.json"
    for n, content in enumerate((b'{"version": 9, "entries": [1, 2]}', b"{", b" " * (LARGEST + 1))):
        path.write_bytes(content)
        assert TuningFile(path, warn=said.append).forget(INFO, SHAPES) == 0
        assert "cannot be read" in said[-1]
        assert path.read_bytes() == content
        TuningFile(path, warn=said.append).keep(INFO, SHAPES, CHOSEN)
        aside = f"k.json.damaged{f'-{n}' if n else ''}"
        assert (tmp_path / aside).read_bytes() == content
        assert aside in said[-1]
        assert TuningFile(path).find(INFO, SHAPES) == CHOSEN


def test_what_is_no_file_is_told(tmp_path: Path, said: list[str]) -> None:
    assert not TuningFile(tmp_path, warn=said.append).find(INFO, SHAPES)
    assert "it is no file" in said[0]


def test_tune_says_at_once_that_nothing_could_be_kept(tmp_path: Path) -> None:
    result = run("tune", "--device", "null", environment={"XINFER_TUNING": str(tmp_path)}, status=1)
    assert f"{tmp_path} cannot be written (it is no file); name another file in XINFER_TUNING" in result.stderr


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 9, "entries": []}', b"\xff\x00", b"[" * 100_000])
def test_no_content_is_a_fault_of_ours(tmp_path: Path, said: list[str], content: bytes) -> None:
    (tmp_path / "k.json").write_bytes(content)
    assert not TuningFile(tmp_path / "k.json", warn=said.append).find(INFO, SHAPES)
    assert len(said) == 1


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="XINFER_TUNING"):
        TuningFile(tmp_path / "file" / "k.json").keep(INFO, SHAPES, CHOSEN)


def test_caches_are_told_apart_as_they_grow() -> None:
    assert [keys_bucket(n) for n in (1, 512, 513, 2048, 4200, 32_768)] == [512, 512, 2048, 2048, 8192, 32_768]


def test_the_cpu_has_nothing_to_tune() -> None:
    assert "has no kernels to choose among" in run("tune", "--device", "cpu", status=1).stderr
    assert "has no kernels to choose among" in run("tune", "--device", "cpu", "--forget", status=1).stderr
