"""From a URL to a store, or to a message that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.tiers.remote.registry import open_remote
from anaphora.tiers.remote.url import without_secrets
from support.remote import why_no_mooncake


@pytest.mark.parametrize(
    "url",
    [
        "valkey://127.0.0.1",
        "redis://user:p%40ss@127.0.0.1:6380/3?timeout=0.5&ttl=60",
        "valkeys://cache.example:6390?ssl_cert_reqs=none",
        "rediss://cache.example?ssl_ca_certs=/etc/ssl/ca.pem&connections=8",
        "unix:///run/valkey.sock?db=2",
        "VALKEY://[::1]:6379/0",
    ],
)
def test_forms_of_valkey_urls(url: str) -> None:
    open_remote(url).close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memcached://127.0.0.1", ["memcached", "valkey://", "mooncake://", "anaphora.remote_stores"]),
        ("127.0.0.1:6379", ["valkey://127.0.0.1:6379/0"]),
        ("", ["valkey://127.0.0.1:6379/0"]),
        ("valkey://127.0.0.1:70000", ["valkey://HOST:PORT/DB"]),
        ("valkey://127.0.0.1/first", ["/first", "whole number"]),
        ("valkey://127.0.0.1?timout=3", ["timout", "timeout"]),
        ("valkey://127.0.0.1?ssl_ca_certs=x", ["ssl_ca_certs"]),
        ("valkey://127.0.0.1?timeout=soon", ["timeout=soon"]),
        ("valkey://127.0.0.1?timeout=nan", ["timeout=nan"]),
        ("valkey://127.0.0.1?ttl=0", ["ttl=0"]),
        ("valkey://127.0.0.1?ttl=5&ttl=6", ["ttl", "twice"]),
        ("unix://", ["path of a socket"]),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_remote(url)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.skipif(bool(why_no_mooncake()), reason=why_no_mooncake())
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mooncake://", ["mooncake://HOST:50051"]),
        ("mooncake://user@host", ["no users"]),
        ("mooncake://host/path", ["no paths"]),
        ("mooncake://host?protocol=smoke", ["tcp, rdma"]),
        ("mooncake://host?segment=lots", ["segment=lots", "GiB"]),
    ],
)
def test_what_is_wrong_with_a_mooncake_url_is_said(url: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        open_remote(url)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("scheme", "package"), [("valkey", "valkey"), ("mooncake", "mooncake")])
def test_a_missing_extra_is_named_with_the_command(scheme: str, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from anaphora.errors import ConfigError\n"
        "from anaphora.tiers.remote.registry import open_remote\n"
        f"try: open_remote('{scheme}://127.0.0.1')\n"
        "except ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'anaphora[{scheme}]'" in result.stdout


def test_the_registry_imports_no_client() -> None:
    code = (
        "import sys, anaphora.tiers.remote.registry, anaphora.tiers.remote.tier\n"
        "print(sorted({'valkey', 'mooncake', 'torch', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def outside_package(folder: Path, source: str) -> None:
    """What pip leaves behind for a package that registers shelf://."""
    (folder / "shelf_store.py").write_text(source)
    info = folder / "shelf_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[anaphora.remote_stores]\nshelf = shelf_store:open_store\n")


def test_an_outside_package_registers_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside_package(tmp_path, "class Shelf:\n    def __init__(self, url): self.url = url\nopen_store = Shelf\n")
    monkeypatch.syspath_prepend(tmp_path)
    store = open_remote("shelf://third/from/top")
    assert vars(store) == {"url": "shelf://third/from/top"}
    with pytest.raises(ConfigError, match="shelf://"):
        open_remote("shelves://x")


def test_an_outside_package_that_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside_package(tmp_path, "raise RuntimeError('no shelf here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shelf_store", raising=False)
    with pytest.raises(ConfigError, match=r"shelf_store:open_store.*no shelf here"):
        open_remote("shelf://x")


def test_a_url_is_shown_without_its_secrets() -> None:
    assert without_secrets("valkey://me:secret@host:1/2?ttl=3") == "valkey://host:1/2"
