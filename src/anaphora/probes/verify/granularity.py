"""In which steps a server reuses a prefix, and how short a prefix it still reuses, found by bisection.

A base prompt is cached once. Probes then share its first k words and go on differently, so whatever is reused of them
is a prefix of the base. Where the server tells reused tokens (`usage` or its counters, if the cross-check trusts
them), each probe reads them off; where it does not, the clock has to do, which sees only steps that take longer than
its noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from anaphora.probes.statistics import mad, median
from anaphora.probes.verify.prompts import Scale, prompt
from anaphora.probes.verify.trials import Experiment, Trial

Source = Literal["cached_tokens", "counters", "clock"]

_SPREAD = (0.97, 0.31, 0.83, 0.47, 0.71, 0.59, 0.9, 0.22)
"""Where along the prefix the first probes part from the base, as shares of it."""
_CLOCK_REPEATS = 3
_CLOCK_SIGMAS = 4.0


@dataclass(frozen=True, slots=True)
class Granularity:
    """In tokens."""

    source: Source
    step: int | None
    """Reuse grows in steps of so many tokens; None where it could not be found."""
    step_exact: bool
    """False: `step` is an upper bound."""
    minimum: int | None
    """Shortest prefix that was reused; None where none was."""
    minimum_exact: bool
    """False: `minimum` is an upper bound."""
    always: int = 0
    """Tokens reused of prompts that share no word: the chat template's head."""
    readings: tuple[tuple[float, float], ...] = ()
    """(shared tokens, about; reused tokens) of every probe, for the plot."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sentence(self) -> str:
        """For people."""
        parts = []
        about = "about " if self.source == "clock" else ""
        if self.minimum is not None and self.minimum_exact and self.minimum > 1:
            parts.append(f"Prefixes under {about}{self.minimum:,} tokens are never reused by this server.")
        elif self.minimum is not None:
            parts.append(f"Prefixes of {about}{self.minimum:,} tokens are reused, and perhaps shorter ones.")
        if self.step == 1:
            parts.append("Reuse is exact to the token.")
        elif self.step is not None and self.step_exact:
            parts.append(f"Reuse goes in steps of {about}{self.step:,} tokens.")
        elif self.step is not None:
            parts.append(f"The steps of reuse are at most {about}{self.step:,} tokens.")
        return " ".join(parts) or "In which steps prefixes are reused could not be found."


@dataclass(slots=True)
class Search:
    """One search over one base prompt. State changes: `readings`; the server's cache."""

    experiment: Experiment
    scale: Scale
    source: Source
    base: list[str]
    step_done: Callable[[], None]
    cold_ttft: float = 0.0
    seconds_per_token: float = 0.0
    readings: dict[int, float] = field(default_factory=dict)
    """Shared words -> reused tokens."""

    async def reused(self, shared: int) -> float:
        """Tokens reused of a prompt that shares `shared` words with the base. Raises ProbeError."""
        if shared not in self.readings:
            repeats = _CLOCK_REPEATS if self.source == "clock" else 1
            found = [self._read(await self._probe(shared)) for _ in range(repeats)]
            self.readings[shared] = median(found)
            self.step_done()
        return self.readings[shared]

    async def _probe(self, shared: int) -> Trial:
        maker = self.experiment.maker
        rest = maker.words(len(self.base) - shared if self.source == "clock" else 8)
        if shared == 0 and rest[0] == self.base[0]:  # elsewhere the capital of a fresh first word makes it differ
            rest[0] = "Else"
        words = [*self.base[:shared], *rest]
        return await self.experiment.measure("warm", -1, prompt(words, self.experiment.maker.question()))

    def _read(self, trial: Trial) -> float:
        told = {"cached_tokens": trial.cached_tokens, "counters": trial.counter_hits}.get(self.source)
        if self.source != "clock":
            return float(told or 0)
        return (self.cold_ttft - trial.ttft) / self.seconds_per_token  # as if a warm request reused the whole base

    async def first_above(self, level: float, low: int, high: int) -> int:
        """Fewest shared words in (low, high] whose reuse is above `level`; it must be at `high`."""
        while high - low > 1:
            middle = (low + high) // 2
            if await self.reused(middle) > level:
                high = middle
            else:
                low = middle
        return high

    def points(self) -> tuple[tuple[float, float], ...]:
        return tuple((self.scale.tokens_for(k), reused) for k, reused in sorted(self.readings.items()))


async def find_granularity(
    experiment: Experiment, scale: Scale, source: Source, step_done: Callable[[], None]
) -> Granularity:
    """About 20 requests, most of them mostly cached; with the clock about 3 times as many. Raises ProbeError."""
    base = experiment.maker.words(experiment.prefix_words)
    search = Search(experiment, scale, source, base, step_done)
    for _ in range(2):
        await experiment.measure("cold", -1, prompt(base, experiment.maker.question()))
    if source == "clock":
        return await _by_clock(search)
    return await _by_tokens(search)


async def _by_tokens(search: Search) -> Granularity:
    words = len(search.base)
    always = await search.reused(0)
    for share in _SPREAD:
        await search.reused(max(1, round(words * share)))
    if max(search.readings.values()) <= always:
        return Granularity(search.source, None, False, None, False, int(always), search.points())
    high = min(k for k, reused in search.readings.items() if reused > always)
    shortest = await search.first_above(always, 0, high)
    # the last edge before the longest probe: where steps are wide, its two sides differ by exactly one
    longest = max(search.readings)
    await search.first_above(search.readings[longest] - 1, shortest - 1, longest)
    values = [round(reused) for reused in search.readings.values()]
    step = math.gcd(*(value for value in values if value > 0), *(v - min(values) for v in values))
    distinct = len({value for value in values if value > always})
    minimum = round(always or search.readings[shortest])
    exact = not always and (step > 1 or shortest > 1)
    return Granularity(search.source, step, distinct > 1, minimum, exact, int(always), search.points())


async def _by_clock(search: Search) -> Granularity:
    experiment, words = search.experiment, len(search.base)
    colds, warms = [], []
    for _ in range(4):
        cold = await experiment.measure("cold", -1, prompt(experiment.maker.words(words), experiment.maker.question()))
        warm = await experiment.measure("warm", -1, prompt(search.base, experiment.maker.question()))
        colds.append(cold.ttft)
        warms.append(warm.ttft)
    search.cold_ttft = median(colds)
    saved = search.cold_ttft - median(warms)
    if saved <= 0:
        return Granularity("clock", None, False, None, False)
    tokens = search.scale.tokens_for(words)
    search.seconds_per_token = saved / tokens
    noise = max(mad(colds), mad(warms)) / math.sqrt(_CLOCK_REPEATS) / search.seconds_per_token
    resolution = min(tokens / 2, max(_CLOCK_SIGMAS * noise, tokens / 64))
    search.readings[0], search.readings[words] = 0.0, tokens
    edge = await search.first_above(resolution, 0, words)
    height = search.readings[edge]
    bound = math.ceil(search.scale.tokens_for(edge))  # something of so many tokens was reused
    if height < 2 * resolution:
        return Granularity("clock", bound, False, bound, False, readings=search.points())
    minimum = bound
    if height + resolution >= tokens:
        return Granularity("clock", minimum, False, minimum, True, readings=search.points())
    second = await search.first_above(height + resolution, edge, words)
    step = round(search.scale.tokens_for(second - edge))
    wide = search.readings[second] - height > 2 * resolution
    return Granularity("clock", step if wide else bound, wide, minimum, True, readings=search.points())
