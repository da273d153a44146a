"""What an engine's own counters say about its prefix cache, its KV memory and its queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from anaphora.errors import ProbeError
from anaphora.probes.client import ProbeClient
from anaphora.probes.prometheus import Sample, largest, parse_metrics, total


@dataclass(frozen=True, slots=True)
class Counters:
    """One scrape. Tokens and events count since the server started; the rest is as of now; None = not told."""

    family: str
    """Prefix of the engine's metrics: anaphora, vllm, sglang or llamacpp."""
    hit_name: str
    """The counter that `hit_tokens` was read from, for the report."""
    query_tokens: float | None = None
    hit_tokens: float | None = None
    preemptions: float | None = None
    evictions: float | None = None
    kv_usage: float | None = None
    """Share of the KV memory in use, 0 .. 1."""
    running: float | None = None
    waiting: float | None = None

    def since(self, earlier: Counters) -> Counters:
        """The same with counts as differences. A server that restarted in between gives None."""

        def less(now: float | None, then: float | None) -> float | None:
            return None if now is None or then is None or now < then else now - then

        return Counters(
            self.family,
            self.hit_name,
            less(self.query_tokens, earlier.query_tokens),
            less(self.hit_tokens, earlier.hit_tokens),
            less(self.preemptions, earlier.preemptions),
            less(self.evictions, earlier.evictions),
            self.kv_usage,
            self.running,
            self.waiting,
        )

    def as_dict(self) -> dict[str, str | float | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Names:
    """The metrics of one engine; several names where versions differ, newest first."""

    hits: tuple[str, ...]
    queries: tuple[str, ...]
    preemptions: tuple[str, ...] = ()
    evictions: tuple[str, ...] = ()
    usage: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    queries_without_hits: bool = False
    """The counter of prompt tokens leaves out those that were reused."""


NAMES = {
    "anaphora": _Names(
        ("anaphora_prefix_cache_hits",),
        ("anaphora_prefix_cache_queries",),
        ("anaphora_preemptions",),
        ("anaphora_evictions",),
        ("anaphora_kv_usage_ratio",),
        ("anaphora_requests_running",),
        ("anaphora_requests_waiting",),
    ),
    "vllm": _Names(
        ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
        ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
        ("vllm:num_preemptions",),
        (),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
    ),
    "sglang": _Names(
        ("sglang:cached_tokens",),
        ("sglang:prompt_tokens",),
        ("sglang:num_retracted_requests",),
        ("sglang:evicted_tokens",),
        ("sglang:token_usage",),
        ("sglang:num_running_reqs",),
        ("sglang:num_queue_reqs",),
    ),
    "llamacpp": _Names(
        ("llamacpp:prompt_tokens_cached",),
        ("llamacpp:prompt_tokens",),
        usage=("llamacpp:kv_cache_usage_ratio",),
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        queries_without_hits=True,
    ),
}
"""Family -> metrics."""


def read_counters(samples: Sequence[Sample]) -> Counters | None:
    """The counters of the first known family in a scrape; None where there is none."""
    for family, names in NAMES.items():
        if not any(s.name.startswith((f"{family}:", f"{family}_")) for s in samples):
            continue
        hit_name, hits = _first(samples, names.hits)
        queries = _first(samples, names.queries)[1]
        if names.queries_without_hits and queries is not None:
            queries += hits or 0.0
        return Counters(
            family,
            hit_name,
            queries,
            hits,
            _first(samples, names.preemptions)[1],
            _first(samples, names.evictions)[1],
            next((v for name in names.usage if (v := largest(samples, name)) is not None), None),
            _first(samples, names.running)[1],
            _first(samples, names.waiting)[1],
        )
    return None


async def scrape(client: ProbeClient) -> Counters | None:
    """Counters as of now; None where /metrics is missing or knows none of them. Never raises."""
    try:
        response = await client.request("GET", "/metrics", timeout=min(5.0, client.endpoint.timeout))
    except ProbeError:
        return None
    return read_counters(parse_metrics(response.text)) if response.is_success else None


def _first(samples: Sequence[Sample], names: tuple[str, ...]) -> tuple[str, float | None]:
    for name in names:
        if (value := total(samples, name)) is not None:
            return name, value
    return (names[0] if names else ""), None
