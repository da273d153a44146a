"""Hub ids against a small hub on this machine, through the real client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789" * 4
CHILD = """
import json, sys
from anaphora.engine.sources.resolve import resolve_model
from anaphora.errors import AnaphoraError
stages = {}
def note(stage, done, total):
    stages[stage] = (done, total)
try:
    model = resolve_model(sys.argv[1], progress=note, **json.loads(sys.argv[2]))
    print(json.dumps({"path": str(model.path), "name": model.name, "source": model.source, "stages": stages}))
except AnaphoraError as error:
    print(json.dumps({"error": type(error).__name__, "says": str(error)}))
"""


class Hub(ThreadingHTTPServer):
    """The routes of the hub that fetching a snapshot needs: info, tree, HEAD and GET of a file."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.fetched = files, []  # type: tuple[dict[str, bytes], list[str]]
        self.failing: tuple[int, dict[str, str]] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.failing:
            status, headers = self.server.failing
            self.reply(status, b"{}", headers)
        elif path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            self.reply(200, json.dumps([entry(*file) for file in self.server.files.items()]).encode())
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self.reply(200, json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/") and (name := path.split("/", 5)[5]) in self.server.files:
            content = self.server.files[name]
            etag = str(entry(name, content).get("lfs", {"oid": git_sha1(content)})["oid"])
            if self.command == "GET":
                self.server.fetched.append(name)
            self.reply(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(name: str, content: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content)}
    if name.endswith(".safetensors"):
        facts["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return facts


@pytest.fixture
def hub() -> Iterator[Hub]:
    header = json.dumps({"w": {"dtype": "F32", "shape": [5000], "data_offsets": [0, 20000]}}).encode()
    files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(20000),
        "pytorch_model.bin": b"pickle",
        "onnx/config.json": b"{}",
        "README.md": b"# tiny",
    }
    with Hub(files) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def resolve(hub: Hub, home: Path, name: str = "org/tiny", **options: bool) -> dict[str, Any]:
    """In a process of its own: the client reads its settings once, when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", CHILD, name, json.dumps(options)]
    child = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return answer


def test_only_what_is_needed_is_fetched_and_only_once(hub: Hub, tmp_path: Path) -> None:
    model = resolve(hub, tmp_path)
    assert (model["name"], model["source"]) == ("org/tiny", "hub:org/tiny")
    wanted = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in Path(model["path"]).iterdir()} == wanted == set(hub.fetched)
    total = sum(len(hub.files[name]) for name in wanted)
    assert model["stages"]["downloading org/tiny"] == [total, total]
    hub.fetched.clear()
    assert resolve(hub, tmp_path)["path"] == model["path"]
    assert hub.fetched == []
    # Without the hub what is there still serves.
    hub.failing = (503, {})
    assert resolve(hub, tmp_path)["path"] == model["path"]


def test_damage_is_named_found_and_fetched_again(hub: Hub, tmp_path: Path) -> None:
    path = Path(resolve(hub, tmp_path)["path"])
    blob = (path / "model.safetensors").resolve()
    good = blob.read_bytes()
    blob.write_bytes(good[:-1])
    answer = resolve(hub, tmp_path)
    assert answer["error"] == "CorruptModel"
    assert "model.safetensors" in answer["says"]
    assert "anaphora pull org/tiny --force" in answer["says"]
    assert resolve(hub, tmp_path, force=True)["path"] == str(path)
    assert (path / "model.safetensors").read_bytes() == good
    # A flipped byte of the same size, and one in a small file: only verifying can tell.
    blob.write_bytes(good[:-1] + b"\1")
    (path / "config.json").resolve().write_bytes(b'{"model_type": "llamb"}')
    hub.fetched.clear()
    assert resolve(hub, tmp_path, verify=True)["path"] == str(path)
    assert sorted(hub.fetched) == ["config.json", "model.safetensors"]
    assert (path / "model.safetensors").read_bytes() == good


@pytest.mark.parametrize(
    ("name", "failing", "error", "says"),
    [
        ("org/other", None, "ModelNotFound", "no model org/other"),
        ("org/tiny", (403, {"X-Error-Code": "GatedRepo"}), "ModelNotFound", "gated. Accept its licence at"),
        ("org/tiny", (401, {"X-Error-Code": "RepoNotFound"}), "ModelNotFound", "set HF_TOKEN"),
        ("org/tiny", (500, {}), "DownloadError", "HF_ENDPOINT"),
        ("org/bad--name..x", None, "ModelNotFound", "Check the spelling"),
    ],
)
def test_what_the_hub_refuses_says_what_to_do(
    hub: Hub, tmp_path: Path, name: str, failing: tuple[int, dict[str, str]] | None, error: str, says: str
) -> None:
    hub.failing = failing
    answer = resolve(hub, tmp_path, name)
    assert answer["error"] == error
    assert says in answer["says"]


def test_no_network(hub: Hub, tmp_path: Path) -> None:
    hub.server_port = 9  # where nobody listens
    answer = resolve(hub, tmp_path)
    assert answer["error"] == "DownloadError"
    assert "Check the network" in answer["says"]
    assert "local model folder" in answer["says"]


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_repository_without_weights_or_tokenizer(hub: Hub, tmp_path: Path, missing: str) -> None:
    del hub.files[missing]
    answer = resolve(hub, tmp_path)
    assert answer["error"] == ("UnsupportedModel" if missing == "model.safetensors" else "CorruptModel")
    assert ("safetensors" if missing == "model.safetensors" else "no tokenizer") in answer["says"]
