"""Names to folders. The hub is a server on this machine that speaks its protocol; the client is the real one."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xinfer.errors import ModelNotFoundError
from xinfer.hub import DEMO_FOLDER, resolve
from xinfer.model.synthetic import PRESETS, write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.BaseHTTPRequestHandler):
    """One repository, `someone/tiny`, at one commit."""

    folder: Path
    served: list[str]

    def do_HEAD(self) -> None:
        self.reply()

    def do_GET(self) -> None:
        self.reply()

    def reply(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/someone/tiny/tree/"):
            listing = [self.entry(file) for file in self.files()]
            self.send(json.dumps(listing).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/api/models/someone/tiny"):
            siblings = [{"rfilename": name} for name in self.files()]
            info = {
                "id": "someone/tiny",
                "sha": COMMIT,
                "siblings": siblings,
                "private": False,
                "tags": [],
                "downloads": 0,
            }
            self.send(json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/someone/tiny/resolve/{COMMIT}/"):
            name = path.split(f"{COMMIT}/", 1)[1]
            if name not in self.files():
                self.send(b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, status=404)
                return
            if self.command == "GET":
                self.served.append(name)
            content = (self.folder / name).read_bytes()
            self.send(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())

    def entry(self, name: str) -> dict[str, Any]:
        content = (self.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[FakeHub]]]:
    folder = write_checkpoint(tmp_path / "repo", PRESETS["sharded"], seed=1)
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    (folder / "README.md").write_text("never fetched")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"never fetched")
    handler = type("Handler", (FakeHub,), {"folder": folder, "served": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join(10)


def inspect(name: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its environment when it is imported."""
    cleaned = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = {**cleaned, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "xinfer", "inspect", name, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_hub_name_fetches_the_files_that_are_needed_and_no_others(
    hub: tuple[str, type[FakeHub]], tmp_path: Path
) -> None:
    endpoint, handler = hub
    done = inspect("someone/tiny", tmp_path, HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config"]["num_hidden_layers"] == 3
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    shards = {f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)}
    assert sorted(handler.served) == sorted(wanted | shards | {"model.safetensors.index.json"})

    handler.served.clear()
    again = inspect("someone/tiny", tmp_path, HF_ENDPOINT=endpoint)
    assert (again.returncode, handler.served) == (0, [])

    offline = inspect("someone/tiny", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr


def test_offline_without_a_copy_is_said(tmp_path: Path) -> None:
    done = inspect("someone/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "not in the local cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_the_hub_does_not_know_is_said(hub: tuple[str, type[FakeHub]], tmp_path: Path) -> None:
    done = inspect("someone/else", tmp_path, HF_ENDPOINT=hub[0])
    assert done.returncode == 1
    assert "the hub has no model 'someone/else'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_hub_is_said(tmp_path: Path) -> None:
    done = inspect("someone/tiny", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["", "no such", "a/b/c", "../x", "x\0y", "a" * 5000, "-/-"])
def test_what_is_neither_folder_nor_hub_name_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelNotFoundError, match="no folder"):
        resolve(name)


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ModelNotFoundError, match="GGUF"):
            resolve(name)


def test_a_folder_that_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve(tmp_path)


def test_folders_and_the_demo(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(None) == resolve("demo") == DEMO_FOLDER
