"""Why a prompt missed: where it parts from the nearest earlier one, what stands there, and what to do about it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_SPAN = 60
"""Characters shown before and after."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A reason that was recognised. `fix` is empty where nothing is wrong with the prompt."""

    code: str
    name: str
    fix: str


_CAUSES = {
    cause.code: cause
    for cause in (
        Cause("billing_header", "a billing header that changes per request",
              "Claude Code: set CLAUDE_CODE_ATTRIBUTION_HEADER=0 in the env section of its settings."),
        Cause("uuid", "a UUID", "Move ids behind the shared text, or leave them out of the prompt."),
        Cause("timestamp", "a date or time",
              "Put the time at the end of the prompt (in the user's message), or round it to the day."),
        Cause("counter", "a number that counts up", "Move the counter behind the shared text."),
        Cause("random_id", "a random id", "Move ids behind the shared text, or leave them out of the prompt."),
        Cause("whitespace", "whitespace only", "Build the prompt from one template, so that spaces stay."),
        Cause("tools_reordered", "the same tools in another order", "Sort the tools by name before sending them."),
        Cause("keys_reordered", "the same JSON with its keys in another order",
              "Serialise JSON with sorted keys (sort_keys=True)."),
        Cause("tools_changed", "other tools", "Keep the list of tools the same over a conversation."),
        Cause("system_prompt", "another system prompt",
              "Put what all system prompts share first, and what differs last."),
        Cause("text", "different text", ""),
        Cause("longer", "nothing: one prompt is the beginning of the other", ""),
    )
}  # fmt: skip

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("billing_header", re.compile(r"x-anthropic-billing-header:[^\n]*|\bcch=[0-9a-f]+", re.IGNORECASE)),
    ("uuid", re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)),
    ("timestamp", re.compile(
        r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
        r"|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:\s?[AP]M)?"
        r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
        r"|\b(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,?\s+)?"
        r"(?:\d{1,2}\s+)?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?\s+\d{1,4}(?:,?\s+\d{4})?"
        r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
        r"|\b1[5-9]\d{8}(?:\d{3})?\b", re.IGNORECASE)),
    ("random_id", re.compile(
        r"\b(?=[0-9a-zA-Z_-]*\d)(?=[0-9a-zA-Z_-]*[a-zA-Z])[0-9a-zA-Z_-]{8,}\b|\b[0-9a-f]{12,}\b")),
    ("counter", re.compile(r"\b\d+(?:[.,]\d+)*\b")),
)  # fmt: skip

_ORDINARY = ("counter", "random_id")
"""Numbers and names that questions hold too: a cause only where both texts read on alike behind them."""


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
    cause: Cause

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
        _CAUSES[code],
    )


def common_length(text: str, other: str) -> int:
    """Characters that both begin with, by bisection: slices compare far faster than characters one by one."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


Span = tuple[int, int]


def _recognise(
    request: Mapping[str, Any], other_request: Mapping[str, Any], text: str, other: str, position: int
) -> tuple[str, Span, Span]:
    """The cause, and the differing span in either text."""
    words = _word(text, position), _word(other, position)
    if position in (len(text), len(other)):
        return "longer", *words
    tools, other_tools = request.get("tools"), other_request.get("tools")
    if tools != other_tools and position < len(render({"tools": tools or other_tools})):
        return _tools(tools, other_tools), *words
    if text[position].isspace() or other[position].isspace():
        mine, theirs = _spaces(text, position), _spaces(other, position)
        if _goes_on(text, other, mine[1], theirs[1]):
            return "whitespace", mine, theirs
    for code, pattern in _PATTERNS:
        found = _covering(pattern, text, position), _covering(pattern, other, position)
        if found[0] and found[1] and (code not in _ORDINARY or _goes_on(text, other, found[0][1], found[1][1])):
            return code, found[0], found[1]
    if _same_json(text, other, position):
        return "keys_reordered", *words
    if _in_system_prompt(request, text, position) and _in_system_prompt(other_request, other, position):
        return "system_prompt", *words
    return "text", *words


def _goes_on(text: str, other: str, mine: int, theirs: int) -> bool:
    """Whether both texts read on alike: what differed was only in the way."""
    return text[mine : mine + 8] == other[theirs : theirs + 8]


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


def _covering(pattern: re.Pattern[str], text: str, position: int) -> Span | None:
    """The match of `pattern` that holds the position, or ends or begins at it."""
    start = max(0, position - 100)
    for match in pattern.finditer(text, start, position + 100):
        if match.start() <= position <= match.end():
            return match.span()
    return None


def _word(text: str, position: int) -> Span:
    start = end = min(position, len(text))
    while start > 0 and not text[start - 1].isspace() and position - start < 30:
        start -= 1
    while end < len(text) and not text[end].isspace() and end - position < 30:
        end += 1
    return start, end


def _spaces(text: str, position: int) -> Span:
    """The run of spaces around the position; empty where there is none."""
    start = end = position
    while start > 0 and text[start - 1].isspace():
        start -= 1
    while end < len(text) and text[end].isspace():
        end += 1
    return start, end


def _same_json(text: str, other: str, position: int) -> bool:
    """Whether the innermost object around the position is the same in both texts but for the order of its keys."""
    start = text.rfind("{", 0, position + 1)
    while start >= 0:
        mine, theirs = _object_at(text, start), _object_at(other, start)
        if mine is not None and theirs is not None:
            return bool(mine == theirs)
        start = text.rfind("{", 0, start)
    return False


def _object_at(text: str, start: int) -> Any:
    try:
        return json.JSONDecoder().raw_decode(text, start)[0]
    except ValueError:
        return None


def _in_system_prompt(request: Mapping[str, Any], text: str, position: int) -> bool:
    messages = request.get("messages") or [{}]
    if messages[0].get("role") not in ("system", "developer"):
        return False
    head = {"tools": request.get("tools"), "messages": messages[:1]}
    return position < len(render(head))
