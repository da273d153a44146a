"""From the engine's plain counters to Prometheus families; nothing else in the project knows Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
TIER_COUNTERS = {
    "anaphora_tier_hits": ("hits", "Blocks loaded, whole and verified."),
    "anaphora_tier_misses": ("misses", "Blocks that were not there when they were loaded."),
    "anaphora_tier_corrupt": ("corrupt", "Blocks that were not as they were stored; each was removed."),
    "anaphora_tier_failed": ("failed", "Loads that the device, the network or the store failed."),
    "anaphora_tier_bytes_loaded": ("bytes_loaded", "Bytes of keys and values loaded."),
    "anaphora_tier_load_seconds": ("load_seconds", "Time spent loading, over all threads."),
    "anaphora_tier_saved": ("saved", "Blocks stored."),
    "anaphora_tier_dropped": ("dropped", "Blocks refused: no room that may be made, or the tier is off."),
    "anaphora_tier_behind": ("behind", "Blocks not queued because the tier was behind."),
    "anaphora_tier_save_failed": ("save_failed", "Saves that the device, the network or the store failed."),
    "anaphora_tier_bytes_saved": ("bytes_saved", "Bytes of keys and values written."),
    "anaphora_tier_save_seconds": ("save_seconds", "Time spent writing."),
    "anaphora_tier_evicted": ("evicted", "Blocks given up for new ones."),
}
TIER_GAUGES = {
    "anaphora_tier_up": ("up", "1: the tier takes and gives blocks; 0: it is off, or could not be opened."),
    "anaphora_tier_blocks": ("blocks", "Blocks held."),
    "anaphora_tier_used_bytes": ("used_bytes", "Bytes taken, the tier's own tables included."),
    "anaphora_tier_limit_bytes": ("limit_bytes", "Bytes it may take; 0: it does not know."),
    "anaphora_tier_loads_waiting": ("loads_waiting", "Pieces of loads that have not begun."),
    "anaphora_tier_saves_waiting": ("saves_waiting", "Blocks that wait to be stored."),
    "anaphora_tier_latency_seconds": ("latency", "Measured: what a load takes besides its bytes."),
    "anaphora_tier_bandwidth_bytes_per_second": ("bandwidth", "Measured: bytes of a load per second."),
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
    missed = CounterMetricFamily("anaphora_missed_tokens", "Prompt tokens not reused, by why.", labels=("cause",))
    for cause, count in sorted(dict(stats.missed_tokens).items()):
        missed.add_metric((cause,), count)
    yield missed
    yield _by_label("anaphora_requests_finished", "Requests by why they ended.", "reason", stats.finished)
    yield _by_label(
        "anaphora_prompt_tokens_by_source",
        "Prompt tokens of admitted requests by where their keys and values came from.",
        "source",
        stats.source_tokens,
    )
    if tiers := stats.tiers():
        yield from tier_families(tiers, stats)
    for name, (field, text) in HISTOGRAMS.items():
        yield _histogram(name, text, getattr(stats, field))


def tier_families(tiers: Mapping[str, Mapping[str, float]], stats: EngineStats) -> Iterator[Metric]:
    """A tier that could not be opened has `up` 0 and nothing else."""
    for table, family in ((TIER_COUNTERS, CounterMetricFamily), (TIER_GAUGES, GaugeMetricFamily)):
        for name, (field, text) in table.items():
            metric = family(name, text, labels=("tier",))
            for tier, numbers in tiers.items():
                if field in numbers:
                    metric.add_metric((tier,), numbers[field])
            yield metric
    text = "Requests by what was done about the tiers: nothing, load, part, compute, hung, late."
    yield _by_label("anaphora_tier_decisions", text, "decision", stats.tier_decisions)


def _by_label(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in sorted(dict(counts).items()):
        family.add_metric((value,), count)
    return family


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
