"""The whole verification: what is asked in which order, and what is kept if it ends early."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from anaphora.errors import EndpointRefused, ProbeError
from anaphora.probes.client import ProbeClient
from anaphora.probes.counters import Counters
from anaphora.probes.engines import Engine, detect
from anaphora.probes.statistics import median
from anaphora.probes.verify.crosscheck import CrossCheck, Finding, cross_check
from anaphora.probes.verify.granularity import Granularity, find_granularity
from anaphora.probes.verify.memory import Memory, MemoryStory, memory_of, server_pids
from anaphora.probes.verify.prompts import PromptMaker, Scale, measure_scale, prompt
from anaphora.probes.verify.trials import BATCH_ROUNDS, Experiment, Trial, of_kind
from anaphora.probes.verify.verdict import CHECK_AFTER, Verdict, judge, whole_rounds

Progress = Callable[[str, int, int | None], None]

_REPEATS = 8
_BUFFER_TOKENS = 24
_FEWEST_PARTLY = 10
"""Rounds before "partly" ends the trials: two hiccups in six look like it."""
_FAST = 1.4
"""A request that is so many times faster than the median cold one reused something."""


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
    """Requests with one prefix in a row, the first of them cold."""
    granularity: Granularity | None = None
    buffered: bool | None = None
    failure: ProbeError | None = None
    """What ended the measurement early, if the endpoint did."""

    def verdict(self) -> Verdict:
        """From the trials; a row of repeats can still show reuse that the trials missed."""
        found = judge(whole_rounds(self.trials), seed=self.seed)
        if found.answer == "does not" and self.repeats:
            threshold = median([t.ttft for t in of_kind(self.trials, "cold")]) / _FAST
            fast = sum(trial.ttft < threshold for trial in self.repeats[1:])
            if fast >= 2:
                reason = f"{fast} of {len(self.repeats) - 1} requests with one prefix in a row were fast, others not."
                return replace(found, answer="partly", reason=reason, threshold=threshold)
        return found

    def cross_check(self) -> CrossCheck:
        verdict = self.verdict()
        slow = None
        if self.repeats and verdict.threshold is not None:
            slow = sum(trial.ttft >= verdict.threshold for trial in self.repeats)
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
        answer = state.verdict().answer
        if answer in ("works", "does not") or (answer == "partly" and rounds >= _FEWEST_PARTLY):
            return


async def _repeats(state: Verification, experiment: Experiment, progress: Progress) -> None:
    prefix = experiment.maker.words(experiment.prefix_words)
    for number in range(_REPEATS + 1):
        progress("one prefix in a row", number, _REPEATS + 1)
        text = prompt(prefix, experiment.maker.question())
        state.repeats.append(await experiment.measure("warm" if number else "cold", -1, text))


async def _buffered(client: ProbeClient, model: str, maker: PromptMaker) -> bool:
    """Whether a stream of several tokens came in one piece."""
    text = "Count from one to fifty in words." + maker.question()
    result = await client.stream_chat(model, [{"role": "user", "content": text}], _BUFFER_TOKENS)
    if not result.incremental:
        return True
    return len(result.chunk_times) >= 8 and result.reads <= 2
