"""The page of `anaphora quality --html`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anaphora.cli import quality_text as text
from anaphora.probes.html import Html, Section, bullets, page, paragraph, table
from anaphora.probes.plots import Mark, Series, plot

if TYPE_CHECKING:
    from anaphora.cli.quality_summary import Form, Recommendation
    from anaphora.engine.quality.results import Result


def html_page(result: Result, found: Sequence[Form], advice: Recommendation) -> str:
    sections = [
        Section("Quality", _grid(text.QUALITY_COLUMNS, text.quality_rows(found, result), text.quality_caption(result))),
        Section("Cost", _grid(text.COST_COLUMNS, text.cost_rows(found), text.cost_caption(found, result))),
        Section("By position", [_positions(found)]),
        Section("By layer left out", [_layers(name, result) for name in result.skipped]),
        Section("Details", [bullets(text.remarks(found, result))]),
    ]
    return page(
        f"KV cache of {result.model}",
        text.subtitle(result),
        text.headline(advice),
        "good" if advice.met else "unsure",
        sections,
    )


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> list[Html]:
    return [table(columns, rows), paragraph(caption)]


def _positions(found: Sequence[Form]) -> Html:
    series = [
        Series(form.name, [stop for stop, _ in form.kl_by_position], [kl for _, kl in form.kl_by_position])
        for form in found[1:]
    ]
    return plot("Mean KL by position", "position, up to", "nats a token", series, log_y=True)


def _layers(name: str, result: Result) -> Html:
    layers = result.skipped[name]
    series = [
        Series("one layer in bf16", range(len(layers)), layers),
        Series("none", [0, len(layers) - 1], [result.skipped_baseline[name]] * 2),
    ]
    best = min(range(len(layers)), key=lambda layer: layers[layer])
    marks = [Mark(best, f"layer {best}")]
    return plot(f"Mean KL of {name} with one layer left out", "layer", "nats a token", series, marks=marks)
