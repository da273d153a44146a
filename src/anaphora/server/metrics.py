"""From the engine's plain counters to Prometheus families; nothing else in the project knows Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from anaphora.engine.stats import EngineStats, Histogram
from anaphora.server.settings import ServerState

GAUGES = {
    "anaphora_requests_running": ("num_running", "Requests that took part in the last step."),
    "anaphora_requests_waiting": ("num_waiting", "Requests that wait for their turn."),
    "anaphora_kv_block_size_tokens": ("block_size", "Tokens that one block holds."),
    "anaphora_kv_bytes_per_token": ("bytes_per_token", "Bytes of keys and values per token, all layers together."),
}
BLOCK_STATES = {"free": "blocks_free", "active": "blocks_active", "cached": "blocks_cached"}
COUNTERS = {
    "anaphora_prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix index."),
    "anaphora_prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix index."),
    "anaphora_preemptions": ("preemptions", "Requests put back into the queue because blocks ran out."),
    "anaphora_evictions": ("evictions", "Cached blocks given up for new ones."),
    "anaphora_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests, cached ones included."),
    "anaphora_cached_tokens": ("cached_tokens", "Prompt tokens whose keys and values were reused."),
    "anaphora_generated_tokens": ("generated_tokens", "Tokens produced."),
    "anaphora_computed_tokens": ("computed_tokens", "Token positions that went through the model."),
}
HISTOGRAMS = {
    "anaphora_time_to_first_token_seconds": ("ttft", "From arrival to the first token."),
    "anaphora_inter_token_latency_seconds": ("itl", "Between two tokens of a request."),
    "anaphora_e2e_request_latency_seconds": ("e2e", "From arrival to the last token."),
    "anaphora_request_queue_time_seconds": ("queue_time", "From arrival to the first admission."),
    "anaphora_step_seconds": ("step_time", "One step of the engine."),
}


class ServerCollector(Collector):
    """Reads the live state at each scrape; keeps nothing. Without an engine only the server's own families exist."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        http = CounterMetricFamily(
            "anaphora_http_requests", "Answers by method, route and status.", labels=("method", "route", "status")
        )
        for labels, count in sorted(self._state.http_requests.items()):
            http.add_metric(labels, count)
        yield http
        startup = GaugeMetricFamily("anaphora_startup_seconds", "Duration of each part of the start.", labels=("part",))
        for part, seconds in self._state.startup_seconds.items():
            startup.add_metric((part,), seconds)
        yield startup
        if self._state.engine is not None:
            yield from engine_families(self._state.engine.stats)


def engine_families(stats: EngineStats) -> Iterator[Metric]:
    for name, (field, text) in GAUGES.items():
        yield GaugeMetricFamily(name, text, value=getattr(stats, field))
    blocks = GaugeMetricFamily("anaphora_kv_blocks", "Blocks of the pool by state.", labels=("state",))
    for label, field in BLOCK_STATES.items():
        blocks.add_metric((label,), getattr(stats, field))
    yield blocks
    usage = stats.blocks_active / stats.blocks_total if stats.blocks_total else 0.0
    yield GaugeMetricFamily("anaphora_kv_usage_ratio", "Share of the pool that running requests hold.", value=usage)
    for name, (field, text) in COUNTERS.items():
        yield CounterMetricFamily(name, text, value=getattr(stats, field))
    finished = CounterMetricFamily("anaphora_requests_finished", "Requests by why they ended.", labels=("reason",))
    for reason, count in sorted(dict(stats.finished).items()):
        finished.add_metric((reason,), count)
    yield finished
    for name, (field, text) in HISTOGRAMS.items():
        yield _histogram(name, text, getattr(stats, field))


def registry_of(state: ServerState) -> CollectorRegistry:
    """A registry of its own for every app; the process-wide one stays untouched."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(state))
    return registry


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    cumulative = accumulate(list(histogram.counts))
    return HistogramMetricFamily(
        name, text, buckets=list(zip(bounds, cumulative, strict=True)), sum_value=histogram.sum
    )
