"""`anaphora quality MODEL`: what a smaller KV cache changes in this model's answers, and what it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anaphora.cli.options import FiniteRange, model_options, needs_serve_extra, user_config
from anaphora.cli.quality_summary import DEFAULT_MAX_KL
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.cli.quality_summary import Form, Recommendation
    from anaphora.engine.quality.opening import Opened
    from anaphora.engine.quality.results import Result
    from anaphora.engine.quality.sequences import Subject
    from anaphora.engine.quality.study import Study

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("model")
@click.option(
    "--kv-dtypes",
    default="fp8_e4m3,int8,k8v4,int4",
    show_default=True,
    help="Values of --kv-cache-dtype to compare with bf16, separated by commas.",
)
@click.option("--prompts", type=_FILE, help="Read these instead: JSONL of chat requests, or one prompt a line.")
@click.option("--context", type=click.IntRange(8), default=2048, show_default=True, help="Most tokens of a prompt.")
@click.option(
    "--greedy-tokens", type=click.IntRange(1), default=64, show_default=True, help="Generated after every prompt."
)
@click.option(
    "--max-kl",
    type=FiniteRange(0),
    help=f"Recommend the smallest form within this mean KL, nats a token. Default: {DEFAULT_MAX_KL}.",
)
@click.option("--by-layer", metavar="DTYPE", help="Also measure DTYPE with each layer in turn left in bf16.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--html", type=_FILE, help="Write a report with plots here.")
@click.option("--output", type=_FILE, help="Write the JSON here too; `plan` and `serve` read it with --quality.")
@model_options
def quality(
    model: str,
    kv_dtypes: str,
    prompts: Path | None,
    context: int,
    greedy_tokens: int,
    max_kl: float | None,
    by_layer: str | None,
    as_json: bool,
    html: Path | None,
    output: Path | None,
    **options: Any,
) -> None:
    """Measure what smaller forms of the KV cache change in MODEL's answers, and what they save.

    Reads the same prompts with every form, token by token, and compares the probabilities of every next token with
    those of a bf16 cache: mean and p99 KL divergence, the likeliest token, perplexity, greedy continuations, questions
    whose answer stands far back; then bytes, tokens a second and TTFT.

    Exit code 0; 1: --max-kl was given and no smaller form is within it; 2: the question makes no sense.
    """
    needs_serve_extra()
    from anaphora.cli.probe_options import shown_steps, write_html
    from anaphora.cli.progress import resolve_with_progress
    from anaphora.cli.quality_page import html_page
    from anaphora.cli.quality_summary import as_dict, forms, recommend
    from anaphora.engine.quality.opening import open_model

    names = [name.strip() for name in kv_dtypes.split(",") if name.strip()]
    opened = open_model(resolve_with_progress(model), user_config(options), names)
    study = _study(opened, prompts, context, greedy_tokens)
    skipping = None if by_layer is None else _subject(opened, by_layer)
    with shown_steps() as progress:
        result = study.run(progress, skipping)
    limit = DEFAULT_MAX_KL if max_kl is None else max_kl
    found = forms(result)
    advice = recommend(found, limit)
    text = json.dumps(as_dict(result, found, advice, limit), indent=2, ensure_ascii=False)
    if output is not None:
        _write(output, text + "\n")
    if html is not None:
        write_html(html, html_page(result, found, advice))
    if as_json:
        click.echo(text)
    else:
        _print(result, found, advice)
    click.get_current_context().exit(1 if max_kl is not None and not advice.met else 0)


def _study(opened: Opened, path: Path | None, context: int, greedy_tokens: int) -> Study:
    from anaphora.engine.quality.prompts import built_in, own, questions
    from anaphora.engine.quality.study import Study
    from anaphora.probes.verify.own_prompts import load_requests

    limit = opened.prepared.geometry.max_position
    if limit is not None and context > limit:
        raise ConfigError(f"--context {context} is beyond this model's context of {limit} tokens; give {limit} or less")
    tokenizer = opened.tokenizer
    if path is not None:
        return Study(opened, own(load_requests(path), tokenizer, context), (), greedy_tokens)
    return Study(opened, built_in(tokenizer, context), questions(tokenizer, context), greedy_tokens)


def _subject(opened: Opened, name: str) -> Subject:
    """Raises ConfigError when it is not among those compared."""
    for subject in opened.subjects[1:]:
        if subject.name == name:
            return subject
    compared = ", ".join(subject.name for subject in opened.subjects[1:])
    raise ConfigError(f"--by-layer {name}: it is not compared; choose one of {compared}, or add it to --kv-dtypes")


def _print(result: Result, found: list[Form], advice: Recommendation) -> None:
    from rich.console import Console

    from anaphora.cli import quality_text as words
    from anaphora.cli.tables import print_table

    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(words.subtitle(result), style="dim")
    console.print(f"\n{words.headline(advice)}\n", style="bold green" if advice.met else "bold yellow")
    print_table(words.QUALITY_COLUMNS, words.quality_rows(found, result), words.quality_caption(result))
    print_table(words.COST_COLUMNS, words.cost_rows(found), words.cost_caption(found, result))
    for line in words.remarks(found, result):
        console.print(f"- {line}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}; give a file in a folder that exists") from None
