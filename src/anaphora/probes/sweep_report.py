"""A sweep as JSON, as lines for people, and as an HTML page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anaphora.probes.endpoint import Endpoint
from anaphora.probes.figures import DEFINITIONS, Quantiles, StepResult
from anaphora.probes.html import Html, Section, Tone, bullets, page, paragraph, table
from anaphora.probes.knee import Knee
from anaphora.probes.limits import Limit
from anaphora.probes.plots import Mark, Series, plot, short, strips
from anaphora.probes.report import envelope, subtitle
from anaphora.probes.sweep import Sweep, fell_behind, said_load

_DOTS = 150
"""Requests that are drawn per step."""
_LATE = 0.005


def headline(state: Sweep, knee: Knee | None, limit: Limit | None) -> str:
    """Knee and reason in two or three sentences."""
    if limit is None:
        return "Nothing was measured."
    if knee is None:
        grows = limit.kind == "compute bound"
        why = "TTFT grows with the load from the first step on" if grows else "TTFT does not turn steep in these loads"
        return f"No knee was found: {why}. {limit.text}"
    at = next(step for step in state.steps if step.level == knee.step)
    times = f"TTFT p50 {_ms(at.ttft)} ms, {at.output_tokens_per_second:,.0f} output tokens/s" if at.ttft else ""
    unit = "requests at once" if state.loads.kind == "concurrency" else "requests per second"
    return (
        f"The knee is at about {short(knee.load)} {unit} (90% interval {short(knee.low)} to {short(knee.high)}; "
        f"{knee.sure}). At {said_load(at.kind, at.level)}: {times}. {limit.text}"
    )


def facts(state: Sweep, knee: Knee | None, limit: Limit | None) -> list[str]:
    """What was found beside it, one sentence each."""
    found = [*limit.evidence, limit.advice] if limit is not None else []
    comparison = state.comparison(knee, limit)
    if comparison is not None:
        found.append(comparison.text)
    most = max((step.output_tokens_per_second for step in state.steps), default=0.0)
    if most:
        step = next(step for step in state.steps if step.output_tokens_per_second >= 0.9 * most)
        found.append(
            f"Nine tenths of the highest throughput ({most:,.0f} tokens/s): at {said_load(step.kind, step.level)}."
        )
    if state.slo is not None:
        best = state.best()
        found.append(
            f"Not even the lightest load keeps {state.slo.text} for nine requests in ten."
            if best is None
            else f"{state.slo.text} holds for nine requests in ten up to {said_load(best.kind, best.level)} "
            f"(goodput {short(best.goodput or 0)} requests/s)."
        )
    if state.stopped:
        found.append(f"The sweep ended because {state.stopped}.")
    return [*found, *_cautions(state)]


def _cautions(state: Sweep) -> list[str]:
    """What makes the figures less good than they look."""
    found = []
    late = max((step.lag for step in state.steps), default=0.0)
    if late > _LATE:
        found.append(
            f"This machine is busy: reads were noted up to {1e3 * late:.0f} ms late (99th percentile). "
            "Does the server run on the same cores?"
        )
    wide = [said_load(s.kind, s.level) for s in state.steps if s.precision > 2 * state.bounds.precision]
    if wide:
        found.append(f"The median TTFT is known less well than asked at {', '.join(wide)}: give more --step-seconds.")
    cut = [said_load(s.kind, s.level) for s in state.steps if s.unfinished > 0.05 * (s.requests + s.unfinished)]
    if cut:
        found.append(f"Many requests were not done in time at {', '.join(cut)}: the table has only those that were.")
    if any(not step.incremental for step in state.steps):
        found.append("Answers came whole although a stream was asked for: TTFT is the total time.")
    pieces = max((step.chunks_per_read for step in state.steps), default=1.0)
    if pieces > 4:
        found.append(
            f"About {pieces:.0f} chunks arrive at once: the server or a proxy gathers them, so ITL means little."
        )
    behind = [said_load(step.kind, step.level) for step in state.steps if fell_behind(step)]
    if behind:
        found.append(
            f"The queue grew all the time at {', '.join(behind)}: latencies there depend on how long one measures."
        )
    example = next((s.error_example for s in state.steps if s.error_example), None)
    if example:
        found.append(f"An error: {example}")
    if state.skipped:
        found.append(f"{state.skipped:,} requests of the workload were left out: longer than the server's context.")
    return found


TIMES = (
    ">load", ">n", ">TTFT p50", ">p90", ">p99", ">ITL p50", ">p90", ">p99", ">TPOT p50", ">p90", ">p99",
    ">E2E p50", ">p90", ">p99",
)  # fmt: skip
RATES = (">load", ">out tok/s", ">total tok/s", ">req/s")
OPTIONAL: dict[str, Any] = {
    ">goodput": lambda step: None if step.goodput is None else f"{short(step.goodput)} ({step.slo_share:.0%})",
    ">cached": lambda step: _share(step.cached_share if step.cached_share is not None else step.engine.hit_share),
    ">KV": lambda step: _share(step.engine.kv_usage),
    ">running": lambda step: None if step.engine.running is None else f"{step.engine.running:,.0f}",
    ">waiting": lambda step: None if step.engine.waiting is None else f"{step.engine.waiting:,.0f}",
    ">preempted": lambda step: f"{step.engine.preemptions:,.0f}" if step.engine.preemptions else None,
    ">own CPU": lambda step: _share(step.core_share),
    "errors": lambda step: ", ".join(f"{count} {kind}" for kind, count in step.errors.items()) or None,
}
"""Columns that are shown where any step has something to say."""


def times_table(state: Sweep) -> tuple[Sequence[str], list[list[str]]]:
    """Latencies in milliseconds: columns and rows."""
    return TIMES, [_times(step) for step in state.steps]


def rates_table(state: Sweep) -> tuple[Sequence[str], list[list[str]]]:
    """Throughput and what the engine said: columns and rows."""
    rows = [_rates(step) for step in state.steps]
    columns = list(RATES)
    for name, tell in OPTIONAL.items():
        cells = [tell(step) for step in state.steps]
        if any(cell is not None for cell in cells):
            columns.append(name)
            for row, cell in zip(rows, cells, strict=True):
                row.append("-" if cell is None else cell)
    return columns, rows


def caption(state: Sweep) -> str:
    words = "; ".join(f"{name}: {text}" for name, text in DEFINITIONS.items() if name != "goodput" or state.slo)
    return f"{state.workload}. Milliseconds. {words}. Seed {state.seed}."


def as_dict(state: Sweep, endpoint: Endpoint, *, interrupted: bool) -> dict[str, Any]:
    """The JSON report."""
    knee = state.knee()
    limit = state.limit(knee)
    comparison = state.comparison(knee, limit)
    best = state.best()
    return {
        **envelope("sweep", endpoint, state.engine, state.model, interrupted=interrupted),
        "seed": state.seed,
        "workload": state.workload,
        "loop": "closed" if state.loads.kind == "concurrency" else "open",
        "headline": headline(state, knee, limit),
        "knee": None if knee is None else {**_plain(knee), "shares": {f"{k:g}": v for k, v in knee.shares.items()}},
        "limit": None if limit is None else _plain(limit),
        "plan": None if comparison is None else comparison.as_dict(),
        "slo": None
        if state.slo is None
        else {"limits_ms": {k: 1e3 * v for k, v in state.slo.limits.items()}, "highest_load": best and best.level},
        "stopped": state.stopped,
        "requests_sent": state.sent,
        "requests_skipped": state.skipped,
        "cautions": _cautions(state),
        "definitions": DEFINITIONS,
        "steps": [step.as_dict() for step in state.steps],
    }


def html_page(state: Sweep, endpoint: Endpoint) -> str:
    """One self-contained file."""
    knee = state.knee()
    limit = state.limit(knee)
    tone: Tone = "unsure" if knee is None or knee.sure == "guess" else "good"
    sections = (
        Section("What limits it", [bullets(facts(state, knee, limit))]),
        Section("Load", _plots(state, knee)),
        Section("Latency of each step", _distributions(state)),
        Section("Figures", [table(*times_table(state)), table(*rates_table(state)), paragraph(caption(state))]),
        Section("How the knee was found", [paragraph(_method(knee))]),
    )
    words = headline(state, knee, limit)
    return endpoint.redact(
        page("How much can this server take?", subtitle(endpoint, state.engine, state.model), words, tone, sections)
    )


def exit_code(state: Sweep) -> int:
    """0; 1 where the service level holds at no load; 3 where nothing was measured."""
    if not any(step.ttft for step in state.steps):
        return 3
    return 1 if state.slo is not None and state.best() is None else 0


def _plots(state: Sweep, knee: Knee | None) -> list[Html]:
    steps = [step for step in state.steps if step.ttft is not None]
    if not steps:
        return []
    xs = [step.level for step in steps]
    label = "requests in flight" if state.loads.kind == "concurrency" else "requests per second"
    marks = [] if knee is None else [Mark(knee.load, f"knee: {short(knee.load)}")]
    times = [_series(f"p{q}", steps, q) for q in (50, 90, 99)]
    tokens = [
        Series("output tokens/s", xs, [step.output_tokens_per_second for step in steps]),
        Series("all tokens/s", xs, [step.total_tokens_per_second for step in steps]),
    ]
    log = len(xs) > 1 and xs[-1] / xs[0] >= 8
    found = [
        plot("Time to first token", label, "milliseconds", times, marks=marks, log_x=log, log_y=True),
        plot("Throughput", label, "tokens per second", tokens, marks=marks, log_x=log),
    ]
    if state.slo is not None:
        good = Series("goodput", xs, [step.goodput or 0.0 for step in steps])
        done = Series("answered", xs, [step.requests_per_second for step in steps])
        title = f"Goodput under {state.slo.text}"
        found.append(plot(title, label, "requests per second", [done, good], marks=marks, log_x=log))
    return found


def _series(label: str, steps: list[StepResult], q: int) -> Series:
    return Series(label, [s.level for s in steps], [1e3 * getattr(s.ttft, f"p{q}") for s in steps])


def _distributions(state: Sweep) -> list[Html]:
    found = []
    for title, name in (("Time to first token", "ttfts"), ("Whole answers", "e2es")):
        groups = {f"{s.level:g}": [1e3 * v for v in _thinned(getattr(s, name))] for s in state.steps}
        if any(groups.values()):
            found.append(strips(title, "milliseconds, logarithmic", groups, log_y=True))
    return found


def _thinned(values: list[float]) -> list[float]:
    """Evenly spaced order statistics where there are too many to draw: the distribution stays."""
    if len(values) <= _DOTS:
        return values
    ordered = sorted(values)
    return [ordered[round(i * (len(ordered) - 1) / (_DOTS - 1))] for i in range(_DOTS)]


def _method(knee: Knee | None) -> str:
    text = (
        "Two straight lines are fitted to the median TTFT against the load, with relative errors and weights by how "
        "well each median is known; where they meet is the knee, if the second line is much steeper. "
    )
    if knee is None:
        return f"{text}Here one line does as well, or TTFT rises by less than half beyond it."
    shares = ", ".join(f"{load:g}: {share:.0%}" for load, share in knee.shares.items())
    return (
        f"{text}Resampling each step's requests in blocks 200 times put the knee between one load and the next as "
        f"follows (by the lower one): {shares}; in {knee.missing:.0%} there was none. Up to the highest load "
        f"TTFT grows {knee.rise:.1f} times."
    )


def _times(step: StepResult) -> list[str]:
    measured = (step.ttft, step.itl, step.tpot, step.e2e)
    return [
        f"{step.level:g}",
        f"{step.requests}",
        *(_ms(value, which) for value in measured for which in ("p50", "p90", "p99")),
    ]


def _rates(step: StepResult) -> list[str]:
    output, everything = step.output_tokens_per_second, step.total_tokens_per_second
    return [f"{step.level:g}", f"{output:,.0f}", f"{everything:,.0f}", short(step.requests_per_second)]


def _ms(value: Quantiles | None, which: str = "p50") -> str:
    return "-" if value is None else short(1e3 * getattr(value, which))


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.0%}"


def _plain(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
