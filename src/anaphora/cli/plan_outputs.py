"""What `anaphora plan` can do besides the plan: write an engine's settings, and compare with a running engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.planning.attribution import Attribution
    from anaphora.planning.engine_report import EngineReport
    from anaphora.planning.plan import Answer, Question
    from anaphora.planning.settings import PlanSettings

F = TypeVar("F", bound=Callable[..., Any])
_TARGETS = "vllm-yaml, vllm-cli, compose, sglang, llama-server, ollama-modelfile or anaphora"
_OPTIONS: tuple[Callable[[F], F], ...] = (
    click.option("--emit", metavar="TARGET", help=f"Print settings, with reasons, for {_TARGETS}."),
    click.option("--kv-offloading-size", type=click.FloatRange(0, min_open=True), help="--emit: GiB of host memory."),
    click.option("--attach", metavar="URL", help="Compare with the engine that runs there."),
    click.option("--api-key", envvar="ANAPHORA_API_KEY", help="--attach: the key to send; shown nowhere."),
    click.option("--log", metavar="FILE", help="Compare with an engine's start-up log; - reads it from stdin."),
)
_TAKEN = {
    "context": "max_model_len",
    "utilization": "utilization",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "engine_version": "version",
}
"""Wish that was left open -> what the engine says."""
_MOST_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Outputs:
    """The options of this module, as typed."""

    emit: str | None = None
    kv_offloading_size: float | None = None
    attach: str | None = None
    api_key: str | None = None
    log: str | None = None

    @classmethod
    def take(cls, options: dict[str, Any], *, drawn: bool) -> Outputs:
        """Remove this module's options from a command's. Raises ConfigError for those that exclude each other.

        `drawn`: whether the heat map was asked for.
        """
        found = cls(**{name: options.pop(name) for name in cls.__dataclass_fields__})
        if sum(option is not None for option in (found.emit, found.attach, found.log)) > 1:
            raise ConfigError("--emit, --attach and --log exclude each other; give one of them")
        if found.kv_offloading_size is not None and found.emit is None:
            raise ConfigError("--kv-offloading-size goes into the settings that --emit writes; add --emit TARGET")
        if found.kv_offloading_size is not None and not found.kv_offloading_size < _MOST_GIB:
            size = f"{found.kv_offloading_size:g}"
            raise ConfigError(f"--kv-offloading-size is {size}; give GiB of host memory, fewer than {_MOST_GIB:,}")
        if drawn and (found.emit or found.attach or found.log):
            raise ConfigError("--grid and --html draw the plan itself; leave out --emit, --attach and --log")
        return found

    def report(self) -> EngineReport | None:
        """What the engine says, where one is asked. Raises ConfigError, ProbeError."""
        if self.attach is not None:
            return read_endpoint(self.attach, self.api_key)
        return _read_log(self.log) if self.log is not None else None

    def engine(self, report: EngineReport | None) -> str | None:
        """The engine that target or report imply. Raises ConfigError for an unknown target."""
        if self.emit is not None:
            from anaphora.planning.emit import find_target

            return find_target(self.emit).engine
        return report.engine if report else None


def plan_outputs(function: F) -> F:
    """--emit, --kv-offloading-size, --attach, --api-key, --log."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def fill_wishes(wishes: dict[str, Any], outputs: Outputs, report: EngineReport | None) -> None:
    """What the user left open is taken from the target or the engine. Changes `wishes`."""
    wishes["engine"] = wishes.get("engine") or outputs.engine(report)
    if report is None or report.engine != wishes["engine"]:
        return
    if wishes.get("context") is None:
        wishes["allow_long"] = True  # the engine was given its length, right or wrong
    for wish, said in _TAKEN.items():
        if wishes.get(wish) is None:
            wishes[wish] = getattr(report, said)
    if report.short_version is None and wishes.get("engine_version") == report.version:
        wishes["engine_version"] = None
    if report.engine in ("vllm", "sglang") and not any(wishes.get(name) for name in ("count", "tp", "pp")):
        wishes["tp"] = report.tensor_parallel_size
    if report.engine in ("llama.cpp", "ollama") and report.max_num_seqs:
        wishes["concurrency"], wishes["max_num_seqs"] = report.max_num_seqs, None
    if report.kv_cache_dtype and wishes.get("kv_dtype") == "auto":
        wishes["kv_dtype"] = report.kv_cache_dtype


