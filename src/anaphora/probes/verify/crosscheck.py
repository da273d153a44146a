"""The lie detector: what the server says about reuse against what the clock says. Pure.

Three witnesses: the clock (time to the first token), `cached_tokens` of every answer, and the engine's hit counter. A
witness that claims reuse where the clock saw none, or none where the clock saw it, is named, with the likely causes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from anaphora.probes.counters import Counters
from anaphora.probes.engines import Engine
from anaphora.probes.statistics import median
from anaphora.probes.verify.granularity import Source
from anaphora.probes.verify.trials import Trial, of_kind
from anaphora.probes.verify.verdict import SMALLEST_GAIN, Verdict

Severity = Literal["problem", "note"]

REPORT_FLAG = {
    "vllm": "start vLLM with --enable-prompt-tokens-details (some versions leave the field empty even then)",
    "sglang": "start SGLang with --enable-cache-report",
    "transformers": "transformers serve does not report it",
    "ollama": "update Ollama: versions before August 2026 do not report it",
}
METRICS_FLAG = {
    "vllm": "vLLM exports them unless started with --disable-log-stats; is /metrics hidden by a proxy?",
    "sglang": "start SGLang with --enable-metrics",
    "llama.cpp": "start llama-server with --metrics",
    "ollama": "Ollama exports no metrics",
    "transformers": "transformers serve exports no hit counters",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing. `code` is stable; `what` and `fix` are for people."""

    code: str
    severity: Severity
    what: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Testimony:
    """What one witness says of each kind of request: median reused tokens, None where it is silent."""

    cold: float | None
    warm: float | None
    control: float | None

    @classmethod
    def of(cls, trials: Sequence[Trial], read: Callable[[Trial], float | None]) -> Testimony:
        def one(kind: Literal["cold", "warm", "control"]) -> float | None:
            told = [value for trial in of_kind(trials, kind) if (value := read(trial)) is not None]
            return median(told) if told else None

        return cls(one("cold"), one("warm"), one("control"))

    def claims_reuse(self, prefix_tokens: float) -> bool | None:
        """Whether it says that warm requests reused at least half of the prefix more than cold ones did."""
        if self.warm is None:
            return None
        return self.warm - (self.cold or 0.0) >= prefix_tokens / 2


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The witnesses side by side, and what follows."""

    cached_tokens: Testimony
    counters: Testimony
    findings: tuple[Finding, ...]
    trusted: Source
    """The most exact witness that does not contradict the clock."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "cached_tokens": asdict(self.cached_tokens),
            "counters": asdict(self.counters),
            "trusted": self.trusted,
        }


def settle(verdict: Verdict, trials: Sequence[Trial], prefix_tokens: float) -> Verdict:
    """Where the clock leaves it open, take the word of the server if both of its witnesses say the same."""
    if verdict.answer != "cannot tell" or verdict.ratio is None or verdict.ratio.low > SMALLEST_GAIN:
        return verdict
    witnesses = [
        Testimony.of(trials, lambda trial: trial.cached_tokens),
        Testimony.of(trials, lambda trial: trial.counter_hits),
    ]
    claims = {witness.claims_reuse(prefix_tokens) for witness in witnesses}
    honest = all(max(w.cold or 0.0, w.control or 0.0) < prefix_tokens / 2 for w in witnesses)
    open_case = f"The clock leaves it open (a ratio of {verdict.ratio.low:.2f} to {verdict.ratio.high:.2f})"
    if claims == {False} and honest:
        reason = f"{open_case}, but the server itself says that it reused nothing."
        return replace(verdict, answer="does not", reason=reason, basis="server", more_rounds=None)
    if claims == {True} and honest:
        reason = f"{open_case}, but answers and counters agree that the prefix is reused; it saves little time here."
        return replace(verdict, answer="works", reason=reason, basis="server", more_rounds=None)
    return verdict


def cross_check(
    trials: Sequence[Trial],
    verdict: Verdict,
    counters: Counters | None,
    engine: Engine,
    prefix_tokens: float,
    slow_repeats: int | None = None,
) -> CrossCheck:
    """Compare the witnesses.

    `counters`: the first reading, None where there are none. `slow_repeats`: how many of a row of requests with one
    prefix were as slow as cold ones, the first included; None where that was not tried.
    """
    # where some warm requests missed, only what is said of the others can be a lie about reuse
    heard = [t for t in trials if t.kind != "warm" or verdict.threshold is None or t.ttft < verdict.threshold]
    told = Testimony.of(heard, lambda trial: trial.cached_tokens)
    counted = Testimony.of(heard, lambda trial: trial.counter_hits)
    clock = {"works": True, "partly": True, "does not": False, "cannot tell": None}[verdict.answer]
    findings = [
        *_usage_findings(told, clock, prefix_tokens, engine),
        *_counter_findings(trials, counted, counters, clock, prefix_tokens, engine),
        *_prompt_findings(trials, told, counted, prefix_tokens),
    ]
    if verdict.answer == "partly":
        findings.append(_why_partly(trials, verdict, slow_repeats))
    lying = {finding.code.partition(".")[0] for finding in findings if finding.severity == "problem"}
    trusted: Source = "clock"
    if counted.claims_reuse(prefix_tokens) and "counters" not in lying:
        trusted = "counters"
    if told.claims_reuse(prefix_tokens) and "cached_tokens" not in lying:
        trusted = "cached_tokens"
    return CrossCheck(told, counted, tuple(findings), trusted)


