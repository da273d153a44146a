"""The whole verification: what is asked in which order, and what is kept if it ends early."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from anaphora.errors import EndpointRefused, ProbeError
from anaphora.probes.client import ProbeClient
from anaphora.probes.counters import Counters
from anaphora.probes.engines import Engine, detect
from anaphora.probes.verify.crosscheck import CrossCheck, Finding, cross_check, settle
from anaphora.probes.verify.granularity import Granularity, find_granularity
from anaphora.probes.verify.memory import Memory, MemoryStory, memory_of, server_pids
from anaphora.probes.verify.prompts import PromptMaker, Scale, measure_scale, prompt
from anaphora.probes.verify.trials import BATCH_ROUNDS, Experiment, Trial
from anaphora.probes.verify.verdict import CHECK_AFTER, Round, Verdict, judge, whole_rounds

Progress = Callable[[str, int, int | None], None]

_REPEATS = 8
_BUFFER_TOKENS = 24
_FEWEST_PARTLY = 10
"""Rounds before "partly" ends the trials: two hiccups in six look like it."""
_FEWEST_OPEN = 16
"""Rounds before the word of the server is taken where the clock leaves it open."""
_FEWEST_FAST = 3
_FAST = 1.4
"""A request that is so many times faster than the median cold one reused something."""


@lru_cache(maxsize=4)
def _judge(rounds: tuple[Round, ...], seed: int) -> Verdict:
    """`judge`, whose resampling takes a while and is asked for by every part of a report."""
    return judge(rounds, seed=seed)


@dataclass(slots=True)
class Verification:
    """Everything measured so far. State changes: filled in by `measure`, in the order of the fields."""

    seed: int
    prefix_tokens: int
    max_rounds: int
    engine: Engine = field(default_factory=Engine)
    model: str | None = None
    counters: Counters | None = None
    scale: Scale | None = None
    memory: MemoryStory | None = None
    trials: list[Trial] = field(default_factory=list)
    repeats: list[Trial] = field(default_factory=list)
    """Requests with one prefix in a row, after a cold one."""
    row_colds: list[Trial] = field(default_factory=list)
    """Cold requests before, at the head of and after that row."""
    granularity: Granularity | None = None
    buffered: bool | None = None
    failure: ProbeError | None = None
    """What ended the measurement early, if the endpoint did."""

    def verdict(self) -> Verdict:
        """From the trials; a row of repeats can still show reuse that the trials missed.

        Warm requests that were slow although the server says it reused their prefix were hiccups, not misses.
        """
        found = _judge(tuple(whole_rounds(self.trials)), self.seed)
        if found.answer == "partly" and _only_hiccups(self.trials, self.real_prefix_tokens):
            reason = f"{found.reason} The server reused the prefix of those too: something else delayed them."
            return replace(found, answer="works", reason=reason)
        found = settle(found, self.trials, self.real_prefix_tokens)
        threshold = self._repeats_threshold()
        if found.answer == "does not" and threshold is not None:
            fast = sum(trial.ttft < threshold for trial in self.repeats)
            if _FEWEST_FAST <= fast < len(self.repeats):
                reason = f"{fast} of {len(self.repeats)} requests with one prefix in a row were fast, the others not."
                return replace(found, answer="partly", reason=reason, threshold=threshold)
        return found

    def _repeats_threshold(self) -> float | None:
        """Seconds below which a request of the row reused something: cold ones of the same moment are the measure."""
        return min(trial.ttft for trial in self.row_colds) / _FAST if self.row_colds and self.repeats else None

    def cross_check(self) -> CrossCheck:
        verdict = self.verdict()
        threshold = self._repeats_threshold()
        slow = None if threshold is None else 1 + sum(trial.ttft >= threshold for trial in self.repeats)
        return cross_check(self.trials, verdict, self.counters, self.engine, self.real_prefix_tokens, slow)

    @property
    def real_prefix_tokens(self) -> float:
        """Tokens of the shared prefix as near as they are known."""
        if self.scale is None:
            return float(self.prefix_tokens)
        return self.scale.tokens_for(self.scale.words_for(self.prefix_tokens))

    def findings(self) -> tuple[Finding, ...]:
        """Problems first."""
        found = list(self.cross_check().findings) if whole_rounds(self.trials) else []
        if self.buffered:
            what = "The stream arrives in one piece: clients see no token before the last one."
            fix = (
                "A proxy buffers it: proxy_buffering off (nginx), no gzip for text/event-stream, X-Accel-Buffering: no."
            )
            found.append(Finding("stream.buffered", "problem", what, fix))
        return tuple(sorted(found, key=lambda finding: finding.severity != "problem"))


def _only_hiccups(trials: list[Trial], prefix_tokens: float) -> bool:
    """Whether `cached_tokens` claims reuse for every warm request, and for no other."""

    def claimed(trial: Trial) -> bool:
        return (trial.cached_tokens or 0) >= prefix_tokens / 2

    return all(claimed(trial) == (trial.kind == "warm") for trial in trials)


async def measure(state: Verification, client: ProbeClient, progress: Progress) -> None:
    """Fill `state`. Raises ProbeError or ConfigError if nothing can be measured; later failures go into the state."""
    progress("looking at the server", 0, None)
    state.engine = await detect(client)
    state.model = await client.choose_model()
    maker = PromptMaker(state.seed)
    state.scale = await measure_scale(client, state.model, maker)
    words = state.scale.words_for(state.prefix_tokens)
    experiment = Experiment(client, state.model, maker, words, random.Random(state.seed))
    experiment.trials = state.trials
    state.counters = await experiment.begin()
    try:
        state.memory = await _memory(client, experiment, progress)
    except EndpointRefused as error:
        if "context" in error.detail.lower() or "too long" in error.detail.lower():
            raise EndpointRefused(
                f"{error} Lower --prefix-tokens below {state.prefix_tokens}.",
                kind=error.kind,
                status=error.status,
                detail=error.detail,
            ) from None
        raise
    try:
        await _rounds(state, experiment, progress)
        answer = state.verdict().answer
        if answer in ("does not", "partly"):
            await _repeats(state, experiment, progress)
        if answer == "works":
            done = 0

            def step() -> None:
                nonlocal done
                done += 1
                progress("finding the steps of reuse", done, None)

            trusted = state.cross_check().trusted
            state.granularity = await find_granularity(experiment, state.scale, trusted, step)
        progress("looking at the stream", 0, None)
        state.buffered = await _buffered(client, state.model, maker)
    except ProbeError as error:
        state.failure = error


async def _memory(client: ProbeClient, experiment: Experiment, progress: Progress) -> MemoryStory | None:
    """A first cold and warm request at full length: they warm the server up, and their memory is looked at."""
    progress("first cold and warm request", 0, 2)
    pids = server_pids(client.endpoint.port) if client.endpoint.is_loopback else ()
    prefix = experiment.maker.words(experiment.prefix_words)
    seen: list[Memory | None] = [memory_of(pids)]
    for done, kind in enumerate(("cold", "warm"), start=1):
        text = prompt(prefix, experiment.maker.question())
        await experiment.measure("cold" if kind == "cold" else "warm", -1, text)
        seen.append(memory_of(pids))
        progress("first cold and warm request", done, 2)
    before, after_cold, after_warm = seen
    if before is None or after_cold is None or after_warm is None:
        return None
    return MemoryStory(pids, before, after_cold, after_warm)


async def _rounds(state: Verification, experiment: Experiment, progress: Progress) -> None:
    for first in range(0, state.max_rounds, BATCH_ROUNDS):
        progress("rounds of cold, warm and control", first, state.max_rounds)
        await experiment.run_batch(first)
        rounds = first + BATCH_ROUNDS
        if rounds not in CHECK_AFTER:
            continue
        verdict = state.verdict()
        patience = _FEWEST_PARTLY if verdict.answer == "partly" else _FEWEST_OPEN if verdict.basis == "server" else 0
        if verdict.answer != "cannot tell" and rounds >= patience:
            return


async def _repeats(state: Verification, experiment: Experiment, progress: Progress) -> None:
    """A cold request, a row of requests with one prefix (the first of them cold too), and another cold one."""
    prefixes = [experiment.maker.words(experiment.prefix_words) for _ in range(3)]
    order = [0, *([1] * (_REPEATS + 1)), 2]
    for done, which in enumerate(order):
        progress("one prefix in a row", done, len(order))
        text = prompt(prefixes[which], experiment.maker.question())
        is_cold = which != 1 or done == 1
        trial = await experiment.measure("cold" if is_cold else "warm", -1, text)
        (state.row_colds if is_cold else state.repeats).append(trial)


async def _buffered(client: ProbeClient, model: str, maker: PromptMaker) -> bool:
    """Whether a stream of several tokens came in one piece."""
    text = "Count from one to fifty in words." + maker.question()
    result = await client.stream_chat(model, [{"role": "user", "content": text}], _BUFFER_TOKENS)
    if not result.incremental:
        return True
    return len(result.chunk_times) >= 8 and result.reads <= 2
