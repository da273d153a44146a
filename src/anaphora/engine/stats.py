"""Plain counters of the engine. Only server/metrics.py turns them into Prometheus families."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of observations per upper bound, and their sum. State changes: `observe`."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


@dataclass
class EngineStats:
    """Gauges are as of the last step; counters only grow; histograms are in seconds."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_active: int = 0
    blocks_cached: int = 0
    block_size: int = 0
    bytes_per_token: int = 0

    prompt_tokens: int = 0
    """Prompt tokens of admitted requests, cached ones included; each request counts once."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was reused at first admission."""
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Token positions that went through the model, recomputation after preemption included."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix index at first admission (resumed requests excluded)."""
    prefix_hits: int = 0
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that were not reused, by cause (see explain/outcome.py)."""
    preemptions: int = 0
    evictions: int = 0
    source_tokens: dict[str, int] = field(default_factory=dict)
    """Prompt tokens of admitted requests by where their KV came from: pool, ram, disk, remote, computed."""
    tiers: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    """Numbers of every tier, by its name; empty where there are none. Thread-safe."""
    tier_decisions: Mapping[str, int] = field(default_factory=dict)
    """Requests by what was done about the tiers; see docs/tiers.md."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""

    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)
    step_time: Histogram = field(default_factory=Histogram)
