"""Options that several commands share, declared once. Names are vLLM's where they mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from anaphora.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class Bytes(click.ParamType[int]):
    """A size in bytes such as 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from anaphora.engine.config import parse_bytes

        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """A range of numbers; NaN, which compares with nothing, and infinity lie in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


Options = tuple[Callable[[F], F], ...]

_KERNELS: Options[Any] = (
    click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16."),
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option(
        "--implementation",
        default="auto",
        show_default=True,
        help="compact (ours), transformers, or auto: ours where it knows the model.",
    ),
    click.option(
        "--backend",
        default="auto",
        show_default=True,
        help="native (C++ kernels, on CPUs), torch (the reference), or auto: native where it runs.",
    ),
    click.option("--threads", type=int, help="Of the native kernels and torch. Default: the cores allowed."),
)
_FORM: Options[Any] = (
    click.option("--k-dtype", help="Keys alone, where they are to differ. Default: as --kv-cache-dtype."),
    click.option("--v-dtype", help="Values alone, likewise."),
    click.option(
        "--kv-cache-dtype-skip-layers",
        default="",
        metavar="LAYERS",
        help="Layers that keep the model's own dtype, for example 0,1,-1 or 0-3; -1 is the last.",
    ),
)
_POOL: Options[Any] = (
    click.option("--max-num-batched-tokens", type=int, help="Tokens per step. Default: 512 on a CPU, 2048 on a GPU."),
    click.option("--block-size", type=int, default=16, show_default=True, help="Tokens per KV block: 1, 2, 4 .. 256."),
    click.option(
        "--kv-memory", type=Bytes(), help="Size of the KV pool. Default: half of what the weights leave free."
    ),
)
MODEL_OPTIONS: Options[Any] = (*_KERNELS, *_FORM, *_POOL)
"""Of commands that run a model without serving it."""

ENGINE_OPTIONS: Options[Any] = (
    *_KERNELS,
    click.option(
        "--kv-cache-dtype",
        default="auto",
        show_default=True,
        help="How keys and values are kept: auto (as the model), bf16, fp16, fp32, fp8_e4m3, int8, k8v4 or int4.",
    ),
    *_FORM,
    click.option("--max-model-len", type=int, help="Context in tokens. Default: the model's own, or what fits."),
    click.option("--max-num-seqs", type=int, default=64, show_default=True, help="Requests that run at once."),
    *_POOL,
    click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True, help="Reuse prefixes."
    ),
    click.option(
        "--eviction-policy",
        default="hazard",
        show_default=True,
        help="What goes when the KV pool is full: hazard (ours), lru, lfu, slru, arc, s3-fifo or cost-aware.",
    ),
    click.option("--ram-cache", type=Bytes(), help="Keep blocks that leave the pool in so much RAM, for example 2GiB."),
    click.option("--ram-eviction-policy", help="What goes when the RAM cache is full. Default: as --eviction-policy."),
    click.option("--disk-cache", metavar="DIR:SIZE", help="Keep blocks on disk too, for example /var/cache/kv:20GiB."),
    click.option(
        "--disk-eviction-policy", help="What goes when the disk cache is full. Default: as --eviction-policy."
    ),
    click.option(
        "--remote-cache", metavar="URL", help="Share blocks with other servers: valkey://... or mooncake://..."
    ),
    click.option(
        "--cache-write-policy",
        default="write-through",
        show_default=True,
        help="When blocks go to RAM, disk and remote: write-through (once computed) or on-eviction.",
    ),
    click.option(
        "--preemption",
        default="auto",
        show_default=True,
        help="Requests that give up their blocks: swap (to the RAM cache), recompute, or auto (the faster one).",
    ),
    click.option("--seed", type=int, help="For requests that bring none. Default: each draws its own."),
    click.option("--chat-template", type=click.Path(path_type=Path), help="Jinja file that replaces the model's own."),
)


def engine_options(function: F) -> F:
    """Add every engine option to a command."""
    for option in reversed(ENGINE_OPTIONS):
        function = option(function)
    return function


def model_options(function: F) -> F:
    """Add those of MODEL_OPTIONS."""
    for option in reversed(MODEL_OPTIONS):
        function = option(function)
    return function


def user_config(options: dict[str, Any]) -> Any:
    """The engine options that a command has -> UserConfig. Raises ConfigError."""
    from dataclasses import fields

    from anaphora.engine.config import UserConfig

    values = {field.name: options[field.name] for field in fields(UserConfig) if field.name in options}
    template: Path | None = values.get("chat_template")
    if template is not None:
        try:
            values["chat_template"] = template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {template}: {error}; give a readable Jinja file") from None
    return UserConfig(**values)


def needs_serve_extra() -> None:
    """Raise a clear error where the engine's packages are not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "tokenizers", "safetensors", "jinja2", "psutil") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this command needs {', '.join(missing)}, which the light install leaves out. "
            "Install the engine with: pip install 'anaphora[serve]'"
        )
