"""`anaphora pull NAME`: fetch, check and convert a model, so that serving it later needs no network."""

from __future__ import annotations

import json

import click

from anaphora.cli.options import needs_serve_extra


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch and convert again even if it is there.")
@click.option("--verify", is_flag=True, help="Read and hash every byte of what is there; make again what is damaged.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def pull(name: str, force: bool, verify: bool, as_json: bool) -> None:
    """Fetch model NAME (a folder, a GGUF file, org/name of the hub, or smollm2-135m) and print its folder."""
    needs_serve_extra()
    from anaphora.cli.progress import resolve_with_progress

    model = resolve_with_progress(name, force=force, verify=verify)
    if not as_json:
        click.echo(model.path)
        return
    sizes = {path.name: path.stat().st_size for path in sorted(model.path.iterdir()) if path.is_file()}
    report = {
        "schema_version": 1,
        "command": "pull",
        "name": model.name,
        "path": str(model.path),
        "source": model.source,
        "bytes": sum(sizes.values()),
        "files": [{"name": file, "bytes": size} for file, size in sizes.items()],
    }
    click.echo(json.dumps(report))
