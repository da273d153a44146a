"""`anaphora kv MODEL`: what its KV cache takes, with the multiplication written out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from anaphora.geometry.formula import KVDtype, Term
    from anaphora.geometry.model import ModelGeometry

_NO_MATTER = {"tie_word_embeddings", "intermediate_size", "vocab_size", "moe_intermediate_size", "num_experts"}
"""Keys that do not change a cache."""


@click.command()
@click.argument("model")
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True, help="Length of one sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences at once.")
@click.option(
    "--kv-dtype", default="bfloat16", show_default=True, help="float32, bfloat16, float16, fp8, int8, int4, q8_0 ..."
)
@click.option(
    "--assume-full-attention", is_flag=True, help="Size an unknown architecture as if every layer kept all tokens."
)
@click.option("--hub", is_flag=True, help="Ask the Hugging Face Hub for a model that is not known offline.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def kv(
    model: str, tokens: int, batch: int, kv_dtype: str, assume_full_attention: bool, hub: bool, as_json: bool
) -> None:
    """Show what the KV cache of MODEL takes (a folder, config.json, .gguf file, or a name of `anaphora models`).

    The bytes are those of the keys and values themselves; `anaphora plan` adds what an engine's blocks round up.
    """
    from anaphora.geometry import formula
    from anaphora.geometry.find import find_geometry

    dtype = formula.kv_dtype(kv_dtype)
    geometry = find_geometry(model, assume_full_attention=assume_full_attention, hub=hub)
    terms = formula.terms(geometry, tokens, batch, dtype)
    if as_json:
        click.echo(json.dumps(_json(model, geometry, tokens, batch, dtype, terms), indent=2))
    else:
        _print(model, geometry, tokens, batch, dtype, terms)


def _per_token(terms: list[Term], *, beyond: bool = False) -> int:
    """Bytes a token of one sequence adds inside every window, or at this length (`beyond`), rounded up."""
    from math import ceil

    return ceil(sum(term.bytes_per_token for term in terms if term.grows or not beyond))


def _warnings(geometry: ModelGeometry, tokens: int) -> list[str]:
    found = []
    if geometry.assumed_full_attention:
        found.append(
            f"{geometry.architecture} is not a known architecture: every layer was assumed to be full attention, "
            "because --assume-full-attention says so"
        )
    assumed = {key: value for key, value in geometry.assumed.items() if key not in _NO_MATTER}
    if assumed:
        keys = ", ".join(f"{key} = {value}" for key, value in assumed.items())
        found.append(f"its config leaves out {keys}: taken from the configuration class of {geometry.model_type}")
    if geometry.max_position and tokens > geometry.max_position:
        found.append(f"{tokens:,} tokens are beyond the model's context of {geometry.max_position:,}")
    return found


def _json(
    model: str, geometry: ModelGeometry, tokens: int, batch: int, dtype: KVDtype, terms: list[Term]
) -> dict[str, object]:
    from anaphora.geometry.formula import total_bytes

    return {
        "schema_version": 1,
        "command": "kv",
        "model": model,
        "architecture": geometry.architecture,
        "assumed_full_attention": geometry.assumed_full_attention,
        "tokens": tokens,
        "batch": batch,
        "kv_dtype": dtype.name,
        "bytes_per_token": _per_token(terms),
        "bytes_per_token_at_this_length": _per_token(terms, beyond=True),
        "total_bytes": total_bytes(terms),
        "terms": [
            {
                "keeps": term.keeps,
                "layers": term.layers,
                "product": term.product,
                "bytes_per_token": float(term.bytes_per_token),
                "total_bytes": term.total_bytes,
            }
            for term in terms
        ],
        "warnings": _warnings(geometry, tokens),
    }


def _print(model: str, geometry: ModelGeometry, tokens: int, batch: int, dtype: KVDtype, terms: list[Term]) -> None:
    from anaphora.geometry.formula import total_bytes
    from anaphora.geometry.units import human_bytes

    many = f" in each of {batch:,} sequences" if batch > 1 else ""
    click.echo(f"{model} ({geometry.architecture}), KV in {dtype.name}, {tokens:,} tokens{many}\n")
    mark = " [assumed]" if geometry.assumed_full_attention else ""
    for term in terms:
        click.echo(f"  {term.layers} layers, {term.keeps}{mark}")
        note = f"   ({term.note})" if term.note else ""
        click.echo(f"    {term.product} = {term.total_bytes:,} bytes{note}")
    inside, beyond, total = _per_token(terms), _per_token(terms, beyond=True), total_bytes(terms)
    further = f"; at this length {beyond:,} bytes ({human_bytes(beyond)}) more" if beyond != inside else ""
    click.echo(f"\n  one token: {inside:,} bytes ({human_bytes(inside)}){further}{mark}")
    click.echo(f"  in all:    {total:,} bytes ({human_bytes(total)}){mark}")
    for warning in _warnings(geometry, tokens):
        click.echo(f"\n  Note: {warning}.")
