"""Clients that leave: their blocks are free at once, long before their answers would have ended."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx
import pytest

from support.servers import Served

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "n": 3}
NO_ANSWER = "anaphora_http_requests_total{method=POST,route=/v1/completions,status=0}"
ABORTED = "anaphora_requests_finished_total{reason=abort}"


def idle(samples: dict[str, float]) -> bool:
    return samples["anaphora_requests_running"] == 0 and samples["anaphora_kv_blocks{state=active}"] == 0


@pytest.mark.model
@pytest.mark.parametrize("leave_after", [1, 5])
def test_a_reader_of_a_stream_leaves(smol: Served, leave_after: int) -> None:
    before = smol.wait_for(idle)
    stream = smol.openai().completions.create(
        model="alias", prompt="Once upon a time", n=3, max_tokens=900, extra_body={"ignore_eos": True}, stream=True
    )
    for _ in range(leave_after):
        next(stream)
    assert smol.metrics()["anaphora_kv_blocks{state=active}"] > 0
    stream.close()
    after = smol.wait_for(idle)
    assert after[ABORTED] - before.get(ABORTED, 0) == 3
    assert after["anaphora_generated_tokens_total"] - before["anaphora_generated_tokens_total"] < 300


@pytest.mark.model
def test_a_client_that_waits_for_a_whole_answer_leaves(smol: Served) -> None:
    before = smol.wait_for(idle)
    with smol.client(timeout=1.0) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG)
    after = smol.wait_for(idle)
    assert after[ABORTED] - before.get(ABORTED, 0) == 3
    gone = "anaphora_http_requests_total{method=POST,route=/v1/completions,status=499}"
    assert after[gone] - before.get(gone, 0) == 1


def test_a_client_that_leaves_while_it_sends(serve_tiny: Callable[..., Served]) -> None:
    served = serve_tiny()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    served.wait_for(lambda samples: samples.get(NO_ANSWER, 0) == 1)
    assert served.metrics()["anaphora_requests_running"] == 0


def test_all_or_none_of_the_choices_are_queued(serve_tiny: Callable[..., Served]) -> None:
    served = serve_tiny(max_waiting=4, max_num_seqs=2)
    with served.client() as client:
        reply = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100, "n": 64, "ignore_eos": True})
        assert reply.status_code == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"
        served.wait_for(idle)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "n": 2}).status_code == 200
