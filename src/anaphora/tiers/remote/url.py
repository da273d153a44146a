"""What the URLs of all stores have in common: options in the query, each known and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

from anaphora.errors import ConfigError

T = TypeVar("T")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def options(url: str, known: Mapping[str, Callable[[str], Any]]) -> tuple[SplitResult, dict[str, Any]]:
    """The URL in parts, and its query's values, read by the functions in `known`.

    Raises ConfigError for an unknown or repeated option, or a value that its function refuses with ValueError.
    """
    parts = urlsplit(url)
    found: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            raise ConfigError(
                f"--remote-cache: {parts.scheme}:// has no option {name!r}; it has {', '.join(sorted(known))}"
            )
        if name in found:
            raise ConfigError(f"--remote-cache: the option {name!r} is there twice; leave one out")
        try:
            found[name] = known[name](text)
        except ValueError as error:
            raise ConfigError(f"--remote-cache: {name}={text} is no use: {error}") from None
    return parts, found


def without_secrets(url: str) -> str:
    """The URL as it may be shown: without user, password and options."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def seconds(text: str) -> float:
    value = float(text)
    if not 0.01 <= value <= 3600:
        raise ValueError("it must be from 0.01 to 3600 seconds")
    return value


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        value = int(text) if text.isdecimal() else low - 1
        if not low <= value <= high:
            raise ValueError(f"it must be a whole number from {low} to {high}")
        return value

    return read


def size(text: str) -> int:
    """Bytes, such as 64MiB or 1073741824."""
    number, unit = (text[:-3], _UNITS[text[-3:]]) if text[-3:] in _UNITS else (text, 1)
    if not number.isdecimal():
        raise ValueError("it must be bytes, such as 64MiB or 2GiB")
    return int(number) * unit


def one_of(*words: str) -> Callable[[str], str]:
    """A reader of one of a few words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"it must be one of {', '.join(words)}")
        return text

    return read
