"""`anaphora serve MODEL`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from anaphora.cli.config_file import load_defaults
from anaphora.cli.options import Bytes, FiniteRange, engine_options, needs_serve_extra, user_config
from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.cli.quality_summary import QualityFile
    from anaphora.engine.build import Prepared
    from anaphora.engine.loop import EngineLoop
    from anaphora.explain.explainer import OnFinish

_SMALLEST_LOG = 64 << 10


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 = any free port.")
@click.option("--served-model-name", multiple=True, help="Name clients use; may be given more than once.")
@engine_options
@click.option("--max-waiting", type=click.IntRange(1), default=1024, show_default=True, help="Then clients get 429.")
@click.option("--api-key", multiple=True, envvar="ANAPHORA_API_KEY", help="Key clients must send; repeatable.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="File with one key per line.")
@click.option("--salt-by-key", is_flag=True, help="Each key reuses only the prefixes that it made itself.")
@click.option("--max-body-bytes", type=click.IntRange(1), default=8 << 20, show_default=True, help="Then 413.")
@click.option("--shutdown-timeout", type=FiniteRange(0), default=30.0, show_default=True, help="Seconds to drain.")
@click.option("--explain-text", is_flag=True, help="Keep the text where prompts part, and show it in GET /explain.")
@click.option(
    "--request-log",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write lengths, times, causes of misses and salted block hashes here, no text: for replay and explain.",
)
@click.option(
    "--request-log-max-bytes",
    type=Bytes(),
    default=256 << 20,
    show_default="256MiB",
    help="Then a new file begins; four old ones are kept.",
)
@click.option("--quality", type=click.Path(path_type=Path), help="Show what `anaphora quality --output` measured.")
@click.option("--demo", is_flag=True, help="Show cold and warm time to first token once the server is ready.")
@click.option("--print-config", is_flag=True, help="Print every setting as resolved (JSON) and exit.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    callback=load_defaults,
    is_eager=True,
    expose_value=False,
    help="YAML file with these options as keys, as vLLM's.",
)
def serve(
    model: str,
    host: str,
    port: int,
    served_model_name: tuple[str, ...],
    max_waiting: int,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    salt_by_key: bool,
    max_body_bytes: int,
    shutdown_timeout: float,
    quality: Path | None,
    explain_text: bool,
    request_log: Path | None,
    request_log_max_bytes: int,
    demo: bool,
    print_config: bool,
    **options: Any,
) -> None:
    """Serve MODEL (a folder, a GGUF file, org/name of the hub, or smollm2-135m) over HTTP."""
    began = time.monotonic()
    needs_serve_extra()
    from anaphora.cli.progress import resolve_with_progress
    from anaphora.cli.quality_summary import read_quality

    user = user_config(options)
    measured = None if quality is None else read_quality(quality)
    keys = (*api_key, *_read_keys(api_key_file))
    if print_config:
        from anaphora.engine.build import prepare

        config = prepare(resolve_with_progress(model), user).config
        click.echo(json.dumps({"schema_version": 1, **config.shown()}, indent=2, default=str))
        return

    from anaphora.server.auth import hash_keys
    from anaphora.server.run import run_server
    from anaphora.server.settings import ServerSettings, ServerState

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    names = served_model_name or (_served_name(model),)
    settings = ServerSettings(names, hash_keys(keys), salt_by_key, max_body_bytes)
    state = ServerState(settings)
    base_url: list[str] = []
    cleanup = ExitStack()

    def load_engine() -> EngineLoop:
        from anaphora.engine.build import Startup, load, prepare
        from anaphora.engine.loop import EngineLoop

        startup = Startup()
        since = startup.timed("imports", began)
        folder = resolve_with_progress(model)
        prepared = prepare(folder, user)
        startup.timed("model and settings", since)
        _print_allotment(prepared, measured)
        on_finish = _request_log(request_log, request_log_max_bytes, prepared, names[0], cleanup)
        engine = load(prepared, startup)
        engine.explainer.keep_text, engine.explainer.on_finish = explain_text, on_finish
        loop = EngineLoop(engine, max_waiting=max_waiting)
        state.startup_seconds = startup.seconds
        loop.start()
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in startup.seconds.items())
        _say(f"ready in {time.monotonic() - began:.1f} s ({parts}): {base_url[0]}/v1")
        if demo:
            _start_demo(base_url[0], names[0], prepared, keys)
        return loop

    with cleanup:
        run_server(
            state,
            host,
            port,
            load=load_engine,
            on_listening=base_url.append,
            shutdown_timeout=shutdown_timeout,
        )


def _say(text: str) -> None:
    click.echo(text, err=True)


def _served_name(model: str) -> str:
    path = Path(model).expanduser()
    return (path.stem if path.is_file() else path.resolve().name) if path.exists() else model


def _read_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: {error}; give a readable file with one key per line") from None
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; put one on each line")
    return keys


def _request_log(
    path: Path | None, max_bytes: int, prepared: Prepared, model: str, cleanup: ExitStack
) -> OnFinish | None:
    """What the engine tells of every request that ends; the file is opened now, and closed by `cleanup`."""
    if path is None:
        return None
    if max_bytes < _SMALLEST_LOG:
        raise ConfigError(
            f"--request-log-max-bytes {max_bytes} is too little for a file; give {_SMALLEST_LOG} or more, or 256MiB"
        )
    from anaphora.replay.outcomes import log_outcome
    from anaphora.replay.request_log import RequestLogWriter

    writer = RequestLogWriter(path, max_bytes, block_size=prepared.config.block_size, model=model)
    cleanup.callback(writer.close)
    return partial(log_outcome, writer)


def _print_allotment(prepared: Prepared, measured: QualityFile | None) -> None:
    from anaphora.engine.build import allotment

    lines = allotment(prepared)
    if measured is not None:
        name = prepared.config.kv_cache_dtype
        found = measured.measured.get(name, f"nothing for {name}")
        lines.append(("quality", f"{found}, against bf16 (measured for {measured.model})"))
    for label, value in lines:
        _say(f"{label:>13}  {value}")


def _start_demo(base_url: str, model: str, prepared: Prepared, keys: tuple[str, ...]) -> None:
    from anaphora.cli import demo

    def show() -> None:
        demo.run(base_url, model, prepared.config.bytes_per_token, keys[0] if keys else None)
        click.echo(demo.next_steps(base_url, model))

    threading.Thread(target=show, name="anaphora-demo", daemon=True).start()
