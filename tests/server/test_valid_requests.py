"""Any mix of valid fields is answered, whole and streamed alike, in the declared shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.engine.loop import EngineLoop
from anaphora.server.responses import ChatChunk, ChatCompletion, Completion
from anaphora.server.settings import ServerSettings, ServerState
from support.servers import running

TEXTS = st.text(max_size=8)
IDS = st.integers(0, 256)
SAMPLING = {
    "model": st.sampled_from(["tiny", "other"]),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 300),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "min_tokens": st.integers(0, 2),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=3),
    "cache_salt": st.text(min_size=1, max_size=3),
    "user": TEXTS,
    "metadata": st.dictionaries(TEXTS, TEXTS, max_size=2),
    "service_tier": st.sampled_from(["auto", "default"]),
    "suffix": st.just(""),
    "response_format": st.just({"type": "text"}),
}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
            "content": TEXTS | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2),
        },
        optional={"name": TEXTS, "refusal": st.none(), "tool_calls": st.none()},
    ),
    min_size=1,
    max_size=3,
)
PROMPT = st.text(min_size=1, max_size=8) | st.lists(IDS, min_size=1, max_size=8)
LIMITS = {"seed": st.integers(-(2**63), 2**63 - 1), "max_tokens": st.integers(3, 6)}
CHAT = st.fixed_dictionaries(
    {"messages": MESSAGES, **LIMITS},
    optional={
        **SAMPLING,
        "logprobs": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "tool_choice": st.just("none"),
        "chat_template_kwargs": st.dictionaries(st.sampled_from(["thinking", "date"]), TEXTS),
    },
)
TEXT = st.fixed_dictionaries(
    {
        "prompt": PROMPT
        | st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=3)
        | st.lists(st.lists(IDS, min_size=1, max_size=8), min_size=1, max_size=3),
        **LIMITS,
    },
    optional={**SAMPLING, "logprobs": st.integers(0, 20), "add_special_tokens": st.booleans()},
)


@pytest.fixture(scope="module")
def client(tiny_loop: Callable[..., EngineLoop]) -> Iterator[httpx.Client]:
    loop = tiny_loop(max_model_len=512)
    with running(ServerState(ServerSettings(("tiny", "other")), loop)) as served, served.client() as client:
        yield client
    assert loop.failure is None
    assert loop.stats.blocks_active == 0


def events(client: httpx.Client, route: str, body: dict[str, Any]) -> list[str]:
    reply = client.post(route, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.status_code == 200, reply.text
    *chunks, done = reply.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [chunk.removeprefix("data: ") for chunk in chunks]


@settings(max_examples=40, deadline=None)
@given(body=CHAT)
def test_chat(client: httpx.Client, body: dict[str, Any]) -> None:
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    whole = ChatCompletion.model_validate_json(reply.content)
    assert [choice.index for choice in whole.choices] == list(range(body.get("n", 1)))
    assert whole.model == body.get("model", "tiny")
    texts: dict[int, str] = {}
    ends: dict[int, tuple[str | None, str | int | None]] = {}
    *chunks, last = [ChatChunk.model_validate_json(event) for event in events(client, "/v1/chat/completions", body)]
    for [choice] in (chunk.choices for chunk in chunks):
        assert (choice.index not in texts) == (choice.delta.role == "assistant")
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason, choice.stop_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: (choice.finish_reason, choice.stop_reason) for choice in whole.choices}
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens >= last.usage.prompt_tokens - 1
    assert {each.logprobs is not None for each in whole.choices} == {body.get("logprobs", False)}


@settings(max_examples=40, deadline=None)
@given(body=TEXT)
def test_completions(client: httpx.Client, body: dict[str, Any]) -> None:
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    whole = Completion.model_validate_json(reply.content)
    prompts = body["prompt"] if isinstance(body["prompt"], list) and not isinstance(body["prompt"][0], int) else [""]
    assert [choice.index for choice in whole.choices] == list(range(len(prompts) * body.get("n", 1)))
    texts = [""] * len(whole.choices)
    tokens: list[list[str]] = [[] for _ in whole.choices]
    *chunks, last = [json.loads(event) for event in events(client, "/v1/completions", body)]
    for [choice] in (chunk["choices"] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert texts == [choice.text for choice in whole.choices]
    assert last["usage"]["completion_tokens"] == (whole.usage and whole.usage.completion_tokens)
    for choice, streamed in zip(whole.choices, tokens, strict=True):
        assert (choice.logprobs is not None) == ("logprobs" in body)
        assert choice.logprobs is None or choice.logprobs.tokens == streamed
