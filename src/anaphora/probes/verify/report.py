"""A verification as JSON, as lines for people, and as an HTML page. Pure."""

from __future__ import annotations

from html import escape
from typing import Any

from anaphora.probes.endpoint import Endpoint
from anaphora.probes.html import Html, Section, Tone, bullets, page, paragraph, table
from anaphora.probes.plots import Series, plot, short, strips
from anaphora.probes.report import envelope, subtitle
from anaphora.probes.verify.crosscheck import Testimony
from anaphora.probes.verify.divergence import Divergence
from anaphora.probes.verify.own_prompts import OwnPrompts, PromptResult, Reading
from anaphora.probes.verify.run import Verification
from anaphora.probes.verify.trials import KINDS, of_kind
from anaphora.probes.verify.verdict import Answer, Verdict, medians

DEFINITIONS = (
    "TTFT: first content chunk minus request sent. Cold: a prefix that nobody sent before. Warm: the same prefix, "
    "another question. Control: the prefix with its first character changed. Ratio: median over rounds of "
    "TTFT(cold) / TTFT(warm), percentile bootstrap over rounds."
)
EXIT_CODES: dict[Answer, int] = {"works": 0, "partly": 1, "does not": 1, "cannot tell": 3}

_TONES: dict[Answer, Tone] = {"works": "good", "partly": "bad", "does not": "bad", "cannot tell": "unsure"}
_HEADLINES: dict[Answer, str] = {
    "works": "Prefix caching works.",
    "partly": "Prefix caching works only sometimes.",
    "does not": "Prefix caching does not work here.",
    "cannot tell": "Whether prefix caching works cannot be told yet.",
}


def headline(verdict: Verdict) -> str:
    """The verdict, the reason and, where it is open, what would settle it."""
    text = f"{_HEADLINES[verdict.answer]} {verdict.reason}"
    if verdict.answer != "cannot tell":
        return text
    if verdict.more_rounds is not None:
        return f"{text} About {verdict.more_rounds} rounds would tell: --trials {verdict.more_rounds}."
    return f"{text} More rounds would not help: raise --prefix-tokens, or measure when the server is idle."


def exit_code(state: Verification) -> int:
    """0 works, 1 does not or only sometimes, 3 cannot be told or the endpoint failed."""
    return 3 if state.failure is not None else EXIT_CODES[state.verdict().answer]


def facts(state: Verification) -> list[str]:
    """What was found beside the verdict, one sentence each."""
    verdict = state.verdict()
    found = []
    times, ratio = medians(state.trials), verdict.ratio
    if times:
        text = ", ".join(f"{kind} {milliseconds(seconds)}" for kind, seconds in times.items())
        found.append(f"TTFT {text} (medians of {verdict.rounds} rounds).")
    if ratio is not None:
        low, high = short(ratio.low), short(ratio.high)
        found.append(f"Cold / warm is {short(ratio.estimate)}, with a {ratio.level:.0%} interval of {low} to {high}.")
    if state.scale is not None:
        how = {"usage": "by the server's usage", "tokenize": "by its /tokenize", "assumed": "assumed"}
        found.append(f"The shared prefix has about {state.real_prefix_tokens:,.0f} tokens ({how[state.scale.source]}).")
    if state.granularity is not None:
        found.append(state.granularity.sentence)
    if state.memory is not None:
        found.append(state.memory.sentence)
    if state.failure is not None:
        found.append(f"The measurement ended early: {state.failure}")
    return found


def witness_rows(state: Verification) -> list[list[str]]:
    """Clock, cached_tokens and counters side by side: name, cold, warm, control."""
    times = medians(state.trials)
    rows = [["clock: TTFT", *(milliseconds(times[kind]) if kind in times else "-" for kind in KINDS)]]
    check = state.cross_check()
    named = state.counters.hit_name if state.counters is not None else "hit counter"
    for name, told in (("usage: cached_tokens", check.cached_tokens), (f"metrics: {named}", check.counters)):
        rows.append([name, *(_tokens(value) for value in _values(told))])
    return rows


def as_dict(state: Verification, endpoint: Endpoint, *, interrupted: bool) -> dict[str, Any]:
    """The JSON report."""
    verdict = state.verdict()
    measured = verdict.ratio is not None
    return {
        **envelope("verify", endpoint, state.engine, state.model, interrupted=interrupted),
        "seed": state.seed,
        "prefix_tokens": round(state.real_prefix_tokens),
        "prefix_tokens_source": state.scale.source if state.scale is not None else None,
        "verdict": verdict.as_dict(),
        "headline": headline(verdict),
        "median_ttft_seconds": medians(state.trials),
        "granularity": None if state.granularity is None else state.granularity.as_dict(),
        "witnesses": state.cross_check().as_dict() if measured else None,
        "findings": [finding.as_dict() for finding in state.findings()],
        "stream_buffered": state.buffered,
        "memory": None if state.memory is None else state.memory.as_dict(),
        "failure": None if state.failure is None else {"kind": state.failure.kind, "message": str(state.failure)},
        "trials": [trial.as_dict() for trial in state.trials],
        "row_colds": [trial.as_dict() for trial in state.row_colds],
        "repeats": [trial.as_dict() for trial in state.repeats],
        "definitions": DEFINITIONS,
    }


