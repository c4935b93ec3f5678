"""Who may import whom, where ctypes may appear, and what `import xinfer` leaves alone. CONTRIBUTING draws the rule."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "xinfer"

# A module (or package) and the modules of ours that it may import. Everyone may import errors, and packages themselves.
ALLOWED = {
    "__init__": {"_version", "errors", "gpu_model", "llm", "sampling"},
    "__main__": {"cli"},
    "_version": set(),
    "errors": set(),
    "cli": {
        "_version",
        "bench",
        "doctor",
        "gpu",
        "gpu_model",
        "hub",
        "inspection",
        "llm",
        "model",
        "progress",
        "progress_lines",
        "quarantine",
        "sampling",
        "verify",
    },
    "bench": {"_version", "gpu", "gpu_model", "kv_cache", "llm", "model", "ops", "tuning_file"},
    "doctor": {"_version", "gpu", "model", "ops", "quarantine", "shaders", "trials"},
    "verify": {
        "_version",
        "choice",
        "gpu",
        "gpu_model",
        "kv_cache",
        "model",
        "ops",
        "quarantine",
        "trials",
        "tuning_file",
    },
    "trials": {"gpu", "model", "ops", "sampling", "shaders"},
    "inspection": {"checkpoint", "gpu", "gpu_model", "model", "quarantine", "tuning_file"},
    "llm": {
        "checkpoint",
        "engine",
        "gpu",
        "gpu_model",
        "model",
        "quarantine",
        "recovery",
        "sampling",
        "settings",
        "tokenizer",
        "transcript",
        "tuning_file",
    },
    "tuning_file": {"cache_files", "gpu", "gpu_model", "quarantine", "shaders", "state_files"},
    "state_files": set(),
    "cache_files": set(),
    "recovery": {"choice", "gpu", "gpu_model", "kv_cache", "quarantine"},
    "quarantine": {"gpu", "state_files"},
    "gpu_model": {"choice", "gpu", "kv_cache", "model", "ops"},
    "ops": {"gpu", "shaders"},
    "kv_cache": {"gpu"},
    "shaders": {"gpu"},
    "gpu": {"cache_files"},
    "checkpoint": {"chat", "hub", "model", "sampling", "settings", "tokenizer"},
    "settings": {"model", "sampling"},
    "transcript": {"tokenizer"},
    "engine": {"choice", "sampling"},
    "hub": {"files"},
    "files": set(),
    "progress": {"progress_lines"},
    "progress_lines": set(),
    "chat": {"files", "template_sandbox"},
    "template_sandbox": set(),
    "tokenizer": {"tokenizer_files"},
    "tokenizer_files": {"cache_files", "files", "patterns"},
    "patterns": set(),
    "sampling": {"choice"},
    "choice": set(),
    "model": {"files"},
}
# Third-party packages that a part of ours may use; what is not listed here may not import any.
THIRD_PARTY = {
    "model": {"numpy", "ml_dtypes", "safetensors", "tokenizers"},  # tokenizers: only synthetic, to write one
    "engine": {"numpy"},
    "bench": {"matplotlib", "numpy"},
    "llm": {"numpy"},
    "recovery": {"numpy"},
    "checkpoint": {"numpy"},
    "gpu": {"numpy"},
    "gpu_model": {"ml_dtypes", "numpy"},
    "kv_cache": {"numpy"},
    "doctor": {"numpy"},
    "trials": {"ml_dtypes", "numpy"},
    "verify": {"numpy"},
    "sampling": {"numpy"},
    "tokenizer": {"numpy", "tokenizers"},
    "tokenizer_files": {"tokenizers"},
    "chat": {"jinja2"},
    "template_sandbox": {"jinja2", "markupsafe"},
    "hub": {"huggingface_hub"},
    "progress": {"rich"},
    "cli": {"numpy", "typer"},
}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package of ours that a file belongs to."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it out"
            assert node.module is not None
            if node.module == "xinfer":
                yield from (f"xinfer.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_direction_rule(path: Path) -> None:
    here = unit(path)
    assert here in ALLOWED, f"{here} is new: say in ALLOWED what it may import"
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top == "xinfer":
            target = rest.partition(".")[0]
            assert target in ALLOWED[here] | {"errors", here}, f"{path.name} imports xinfer.{target}"
        elif top not in sys.stdlib_module_names:
            assert top in THIRD_PARTY.get(here, set()), f"{path.name} imports {top}"
        assert top != "ctypes" or here == "gpu", "ctypes belongs to gpu"
        assert top not in {"pickle", "torch", "transformers", "shelve", "marshal", "dill"}, f"{path.name} imports {top}"


def test_contributing_draws_the_rule() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line.partition("->") for line in text.splitlines() if re.match(r"\w+ +-> ", line)]
    drawn = {name.strip(): {target.strip() for target in targets.split(",")} for name, _, targets in rows}
    leaves = {name for name, targets in ALLOWED.items() if not targets}
    private = {"__init__", "__main__", "_version"}
    assert drawn == {name: targets - private for name, targets in ALLOWED.items() if name not in leaves | private}
    places = {name: row for row, name in enumerate(drawn)}
    for name, targets in drawn.items():  # no arrow leads up, so that there is no circle
        assert all(places[name] < places.get(target, len(drawn)) for target in targets), name


def test_every_rule_names_a_module_that_exists() -> None:
    assert {unit(path) for path in modules()} == set(ALLOWED)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import xinfer", {"numpy", "typer", "rich", "tokenizers", "jinja2", "huggingface_hub", "safetensors"}),
        ("import xinfer.cli.app", {"numpy", "tokenizers", "jinja2", "huggingface_hub", "safetensors"}),
    ],
)
def test_heavy_modules_wait_until_they_are_used(code: str, absent: set[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], check=True, capture_output=True, text=True
    )
    assert absent.isdisjoint(run.stdout.split())
