"""`--config FILE.yaml`: the keys of a vLLM config file become defaults of the command's options."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import click

from anaphora.errors import ConfigError

REPLACED = {
    "swap_space": "vLLM removed it in 0.18 (kv-offloading-size took its place); here preempted requests go to the RAM "
    "cache, for example ram-cache: 4GiB",
    "kv_offloading_size": "the same is called ram-cache here, for example ram-cache: 4GiB",
    "kv_offloading_backend": "ram-cache, disk-cache and remote-cache choose what lies behind the pool; drop the key",
    "kv_transfer_config": "ram-cache, disk-cache and remote-cache take the place of connectors; drop the key",
    "cpu_offload_gb": "it moves weights, not KV, and there is nothing of the kind here; drop the key",
    "num_gpu_blocks_override": "set the pool with kv-memory, for example kv-memory: 4GiB",
    "gpu_memory_utilization": "set the pool with kv-memory, for example kv-memory: 4GiB",
    "device_memory_utilization": "set the pool with kv-memory, for example kv-memory: 4GiB",
    "kv_cache_memory_bytes": "the same is called kv-memory here",
    "enable_chunked_prefill": "prefill is always chunked; drop the key",
    "enforce_eager": "there are no graphs to capture; drop the key",
    "enable_prompt_tokens_details": "cached_tokens is always reported; drop the key",
    "use_v2_block_manager": "it is gone from vLLM too; drop the key",
    "tensor_parallel_size": "one process serves one device here; run vLLM for tensor parallelism",
    "pipeline_parallel_size": "one process serves one device here; run vLLM for pipeline parallelism",
    "trust_remote_code": "code from a model's folder is never run; drop the key",
    "quantization": "quantised checkpoints cannot run yet; give an unquantised one",
    "prefix_caching_hash_algo": "blocks are named by keyed BLAKE2b and their tokens compared; drop the key",
    "disable_log_requests": "requests are not logged; drop the key",
    "disable_log_stats": "statistics are on /metrics only; drop the key",
}
"""Keys people paste from vLLM files, and what to do with them here."""


def load_defaults(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Eager callback of --config: fill `ctx.default_map`; the command line still wins. Raises ConfigError."""
    if path is None:
        return None
    known = {p.name for p in ctx.command.params if p.name} - {param.name, "print_config", "help"}
    repeatable = frozenset(p.name for p in ctx.command.params if p.name and getattr(p, "multiple", False))
    values = read_config_file(path, known, repeatable)
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


def read_config_file(path: Path, known: set[str], repeatable: frozenset[str]) -> dict[str, Any]:
    """Keys (dashes or underscores) and values of a YAML file; every problem in it is told at once.

    Keys in `repeatable` may hold a list.
    """
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path after --config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if loaded is None:
        loaded = {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold keys and values, for example 'max-model-len: 8192'")
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name in REPLACED:
            problems.append(f"{key}: {REPLACED[name]}")
        elif name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else "see anaphora serve --help for the keys"
            problems.append(f"{key}: no such key; {hint}")
        elif isinstance(value, dict) or (isinstance(value, list) and name not in repeatable):
            problems.append(f"{key}: give one value, as {name.replace('_', '-')}: VALUE")
        elif value is not None:
            values[name] = value
    if problems:
        raise ConfigError(f"{path} cannot be used as it is:\n  " + "\n  ".join(problems))
    return values
