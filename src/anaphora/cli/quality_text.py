"""Words and tables of a quality report, the same in the terminal and on the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from anaphora.probes.plots import short

if TYPE_CHECKING:
    from anaphora.cli.quality_summary import Form, Recommendation
    from anaphora.engine.quality.results import Result

QUALITY_COLUMNS = (
    "KV cache",
    ">mean KL",
    ">95 % interval",
    ">p99 KL",
    ">same choice",
    ">perplexity",
    "greedy tokens",
    ">answers",
)
COST_COLUMNS = ("KV cache", ">bytes/token", ">tokens/GiB", ">capacity", ">decode tokens/s", ">TTFT")


def headline(advice: Recommendation) -> str:
    return f"Recommended: {advice.name}. {advice.why[:1].upper()}{advice.why[1:]}."


def subtitle(result: Result) -> str:
    return (
        f"{result.model}, computed in {result.dtype} by the {result.backend} kernels; {len(result.text):,} tokens of "
        f"{len(result.texts)} texts in prompts of up to {result.context:,}"
    )


def quality_rows(found: Sequence[Form], result: Result) -> list[list[str]]:
    return [
        [
            form.name,
            short(form.mean_kl.estimate),
            f"{short(form.mean_kl.low)} .. {short(form.mean_kl.high)}",
            short(form.p99_kl),
            f"{form.agreement.estimate:.2%}",
            f"{form.perplexity:.3f}",
            _greedy(form.first_difference, result.greedy_tokens),
            f"{sum(form.answered)} of {len(form.answered)}" if form.answered else "-",
        ]
        for form in found
    ]


def cost_rows(found: Sequence[Form]) -> list[list[str]]:
    return [
        [
            form.name,
            f"{form.bytes_per_token:,}",
            f"{form.tokens_per_gib:,}",
            f"{form.capacity:.2f}x",
            f"{form.decode_tokens_per_second:.1f}",
            f"{form.ttft_seconds:.3f} s",
        ]
        for form in found
    ]


def quality_caption(result: Result) -> str:
    spread = "Intervals are over texts." if len(result.texts) > 1 else "One text only: there is no interval."
    return (
        f"KL in nats a token, against {result.reference.name}, teacher-forced. {spread} Greedy tokens: how many of the "
        f"prompts go on alike for {result.greedy_tokens} tokens, and where the others part. Answers: questions whose "
        "answer stands far back."
    )


def cost_caption(found: Sequence[Form], result: Result) -> str:
    streams = found[0].streams
    return (
        f"Decode: {streams} sequence{'s' if streams > 1 else ''} of {result.context:,} tokens at once, nothing shared. "
        f"TTFT: a prompt of {result.context:,} tokens."
    )


def remarks(found: Sequence[Form], result: Result) -> list[str]:
    """What the tables leave out."""
    lines = []
    reference, *others = found
    if len(reference.kl_by_kind) > 1:
        for form in others:
            kinds = ", ".join(f"{kind} {short(kl)}" for kind, kl in form.kl_by_kind.items())
            lines.append(f"{form.name}, mean KL by kind of text: {kinds}.")
    if reference.answered and not any(reference.answered):
        lines.append(
            f"{reference.name} itself gives no answer right: the questions say nothing of this model; look at KL."
        )
    for name, layers in result.skipped.items():
        few = min(3, max(1, len(layers) // 4))
        gains = sorted(range(len(layers)), key=lambda layer: layers[layer])[:few]
        best = ", ".join(f"layer {layer} ({short(layers[layer])})" for layer in gains)
        lines.append(
            f"{name} with one layer left in {reference.name}: mean KL {short(result.skipped_baseline[name])} falls "
            f"most without {best}: --kv-cache-dtype-skip-layers {','.join(str(layer) for layer in sorted(gains))}."
        )
    return lines


def _greedy(differences: Sequence[int | None], tokens: int) -> str:
    parted = [at for at in differences if at is not None]
    same = f"{len(differences) - len(parted)} of {len(differences)} alike"
    if not parted:
        return same
    return f"{same}, else part at {min(parted)} .. {max(parted)} (median {statistics.median(parted):g})"
