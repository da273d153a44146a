"""What kind of thing two texts part in, without knowing the requests they came from."""

from __future__ import annotations

import json

import pytest

from anaphora.explain.difference import KINDS, common_length, recognise, recognise_tools

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CLOCK = {"name": "clock", "parameters": {}}


def listing(*tools: object) -> str:
    """As chat templates write tools: one JSON object a line."""
    return "<tools>\n" + "\n".join(json.dumps(tool) for tool in tools) + "\n</tools> Answer."


@pytest.mark.parametrize(
    ("text", "other", "code"),
    [
        (listing(WEATHER, SEARCH), listing(SEARCH, WEATHER), "tools_reordered"),
        (listing(CLOCK, WEATHER, SEARCH), listing(CLOCK, SEARCH, WEATHER), "tools_reordered"),
        (listing(WEATHER, SEARCH), listing(WEATHER, CLOCK), "tools_changed"),
        (listing(CLOCK), listing({"parameters": {}, "name": "clock"}), "keys_reordered"),
        ("{broken " + listing(WEATHER), "{broken " + listing(SEARCH), "tools_changed"),
        ('{"a": 1} x', '{"a": 2} x', None),
        ("What is a cat?", "What is a dog?", None),
        (listing(WEATHER)[:40], listing(SEARCH)[:40], None),
    ],
)
def test_tools(text: str, other: str, code: str | None) -> None:
    assert recognise_tools(text, other, common_length(text, other)) == code
    assert code is None or KINDS[code].fix


@pytest.mark.parametrize(
    ("text", "other", "code"),
    [
        ("Now: 2026-11-29T10:15:03Z. Rules", "Now: 2026-11-29T10:15:09Z. Rules", "timestamp"),
        (
            "x-anthropic-billing-header: cch=ab12; Rules",
            "x-anthropic-billing-header: cch=99ff; Rules",
            "billing_header",
        ),
        ("Rules:  be kind", "Rules: be kind", "whitespace"),
        ("Turn 7 of this chat", "Turn 8 of this chat", "counter"),
        ("the same", "the same and more", "longer"),
        ("cats", "dogs", "text"),
    ],
)
def test_texts(text: str, other: str, code: str) -> None:
    found, mine, theirs = recognise(text, other, common_length(text, other))
    assert found == code
    assert text[: mine[0]] == other[: theirs[0]] or code == "whitespace"


def test_common_length() -> None:
    assert common_length("", "a") == 0
    assert common_length("abc", "abd") == 2
    assert common_length("a" * 1000, "a" * 999) == 999