def _usage_findings(told: Testimony, clock: bool | None, prefix: float, engine: Engine) -> list[Finding]:
    claims = told.claims_reuse(prefix)
    if claims is None:
        how = "a gateway may drop the field" if engine.gateway else REPORT_FLAG.get(engine.name, "it has no such field")
        text = "The server does not report cached_tokens, so clients cannot see what was reused."
        return [Finding("cached_tokens.missing", "note", text, f"To see it: {how}.")]
    if (told.cold or 0.0) >= prefix / 2:
        what = f"cached_tokens says {told.cold:,.0f} of prompts that nobody ever sent before."
        return [
            Finding(
                "cached_tokens.random", "problem", what, "Do not trust this field: it counts something else than reuse."
            )
        ]
    if clock and not claims:
        cause = (
            f"{engine.gateway} in front of the engine may drop or zero it; compare with the engine itself"
            if engine.gateway
            else f"the field is not wired here; {REPORT_FLAG.get(engine.name, 'update the server')}"
        )
        what = f"cached_tokens says {told.warm:,.0f} where the clock shows that the prefix was reused: the field lies."
        return [Finding("cached_tokens.low", "problem", what, f"Trust the clock. Likely cause: {cause}.")]
    if clock is False and claims:
        what = (
            f"cached_tokens claims {told.warm:,.0f} reused tokens, but the first token came no sooner: the field lies, "
            "or loading the saved prefix takes as long as computing it."
        )
        fix = "Compare the engine's counters; with an offload tier, measure the tier; else distrust the field."
        return [Finding("cached_tokens.high", "problem", what, fix)]
    return []


def _counter_findings(
    trials: Sequence[Trial],
    counted: Testimony,
    counters: Counters | None,
    clock: bool | None,
    prefix: float,
    engine: Engine,
) -> list[Finding]:
    if counters is None or counters.hit_tokens is None:
        text = "No hit counters can be read from /metrics."
        return [Finding("counters.missing", "note", text, METRICS_FLAG.get(engine.name, "Export them if you can."))]
    name = counters.hit_name
    sent = sum(trial.prompt_tokens or prefix for trial in trials if trial.counter_queries is not None)
    queried = sum(trial.counter_queries or 0.0 for trial in trials)
    if sent and queried > 1.5 * sent:
        what = f"The counters grew by {queried:,.0f} queried tokens while this probe sent {sent:,.0f}."
        fix = "Others use the server now (or preempted requests are counted again): measure when it is idle."
        return [Finding("counters.others", "note", what, fix)]
    claims = counted.claims_reuse(prefix)
    if (counted.cold or 0.0) >= prefix / 2:
        what = f"{name} grew by {counted.cold:,.0f} for prompts that nobody ever sent before: the counter lies."
        fix = "It probably counts tokens that preempted requests recompute: trust the clock, and update the engine."
        return [Finding("counters.random", "problem", what, fix)]
    if clock and claims is False:
        what = f"{name} grew by {counted.warm:,.0f} where the clock shows that the prefix was reused: the counter lies."
        return [
            Finding(
                "counters.low",
                "problem",
                what,
                "Trust the clock: the metric is not wired in this build, or another replica than the one scraped "
                "answers.",
            )
        ]
    if clock is False and claims:
        what = f"{name} claims {counted.warm:,.0f} reused tokens, but the first token came no sooner."
        fix = "Loading the saved prefix may take as long as computing it (an offload tier), or the counter is wrong."
        return [Finding("counters.high", "problem", what, fix)]
    return []


def _prompt_findings(trials: Sequence[Trial], told: Testimony, counted: Testimony, prefix: float) -> list[Finding]:
    findings = []
    control = told.control if told.control is not None else counted.control
    honest_cold = (told.cold if told.cold is not None else counted.cold) or 0.0
    if control is not None and control >= prefix / 2 and honest_cold < prefix / 2:
        what = f"Prompts whose first character differs still reuse {control:,.0f} tokens: not a prefix, shifted chunks."
        fix = "With llama-server that is --cache-reuse; it can change answers. Set it to 0 to be exact."
        findings.append(Finding("reuse.shifted", "note", what, fix))
    prompts = [t.prompt_tokens for t in of_kind(trials, "cold") if t.prompt_tokens]
    if prompts and median(prompts) < 0.9 * prefix:
        what = f"Prompts of about {prefix:,.0f} tokens were counted as {median(prompts):,.0f}: the server cut them."
        fix = "Raise the context (num_ctx in Ollama, --ctx-size in llama-server, --max-model-len in vLLM)."
        findings.append(Finding("prompt.cut", "problem", what, fix))
    return findings


def _why_partly(trials: Sequence[Trial], verdict: Verdict, slow_repeats: int | None) -> Finding:
    """One slot forgets as soon as another prompt comes between; replicas miss whatever the order."""
    threshold = verdict.threshold or 0.0
    warm = of_kind(trials, "warm")
    at_once = [trial.ttft < threshold for trial in warm if trial.gap == 0]
    later = [trial.ttft < threshold for trial in warm if trial.gap > 0]
    if at_once and later and sum(at_once) >= 0.9 * len(at_once) and sum(later) <= 0.1 * len(later):
        what = "A prefix is reused only by the very next request: another prompt in between and it is gone."
        fix = "One slot, or a tiny cache: give it more slots (OLLAMA_NUM_PARALLEL, --parallel) or more KV memory."
        return Finding("cache.forgets", "problem", what, fix)
    what = "Requests with the same prefix are of two kinds, fast and as slow as cold ones, whatever came between."
    if slow_repeats is not None and slow_repeats > 1:
        what += f" In a row of them {slow_repeats} were slow, so about {slow_repeats} replicas answer in turn."
    fix = "Replicas without affinity: let the balancer keep a prefix on one replica (prefix-aware or sticky routing)."
    return Finding("replicas.no_affinity", "problem", what, fix)
