"""What became of a request's prompt: what was reused, from where, and why the rest was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar

from anaphora.explain.difference import KINDS

T = TypeVar("T")


class Cause(StrEnum):
    """Why the first token that was not reused was not."""

    NEVER_SEEN = "never_seen"
    """No earlier prompt goes on like this, as far as is remembered."""
    DIVERGED = "diverged"
    """An earlier prompt goes on from there, but differently."""
    EVICTED = "evicted"
    """It was cached, and made room for others."""
    BELOW_GRANULARITY = "below_granularity"
    """It is cached, but what is reused must end before it: a prompt's last token is always computed."""
    OTHER_NAMESPACE = "other_namespace"
    """The same tokens were computed under another salt (or adapter, or model)."""
    IN_PROGRESS = "in_progress"
    """Another request that runs has it, in a block that is not whole yet."""
    LOAD_FAILED = "load_failed"
    """A tier had it and did not bring it."""
    CACHING_OFF = "caching_off"
    """The server runs without prefix caching."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What stands where two prompts part."""

    kind: str
    """A code of difference.KINDS; "unknown" where the other prompt's tokens are gone."""
    exact: bool
    """Whether the position is that of the token; else that of its block."""
    before: str | None = None
    """The text around it, if it may be kept: what both have, then what differs, then how this prompt goes on."""
    mine: str | None = None
    theirs: str | None = None
    after: str | None = None

    @property
    def name(self) -> str:
        return KINDS[self.kind].name if self.kind in KINDS else "something that is no longer known"

    @property
    def fix(self) -> str:
        return KINDS[self.kind].fix if self.kind in KINDS else ""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the tokens from `position` on were computed."""

    cause: Cause
    position: int
    """The first token that was not reused."""
    tokens: int
    known_tokens: int = 0
    """Of those: tokens that were cached once, or are elsewhere, and could have been reused."""
    other_request: str | None = None
    """The one it parts from, that evicted it, that is computing it, or had it under another salt."""
    seconds_ago: float | None = None
    more_blocks: int | None = None
    """So many more blocks in the pool would have kept it."""
    more_bytes: int | None = None
    difference: Difference | None = None


@dataclass(slots=True)
class Outcome:
    """One sequence in the engine. Complete once `finish_reason` is there."""

    request_id: str
    time: float
    """Arrival, seconds since 1970."""
    prompt_tokens: int
    reused: Mapping[str, int]
    """Prompt tokens that were not computed, by where they came from."""
    seconds: Mapping[str, float]
    """By source, and of the queue."""
    miss: Miss | None = None
    """None: nothing was missed."""
    waited_for: str | None = None
    """The request whose blocks this one waited for, instead of computing them too."""
    pinned_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """As GET /explain gives it: plain JSON."""
    return asdict(outcome)


def from_dict(facts: Mapping[str, Any]) -> Outcome:
    """The other way; unknown keys are left out. Raises ValueError that says what is wrong."""
    known = _checked(Outcome, facts)
    if known.get("miss") is not None:
        known["miss"] = _miss(known["miss"])
    return _made(Outcome, known)


def _miss(facts: Any) -> Miss:
    known = _checked(Miss, facts)
    if known.get("difference") is not None:
        known["difference"] = _made(Difference, _checked(Difference, known["difference"]))
    if "cause" in known:
        known["cause"] = Cause(known["cause"])
    return _made(Miss, known)


_TEXT, _WHOLE, _NUMBER = (str, NoneType), (int, NoneType), (int, float, NoneType)
_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("request_id", "cause", "kind"), (str,)),
    **dict.fromkeys(("prompt_tokens", "output_tokens", "pinned_tokens", "position", "tokens", "known_tokens"), (int,)),
    **dict.fromkeys(("other_request", "waited_for", "finish_reason", "before", "mine", "theirs", "after"), _TEXT),
    **dict.fromkeys(("more_blocks", "more_bytes"), _WHOLE),
    **dict.fromkeys(("reused", "seconds"), (dict,)),
    **dict.fromkeys(("miss", "difference"), (dict, NoneType)),
    "time": (int, float),
    "seconds_ago": _NUMBER,
    "exact": (bool,),
}
"""What every field may be in JSON."""
_MOST = 1e15


def _checked(cls: type, facts: Any) -> dict[str, Any]:
    if not isinstance(facts, dict):
        raise ValueError(f"{facts!r} is no JSON object")
    known = {each.name: facts[each.name] for each in fields(cls) if each.name in facts}
    for name, value in known.items():
        table = isinstance(value, dict) and name in ("reused", "seconds")
        fits = (
            all(map(_is_amount, value.values())) if table else not isinstance(value, int | float) or _is_amount(value)
        )
        if not isinstance(value, _TYPES[name]) or not fits:
            raise ValueError(f"{name} is {value!r}, which it cannot be")
    return known


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < _MOST


def _made(cls: type[T], known: Mapping[str, Any]) -> T:
    try:
        return cls(**known)
    except TypeError as error:
        raise ValueError(str(error)) from None
