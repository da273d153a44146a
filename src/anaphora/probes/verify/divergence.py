"""Why a prompt missed: where it parts from the nearest earlier one, what stands there, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anaphora.explain.difference import KINDS, Kind, Span, common_length, recognise

_SPAN = 60
"""Characters shown before and after."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Character `position` is the first that differs; `mine` and `theirs` are the spans around it that differ."""

    position: int
    shared: float
    """Share of this prompt that it has in common with the earlier one, by characters."""
    nearest: int
    """Index of that earlier prompt."""
    before: str
    """The last characters that both have."""
    mine: str
    theirs: str
    after: str
    """What follows in this prompt."""
    cause: Kind

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.cause.code, "what": self.cause.name, "fix": self.cause.fix}


def render(request: Mapping[str, Any]) -> str:
    """A request as one text in the order of usual chat templates: tools, then the messages."""
    parts = [f"[tools]\n{json.dumps(request['tools'], ensure_ascii=False)}\n"] if request.get("tools") else []
    for message in request.get("messages", ()):
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", f"<{part.get('type')}>")) for part in content)
        calls = message.get("tool_calls")
        called = json.dumps(calls, ensure_ascii=False) if calls else ""
        parts.append(f"[{message.get('role')}]\n{content or ''}{called}\n")
    return "".join(parts)


def explain(request: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> Divergence | None:
    """Compare with the earlier request that has the longest common beginning; None where there is no earlier one."""
    if not earlier:
        return None
    text = render(request)
    texts = [render(other) for other in earlier]
    lengths = [common_length(text, other) for other in texts]
    nearest = max(range(len(texts)), key=lambda i: (lengths[i], i))
    position, other = lengths[nearest], texts[nearest]
    code, mine, theirs = _recognise(request, earlier[nearest], text, other, position)
    start = min(mine[0], theirs[0])
    return Divergence(
        position,
        position / len(text) if text else 1.0,
        nearest,
        text[max(0, start - _SPAN) : start],
        text[start : mine[1]],
        other[start : theirs[1]],
        text[mine[1] : mine[1] + _SPAN],
        KINDS[code],
    )


def _recognise(
    request: Mapping[str, Any], other_request: Mapping[str, Any], text: str, other: str, position: int
) -> tuple[str, Span, Span]:
    """The cause, and the differing span in either text."""
    code, mine, theirs = recognise(text, other, position)
    if code == "longer":
        return code, mine, theirs
    tools, other_tools = request.get("tools"), other_request.get("tools")
    if tools != other_tools and position < len(render({"tools": tools or other_tools})):
        return _tools(tools, other_tools), mine, theirs
    in_system = _in_system_prompt(request, text, position) and _in_system_prompt(other_request, other, position)
    return "system_prompt" if code == "text" and in_system else code, mine, theirs


def _tools(tools: Any, others: Any) -> str:
    def canonical(value: Any) -> str:
        return json.dumps(value, sort_keys=True)

    if not isinstance(tools, list) or not isinstance(others, list):
        return "tools_changed"
    if canonical(tools) == canonical(others):
        return "keys_reordered"
    if sorted(map(canonical, tools)) == sorted(map(canonical, others)):
        return "tools_reordered"
    return "tools_changed"


def _in_system_prompt(request: Mapping[str, Any], text: str, position: int) -> bool:
    messages = request.get("messages") or [{}]
    if messages[0].get("role") not in ("system", "developer"):
        return False
    head = {"tools": request.get("tools"), "messages": messages[:1]}
    return position < len(render(head))
