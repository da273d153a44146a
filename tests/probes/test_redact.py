"""Secrets in every shape they come in, and harmless text that must stay."""

from __future__ import annotations

import pytest

from anaphora.probes.redact import redact


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer S3CRET-value",
        "authorization: Basic S3CRET=",
        '"api_key": "S3CRET"',
        "OPENAI_API_KEY=S3CRET",
        "export ANTHROPIC_AUTH_TOKEN='S3CRET'",
        "x-api-key: S3CRET",
        "http://user:S3CRET@host/",
        "https://host/v1?key=S3CRET&alt=sse",
        "Incorrect API key provided: sk-proj-S3CRETabcdef",
        "hf_S3CRETabcdefgh",
        "AKIAS3CRET1234567890",
        "eyJS3CRETxxxx.eyJzdWIiOiIx.sig",
        '{"refresh_token": "S3CRET", "id_token":"S3CRET"}',
        "password: S3CRET",
    ],
)
def test_secrets_go(text: str) -> None:
    assert "S3CRET" not in redact(text)
    assert "[redacted]" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 32000, prompt_tokens=2005 cached_tokens: 1920",
        'env_key = "OPENAI_API_KEY"',
        "api_key=$OPENAI_API_KEY",
        "http://127.0.0.1:8000/v1",
        "tokenizer: llama, block_size 16",
        "sk-1 is short",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_given_secrets_go_wherever_they_stand_and_twice_is_once() -> None:
    text = redact("abcd and abcdef, x", ["abcd", "abcdef", "x", " "])
    assert text == "[redacted] and [redacted], x"
    assert redact(text, ["abcd", "abcdef"]) == text
