"""Where the keys and values of a request's prompt came from, and what each source cost."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Source:
    """One source's part of a prompt."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class TokenSources:
    """Of one request's first admission: tokens of all sources together are those of the prompt.

    Seconds of a tier: from the start of the load to the tier's last block. Of `computed`: the request's share, by
    tokens, of the steps until its first token, what a preemption made it compute again included.
    """

    pool: Source = field(default_factory=Source)
    """Prefix hits; what another request has just loaded or computed counts here."""
    ram: Source = field(default_factory=Source)
    disk: Source = field(default_factory=Source)
    remote: Source = field(default_factory=Source)
    computed: Source = field(default_factory=Source)

    def items(self) -> list[tuple[str, Source]]:
        """By name, nearest first."""
        return [(each.name, getattr(self, each.name)) for each in fields(self)]

    def take_from_pool(self, name: str, tokens: int, seconds: float) -> None:
        """Of the tokens found in the pool, so many had been brought there by tier `name`, for this request."""
        tier: Source = getattr(self, name)
        tier.tokens += tokens
        tier.seconds += seconds
        self.pool.tokens -= tokens

    def add(self, other: TokenSources) -> None:
        """Count another prompt's in."""
        for (_, mine), (_, theirs) in zip(self.items(), other.items(), strict=True):
            mine.tokens += theirs.tokens
            mine.seconds += theirs.seconds
