"""Are tokens counted, and does a repeated prompt come from the prefix cache? A quick look; `verify` measures."""

from __future__ import annotations

import random
from collections.abc import Sequence

from anaphora.errors import ProbeError
from anaphora.probes.counters import Counters, scrape
from anaphora.probes.doctor.finding import Finding
from anaphora.probes.doctor.sayings import say
from anaphora.probes.doctor.visit import Outcome, Visit, filler, user
from anaphora.probes.statistics import median
from anaphora.probes.stream import StreamResult, cached_tokens

_COLD, _WARM = 3, 6
_TOKENS = 1200
_SECONDS = 60.0
"""Time that the cold prompts may take together."""
_FASTER = 0.6
"""Warm time over cold time below which a cache is at work."""

_FLAGS = {
    "vllm": "--enable-prompt-tokens-details",
    "sglang": "--enable-cache-report",
}
"""Engine -> the option without which it does not report cached tokens."""
_OFF = {
    "vllm": "Drop --no-enable-prefix-caching; it is on by default.",
    "sglang": "Drop --disable-radix-cache; it is on by default.",
    "llama.cpp": "Drop --no-cache-prompt, and give enough slots (--parallel) or --cache-ram.",
}


async def check_usage(visit: Visit) -> Outcome:
    usage = visit.completion.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    plain = isinstance(usage.get("prompt_tokens"), int)
    streamed = visit.stream is not None and visit.stream.prompt_tokens is not None
    cached = plain and isinstance(cached_tokens(usage), int)
    cached = cached or (visit.stream is not None and visit.stream.cached_tokens is not None)
    found: list[Finding] = []
    if not plain:
        found.append(say("usage.missing"))
    elif visit.stream is not None and not streamed:
        found.append(say("usage.stream"))
    elif not cached and visit.engine.name in _FLAGS:
        evidence = f"{visit.engine.title} leaves them out by default"
        found.append(say("usage.cached", evidence, flag=_FLAGS[visit.engine.name]))
    return Outcome(
        f"usage: {_yes(plain)}; in streams: {_yes(streamed)}; cached tokens: {_yes(bool(cached))}", tuple(found)
    )


async def check_cache(visit: Visit) -> Outcome:
    """Cold prompts nobody ever sent, then the last of them again and again (an engine with one slot has that one)."""
    rng, words = random.Random(), _length(visit)
    prompts = [filler(rng, words) for _ in range(_COLD)]
    before = await scrape(visit.http)
    try:
        cold = [await _ask(visit, prompt) for prompt in prompts]
        warm = [await _ask(visit, prompts[-1]) for _ in range(_WARM)]
    except ProbeError as error:
        return Outcome(f"not tried to the end: {error}")
    after = await scrape(visit.http)
    seen = _Seen(cold, warm, after.since(before) if before and after else None)
    finding = seen.finding(visit)
    tail = "" if finding else "; `anaphora verify` measures it with a confidence interval"
    return Outcome(seen.evidence() + tail, (finding,) if finding else ())


class _Seen:
    """The times and counts of one quick look."""

    def __init__(self, cold: Sequence[StreamResult], warm: Sequence[StreamResult], counted: Counters | None) -> None:
        self.prompt = next((r.prompt_tokens for r in cold if r.prompt_tokens), None)
        self.cold_reported = [r.cached_tokens for r in cold]
        self.warm_reported = [r.cached_tokens for r in warm]
        self.ratio = median([r.ttft for r in warm]) / max(1e-9, median([r.ttft for r in cold]))
        self.counted = counted

    def evidence(self) -> str:
        told = ", ".join("-" if n is None else str(n) for n in self.warm_reported)
        counter = ""
        if self.counted is not None and self.counted.hit_tokens is not None:
            counter = f"; counter {self.counted.hit_name}: +{self.counted.hit_tokens:g}"
        return (
            f"prompt of {self.prompt or '?'} tokens: repeated at {self.ratio:.2f} x the time to first token; "
            f"cached tokens reported: {told}{counter}"
        )

    def finding(self, visit: Visit) -> Finding | None:
        """Only what is plain without statistics."""
        told = [n for n in self.warm_reported if n is not None]
        faster = self.ratio < _FASTER
        prompt = self.prompt or 0
        cold = [n for n in self.cold_reported if n is not None]
        hits = [n for n in told if n > 0]
        if prompt and cold and min(cold) > prompt // 2:
            return say("cache.lies", self.evidence(), tokens=min(cold))
        if told and not hits:
            off = _OFF.get(visit.engine.name, "Turn prefix caching on in the server.")
            return say("cache.unreported" if faster else "cache.none", self.evidence(), tokens=prompt, off=off)
        if hits and len(hits) < len(told):
            return say("cache.affinity", self.evidence(), hits=len(hits), sent=len(told))
        if hits and self.counted is not None and self.counted.hit_tokens == 0:
            return say("cache.counter", self.evidence(), counter=self.counted.hit_name)
        return None


def _length(visit: Visit) -> int:
    """Words of a prompt: longer than the largest blocks known, within the context, read in bearable time."""
    tokens = float(_TOKENS)
    if visit.limit is not None:
        tokens = min(tokens, visit.limit / 2)
    if visit.seconds_per_token:
        tokens = min(tokens, _SECONDS / _COLD / visit.seconds_per_token)
    return max(16, int(tokens / visit.tokens_per_word))


async def _ask(visit: Visit, text: str) -> StreamResult:
    return await visit.http.stream_chat(visit.chosen, user(text), 1)


def _yes(known: bool) -> str:
    return "yes" if known else "no"
