"""From the options of `anaphora replay` to a plan: sizes to blocks, model and hardware to bytes and seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anaphora.errors import ConfigError

if TYPE_CHECKING:
    from anaphora.replay.costs import Costs
    from anaphora.replay.spool import Spool
    from anaphora.replay.study import Plan
    from anaphora.tiers.break_even import PrefillSpeed

_TIERS = ("ram_cache", "disk_cache", "remote_cache")
_HEADER_BYTES = 144
"""In front of a block on disk, and 4 a token (docs/tiers.md); both parts fill whole pages."""
_SHORT, _LONG = 1024, 32768
"""Prompts whose prefill is estimated, to tell the part that grows with their length from that with its square."""


def check(options: dict[str, Any]) -> None:
    """What can be refused before the trace is read. Raises ConfigError."""
    from anaphora.blocks.eviction import make_policy

    _policies(options["policies"])
    for name in ("kv_memory", *_TIERS):
        if options[name] is not None:
            _bytes_or_blocks(options[name], _flag(name))
    for text in _split(options["sizes"]):
        _bytes_or_blocks(text, "--sizes")
    if any(options[name] for name in _TIERS) and options["kv_memory"] is None:
        raise ConfigError("tiers lie behind a pool: say how large it is with --kv-memory")
    for tier in ("ram", "disk"):
        policy = options[f"{tier}_eviction_policy"]
        if policy is not None:
            make_policy(policy)
            if options[f"{tier}_cache"] is None:
                raise ConfigError(f"--{tier}-eviction-policy {policy} is of a tier: add --{tier}-cache")
    if options["cache_write_policy"] == "on-eviction" and options["ram_cache"] is None:
        raise ConfigError("--cache-write-policy on-eviction goes through RAM, as in the server: add --ram-cache")
    if options["bounded"] and not options["sizes"]:
        raise ConfigError("--bounded simulates the sizes of --sizes and nothing else; give some")
    if options["hardware"] is not None and options["model"] is None and options["prefill_speed"] is None:
        raise ConfigError("--hardware needs --model: how fast a prompt is computed depends on both")
    if options["worth"] is not None and (
        options["model"] is None or not (options["hardware"] or options["prefill_speed"])
    ):
        raise ConfigError("--worth weighs seconds against GiB: give --model, and --hardware or --prefill-speed")


def make_plan(options: dict[str, Any], spool: Spool, processes: int) -> Plan:
    """Raises ConfigError, ModelNotFound, HardwareNotFound and what else the model's folder makes wrong."""
    from anaphora.replay.study import Plan
    from anaphora.replay.tiered import TierSizes
    from anaphora.tiers.memory import round_up
    from anaphora.tiers.ram import ENTRY_BYTES
    from anaphora.tiers.saving import WritePolicy

    costs = _costs(options)
    block = None if costs.bytes_per_token is None else costs.bytes_per_token * spool.block_size
    weights = {
        "ram_cache": block and block + ENTRY_BYTES,
        "disk_cache": block and round_up(block) + round_up(_HEADER_BYTES + 4 * spool.block_size),
        "remote_cache": block,
    }
    if options["worth"] is not None and not spool.seconds:
        raise ConfigError("--worth counts by the hour, and all requests of this trace have the same time; leave it out")
    ram, disk, remote = (_blocks(options[name], weights[name], _flag(name)) for name in _TIERS)
    pool, policies = options["kv_memory"], (options["ram_eviction_policy"], options["disk_eviction_policy"])
    written = WritePolicy(options["cache_write_policy"])
    return Plan(
        policies=_policies(options["policies"]),
        sizes=[_blocks(text, block, "--sizes") for text in _split(options["sizes"])],
        pool=None if pool is None else _blocks(pool, block, "--kv-memory"),
        tiers=None if pool is None else TierSizes(ram, disk, remote, written, *policies),
        costs=costs,
        worth=options["worth"],
        bounded=options["bounded"],
        processes=processes,
    )


def _policies(names: tuple[str, ...]) -> tuple[str, ...]:
    from anaphora.blocks.eviction import DEFAULT_POLICY, POLICIES, make_policy

    asked = [name for text in names for name in _split(text)] or ["lru", DEFAULT_POLICY]
    if "all" in asked:
        asked = [*(name for name in POLICIES if name != DEFAULT_POLICY), DEFAULT_POLICY]
    for name in asked:
        make_policy(name)
    return tuple(dict.fromkeys(asked))


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _bytes_or_blocks(text: str, option: str) -> tuple[int, bool]:
    """(number, whether it is of bytes). Raises ConfigError."""
    from anaphora.engine.config import parse_bytes

    if text.isascii() and text.isdigit():
        return int(text), False
    try:
        return parse_bytes(text), True
    except ConfigError:
        raise ConfigError(f"{option} {text!r} is no size; write blocks, as 5000, or bytes, as 20GiB") from None


def _blocks(text: str | None, block_bytes: int | None, option: str) -> int:
    """Raises ConfigError where not even one block fits."""
    if text is None:
        return 0
    number, of_bytes = _bytes_or_blocks(text, option)
    if of_bytes:
        if block_bytes is None:
            raise ConfigError(f"{option} {text}: how many blocks that holds depends on the model; add --model")
        number //= max(1, block_bytes)
    if not 1 <= number < 1 << 40:
        raise ConfigError(f"{option} {text} is {number:,} blocks; give at least one, and fewer than 2**40")
    return number


def _costs(options: dict[str, Any]) -> Costs:
    from anaphora.replay.costs import Costs
    from anaphora.tiers.break_even import LoadSpeed, PrefillSpeed

    weight = None
    prefill: PrefillSpeed | None = None
    device = "device"
    if options["model"] is not None:
        from math import ceil

        from anaphora.geometry import formula
        from anaphora.geometry.find import find_geometry

        geometry = find_geometry(options["model"])
        terms = formula.terms(geometry, _SHORT, 1, formula.kv_dtype(options["kv_dtype"]))
        weight = ceil(sum(term.bytes_per_token for term in terms if term.grows))
        if options["hardware"] is not None:
            device, prefill = _estimated(geometry, options["hardware"], options["count"])
    if options["prefill_speed"] is not None:
        prefill = PrefillSpeed(1 / options["prefill_speed"])
    rates = (options["ram_speed"], options["disk_speed"], options["remote_speed"])
    speeds = {
        tier: LoadSpeed(latency, rate * 1e9)
        for tier, latency, rate in zip(("ram", "disk", "remote"), (1e-4, 1e-3, 2e-3), rates, strict=True)
    }
    return Costs(prefill, weight, speeds, options["count"], device)


def _estimated(geometry: Any, name: str, count: int) -> tuple[str, PrefillSpeed]:
    """(the device's name, its speed). Raises ConfigError where nobody published how fast it computes."""
    from anaphora.planning.hardware import find_device
    from anaphora.planning.offload import offload
    from anaphora.tiers.break_even import PrefillSpeed

    device = find_device(name)
    short, long = (offload(geometry, device, tokens, 0, count).recompute_seconds for tokens in (_SHORT, _LONG))
    if not short or not long:
        raise ConfigError(f"how fast {device.name} computes is not known; measure it and give --prefill-speed")
    per_pair = max(0.0, 2 * (long / _LONG - short / _SHORT) / (_LONG - _SHORT))
    return device.name, PrefillSpeed(short / _SHORT - per_pair * _SHORT / 2, per_pair)
