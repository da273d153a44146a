"""What the user asked for (UserConfig, None = you choose) and what was resolved (EngineConfig, nothing left open)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from anaphora.blocks.eviction import DEFAULT_POLICY, POLICIES
from anaphora.engine.backend import Backend, NativeNeeds, choose_backend
from anaphora.engine.skip_layers import parse_layers
from anaphora.errors import ConfigError
from anaphora.geometry.kv_dtype import BlockMap, kv_dtype
from anaphora.geometry.layout import CacheLayout
from anaphora.geometry.model import ModelGeometry
from anaphora.geometry.units import human_bytes

Implementation = Literal["auto", "compact", "transformers"]
CacheWritePolicy = Literal["write-through", "on-eviction"]
Preemption = Literal["swap", "recompute", "auto"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_NAMES = {"auto": None, "half": "float16", "float": "float32"} | {name: name for name in DTYPE_BYTES}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True)
class UserConfig:
    """As given on the command line, in a file or by a caller. None = resolved from model and machine."""

    dtype: str = "auto"
    device: str = "auto"
    implementation: Implementation = "auto"
    backend: str = "auto"
    threads: int | None = None
    """None = the cores this process may use."""
    kv_cache_dtype: str = "auto"
    k_dtype: str | None = None
    """Of keys alone; None = what kv_cache_dtype says. `v_dtype` likewise."""
    v_dtype: str | None = None
    kv_cache_dtype_skip_layers: str = ""
    """Layers that keep the model's own dtype: see skip_layers.parse_layers."""
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_memory: int | None = None
    """Bytes of the KV pool."""
    enable_prefix_caching: bool = True
    eviction_policy: str = DEFAULT_POLICY
    ram_cache: int | None = None
    """Bytes of the tier in memory."""
    ram_eviction_policy: str | None = None
    """None: as `eviction_policy`."""
    disk_cache: str | None = None
    """DIR:SIZE"""
    disk_eviction_policy: str | None = None
    remote_cache: str | None = field(default=None, repr=False)
    """A URL; it may hold a password."""
    cache_write_policy: str = "write-through"
    preemption: str = "auto"
    seed: int | None = None
    """Of requests that bring none; None = each draws its own."""
    chat_template: str | None = None
    """A Jinja template that replaces the model's own."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine runs with. Resolved once, never changed."""

    model_path: Path
    model_name: str
    dtype: str
    dtype_reason: str
    device: str
    implementation: Implementation
    backend: Backend
    backend_reason: str
    threads: int
    kv_cache_dtype: str
    """What keys and values are kept as, layer by layer, in words."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    weight_bytes: int
    bytes_per_token: int
    block_bytes: int
    enable_prefix_caching: bool
    eviction_policy: str
    ram_cache: int
    """Bytes; 0: no such tier."""
    ram_eviction_policy: str
    disk_cache: str
    """The folder; empty: no such tier."""
    disk_cache_bytes: int
    disk_eviction_policy: str
    remote_cache: str = field(repr=False)
    """The URL, with its secrets; empty: no such tier."""
    cache_write_policy: CacheWritePolicy
    preemption: Preemption
    seed: int | None

    @property
    def has_tiers(self) -> bool:
        return bool(self.ram_cache or self.disk_cache or self.remote_cache)

    def shown(self) -> dict[str, Any]:
        """Every setting, without secrets."""
        settings = asdict(self)
        if self.remote_cache:
            from anaphora.tiers.remote.url import without_secrets

            settings["remote_cache"] = without_secrets(self.remote_cache)
        return settings

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """What resolving needs to know of this machine."""

    device: str
    fast_bfloat16: bool
    free_bytes: int
    """Memory the process may still take, before the weights are loaded."""
    threads: int = 1
    """Cores this process may use."""
    no_native: str = "the native extension was not looked for"
    """Why the native extension cannot be used; empty when it can."""


def resolve(
    user: UserConfig,
    *,
    model_path: Path,
    model_name: str,
    model_config: dict[str, Any],
    geometry: ModelGeometry,
    num_weights: int,
    has_spec: bool,
    machine: Machine,
) -> tuple[EngineConfig, BlockMap]:
    """Fill in every open value, and say what a block holds. `has_spec`: the compact decoder can run the model.

    Raises ConfigError with the number that would work.
    """
    _positive(user)
    if user.dtype not in _DTYPE_NAMES:
        raise ConfigError(f"--dtype is {user.dtype!r}; it must be one of {', '.join(_DTYPE_NAMES)}")
    asked = _DTYPE_NAMES[user.dtype]
    needs = NativeNeeds(machine.device, machine.no_native, user.block_size, asked or "auto")
    backend, backend_reason = choose_backend(user.backend, needs)
    fast = machine.fast_bfloat16 or (backend == "native" and has_spec and user.implementation != "transformers")
    dtype, reason = (asked, "asked for") if asked else _own_dtype(model_config, machine.device, fast_bfloat16=fast)
    layout = CacheLayout.of(geometry, user.block_size)
    skipped = parse_layers(user.kv_cache_dtype_skip_layers, len(geometry.layers))
    kept = kv_dtype(user.kv_cache_dtype, own=dtype, key=user.k_dtype, value=user.v_dtype, skip_layers=skipped)
    blocks = BlockMap(layout, kept)
    block_bytes = blocks.block_bytes
    weight_bytes = num_weights * DTYPE_BYTES[dtype]
    batched = user.max_num_batched_tokens or (512 if machine.device == "cpu" else 2048)
    if batched < user.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {batched} is below --max-num-seqs {user.max_num_seqs}: every running "
            f"request needs one token per step. Raise the first to {user.max_num_seqs} or lower the second to {batched}"
        )
    ram_cache = user.ram_cache or 0
    left = machine.free_bytes - weight_bytes - ram_cache
    if ram_cache and left <= 0:
        raise ConfigError(
            f"--ram-cache {human_bytes(ram_cache)} does not fit: {human_bytes(machine.free_bytes)} are free and the "
            f"weights take {human_bytes(weight_bytes)}. "
            f"Ask for less than {human_bytes(max(left + ram_cache, 0))}: the KV pool needs some of it"
        )
    kv_memory = user.kv_memory if user.kv_memory is not None else max(left, 0) // 2
    if kv_memory > left:
        raise ConfigError(
            f"--kv-memory {human_bytes(kv_memory)} does not fit: {human_bytes(machine.free_bytes)} are free and the "
            f"weights{' and --ram-cache' if ram_cache else ''} take {human_bytes(weight_bytes + ram_cache)}. "
            f"Ask for at most {human_bytes(max(left, 0))}"
        )
    disk_cache, disk_bytes = parse_disk_cache(user.disk_cache) if user.disk_cache else ("", 0)
    write_policy, preemption = _tier_settings(user, machine.device)
    num_blocks = kv_memory // block_bytes
    limit = geometry.max_position
    if user.max_model_len is not None and limit is not None and user.max_model_len > limit:
        raise ConfigError(
            f"--max-model-len {user.max_model_len} is beyond this model's context of {limit} tokens "
            f"(max_position_embeddings). Use {limit} or less"
        )
    wanted = user.max_model_len or limit or 4096
    fits = _longest_that_fits(layout, num_blocks, wanted, batched)
    if fits < 1 or (user.max_model_len is not None and fits < wanted):
        need = layout.blocks_for(wanted, batched) * block_bytes
        raise ConfigError(
            f"the KV pool of {human_bytes(kv_memory)} holds {max(fits, 0)} tokens of one request; "
            f"{wanted} tokens need {human_bytes(need)}. Raise --kv-memory to that, or lower --max-model-len"
        )
    config = EngineConfig(
        model_path=model_path,
        model_name=model_name,
        dtype=dtype,
        dtype_reason=reason,
        device=machine.device,
        implementation=user.implementation,
        backend=backend,
        backend_reason=backend_reason,
        threads=user.threads or machine.threads,
        kv_cache_dtype=blocks.dtype.name,
        max_model_len=fits,
        max_num_seqs=user.max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=user.block_size,
        num_blocks=num_blocks,
        weight_bytes=weight_bytes,
        bytes_per_token=blocks.dtype.bytes_per_token(layout),
        block_bytes=block_bytes,
        enable_prefix_caching=user.enable_prefix_caching,
        eviction_policy=user.eviction_policy,
        ram_cache=ram_cache,
        ram_eviction_policy=user.ram_eviction_policy or user.eviction_policy,
        disk_cache=disk_cache,
        disk_cache_bytes=disk_bytes,
        disk_eviction_policy=user.disk_eviction_policy or user.eviction_policy,
        remote_cache=user.remote_cache or "",
        cache_write_policy=write_policy,
        preemption=preemption,
        seed=user.seed,
    )
    return config, blocks


def _positive(user: UserConfig) -> None:
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_memory", "threads", "ram_cache"):
        value = getattr(user, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be 1 or more")
    size = user.block_size
    if not 1 <= size <= 256 or size & (size - 1):
        raise ConfigError(f"--block-size is {size}; it must be a power of two from 1 to 256, for example 16")
    for name in ("eviction_policy", "ram_eviction_policy", "disk_eviction_policy"):
        if (policy := getattr(user, name)) is not None:
            _one_of(f"--{name.replace('_', '-')}", policy, list(POLICIES))
    if user.implementation not in ("auto", "compact", "transformers"):
        raise ConfigError(f"--implementation is {user.implementation!r}; it must be auto, compact or transformers")


def _tier_settings(user: UserConfig, device: str) -> tuple[CacheWritePolicy, Preemption]:
    """(write policy, what becomes of preempted requests). Raises ConfigError for what does not go together."""
    asked = {"--ram-cache": user.ram_cache, "--disk-cache": user.disk_cache, "--remote-cache": user.remote_cache}
    first = next((name for name, value in asked.items() if value is not None), None)
    policy = _one_of("--cache-write-policy", user.cache_write_policy, get_args(CacheWritePolicy))
    preemption = _one_of("--preemption", user.preemption, get_args(Preemption))
    if first is not None and not user.enable_prefix_caching:
        raise ConfigError(f"{first} keeps prefixes, and --no-enable-prefix-caching reuses none. Leave one of them out")
    if first is not None and device != "cpu":
        raise ConfigError(f"{first}: tiers need the KV pool in main memory, and it is on {device}. Use --device cpu")
    if user.ram_cache is None and policy == "on-eviction":
        raise ConfigError("--cache-write-policy on-eviction goes through RAM: add --ram-cache, for example 2GiB")
    if user.ram_cache is None and user.ram_eviction_policy is not None:
        raise ConfigError(f"--ram-eviction-policy {user.ram_eviction_policy}: add --ram-cache, for example 2GiB")
    if user.disk_cache is None and user.disk_eviction_policy is not None:
        raise ConfigError(f"--disk-eviction-policy {user.disk_eviction_policy}: add --disk-cache, for example kv:20GiB")
    if user.ram_cache is None and preemption == "swap":
        raise ConfigError("--preemption swap goes to RAM: add --ram-cache, for example 2GiB")
    return policy, preemption if first is not None else "recompute"


def _one_of(option: str, value: str, known: Sequence[str]) -> Any:
    if value not in known:
        raise ConfigError(f"{option} is {value!r}; it must be one of {', '.join(known)}")
    return value


def _own_dtype(model_config: dict[str, Any], device: str, *, fast_bfloat16: bool) -> tuple[str, str]:
    """(name, why). Where a CPU computes bfloat16 slowly, float32: products run about eight times faster."""
    text = model_config.get("text_config") or {}
    own = str(
        text.get("dtype") or text.get("torch_dtype") or model_config.get("dtype") or model_config.get("torch_dtype")
    )
    own = own.removeprefix("torch.")
    if own not in DTYPE_BYTES:
        own = "float32"
    if device == "cpu" and own != "float32" and not fast_bfloat16:
        return "float32", f"the model's is {own}, but this CPU has no bfloat16 instructions"
    if device == "cpu" and own == "float16":
        return "bfloat16", "the model's is float16, which CPUs compute slowly"
    return own, "the model's own"


def _longest_that_fits(layout: CacheLayout, num_blocks: int, wanted: int, in_flight: int) -> int:
    """Most tokens one request may have in a pool of `num_blocks` (0 when not even one block a group is there)."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if layout.blocks_for(middle, in_flight) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def parse_bytes(text: str) -> int:
    """'4GiB', '500MB', '2g', '1073741824' -> bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 4GiB, 500MB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def parse_disk_cache(text: str) -> tuple[str, int]:
    """'DIR:20GiB' -> (folder, bytes). Raises ConfigError."""
    folder, _, size = text.rpartition(":")
    if not folder:
        raise ConfigError(f"--disk-cache {text!r} needs a folder and a size; write for example /var/cache/kv:20GiB")
    try:
        limit = parse_bytes(size)
    except ConfigError as error:
        raise ConfigError(f"--disk-cache {text!r} must end with a size, for example {folder}:20GiB: {error}") from None
    return str(Path(folder).expanduser().absolute()), limit


def free_memory() -> int:
    """Bytes of RAM this process may still take: what the system has available, or less where a cgroup limits it."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if os.path.exists(limit_file) and os.path.exists(used_file):
            limit = Path(limit_file).read_text().strip()
            if limit.isdigit():
                free = min(free, int(limit) - int(Path(used_file).read_text()))
    return free
