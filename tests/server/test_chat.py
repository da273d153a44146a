"""/v1/chat/completions through the openai client, with the real model."""

from __future__ import annotations

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from support.servers import Served

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three colours of the rainbow."}]


@pytest.fixture
def client(smol: Served) -> OpenAI:
    return smol.openai()


def answer(client: OpenAI, **options: object) -> str:
    """One greedy answer of 12 tokens at most."""
    made = client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12, **options}  # type: ignore[call-overload]
    )
    return str(made.choices[0].message.content)


def test_answer_usage_and_names(client: OpenAI) -> None:
    made = client.chat.completions.create(model="alias", messages=QUESTION, temperature=0, max_completion_tokens=12)
    assert made.object == "chat.completion"
    assert made.model == "alias"
    assert made.id.startswith("chatcmpl-")
    [choice] = made.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert 1 <= made.usage.completion_tokens <= 12
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens is not None


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=12)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks[:-1]) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert len({chunk.id for chunk in chunks}) == 1
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_without_include_usage_has_no_usage(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_the_wire_format_of_a_stream(smol: Served) -> None:
    body = {"messages": QUESTION, "max_tokens": 2, "stream": True}
    with smol.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no"
        events = reply.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_the_second_request_reuses_the_first_ones_tokens(client: OpenAI) -> None:
    system = "You are the assistant of a harbour library. " + "Rule: be brief, be kind, be exact. " * 12
    cached = []
    for question in ("When do you open?", "Where may I eat?"):
        made = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            max_tokens=2,
        )
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        cached.append((made.usage.prompt_tokens_details.cached_tokens or 0, made.usage.prompt_tokens))
    (cold, _), (warm, prompt) = cached
    assert cold < 30
    assert prompt - 20 < warm < prompt


def test_a_cache_salt_isolates(client: OpenAI) -> None:
    system = "This text belongs to one tenant only, and nobody else may learn of it. " * 8

    def cached(salt: str) -> int:
        made = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": system}, {"role": "user", "content": "Hello."}],
            max_tokens=1,
            extra_body={"cache_salt": salt},
        )
        assert made.usage is not None
        assert made.usage.prompt_tokens_details is not None
        return made.usage.prompt_tokens_details.cached_tokens or 0

    assert cached("a") == 0
    assert cached("a") > 100
    assert cached("b") == 0


def test_n_choices_are_numbered_and_seeded_one_by_one(client: OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, seed=11, temperature=1.0, max_tokens=8)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in made.choices]
    assert len(set(texts)) > 1
    assert texts == [answer(client, seed=11 + i, temperature=1.0, max_tokens=8) for i in range(3)]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=11, temperature=1.0, max_tokens=8, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_stop_string_ends_the_answer_and_is_not_shown(client: OpenAI) -> None:
    whole = answer(client)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    before = whole[: whole.index(stop)]
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, stop=[stop, "§"]
    )
    assert made.choices[0].message.content == before
    assert made.choices[0].finish_reason == "stop"
    assert made.choices[0].model_extra == {"stop_reason": stop}
    chunks = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=12, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before


def test_logprobs_belong_to_the_text(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=10, logprobs=True, top_logprobs=3
    )
    [choice] = made.choices
    assert choice.logprobs is not None
    items = choice.logprobs.content
    assert items
    assert "".join(item.token for item in items) == choice.message.content
    assert b"".join(bytes(item.bytes or []) for item in items).decode() == choice.message.content
    for item in items:
        assert len(item.top_logprobs) == 3
        assert item.logprob <= 0
        assert (item.token, item.logprob) == (item.top_logprobs[0].token, item.top_logprobs[0].logprob)
    chunks = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=10, logprobs=True, stream=True
    )
    streamed = [
        item.token for chunk in chunks if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == [item.token for item in items]


def test_logit_bias_forces_a_token(smol: Served, client: OpenAI) -> None:
    with smol.client() as http:
        [token] = http.post("/tokenize", json={"prompt": " blue"}).json()["tokens"]
    assert answer(client, logit_bias={str(token): 100}, max_tokens=4) == " blue" * 4


def test_content_parts_and_the_developer_role(client: OpenAI) -> None:
    plain = answer(client, messages=[{"role": "system", "content": "Be brief."}, *QUESTION])
    text = QUESTION[0]["content"]
    assert isinstance(text, str)
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert answer(client, messages=messages) == plain


def test_the_last_message_is_continued(client: OpenAI) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The colours are red,"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    made = answer(client, messages=begun, extra_body=options)
    assert made == answer(client, messages=begun, extra_body={"continue_final_message": True})
    assert made != answer(client, messages=begun)


def test_fields_that_change_nothing_are_taken(client: OpenAI) -> None:
    plain = answer(client)
    assert plain == answer(
        client,
        user="someone",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        tool_choice="none",
        extra_body={"best_of": None, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "tools": []},
    )
