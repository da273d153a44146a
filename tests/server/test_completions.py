"""/v1/completions through the openai client, with the real model."""

from __future__ import annotations

import pytest
from openai import OpenAI

from support.servers import Served

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
PROMPT = "The capital of France is"


@pytest.fixture
def client(smol: Served) -> OpenAI:
    return smol.openai()


def tokens_of(smol: Served, text: str) -> list[int]:
    with smol.client() as http:
        return list(http.post("/tokenize", json={"prompt": text}).json()["tokens"])


def test_text_and_defaults(client: OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0)
    [choice] = made.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert made.usage is not None
    assert made.usage.completion_tokens == 16


def test_four_shapes_of_a_prompt(smol: Served, client: OpenAI) -> None:
    other = "Once upon a time"
    texts = {}
    for prompt in (PROMPT, other):
        texts[prompt] = (
            client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=8).choices[0].text
        )
    ids = [tokens_of(smol, PROMPT), tokens_of(smol, other)]
    one = client.completions.create(model=MODEL, prompt=ids[0], temperature=0, max_tokens=8)
    assert [choice.text for choice in one.choices] == [texts[PROMPT]]
    for prompts in ([PROMPT, other], ids):
        made = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8)
        assert [choice.index for choice in made.choices] == [0, 1]
        assert [choice.text for choice in made.choices] == [texts[PROMPT], texts[other]]
        assert made.usage is not None
        assert made.usage.prompt_tokens == len(ids[0]) + len(ids[1])
        assert made.usage.completion_tokens == 16


def test_n_choices_of_two_prompts_streamed_and_not(client: OpenAI) -> None:
    prompts = [PROMPT, "Once upon a time"]
    made = client.completions.create(model=MODEL, prompt=prompts, n=2, best_of=2, seed=5, max_tokens=6)
    texts = [choice.text for choice in made.choices]
    assert len(texts) == 4
    streamed = [""] * 4
    finished = []
    for chunk in client.completions.create(model=MODEL, prompt=prompts, n=2, seed=5, max_tokens=6, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason:
            finished.append(chunk.choices[0].index)
    assert streamed == texts
    assert sorted(finished) == [0, 1, 2, 3]


def test_echo(smol: Served, client: OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4).choices[0].text
    for prompt in (PROMPT, tokens_of(smol, PROMPT)):
        made = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4, echo=True)
        assert made.choices[0].text == PROMPT + plain
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=4, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain


def test_logprobs_point_into_the_text(client: OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, logprobs=2)
    [choice] = made.choices
    shown = choice.logprobs
    assert shown is not None
    assert shown.tokens
    assert shown.text_offset is not None
    assert shown.token_logprobs is not None
    assert shown.top_logprobs is not None
    assert len(shown.tokens) == len(shown.text_offset) == len(shown.token_logprobs) == len(shown.top_logprobs) == 8
    for token, offset, logprob, top in zip(
        shown.tokens, shown.text_offset, shown.token_logprobs, shown.top_logprobs, strict=True
    ):
        assert choice.text[offset : offset + len(token)] == token
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    streamed: list[int] = []
    for chunk in client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, max_tokens=8, logprobs=0, stream=True
    ):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.text_offset or []
    assert streamed == shown.text_offset


def test_a_seed_gives_the_same_text_whatever_else_runs(client: OpenAI) -> None:
    alone = client.completions.create(model=MODEL, prompt=PROMPT, seed=3, max_tokens=12).choices[0].text
    among = client.completions.create(model=MODEL, prompt=["A", "B", "C"], seed=9, max_tokens=30, stream=True)
    try:
        next(iter(among))
        again = client.completions.create(model=MODEL, prompt=PROMPT, seed=3, max_tokens=12).choices[0].text
    finally:
        among.close()
    assert again == alone


def test_characters_of_many_bytes_come_whole(client: OpenAI) -> None:
    chunks = client.completions.create(
        model=MODEL, prompt="你好，世界 👩‍🚀é " * 8, temperature=0, max_tokens=24, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "\ufffd" not in "".join(pieces)
    assert any(ord(char) > 0x2000 for piece in pieces for char in piece)


def test_stop_token_ids_and_min_tokens(smol: Served, client: OpenAI) -> None:
    [paris] = tokens_of(smol, " Paris")
    body = {"stop_token_ids": [paris]}
    stopped = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body=body).choices[0]
    assert "Paris" not in stopped.text
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra == {"stop_reason": paris}
    kept = client.completions.create(
        model=MODEL, prompt=PROMPT, temperature=0, extra_body={**body, "include_stop_str_in_output": True}
    )
    assert kept.choices[0].text.endswith(" Paris")


def test_tokens_and_back(smol: Served) -> None:
    text = "Grüße, 世界 👩‍🚀!"
    with smol.client() as http:
        made = http.post("/tokenize", json={"model": MODEL, "prompt": text, "return_token_strs": True}).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert made["max_model_len"] == 1024
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
        assert (
            http.post("/detokenize", json={"tokens": chat["tokens"]})
            .json()["prompt"]
            .endswith("<|im_start|>assistant\n")
        )
        asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"] == chat["count"]


def test_models(client: OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["smollm2-135m", "alias"]
    assert client.models.retrieve("alias").model_extra == {"max_model_len": 1024}
