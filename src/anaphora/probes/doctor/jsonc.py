"""JSON as people write it into settings files: with the line of every value, comments and commas too many noted."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from anaphora.errors import ConfigError

_SPACE = re.compile(r"[ \t\r\n]+")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")


@dataclass(slots=True)
class Parsed:
    """A value, where its parts stand, and what strict JSON would not take."""

    value: Any = None
    where: dict[tuple[str | int, ...], int] = field(default_factory=dict)
    comments: list[int] = field(default_factory=list)
    """Lines."""
    commas: list[int] = field(default_factory=list)
    """Lines of commas before a closing bracket."""
    twice: list[tuple[int, str]] = field(default_factory=list)
    """Keys given a second time; the last one counts."""


def parse(text: str) -> Parsed:
    """Raises ConfigError that names the line."""
    reader = _Reader(text)
    reader.parsed.value = reader.value(())
    reader.skip()
    if reader.at < len(text):
        reader.fail("text after the end")
    return reader.parsed


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.parsed = text, 0, Parsed()

    @property
    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fail(self, what: str) -> None:
        raise ConfigError(f"line {self.line} is not JSON: {what}")

    def skip(self) -> None:
        while self.at < len(self.text):
            if space := _SPACE.match(self.text, self.at):
                self.at = space.end()
            elif self.text.startswith("//", self.at):
                self.parsed.comments.append(self.line)
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.text.startswith("/*", self.at):
                self.parsed.comments.append(self.line)
                end = self.text.find("*/", self.at)
                if end < 0:
                    self.fail("a comment without an end")
                self.at = end + 2
            else:
                break

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def string(self) -> str:
        found = _STRING.match(self.text, self.at)
        if not found:
            self.fail(f"a name or text in double quotes is wanted, not {self.text[self.at : self.at + 1]!r}")
            return ""
        try:
            value = json.loads(found.group(), strict=False)
        except ValueError:
            self.fail("a text with a wrong \\ in it")
            return ""
        self.at = found.end()
        return str(value)

    def value(self, path: tuple[str | int, ...]) -> Any:
        first = self.peek()
        self.parsed.where.setdefault(path, self.line)
        if first == "{":
            return self.mapping(path)
        if first == "[":
            return self.sequence(path)
        if first == '"':
            return self.string()
        found = _LITERAL.match(self.text, self.at)
        if not found:
            self.fail(f"unexpected {first!r}" if first else "it ends too early")
            return None
        self.at = found.end()
        return json.loads(found.group())

    def mapping(self, path: tuple[str | int, ...]) -> dict[str, Any]:
        self.at += 1
        found: dict[str, Any] = {}
        while self.peek() != "}":
            line = self.line
            key = self.string()
            if key in found:
                self.parsed.twice.append((line, key))
            if self.peek() != ":":
                self.fail(f"a colon is missing after {key!r}")
            self.at += 1
            self.parsed.where[(*path, key)] = line
            found[key] = self.value((*path, key))
            if not self.comma("}"):
                break
        self.at += 1
        return found

    def sequence(self, path: tuple[str | int, ...]) -> list[Any]:
        self.at += 1
        found: list[Any] = []
        while self.peek() != "]":
            found.append(self.value((*path, len(found))))
            if not self.comma("]"):
                break
        self.at += 1
        return found

    def comma(self, end: str) -> bool:
        """Whether another element may follow."""
        mark = self.peek()
        if mark == end:
            return False
        if mark != ",":
            self.fail(f"a comma or {end} is missing")
        line = self.line
        self.at += 1
        if self.peek() == end:
            self.parsed.commas.append(line)
        return True