def read_endpoint(url: str, api_key: str | None = None) -> EngineReport:
    """What the server at `url` says of its memory; proxies are bypassed for local addresses.

    Raises ProbeError (unreachable, refused) and ConfigError (no engine that can be read), each with what to do.
    """
    import asyncio

    from anaphora.planning.attach import read_answers
    from anaphora.probes import engines
    from anaphora.probes.client import ProbeClient
    from anaphora.probes.endpoint import Endpoint
    from anaphora.probes.prometheus import parse_metrics

    endpoint = Endpoint.parse(url, api_key=api_key, timeout=10.0)

    async def ask() -> EngineReport:
        async with ProbeClient(endpoint) as client:
            answers = await engines.ask(client)
            documents = {route: answers.json(route) for route in answers.bodies}
            try:
                return read_answers(endpoint.root, parse_metrics(answers.bodies.get("/metrics", "")), documents)
            except ConfigError:
                await client.json("GET", "/v1/models")  # unreachable or refused: says so, and why
                raise

    return asyncio.run(ask())


def show_settings(outputs: Outputs, question: Question, answer: Answer, dtype: str, as_json: bool) -> None:
    """Print what --emit asks for. Raises ConfigError where nothing would start."""
    from anaphora.planning.emit import emit
    from anaphora.planning.settings import settings_of

    assert outputs.emit is not None
    size = outputs.kv_offloading_size
    settings = settings_of(answer, dtype=dtype, kv_offload_bytes=int(size * 2**30) if size else None)
    text = emit(outputs.emit, settings)
    if as_json:
        click.echo(json.dumps(_settings_json(outputs.emit, question, settings, text), indent=2))
    else:
        click.echo(text, nl=False)


def show_difference(found: Attribution, as_json: bool) -> None:
    """Print prediction, report and every cause of the difference."""
    if as_json:
        click.echo(json.dumps(_difference_json(found), indent=2))
        return
    from anaphora.cli.tables import print_table

    report = found.report
    named = f"{report.engine} {report.version}" if report.version else report.engine
    click.echo(f"{named}, {report.source}")
    if report.refused:
        click.echo(f"It did not start: {report.refused}")
    click.echo(
        f"KV cache: planned {found.predicted_tokens:,} tokens; for its real settings {found.aligned_tokens:,}; "
        f"it has {found.reported_tokens:,} ({found.error:+.1%} predicted against real, "
        f"{'inside' if found.inside else 'outside'} the interval)"
    )
    rows = [
        (item.cause, item.predicted, item.reported, _signed(item.kv_bytes), f"{item.tokens:+,}", _verdict(item.within))
        for item in found.differences
    ]
    columns = ("cause", "predicted", "real", ">KV memory", ">tokens", "in its interval")
    print_table(columns, rows, f"the tokens add up to {found.reported_tokens - found.predicted_tokens:+,}")
    for item in found.differences:
        if item.corrects:
            click.echo(f"{item.cause}: {item.corrects}.")
    for remark in found.remarks:
        click.echo(f"Note: {remark}.")


def _read_log(name: str) -> EngineReport:
    from anaphora.planning.start_log import read_log

    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--log {name}: {error.strerror}; give the file with the engine's start-up log") from None
    return read_log(data.decode("utf-8", "replace"), "stdin" if name == "-" else name)


def _signed(count: int) -> str:
    from anaphora.geometry.units import human_bytes

    return f"{'-' if count < 0 else '+'}{human_bytes(abs(count))}" if count else "0"


def _verdict(within: bool | None) -> str:
    return "" if within is None else "yes" if within else "no"


def _settings_json(target: str, question: Question, settings: PlanSettings, text: str) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "command": "plan",
        "model": question.model,
        "emit": {"target": target, "text": text, "corrections": list(settings.corrections)},
    }


def _difference_json(found: Attribution) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "command": "plan",
        "model": found.predicted.question.model,
        "report": {key: value for key, value in asdict(found.report).items() if value not in (None, {}, ())},
        "predicted_tokens": found.predicted_tokens,
        "predicted_tokens_for_its_settings": found.aligned_tokens,
        "reported_tokens": found.reported_tokens,
        "error": found.error,
        "inside_interval": found.inside,
        "differences": [asdict(item) for item in found.differences],
        "remarks": list(found.remarks),
    }
