"""What users type becomes an endpoint; proxies are chosen as other clients would, except where that makes no sense."""

from __future__ import annotations

import pytest

from anaphora.errors import ConfigError
from anaphora.probes.endpoint import Endpoint, split_url
from anaphora.probes.proxies import choose_proxy, excluded, is_local, is_loopback, proxy_variables

PROXY = {"HTTP_PROXY": "http://proxy.corp:3128", "HTTPS_PROXY": "http://proxy.corp:3128"}


@pytest.mark.parametrize(
    ("typed", "root", "api_base"),
    [
        ("http://host:8000", "http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/v1", "http://host:8000", "http://host:8000/v1"),
        (" 'http://host:8000/v1/' ", "http://host:8000", "http://host:8000/v1"),
        ("http://host//v1//chat/completions", "http://host", "http://host/v1"),
        ("http://host/v1/v1", "http://host", "http://host/v1"),
        ("http://host/v1/models?x=1#y", "http://host", "http://host/v1"),
        ("host:8000", "http://host:8000", "http://host:8000/v1"),
        ("localhost", "http://localhost", "http://localhost/v1"),
        ("api.openai.com/v1", "https://api.openai.com", "https://api.openai.com/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000", "http://[::1]:8000/v1"),
        ("https://api.groq.com/openai/v1", "https://api.groq.com/openai", "https://api.groq.com/openai/v1"),
        ("https://open.bigmodel.cn/api/paas/v4", "https://open.bigmodel.cn/api/paas",
         "https://open.bigmodel.cn/api/paas/v4"),
        ("https://g.example/v1beta/openai/", "https://g.example", "https://g.example/v1beta/openai"),
    ],
)  # fmt: skip
def test_url_forms(typed: str, root: str, api_base: str) -> None:
    assert split_url(typed) == (root, api_base)


@pytest.mark.parametrize("typed", ["", "ftp://host", "http://", "http://host:port", "http://[::1", "http://me:pw@host"])
def test_what_is_no_url_is_refused_without_showing_a_password(typed: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_url(typed)
    assert "pw" not in str(error.value)


def test_headers_carry_the_key_unless_the_user_sets_another() -> None:
    plain = Endpoint.parse("http://h", api_key="sk-1", environ={})
    assert plain.request_headers() == {"Authorization": "Bearer sk-1"}
    own = Endpoint.parse("http://h", api_key="sk-1", headers=["authorization: Basic abc", "X-A:  b "], environ={})
    assert own.request_headers() == {"authorization": "Basic abc", "X-A": "b"}


@pytest.mark.parametrize("header", ["no colon", "bad name: x", "X: caf\u00e9", "X: a\nb"])
def test_bad_headers_are_refused_without_their_value(header: str) -> None:
    with pytest.raises(ConfigError) as error:
        Endpoint.parse("http://h", headers=[header], environ={})
    assert "caf" not in str(error.value)


def test_a_key_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="line break") as error:
        Endpoint.parse("http://h", api_key="sk-secret\n", environ={})
    assert "secret" not in str(error.value)


def test_the_endpoint_redacts_its_own_secrets() -> None:
    endpoint = Endpoint.parse("http://h", api_key="plainword", headers=["X-Api-Key: other-word"], environ={})
    assert endpoint.redact("got plainword and other-word") == "got [redacted] and [redacted]"
    assert "plainword" not in repr(endpoint)
    assert "other-word" not in repr(endpoint)


def test_loopback_and_private_addresses_bypass_a_proxy_and_say_so() -> None:
    for host in ("localhost", "127.0.0.1", "[::1]", "10.1.2.3", "192.168.0.7", "gpu-box", "nas.local"):
        choice = choose_proxy(f"http://{host}:8000/v1", PROXY)
        assert choice.proxy is None
        assert choice.overruled
        assert "NO_PROXY" in choice.note


def test_public_addresses_use_the_proxy_of_their_scheme() -> None:
    choice = choose_proxy("https://api.example.com/v1", {**PROXY, "https_proxy": "http://u:pw@low:1"})
    assert choice.proxy == "http://u:pw@low:1"
    assert choice.variable == "https_proxy"
    assert "pw" not in choice.note
    assert choose_proxy("https://api.example.com", {"ALL_PROXY": "proxy:80"}).proxy == "http://proxy:80"
    assert choose_proxy("https://api.example.com", {"HTTP_PROXY": "http://p:1"}).proxy is None
    assert choose_proxy("https://api.example.com", {**PROXY, "NO_PROXY": ".example.com"}).proxy is None
    assert choose_proxy("http://h", {}).note == ""


@pytest.mark.parametrize(
    ("host", "no_proxy", "expected"),
    [
        ("a.example.com", "example.com", True),
        ("a.example.com", ".example.com", True),
        ("a.example.com", "*.example.com", True),
        ("example.com", ".example.com", True),
        ("badexample.com", "example.com", False),
        ("x.org", "*", True),
        ("x.org", "y.org, x.org:8000", True),
        ("x.org", "x.org:9000", False),
        ("8.8.4.4", "8.8.0.0/16", True),
        ("8.9.4.4", "8.8.0.0/16,nonsense/99", False),
        ("::1", "[::1]", True),
        ("x.org", "", False),
    ],
)
def test_no_proxy(host: str, no_proxy: str, expected: bool) -> None:
    assert excluded(host, 8000, no_proxy) is expected


def test_local_names() -> None:
    assert is_loopback("127.5.0.1")
    assert is_loopback("0.0.0.0")
    assert not is_loopback("10.0.0.1")
    assert is_local("10.0.0.1")
    assert is_local("vllm")
    assert not is_local("8.8.8.8")
    assert not is_local("api.openai.com")


def test_variables_are_listed_as_they_are_set() -> None:
    environ = {"http_proxy": "a", "NO_PROXY": "b", "HTTPS_PROXY": " ", "PATH": "c"}
    assert proxy_variables(environ) == {"NO_PROXY": "b", "http_proxy": "a"}
