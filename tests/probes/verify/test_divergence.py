"""Where a prompt parts from an earlier one, and why."""

from __future__ import annotations

from typing import Any

import pytest

from anaphora.probes.verify.divergence import explain, render

RULES = "You are a helpful assistant. "
UUID = "123e4567-e89b-12d3-a456-42661417"
BILLING = "x-anthropic-billing-header: cch="
TOOLS = [{"name": "a", "x": 1}, {"name": "b", "y": 2}]
Chat = dict[str, Any]


def chat(system: str, user: str = "hi", **more: Any) -> Chat:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}], **more}


@pytest.mark.parametrize(
    ("earlier", "later", "code", "mine"),
    [
        (chat(RULES + "Now: 2026-11-29 10:15:03."), chat(RULES + "Now: 2026-11-29 10:15:09."), "timestamp",
         "2026-11-29 10:15:09"),
        (chat(RULES + "It is 10:15 now"), chat(RULES + "It is 9:15 now"), "timestamp", "9:15"),
        (chat("Today is Monday, November 3, 2025."), chat("Today is Tuesday, November 4, 2025."), "timestamp",
         "Tuesday, November 4, 2025"),
        (chat(RULES + "epoch 1764412345 end"), chat(RULES + "epoch 1764412399 end"), "timestamp", "1764412399"),
        (chat(f"{RULES}id {UUID}4000."), chat(f"{RULES}id {UUID}ffff."),
         "uuid", UUID + "ffff"),
        (chat(RULES + "Request 9 of user"), chat(RULES + "Request 10 of user"), "counter", "10"),
        (chat(RULES + "session a8Xk29dkq1 on"), chat(RULES + "session b9Zk29dkq1 on"), "random_id", "b9Zk29dkq1"),
        (chat(RULES + "A  B"), chat(RULES + "A B"), "whitespace", " "),
        (chat(RULES + "A\n"), chat(RULES + "A"), "whitespace", "\n"),
        (chat(RULES, tools=TOOLS), chat(RULES, tools=TOOLS[::-1]), "tools_reordered", '"b",'),
        (chat(RULES, tools=[{"a": 1, "b": 2}]), chat(RULES, tools=[{"b": 2, "a": 1}]), "keys_reordered", '[{"b":'),
        (chat(RULES, tools=TOOLS), chat(RULES, tools=TOOLS[:1]), "tools_changed", "1}]"),
        (chat(RULES, tools=TOOLS), chat(RULES), "tools_changed", "[system]"),
        (chat(RULES + '{"a": 1, "b": 2}'), chat(RULES + '{"b": 2, "a": 1}'), "keys_reordered", '{"b":'),
        (chat("You are a pirate"), chat("You are a lawyer"), "system_prompt", "lawyer"),
        (chat(f"{BILLING}ab12f;\n{RULES}"), chat(f"{BILLING}9912f;\n{RULES}"),
         "billing_header", f"{BILLING}9912f;"),
        (chat(RULES, "what is x"), chat(RULES, "why is y"), "text", "why"),
        (chat(RULES, "what is 2+3?"), chat(RULES, "what is 41-5?"), "text", "41-5?"),
        (chat(RULES), chat(RULES), "longer", ""),
    ],
)  # fmt: skip
def test_causes(earlier: Chat, later: Chat, code: str, mine: str) -> None:
    found = explain(later, [earlier])
    assert found is not None
    assert found.cause.code == code
    assert found.mine == mine
    text = render(later)
    assert text[: found.position] == render(earlier)[: found.position]
    assert found.before + found.mine + found.after in text
    assert bool(found.cause.fix) == (code not in ("text", "longer"))


def test_the_nearest_earlier_prompt_is_taken() -> None:
    earlier = [chat("Quite another"), chat(RULES + "Day 1 is on"), chat("x")]
    found = explain(chat(RULES + "Day 2 is on"), earlier)
    assert found is not None
    assert found.nearest == 1
    assert 0.5 < found.shared < 1
    assert explain(chat("x"), []) is None


def test_parts_and_calls_are_rendered() -> None:
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {}}]
    calls = [{"function": {"name": "f"}}]
    text = render({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": calls}]})
    assert text == '[user]\nsee <image_url>\n[assistant]\n[{"function": {"name": "f"}}]\n'
