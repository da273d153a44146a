"""What hits are worth: seconds of prefill, the time to the first token, and the size beyond which more buys little.

A request alone on the machine, no queue: what lies in a tier is loaded, tiers side by side, the rest is computed after
it. How much to load is decided as the server does (tiers/break_even.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anaphora.tiers.break_even import LoadSpeed, PrefillSpeed

TIERS = ("ram", "disk", "remote")
"""Behind the pool, nearest first."""
_STEP = 1.02
"""Quantiles are known to this factor (a histogram of logarithms; Masson et al., DDSketch, VLDB 2019)."""
_LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of model and machine; None: nothing."""

    prefill: PrefillSpeed | None = None
    bytes_per_token: int | None = None
    speeds: Mapping[str, LoadSpeed] = field(default_factory=dict)
    """By tier."""
    devices: int = 1
    """That work on one prefill: their hours are saved together."""
    device: str = "device"

    @property
    def decides(self) -> bool:
        """Whether loading can be weighed against computing."""
        return self.prefill is not None and self.bytes_per_token is not None


class Quantiles:
    """Of positive numbers, in bounded memory, to 2%."""

    def __init__(self) -> None:
        self.count = 0
        self._bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        self.count += 1
        place = round(math.log(max(value, _LEAST)) / math.log(_STEP))
        self._bins[place] = self._bins.get(place, 0) + 1

    def at(self, share: float) -> float:
        """The value below which that share lies; 0 without values."""
        left = share * self.count
        for place in sorted(self._bins):
            left -= self._bins[place]
            if left <= 0:
                return float(_STEP**place)
        return 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """One size: what it takes and what it saves over the whole trace."""

    gib: float
    saved_seconds: float


def worthwhile(offers: Sequence[Offer], worth: float, hours: float) -> Offer | None:
    """The size beyond which another GiB saves less than `worth` seconds an hour; None: not even the first does.

    Where the curve is not concave: the size whose savings exceed the worth of its GiB by most.
    """
    best, gain = None, 0.0
    for offer in offers:
        net = offer.saved_seconds / hours - worth * offer.gib
        if net > gain:
            best, gain = offer, net
    return best
