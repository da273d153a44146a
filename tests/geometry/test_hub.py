"""from_hub against a server on this machine: config and headers only, never a weight."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from anaphora.errors import CorruptModel, DownloadError, ModelNotFound
from anaphora.geometry.find import find_geometry
from anaphora.geometry.model import ModelGeometry

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
}
WEIGHTS = 50 << 20
"""Bytes of tensor data each file claims to have; the server would send zeros for them."""


def header(tensors: int) -> bytes:
    """A safetensors header whose tensors fill WEIGHTS."""
    size = WEIGHTS // tensors
    table: dict[str, object] = {
        f"layer.{i}": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(tensors)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    return len(text).to_bytes(8, "little") + text


class Hub(ThreadingHTTPServer):
    """Serves files by path; counts the bytes it sends; with `ranges` off it answers 200 with the whole file."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.statuses: dict[str, int] = {}
        self.ranges = True
        self.sent = 0

    def put(self, name: str, content: bytes | dict[str, object], model: str = "org/tiny") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.files[f"/{model}/resolve/main/{name}"] = body


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        status = self.server.statuses.get(self.path)
        content = self.server.files.get(self.path)
        if status or content is None:
            self.send_error(status or 404)
            return
        asked = self.headers.get("Range")
        start, end = 0, len(content) + (WEIGHTS if self.path.endswith("safetensors") else 0) - 1
        if asked and self.server.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last), end)
        self.send_response(206 if asked and self.server.ranges else 200)
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        try:
            self.wfile.write(content[start : end + 1])
            rest = end + 1 - max(start, len(content))
            while rest > 0:
                rest -= self.wfile.write(bytes(min(rest, 1 << 16)))
                self.server.sent += 1 << 16
        except OSError:
            pass  # the client has read enough and went away

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_one_file(hub: Hub) -> None:
    hub.put("config.json", CONFIG)
    hub.put("model.safetensors", header(4))
    geometry = ModelGeometry.from_hub("org/tiny")
    assert geometry.layers == ModelGeometry.from_config(CONFIG).layers
    assert geometry.stored_weight_bytes == geometry.weight_bytes() == WEIGHTS
    assert hub.sent <= 1 << 17  # what the first range asks for, not the weights


def test_several_files_with_long_headers(hub: Hub) -> None:
    hub.put("config.json", CONFIG)
    hub.put(
        "model.safetensors.index.json",
        {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-1.safetensors"}},
    )
    hub.put("x-1.safetensors", header(4))
    hub.put("x-2.safetensors", header(2048))
    assert len(header(2048)) > 1 << 16
    assert ModelGeometry.from_hub("org/tiny").stored_weight_bytes == 2 * WEIGHTS


def test_a_server_without_ranges(hub: Hub) -> None:
    hub.ranges = False
    hub.put("config.json", CONFIG)
    hub.put("model.safetensors", header(4))
    assert ModelGeometry.from_hub("org/tiny").stored_weight_bytes == WEIGHTS
    assert hub.sent < WEIGHTS // 2


def test_without_safetensors_the_config_is_enough(hub: Hub) -> None:
    hub.put("config.json", CONFIG)
    geometry = ModelGeometry.from_hub("org/tiny")
    assert geometry.stored_weight_bytes is None
    assert geometry.weight_bytes() == 2 * ModelGeometry.from_config(CONFIG).parameters.total  # type: ignore[union-attr]


def test_find_asks_the_hub_only_when_told_to(hub: Hub) -> None:
    hub.put("config.json", CONFIG)
    with pytest.raises(ModelNotFound, match="--hub asks the Hugging Face Hub"):
        find_geometry("org/tiny")
    assert find_geometry("org/tiny", hub=True).query_heads == 8


def test_failures_are_told_apart(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json of 'org/none' at 'main'"):
        ModelGeometry.from_hub("org/none")
    hub.statuses["/org/gated/resolve/main/config.json"] = 401
    with pytest.raises(ModelNotFound, match=r"answers 401: .*HF_TOKEN"):
        ModelGeometry.from_hub("org/gated")
    hub.statuses["/org/down/resolve/main/config.json"] = 503
    with pytest.raises(DownloadError, match=r"config\.json of org/down could not be fetched .*503"):
        ModelGeometry.from_hub("org/down")
    hub.put("config.json", b"<html>", "org/proxy")
    with pytest.raises(CorruptModel, match=r"config\.json of org/proxy is not JSON: .* line 1, column 1"):
        ModelGeometry.from_hub("org/proxy")
    hub.put("config.json", CONFIG, "org/lfs")
    hub.put("model.safetensors", b"version https://git-lfs.github.com/spec/v1", "org/lfs")
    with pytest.raises(CorruptModel, match=r"model\.safetensors of org/lfs is not a safetensors file"):
        ModelGeometry.from_hub("org/lfs")
    hub.put("config.json", CONFIG, "org/cut")
    hub.put("model.safetensors", (9).to_bytes(8, "little") + b'{"a": {}}', "org/cut")
    with pytest.raises(CorruptModel, match=r"model\.safetensors of org/cut: its header is broken"):
        ModelGeometry.from_hub("org/cut")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="Check the network"):
        ModelGeometry.from_hub("org/tiny")


def test_headers_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert ModelGeometry.from_config(tmp_path).stored_weight_bytes is None
    (tmp_path / "model.safetensors").write_bytes(header(4))
    assert ModelGeometry.from_config(tmp_path).stored_weight_bytes == WEIGHTS
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CorruptModel, match=r"model\.safetensors is not a safetensors file"):
        ModelGeometry.from_config(tmp_path)