def html_page(state: Verification, endpoint: Endpoint) -> str:
    """One self-contained file."""
    verdict = state.verdict()
    by_kind: dict[str, list[float]] = {
        kind: [1000 * trial.ttft for trial in of_kind(state.trials, kind)] for kind in KINDS
    }
    plots: list[Html] = []
    if any(by_kind.values()):
        plots.append(strips("Time to first token", "milliseconds, logarithmic", by_kind, log_y=True))
    if state.repeats:
        row = [1000 * trial.ttft for trial in (*state.row_colds[1:2], *state.repeats)]
        numbers = [float(n + 1) for n in range(len(row))]
        plots.append(plot("One prefix in a row", "request", "TTFT, ms", [Series("TTFT", numbers, row)]))
    steps: list[Html] = []
    if state.granularity is not None and state.granularity.readings:
        shared, reused = zip(*state.granularity.readings, strict=True)
        series = [Series("reused", shared, reused, "dots")]
        steps = [
            paragraph(state.granularity.sentence),
            plot("What is reused of a shared prefix", "shared tokens, about", "reused tokens", series),
        ]
    findings = [f"{finding.what} {finding.fix}" for finding in state.findings()]
    sections = [
        Section("What was measured", [bullets(facts(state)), *plots]),
        Section("Findings", [bullets(findings)] if findings else []),
        Section("What the server says and what the clock says", [table(_WITNESS_COLUMNS, witness_rows(state))]),
        Section("Steps of reuse", steps),
        Section("Definitions", [paragraph(DEFINITIONS), paragraph(f"Seed {state.seed}.")]),
    ]
    line = subtitle(endpoint, state.engine, state.model)
    return endpoint.redact(page("Prefix caching, verified", line, headline(verdict), _TONES[verdict.answer], sections))


_WITNESS_COLUMNS = ("witness", ">cold", ">warm", ">control")


def own_headline(state: OwnPrompts) -> str:
    """One sentence on the user's own prompts."""
    results = state.results()
    told = [result for result in results[1:] if result.hit is not None]
    if not told:
        return (
            "Whether these prompts hit cannot be told: the server reports no reuse and the clock shows no difference."
        )
    hits = sum(bool(result.hit) for result in told)
    text = f"{hits} of {len(told)} prompts reused at least half of their tokens from earlier ones."
    again = [result.hit_again for result in results if result.hit_again is not None and not result.too_short]
    if again and not any(again):
        return f"{text} Sent again word for word, none did: no prefix cache, or it is too small, or its steps too wide."
    if again and not all(again):
        return f"{text} Sent again word for word, {sum(map(bool, again))} of {len(again)} did."
    return text


def own_exit_code(state: OwnPrompts) -> int:
    """0 nothing to mend, 1 a miss that can be mended, 3 the endpoint failed or tells nothing."""
    if state.failure is not None or all(result.hit is None for result in state.results()[1:] or state.results()):
        return 3
    return 1 if state.needs_attention() else 0


def own_rows(state: OwnPrompts) -> list[list[str]]:
    """For each prompt: number, tokens, reused at first, reused again, TTFT at first and again, why it missed."""
    return [_own_row(result) for result in state.results()]


OWN_COLUMNS = (">prompt", ">tokens", ">reused", ">again", ">TTFT", ">again", "parts from", "at")


def own_as_dict(state: OwnPrompts, endpoint: Endpoint, *, interrupted: bool) -> dict[str, Any]:
    """The JSON report of --prompts."""
    return {
        **envelope("verify --prompts", endpoint, state.engine, state.model, interrupted=interrupted),
        "headline": own_headline(state),
        "prompts": [result.as_dict() for result in state.results()],
        "failure": None if state.failure is None else {"kind": state.failure.kind, "message": str(state.failure)},
    }


def own_html_page(state: OwnPrompts, endpoint: Endpoint) -> str:
    """One self-contained file with every divergence marked."""
    marked = [
        Html(f"<h3>Prompt {result.number}: {escape(result.divergence.cause.name)}</h3>{_marked(result.divergence)}")
        for result in state.results()
        if result.divergence is not None
    ]
    tone: Tone = {0: "good", 1: "bad"}.get(own_exit_code(state), "unsure")  # type: ignore[assignment]
    sections = [Section("Prompts", [table(OWN_COLUMNS, own_rows(state))]), Section("Where they part", marked)]
    line = subtitle(endpoint, state.engine, state.model)
    return endpoint.redact(page("Your prompts, replayed", line, own_headline(state), tone, sections))


def milliseconds(seconds: float) -> str:
    return f"{short(1000 * seconds)} ms"


def _own_row(result: PromptResult) -> list[str]:
    found = result.divergence
    return [
        str(result.number),
        _tokens(result.first.prompt_tokens),
        _reused(result.first),
        "-" if result.second is None else _reused(result.second),
        milliseconds(result.first.ttft),
        "-" if result.second is None else milliseconds(result.second.ttft),
        "" if found is None else f"prompt {found.nearest + 1}: {found.cause.name}",
        "" if found is None else f"character {found.position:,} ({found.shared:.0%})",
    ]


def _reused(reading: Reading) -> str:
    return _tokens(reading.reused)


def _marked(found: Divergence) -> Html:
    def line(who: str, differing: str, after: str) -> str:
        visible = escape(differing.replace("\n", "\u23ce\n").replace("\t", "\u21e5") or "\u2205")
        return f"{who}: …{escape(found.before)}<mark>{visible}</mark>{escape(after)}…"

    earlier = line(f"prompt {found.nearest + 1}", found.theirs, "")
    fix = f"<p>{escape(found.cause.fix)}</p>" if found.cause.fix else ""
    return Html(f"<pre>{line('this prompt', found.mine, found.after)}\n{earlier}</pre>{fix}")


def _values(told: Testimony) -> tuple[float | None, float | None, float | None]:
    return told.cold, told.warm, told.control


def _tokens(value: float | None) -> str:
    return "not told" if value is None else f"{value:,.0f}"
