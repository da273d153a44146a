"""GET /explain: why each request of a real server missed; whose business that is; pins and their header."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from anaphora.server.auth import hash_keys
from anaphora.server.settings import ServerSettings
from server.conftest import ServeTiny
from support.servers import Served

RULES = "You are a helpful assistant. Be brief. "
SECRET = "Zebra-Quartz-77"


def complete(
    server: Served, prompt: str, *, key: str | None = None, headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    sent = dict(headers or {})
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **more}
    with server.client() as client:
        return client.post("/v1/completions", json=body, headers=sent)


def explained(server: Served, what: str, *, key: str | None = None) -> list[dict[str, Any]]:
    with server.client() as client:
        answer = client.get(f"/explain{what}", headers={"Authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200, answer.text
    facts = answer.json()
    assert facts["schema_version"] == 1
    requests: list[dict[str, Any]] = facts["requests"]
    return requests


def test_by_the_id_that_the_answer_carries(serve_tiny: ServeTiny) -> None:
    server = serve_tiny()
    first = complete(server, RULES + "Now: 2026-11-29 10:15:03. Hi")
    second = complete(server, RULES + "Now: 2026-11-29 10:15:09. Hi")
    assert second.headers["x-request-id"] == second.json()["id"]
    (outcome,) = explained(server, f"/{second.json()['id']}")
    assert outcome["request_id"] == second.json()["id"] + "-0"
    miss = outcome["miss"]
    assert (miss["cause"], miss["position"]) == ("diverged", len(RULES) + 23)
    assert miss["other_request"] == first.json()["id"] + "-0"
    assert miss["difference"]["kind"] == "timestamp"
    assert miss["difference"]["mine"] is None
    assert "a date or time" in miss["reason"]
    assert "end of the prompt" in miss["advice"]
    assert outcome["reused"] == {"pool": second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]}
    assert explained(server, f"/{outcome['request_id']}") == [outcome]
    assert server.metrics()["anaphora_missed_tokens_total{cause=diverged}"] == miss["tokens"]


def test_every_choice_and_the_stream_have_one(serve_tiny: ServeTiny) -> None:
    server = serve_tiny()
    answer = complete(server, RULES, n=3, temperature=1)
    outcomes = explained(server, f"/{answer.json()['id']}")
    assert [o["request_id"].rpartition("-")[2] for o in outcomes] == ["0", "1", "2"]
    assert [o["waited_for"] for o in outcomes][1:] == [outcomes[0]["request_id"]] * 2
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as stream:
        stream.read()
        name = stream.headers["x-request-id"]
    assert f'"id":"{name}"' in stream.text
    assert len(explained(server, f"/{name}")) == 1


def test_the_last_ones_newest_first(serve_tiny: ServeTiny) -> None:
    server = serve_tiny()
    assert explained(server, "") == []
    names = [complete(server, f"Prompt {i}").json()["id"] + "-0" for i in range(4)]
    assert [o["request_id"] for o in explained(server, "?last=3")] == names[:0:-1]
    assert len(explained(server, "")) == 4


@pytest.mark.parametrize("last", ["0", "-1", "x", "", "1.5", "9" * 30, "１"])
def test_bad_numbers(serve_tiny: ServeTiny, last: str) -> None:
    with serve_tiny().client() as client:
        answer = client.get("/explain", params={"last": last})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "last"
    assert "?last=20" in answer.json()["error"]["message"]


@pytest.mark.parametrize("query", ["?lst=3", "?last=3&more=1", "?last=3&last=4"])
def test_bad_parameters(serve_tiny: ServeTiny, query: str) -> None:
    with serve_tiny().client() as client:
        answer = client.get(f"/explain{query}")
    assert answer.status_code == 400
    assert "?last=20" in answer.json()["error"]["message"]


def test_an_unknown_request(serve_tiny: ServeTiny) -> None:
    with serve_tiny().client() as client:
        answer = client.get("/explain/cmpl-nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"
    assert "GET /explain" in answer.json()["error"]["message"]


def test_text_is_kept_only_when_asked_for(serve_tiny: ServeTiny) -> None:
    prompts = [RULES + f"The word is {SECRET}{n}. Go on" for n in "12"]
    for keep in (False, True):
        server = serve_tiny()
        assert server.state.engine is not None
        server.state.engine.explainer.keep_text = keep
        for prompt in prompts:
            complete(server, prompt)
        with server.client() as client:
            text = client.get("/explain").text
        assert [each in text for each in ("Zebra", "The word", "Go on")] == [keep] * 3


def test_keys_are_asked_for(serve_tiny: ServeTiny) -> None:
    server = serve_tiny(settings=ServerSettings(("tiny",), hash_keys(["one", "two"])))
    complete(server, RULES, key="one")
    with server.client() as client:
        assert client.get("/explain").status_code == 401
        assert client.get("/explain/x").status_code == 401
    assert len(explained(server, "", key="two")) == 1  # keys share one cache here, and what is said of it


def test_with_caches_by_key_nobody_learns_of_others(serve_tiny: ServeTiny) -> None:
    settings = ServerSettings(("tiny",), hash_keys(["one", "two"]), salt_by_key=True)
    server = serve_tiny(settings=settings, num_blocks=12, eviction_policy="lru")
    name = complete(server, RULES * 2, key="one").json()["id"]
    complete(server, RULES * 2, key="two")
    with server.client() as client:
        answer = client.get(f"/explain/{name}", headers={"Authorization": "Bearer two"})
    assert answer.status_code == 404
    (outcome,) = explained(server, "", key="two")
    assert (outcome["miss"]["cause"], outcome["miss"]["other_request"]) == ("never_seen", None)
    complete(server, "x" * 100, key="two")
    complete(server, RULES * 2, key="one")
    latest, _ = explained(server, "", key="one")
    assert (latest["miss"]["cause"], latest["miss"]["other_request"]) == ("evicted", None)
    assert "another request" in latest["miss"]["reason"]
    complete(server, "same words, twice salted", key="one", cache_salt="a")
    complete(server, "same words, twice salted", key="one", cache_salt="b")
    latest, _ = explained(server, "?last=2", key="one")
    assert latest["miss"]["cause"] == "other_namespace"


def test_many_at_once(serve_tiny: ServeTiny) -> None:
    """Readers while requests come and go: every answer has its outcome, whole."""
    server = serve_tiny(max_num_seqs=8)

    def one(number: int) -> bool:
        answer = complete(server, RULES + f"{number % 5} and so on", max_tokens=4)
        (outcome,) = explained(server, f"/{answer.json()['id']}")
        explained(server, "?last=50")
        missed = outcome["miss"]["tokens"] if outcome["miss"] else 0
        tokens = sum(outcome["reused"].values()) + missed
        return bool(tokens == outcome["prompt_tokens"] and outcome["output_tokens"] == 4)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(16)))


def test_a_pin_keeps_what_would_have_gone(serve_tiny: ServeTiny) -> None:
    for headers, kept in ((None, 0), ({"X-Anaphora-Pin": "60"}, 47)):
        server = serve_tiny(num_blocks=16, eviction_policy="lru")
        name = complete(server, "p" * 48, headers=headers).json()["id"]
        (outcome,) = explained(server, f"/{name}")
        assert outcome["pinned_tokens"] == (48 if kept else 0)
        for other in "abcdef":
            complete(server, other * 100)
        again = complete(server, "p" * 48)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == kept


def test_pins_take_half_of_the_pool_at_most(serve_tiny: ServeTiny) -> None:
    server = serve_tiny(num_blocks=16)
    names = [complete(server, p * 96, headers={"X-Anaphora-Pin": "60"}).json()["id"] for p in "ab"]
    assert [explained(server, f"/{name}")[0]["pinned_tokens"] for name in names] == [96, 32]
    assert complete(server, "c" * 120).status_code == 200


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan", "inf", "", "1e9", "5 s", "1_0", "1,2"])
def test_bad_pins(serve_tiny: ServeTiny, value: str) -> None:
    answer = complete(serve_tiny(), "Hi", headers={"X-Anaphora-Pin": value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "X-Anaphora-Pin"
    assert "number of seconds" in error["message"]


def test_a_pin_twice_or_without_caching(serve_tiny: ServeTiny) -> None:
    with serve_tiny().client() as client:
        twice = [("X-Anaphora-Pin", "5"), ("X-Anaphora-Pin", "6")]
        assert client.post("/v1/completions", json={"prompt": "Hi"}, headers=twice).status_code == 400
    answer = complete(serve_tiny(enable_prefix_caching=False), "Hi", headers={"X-Anaphora-Pin": "5"})
    assert answer.status_code == 400
    assert "--no-enable-prefix-caching" in answer.json()["error"]["message"]
