"""`anaphora plan MODEL`: what fits on which hardware, and what to set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anaphora.cli.plan_outputs import Outputs, fill_wishes, plan_outputs, show_difference, show_settings

if TYPE_CHECKING:
    from anaphora.cli.quality_summary import QualityFile


@click.command()
@click.argument("model")
@click.option("--hardware", help="A device of `anaphora hardware`. Default: this machine.")
@click.option("--count", type=int, help="How many of them. Default: --tp x --pp.")
@click.option("--tp", type=int, help="Tensor parallel size. Default: --count.")
@click.option("--pp", type=int, help="Pipeline parallel size.")
@click.option("--dp", type=int, default=1, show_default=True, help="Replicas; each on --tp x --pp devices of its own.")
@click.option("--context", type=int, help="Tokens of one request, prompt and answer.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests at once.")
@click.option("--shared-prefix", type=int, default=0, show_default=True, help="Tokens that all of them begin with.")
@click.option("--engine", help="vllm, sglang, llama.cpp, ollama, transformers or anaphora. Default: by hardware.")
@click.option("--engine-version", help="Such as 0.11: older rules for what is left for KV. Default: the newest known.")
@click.option("--dtype", default="auto", show_default=True, help="Of the model: auto, bfloat16, float16, float32.")
@click.option("--quantization", help="Of the weights: fp8, awq, nvfp4, q4_k_m ... Default: the checkpoint's own.")
@click.option("--kv-dtype", default="auto", show_default=True, help="Of the cache: auto, bfloat16, fp8, int8, q8_0 ...")
@click.option("--utilization", type=float, help="The engine's share of the memory. Default: the engine's.")
@click.option("--max-num-seqs", type=int, help="Default: --concurrency.")
@click.option("--max-num-batched-tokens", type=int, help="Tokens per step. Default: the engine's.")
@click.option("--block-size", type=int, help="Tokens per block. Default: the engine's.")
@click.option("--quality", type=click.Path(path_type=Path), help="Show what `anaphora quality --output` measured too.")
@click.option("--grid", "with_grid", is_flag=True, help="Draw context x concurrency as a heat map.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the heat map as a page (or .svg).")
@click.option("--allow-long", is_flag=True, help="Plan a context beyond the model's own limit.")
@click.option("--assume-full-attention", is_flag=True, help="Size an unknown architecture as if all layers kept all.")
@click.option("--hub", is_flag=True, help="Ask the Hugging Face Hub for a model that is not known offline.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@plan_outputs
def plan(
    model: str,
    quality: Path | None,
    with_grid: bool,
    html: Path | None,
    assume_full_attention: bool,
    hub: bool,
    as_json: bool,
    **wishes: Any,
) -> None:
    """Say whether a workload fits, what would make it fit, and what to set.

    MODEL is a folder, a config.json, a .gguf file, or a name of `anaphora models`. Exit code 0: it fits; 1: it does
    not (with --attach and --log: the engine lies outside the prediction's interval); 2: the question makes no sense;
    3: the server of --attach does not answer.
    """
    from anaphora.geometry.find import find_geometry
    from anaphora.planning.ask import Wishes, ask
    from anaphora.planning.plan import answer
    from anaphora.planning.report import as_json as to_json
    from anaphora.planning.report import make_report

    measured = None if quality is None else _measured(quality)
    outputs = Outputs.take(wishes, drawn=with_grid or html is not None)
    engine_report = outputs.report()
    fill_wishes(wishes, outputs, engine_report)
    geometry = find_geometry(model, assume_full_attention=assume_full_attention, hub=hub)
    question, remarks = ask(model, geometry, Wishes(**wishes))
    exit_with = click.get_current_context().exit
    if outputs.emit is not None:
        now = answer(question)
        show_settings(outputs, question, now, wishes["dtype"], as_json)
        exit_with(0 if now.fits else 1)
    if engine_report is not None:
        from anaphora.planning.attribution import attribute

        found = attribute(answer(question), engine_report)
        show_difference(found, as_json)
        exit_with(0 if found.inside else 1)
    report = make_report(question, remarks)
    if html is not None:
        _write_html(report, html)
    if as_json:
        said = {} if measured is None else {"measured": {"model": measured.model, "kv_types": measured.measured}}
        click.echo(json.dumps(to_json(report, with_grid) | said, indent=2))
    else:
        from anaphora.cli.plan_text import print_report

        print_report(report, with_grid, measured)
    exit_with(0 if report.answer.fits else 1)


def _measured(path: Path) -> QualityFile:
    from anaphora.cli.quality_summary import read_quality

    return read_quality(path)


def _write_html(report: Any, path: Path) -> None:
    from anaphora.cli.plan_text import headline, verdict
    from anaphora.errors import ConfigError
    from anaphora.planning.heatmap import page, svg
    from anaphora.planning.plan import grid

    found, title = grid(report.question), headline(report)
    lines = [verdict(report), *report.remarks]
    text = svg(found, title) if path.suffix == ".svg" else page(found, title, lines)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error}; give a file in a folder that can be written") from None
