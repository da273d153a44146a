"""How fast prompts are computed, learnt from the steps that compute them."""

from __future__ import annotations

from anaphora.engine.batch import Batch
from anaphora.tiers.break_even import PrefillSpeed

_KEEP = 0.9
"""What an observation still counts after the next one."""
_LEAST_TOKENS = 16
"""Steps with fewer tokens, or with more that decode, read memory rather than compute: they say little of prompts."""


class PrefillEstimate:
    """seconds = per_token * tokens + per_pair * pairs, fitted by least squares of relative errors to recent steps.

    A pair is a token and one that it attends to. Until something was observed computing is taken to be free, so
    nothing is loaded.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._speed = PrefillSpeed(0.0)

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step took so long."""
        tokens = float(batch.num_tokens)
        prompt_tokens = sum(len(row.token_ids) for row in batch.rows if len(row.token_ids) > 1)
        if tokens < _LEAST_TOKENS or prompt_tokens * 2 < tokens or seconds <= 0:
            return
        pairs = sum(_pairs(row.start, row.start + len(row.token_ids)) for row in batch.rows)
        a, b = tokens / seconds, pairs / seconds
        terms = (tokens * a * a, tokens * a * b, tokens * b * b, tokens * a, tokens * b)  # long steps count for more
        self._sums = tuple(_KEEP * old + new for old, new in zip(self._sums, terms, strict=True))  # type: ignore[assignment]
        self._speed = self._fit()

    def speed(self) -> PrefillSpeed:
        return self._speed

    def _fit(self) -> PrefillSpeed:
        aa, ab, bb, a, b = self._sums
        det = aa * bb - ab * ab
        if det > 1e-6 * aa * bb:  # else all steps looked alike: there is nothing to tell the two apart by
            per_token, per_pair = (a * bb - b * ab) / det, (b * aa - a * ab) / det
            if per_token > 0 and per_pair >= 0:
                return PrefillSpeed(per_token, per_pair)
        return PrefillSpeed(a / aa)


def _pairs(start: int, stop: int) -> float:
    return (stop * stop - start * start) / 2
