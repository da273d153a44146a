"""`anaphora models`: the catalogue of models that works offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from anaphora.geometry.catalog import CatalogModel
    from anaphora.geometry.model import ModelGeometry


@click.command()
@click.argument("search", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def models(search: tuple[str, ...], as_json: bool) -> None:
    """List the models whose facts are known offline, or those that match every word of SEARCH.

    Bytes per token are for a bf16 cache, for a token inside every window; recurrent layers add a state per
    sequence. More entries: models.toml in $ANAPHORA_CONFIG_DIR, else in ~/.config/anaphora.
    """
    from anaphora.cli.tables import print_json, print_table
    from anaphora.geometry.catalog import find_model, search_models

    text = " ".join(search)
    rows = [_Row(model, _geometry(model)) for model in search_models(text)]
    if not rows:
        rows = [_Row(model := find_model(text), _geometry(model))]  # or its error, with the nearest names
    if as_json:
        print_json("models", [row.json() for row in rows])
        return
    columns = ("model", ">parameters", "weights", ">layers", ">KV bytes/token", ">context", "also")
    print_table(columns, [row.cells() for row in rows], f"{len(rows)} models")


def _geometry(model: CatalogModel) -> ModelGeometry | None:
    """None for a model that cannot be sized; `anaphora kv` says why."""
    from anaphora.errors import AnaphoraError
    from anaphora.geometry.model import ModelGeometry

    try:
        return ModelGeometry.from_config(model.config)
    except AnaphoraError:
        return None


@dataclass(frozen=True, slots=True)
class _Row:
    model: CatalogModel
    geometry: ModelGeometry | None

    def json(self) -> dict[str, Any]:
        model, geometry = self.model, self.geometry
        return {
            "id": model.id,
            "aliases": list(model.aliases),
            "architecture": model.architecture,
            "parameters": model.parameters,
            "parameters_from": model.parameters_from,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "layers": geometry and len(geometry.layers),
            "kv_bytes_per_token": geometry and geometry.bytes_per_token(2),
            "state_bytes": geometry and geometry.state_bytes(2),
            "max_position": geometry and geometry.max_position,
            "source": model.source,
        }

    def cells(self) -> tuple[str, ...]:
        model, geometry = self.model, self.geometry
        weights = model.dtype or "-"
        if model.quantization:
            weights = f"{model.quantization} + {weights}"
        sizes = ("-", "-", "-")
        if geometry:
            context = f"{geometry.max_position:,}" if geometry.max_position else "-"
            sizes = (str(len(geometry.layers)), f"{geometry.bytes_per_token(2):,}", context)
        return (model.id, _short(model.parameters), weights, *sizes, ", ".join(model.aliases))


def _short(parameters: int | None) -> str:
    """7615616512 -> "7.62B"."""
    if parameters is None:
        return "-"
    size, unit = (parameters / 1e9, "B") if parameters >= 1e9 else (parameters / 1e6, "M")
    return f"{size:.2f}{unit}"
