"""What became of a request's prompt: what was reused, from where, and why the rest was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from anaphora.explain.difference import KINDS


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
    """The other way. Raises ValueError, KeyError or TypeError for another shape; unknown keys are left out."""
    known = {name: facts[name] for name in Outcome.__slots__ if name in facts}
    miss = known.get("miss")
    if miss is not None:
        known["miss"] = miss_from_dict(miss)
    return Outcome(**known)


def miss_from_dict(facts: Mapping[str, Any]) -> Miss:
    """Raises as `from_dict`."""
    known = {name: facts[name] for name in Miss.__slots__ if name in facts}
    difference = known.get("difference")
    if difference is not None:
        known["difference"] = Difference(**{n: difference[n] for n in Difference.__slots__ if n in difference})
    return Miss(**known | {"cause": Cause(known["cause"])})
