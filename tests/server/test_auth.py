"""Keys: asked for everywhere but on the open routes, and with --salt-by-key each with its own cache."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from anaphora.errors import AuthenticationFailed, ConfigError
from anaphora.server.auth import find_key, hash_keys
from anaphora.server.settings import ServerSettings
from support.servers import Served

KEYS = hash_keys(["first-key", "second-key"])


@pytest.fixture
def served(serve_tiny: Callable[..., Served]) -> Served:
    return serve_tiny(settings=ServerSettings(("tiny",), api_key_digests=KEYS, salt_by_key=True))


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": "Basic first-key"}],
)
@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/openapi.json"),
        ("GET", "/no"),
        ("POST", "/tokenize"),
    ],
)
def test_no_key_or_a_wrong_one(served: Served, method: str, route: str, headers: dict[str, str]) -> None:
    with served.client() as client:
        reply = client.request(method, route, headers=headers)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.json()["error"]["type"] == "authentication_error"


def test_either_key_opens_and_some_routes_are_open(served: Served) -> None:
    with served.client() as client:
        for key in ("first-key", "second-key"):
            assert client.get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
        for route in ("/health", "/version", "/metrics"):
            assert client.get(route).status_code == 200


def test_the_openai_client_says_so(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError, match="not one of the server's"):
        served.openai(api_key="wrong").models.list()


def test_each_key_has_its_own_cache(served: Served) -> None:
    def cached(key: str, **extra: str) -> int:
        made = served.openai(api_key=key).completions.create(
            model="tiny", prompt="the same text " * 6, max_tokens=1, extra_body=extra
        )
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        return made.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("first-key") == 0
    assert cached("first-key") > 60
    assert cached("second-key") == 0
    assert cached("first-key", cache_salt="one") == 0
    assert cached("first-key", cache_salt="one") > 60
    assert cached("second-key", cache_salt="one") == 0


def test_keys_are_kept_as_digests_only() -> None:
    settings = ServerSettings(("tiny",), api_key_digests=KEYS)
    assert all(len(digest) == 32 for digest in KEYS)
    assert "digest" not in repr(settings)
    assert find_key("Bearer second-key", KEYS) == KEYS[1]
    with pytest.raises(AuthenticationFailed, match="Authorization: Bearer"):
        find_key(None, KEYS)


@pytest.mark.parametrize("key", ["", " ", "two words", "schlüssel", "tab\t"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    with pytest.raises(ConfigError, match="number 2"):
        hash_keys(["good", key])


def test_settings_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        ServerSettings(("tiny",), salt_by_key=True)
    with pytest.raises(ConfigError, match="--served-model-name"):
        ServerSettings(())
