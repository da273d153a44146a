"""What kind of thing it is in which two texts part: a time, an id, a counter, spaces, tools in another order ..."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """A reason that was recognised. `fix` is empty where nothing is wrong with the prompt."""

    code: str
    name: str
    fix: str


KINDS = {
    kind.code: kind
    for kind in (
        Kind("billing_header", "a billing header that changes per request",
             "Claude Code: set CLAUDE_CODE_ATTRIBUTION_HEADER=0 in the env section of its settings."),
        Kind("uuid", "a UUID", "Move ids behind the shared text, or leave them out of the prompt."),
        Kind("timestamp", "a date or time",
             "Put the time at the end of the prompt (in the user's message), or round it to the day."),
        Kind("counter", "a number that counts up", "Move the counter behind the shared text."),
        Kind("random_id", "a random id", "Move ids behind the shared text, or leave them out of the prompt."),
        Kind("whitespace", "whitespace only", "Build the prompt from one template, so that spaces stay."),
        Kind("tools_reordered", "the same tools in another order", "Sort the tools by name before sending them."),
        Kind("keys_reordered", "the same JSON with its keys in another order",
             "Serialise JSON with sorted keys (sort_keys=True)."),
        Kind("tools_changed", "other tools", "Keep the list of tools the same over a conversation."),
        Kind("system_prompt", "another system prompt",
             "Put what all system prompts share first, and what differs last."),
        Kind("retokenised", "the same text, split into other tokens",
             "Send earlier answers back exactly as they came, and keep the chat template the same."),
        Kind("text", "different text", ""),
        Kind("longer", "nothing: one prompt is the beginning of the other", ""),
    )
}  # fmt: skip
"""By code."""

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


def recognise(text: str, other: str, position: int) -> tuple[str, Span, Span]:
    """The code of a Kind, and the differing span in either text; they part at character `position`."""
    words = _word(text, position), _word(other, position)
    if position in (len(text), len(other)):
        return "longer", *words
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
    return "text", *words


def recognise_tools(text: str, other: str, position: int) -> str | None:
    """The code where the texts part inside a tool's definition: its JSON object has a name. None where they do not.

    Reordered: the tool that stands here in either text stands elsewhere in the other one.
    """
    mine, theirs = list(_tools(text)), list(_tools(other))
    here = next((tool for start, end, tool in mine if start <= position < end), None)
    there = next((tool for start, end, tool in theirs if start <= position < end), None)
    if here is None or there is None:
        return None
    if here == there:
        return "keys_reordered"
    swapped = any(tool == here for *_, tool in theirs) and any(tool == there for *_, tool in mine)
    return "tools_reordered" if swapped else "tools_changed"


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


def _goes_on(text: str, other: str, mine: int, theirs: int) -> bool:
    """Whether both texts read on alike: what differed was only in the way."""
    return text[mine : mine + 8] == other[theirs : theirs + 8]


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
            return bool(mine[0] == theirs[0])
        start = text.rfind("{", 0, start)
    return False


def _tools(text: str) -> Iterator[tuple[int, int, Any]]:
    """(start, end, definition) of the objects that have a name, or a function with one. Outermost ones only."""
    start = text.find("{")
    while start >= 0:
        found = _object_at(text, start)
        if found is None:
            start = text.find("{", start + 1)
            continue
        tool, end = found
        function = tool.get("function", tool)
        if isinstance(function, dict) and "name" in function:
            yield start, end, tool
        start = text.find("{", end)


def _object_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON object that begins there, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
