"""The experiment: cold, warm and control requests, interleaved at random, timed one at a time.

A round has one fresh prefix P and three requests: cold (P, a question), warm (P, another question) and control (P with
its first character changed, a question). Warm comes somewhere after cold. What the server does between the rounds of a
batch is random, so that drift, noise and the order itself fall on all three kinds alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from anaphora.probes.client import ProbeClient
from anaphora.probes.counters import Counters, scrape
from anaphora.probes.verify.prompts import PromptMaker, altered, prompt

Kind = Literal["cold", "warm", "control"]
KINDS: tuple[Kind, ...] = ("cold", "warm", "control")
BATCH_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """One timed request."""

    kind: Kind
    round: int
    gap: int
    """Warm only: other requests between this one and the cold one of its round. 0 for the others."""
    ttft: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """As the server's `usage` says."""
    counter_hits: float | None = None
    """By how much the server's hit counter grew, in tokens."""
    counter_queries: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan_batch(first_round: int, rng: random.Random) -> list[tuple[Kind, int]]:
    """Order of the requests of BATCH_ROUNDS rounds: random, but cold comes before warm and control of its round.

    In every batch one warm request follows its cold one at once and one does not: an engine that keeps only the
    last prompt hits in the first case only.
    """
    rounds = range(first_round, first_round + BATCH_ROUNDS)
    steps: list[tuple[Kind, int]] = [(kind, number) for number in rounds for kind in KINDS]
    while True:
        rng.shuffle(steps)
        at = {step: i for i, step in enumerate(steps)}
        gaps = [at["warm", n] - at["cold", n] - 1 for n in rounds]
        ordered = all(at["cold", n] < min(at["warm", n], at["control", n]) for n in rounds)
        if ordered and min(gaps) == 0 and max(gaps) > 0:
            return steps


class Experiment:
    """Runs requests one after another. State changes: `trials`, and `history` of every request's reading."""

    def __init__(self, client: ProbeClient, model: str, maker: PromptMaker, prefix_words: int, rng: random.Random):
        self.client = client
        self.model = model
        self.maker = maker
        self.prefix_words = prefix_words
        self.trials: list[Trial] = []
        self._rng = rng
        self._prefixes: dict[int, list[str]] = {}
        self._order: list[tuple[Kind, int]] = []
        self._counters: Counters | None = None

    async def begin(self) -> Counters | None:
        """Take the counters' first reading; None where there are none to read."""
        self._counters = await scrape(self.client)
        return self._counters

    async def run_batch(self, first_round: int) -> None:
        """BATCH_ROUNDS rounds. Raises ProbeError; the trials before it are kept."""
        for kind, number in plan_batch(first_round, self._rng):
            await self.run_one(kind, number)

    async def run_one(self, kind: Kind, number: int) -> Trial:
        """One request of round `number`. Raises ProbeError."""
        prefix = self._prefixes.setdefault(number, self.maker.words(self.prefix_words))
        text = prompt(altered(prefix) if kind == "control" else prefix, self.maker.question())
        gap = len(self._order) - self._order.index(("cold", number)) - 1 if kind == "warm" else 0
        trial = await self.measure(kind, number, text, gap)
        self._order.append((kind, number))
        self.trials.append(trial)
        return trial

    async def measure(self, kind: Kind, number: int, text: str, gap: int = 0) -> Trial:
        """Time one prompt; not kept in `trials`. Raises ProbeError."""
        result = await self.client.stream_chat(self.model, [{"role": "user", "content": text}], 1)
        change = None
        if self._counters is not None and (now := await scrape(self.client)) is not None:
            change, self._counters = now.since(self._counters), now
        return Trial(
            kind,
            number,
            gap,
            result.ttft,
            result.prompt_tokens,
            result.cached_tokens,
            change.hit_tokens if change else None,
            change.query_tokens if change else None,
        )


def of_kind(trials: Sequence[Trial], kind: Kind) -> list[Trial]:
    return [trial for trial in trials if trial.kind == kind]
