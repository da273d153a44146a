"""`anaphora doctor [URL | FILE ...]`: it does not work; whose side is it, and what to type."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from anaphora.cli.probe_options import ENDPOINT_OPTIONS, output_options
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.probes.doctor.finding import Diagnosis
    from anaphora.probes.doctor.source import Source
    from anaphora.probes.doctor.visit import Visit

_TIMEOUT = 60.0


def _endpoint_options(function: click.decorators.FC) -> click.decorators.FC:
    """The endpoint's options, with a shorter --timeout."""
    timeout = click.option(
        "--timeout", type=click.FloatRange(0, min_open=True), default=_TIMEOUT, show_default=True,
        help="Seconds without any byte before a request is given up.",
    )  # fmt: skip
    for option in (timeout, *reversed(ENDPOINT_OPTIONS[:-1])):
        function = option(function)
    return function


@click.command()
@click.argument("targets", nargs=-1, metavar="[URL | FILE ...]")
@_endpoint_options
@click.option("--log", "logs", multiple=True, help="A server's log or an error text; - reads stdin; repeatable.")
@click.option("--gpu", help="Device of `anaphora hardware`: configurations are checked against its memory.")
@click.option("--fix", is_flag=True, help="Write the edits that are safe, and keep the file as FILE.bak.")
@click.option(
    "--bundle", type=click.Path(dir_okay=False, path_type=Path), help="Write a redacted .zip for a bug report."
)
@click.option(
    "--context-words", type=click.IntRange(0), default=6400, show_default=True,
    help="Longest prompt sent to find silent truncation; 0 = none.",
)  # fmt: skip
@output_options
@click.pass_context
def doctor(
    ctx: click.Context,
    targets: tuple[str, ...],
    api_key: str | None,
    model: str | None,
    header: tuple[str, ...],
    timeout: float,
    logs: tuple[str, ...],
    gpu: str | None,
    fix: bool,
    bundle: Path | None,
    context_words: int,
    as_json: bool,
    html: Path | None,
) -> None:
    """Find out what is wrong with an endpoint, a configuration file or a server's log, and what to type.

    A URL is examined step by step, from the proxy variables to the prefix cache. Files (vLLM YAML, command lines,
    compose files, .env, Claude Code settings.json, Codex config.toml, auth.json) are read offline and only changed
    with --fix. With neither, a log is read from stdin.
    """
    import os

    from anaphora.cli.probe_options import run_until_interrupted, write_html
    from anaphora.probes.doctor.chain import examine
    from anaphora.probes.doctor.finding import Diagnosis
    from anaphora.probes.doctor.report import Report
    from anaphora.probes.doctor.visit import Visit

    urls = [target for target in targets if not _is_file(target)]
    if len(urls) > 1:
        raise ConfigError("Give one URL at a time (files may be several).")
    diagnosis = Diagnosis()
    texts = _read_logs(logs if logs or targets else ("-",))
    sources = _read_files([Path(target) for target in targets if _is_file(target)], diagnosis)
    visit: Visit | None = None
    report = Report(diagnosis, secrets=[secret for source in sources for secret in source.secrets])
    if urls:
        visit = report.visit = Visit(urls[0], api_key, model, header, timeout, dict(os.environ), context_words)
        diagnosis.read.append(urls[0])
        chain = visit
        report.interrupted = run_until_interrupted(lambda progress: examine(chain, diagnosis, progress), quiet=as_json)
    _check_memory(sources, gpu, diagnosis)
    _check_logs(texts, diagnosis)
    if fix:
        _fix(sources, diagnosis)
    click.echo(report.as_json() if as_json else report.as_text())
    if html:
        write_html(html, report.as_html())
    if bundle:
        from anaphora.probes.doctor.bundle import write_bundle

        write_bundle(bundle, report, sources, texts, os.environ)
    ctx.exit(diagnosis.exit_code)


def _is_file(target: str) -> bool:
    """What exists is a file; so is what looks like a path and not like a host."""
    path = Path(target)
    if "://" in target:
        return False
    return path.exists() or path.suffix in (".json", ".jsonc", ".toml", ".yaml", ".yml", ".env", ".sh", ".txt", ".log")


def _read_logs(names: tuple[str, ...]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name in names:
        if name == "-":
            if sys.stdin.isatty():
                raise ConfigError("Nothing to examine: give a URL, files, or --log FILE (or pipe a log into it).")
            texts["stdin"] = sys.stdin.buffer.read().decode("utf-8", errors="replace")
            continue
        try:
            texts[name] = Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"cannot read --log {name}: {error.strerror}; check the path") from None
    return texts


def _read_files(paths: list[Path], diagnosis: Diagnosis) -> list[Source]:
    if not paths:
        return []
    from anaphora.probes.doctor.files import lint

    sources = []
    for path in paths:
        source = lint(path)
        sources.append(source)
        diagnosis.loose += source.findings
        diagnosis.notes += source.notes
        diagnosis.read.append(f"{path} ({source.kind})")
    return sources


def _check_logs(texts: dict[str, str], diagnosis: Diagnosis) -> None:
    if not texts:
        return
    from anaphora.probes.doctor.logs import read_log

    for name, text in texts.items():
        found = read_log(text, name)
        diagnosis.loose += found
        diagnosis.read.append(f"{name} (log)")
        if not found and text.strip():
            diagnosis.notes.append(f"{name}: no message about memory or capacity that is known here")


def _check_memory(sources: list[Source], gpu: str | None, diagnosis: Diagnosis) -> None:
    launches = [(source, launch) for source in sources for launch in source.launches if launch.engine != "llama_server"]
    if not launches:
        return
    from anaphora.cli.doctor_memory import check_memory

    for source, launch in launches:
        findings, notes = check_memory(source, launch, gpu)
        diagnosis.loose += findings
        diagnosis.notes += notes


def _fix(sources: list[Source], diagnosis: Diagnosis) -> None:
    from anaphora.probes.doctor.fixing import fix

    for source in sources:
        count, backup = fix(source)
        if backup is not None:
            diagnosis.notes.append(f"{source.path}: {count} edits written, the file as it was is {backup}")
