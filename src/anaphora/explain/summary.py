"""Many outcomes at a glance: tokens by cause, and what could be done about each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from anaphora.explain.outcome import Cause, Outcome
from anaphora.explain.wording import advice


@dataclass(slots=True)
class CauseTotal:
    """What one cause, or one kind of difference, cost."""

    cause: Cause
    kind: str | None
    """Of a divergence: a code of difference.KINDS."""
    advice: str
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Summary:
    """Grows with `add`; holds no outcome."""

    requests: int = 0
    _totals: dict[tuple[Cause, str | None], CauseTotal] = field(default_factory=dict)

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.requests += 1
            if (miss := outcome.miss) is None:
                continue
            kind = miss.difference.kind if miss.difference is not None else None
            total = self._totals.setdefault((miss.cause, kind), CauseTotal(miss.cause, kind, advice(miss)))
            total.requests += 1
            total.tokens += miss.tokens

    @property
    def causes(self) -> list[CauseTotal]:
        """Most tokens first."""
        return sorted(self._totals.values(), key=lambda total: -total.tokens)

    @property
    def something_to_do(self) -> bool:
        return any(total.advice for total in self._totals.values())
