"""`anaphora generate MODEL PROMPT`: print text as it comes; `--compare-cache` shows what the cache saves."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from anaphora.cli.options import FiniteRange, engine_options, needs_serve_extra, user_config
from anaphora.errors import InvalidRequest

if TYPE_CHECKING:
    from anaphora.engine.build import Prepared
    from anaphora.engine.compare_cache import Run
    from anaphora.engine.engine import Engine


@click.command()
@click.argument("model")
@click.argument("prompt")
@click.option("--chat/--raw", default=False, show_default=True, help="Wrap the prompt in the model's chat template.")
@click.option("--max-tokens", type=click.IntRange(1), default=200, show_default=True, help="Most new tokens.")
@click.option("--temperature", type=FiniteRange(0), default=0.0, show_default=True, help="0 = greedy.")
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, show_default=True, help="Nucleus.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--prompt-tokens", type=click.IntRange(1), help="Repeat or cut the prompt to exactly this many tokens.")
@click.option(
    "--compare-cache", is_flag=True, help="Generate greedily with no cache and with the cache; fail if they differ."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@engine_options
def generate(
    model: str,
    prompt: str,
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    ignore_eos: bool,
    prompt_tokens: int | None,
    compare_cache: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text from PROMPT with MODEL (a folder, a GGUF file, org/name, or smollm2-135m)."""
    needs_serve_extra()
    from anaphora.cli.progress import resolve_with_progress
    from anaphora.engine.build import Startup, load, prepare
    from anaphora.engine.params import SamplingParams

    folder = resolve_with_progress(model)
    prepared = prepare(folder, user_config(options))
    engine = load(prepared, Startup())
    try:
        if chat:
            prompt_ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            prompt_ids = engine.tokenizer.encode(prompt)
        if prompt_tokens is not None and prompt_ids:
            prompt_ids = (prompt_ids * -(-prompt_tokens // len(prompt_ids)))[:prompt_tokens]
        if compare_cache:
            _compare(engine, prepared, prompt_ids, max_tokens, as_json)
            return
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, ignore_eos=ignore_eos)
        _generate(engine, prompt_ids, params, as_json)
    finally:
        engine.close()


def _generate(engine: Engine, prompt_ids: list[int], params: Any, as_json: bool) -> None:
    engine.add("generate", prompt_ids, params)
    text: list[str] = []
    last = None
    while engine.has_work:
        for last in engine.step():
            text.append(last.text)
            if not as_json:
                sys.stdout.write(last.text)
                sys.stdout.flush()
    assert last is not None
    if last.finish_reason == "error":
        raise click.ClickException(last.error or "the step failed")
    if not as_json:
        sys.stdout.write("\n")
        return
    click.echo(
        json.dumps(
            {
                "schema_version": 1,
                "command": "generate",
                "text": "".join(text),
                "finish_reason": last.finish_reason,
                "prompt_tokens": last.num_prompt_tokens,
                "completion_tokens": last.num_output_tokens,
            }
        )
    )


def _compare(engine: Engine, prepared: Prepared, prompt_ids: list[int], new_tokens: int, as_json: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from anaphora.engine.compare_cache import with_cache, without_cache

    longest = prepared.config.max_model_len
    if not prompt_ids or len(prompt_ids) + new_tokens > longest:
        raise InvalidRequest(
            f"{len(prompt_ids)} prompt tokens and {new_tokens} new ones must be at least 1 and at most {longest} "
            "together; shorten the prompt or lower --max-tokens"
        )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        cached_task = bar.add_task("with the cache", total=new_tokens)
        cached = with_cache(
            engine.runner, prepared.blocks.layout, prompt_ids, new_tokens, lambda n: bar.advance(cached_task, n)
        )
        plain_task = bar.add_task("no cache", total=new_tokens)
        plain = without_cache(
            engine.runner, prepared.blocks.layout, prompt_ids, new_tokens, lambda n: bar.advance(plain_task, n)
        )
    same = plain.token_ids == cached.token_ids
    if as_json:
        click.echo(json.dumps(_comparison(prompt_ids, plain, cached, same)))
    else:
        _print_comparison(engine, prompt_ids, plain, cached)
    if not same:
        at = next(i for i, (a, b) in enumerate(zip(plain.token_ids, cached.token_ids, strict=True)) if a != b)
        raise click.ClickException(f"the two runs differ from new token {at} on: a bug in the cache; please report it")


def _comparison(prompt_ids: list[int], plain: Run, cached: Run, same: bool) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "command": "generate --compare-cache",
        "prompt_tokens": len(prompt_ids),
        "new_tokens": len(plain.token_ids),
        "token_computations": {
            "no_cache": plain.new_token_tokens,
            "no_cache_first_prompt_pass": plain.prompt_pass_tokens,
            "with_cache": cached.prompt_pass_tokens + cached.new_token_tokens,
        },
        "seconds": {"no_cache": plain.seconds, "with_cache": cached.seconds},
        "same_tokens": same,
    }


def _print_comparison(engine: Engine, prompt_ids: list[int], plain: Run, cached: Run) -> None:
    from rich.console import Console
    from rich.table import Table

    click.echo(engine.tokenizer.decode(cached.token_ids))
    table = Table(title=f"{len(prompt_ids):,} prompt tokens, {len(plain.token_ids):,} new tokens, greedy")
    for column in ("", "no cache", "with cache", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    total = cached.prompt_pass_tokens + cached.new_token_tokens
    computed = plain.new_token_tokens
    table.add_row("token computations", f"{computed:,}", f"{total:,}", f"{computed / total:.1f}x")
    table.add_row("seconds", f"{plain.seconds:.2f}", f"{cached.seconds:.2f}", f"{plain.seconds / cached.seconds:.1f}x")
    same = plain.token_ids == cached.token_ids
    table.add_row("same tokens", "", "yes" if same else "NO", "")
    console = Console()
    console.print(table)
    console.print(
        f"No cache: one pass over the whole sequence per new token; its first pass over the prompt alone "
        f"({plain.prompt_pass_tokens:,} more) is left out, as the formula leaves it out."
    )
