"""From options to a hierarchy. A disk that cannot be used costs its tier, not the server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from anaphora.blocks.eviction import DEFAULT_POLICY, make_policy
from anaphora.errors import ConfigError
from anaphora.tiers.break_even import LoadSpeed
from anaphora.tiers.directory import lock_bytes
from anaphora.tiers.disk import DiskTier
from anaphora.tiers.hierarchy import Hierarchy, Tier
from anaphora.tiers.ram import RamTier
from anaphora.tiers.remote.registry import open_remote
from anaphora.tiers.remote.tier import RemoteTier
from anaphora.tiers.saving import WritePolicy
from anaphora.tiers.segment import file_bytes, slot_bytes
from anaphora.tiers.store import StoreError

log = logging.getLogger(__name__)
_RAM = (1, LoadSpeed(0.0001, 4e9))
_DISK = (3, LoadSpeed(0.001, 5e8))
_REMOTE = (2, LoadSpeed(0.002, 3e8))
"""Worker threads, and what to expect of a tier until it has been measured: cautious, so that the first tries are
made where computing is clearly slower."""
_REMOTE_PIECE_BYTES = 24 << 20
"""Of a load, in one call of the store: each costs a few round trips."""
_WAITING_BYTES = 256 << 20
"""Of saves may wait in front of a tier."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Any subset; None: no such tier."""

    ram_bytes: int | None = None
    disk_directory: Path | None = None
    disk_bytes: int = 0
    remote_url: str | None = None
    write_policy: WritePolicy = WritePolicy.THROUGH
    ram_policy: str = DEFAULT_POLICY
    """Which block goes first, by the names of blocks/eviction."""
    disk_policy: str = DEFAULT_POLICY


def open_hierarchy(
    config: TierConfig,
    block_bytes: int,
    block_tokens: int,
    *,
    pool: memoryview | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> Hierarchy:
    """The tiers of `config` for blocks of `block_bytes` bytes; `pool`: the memory they come from.

    Raises ConfigError for a limit that holds no block, a folder in use, and a URL or policy nobody knows. A disk
    that cannot be used is warned about and left out; a remote need not be up.
    """
    tiers: list[Tier] = []
    unavailable: dict[str, str] = {}
    max_saves = max(16, _WAITING_BYTES // block_bytes)
    orphans = config.write_policy is WritePolicy.ON_EVICTION
    with ExitStack() as opened:  # closes what was opened when a later tier cannot be
        ram: RamTier | None = None
        if config.ram_bytes is not None:
            ram = RamTier(config.ram_bytes, block_bytes, make_policy(config.ram_policy), keeps_orphans=orphans)
            tiers.append(Tier(ram, *_RAM, max_saves=max_saves))
        if config.disk_directory is not None:
            _check_disk_limit(config.disk_bytes, block_bytes, block_tokens)
            try:
                policy = make_policy(config.disk_policy)
                disk = DiskTier(config.disk_directory, config.disk_bytes, policy, keeps_orphans=orphans)
            except StoreError as error:
                log.warning("%s. Going on without a disk cache", error)
                unavailable[DiskTier.name] = str(error)
            else:
                opened.callback(disk.close)
                tiers.append(Tier(disk, *_DISK, max_saves=max_saves))
        if config.remote_url is not None:
            remote = RemoteTier(open_remote(config.remote_url))
            opened.callback(remote.close)
            for memory in (pool, ram.arena if ram is not None else None):
                if memory is not None:
                    remote.register(memory)
            tiers.append(Tier(remote, *_REMOTE, remote.keep_locally, max_saves, _REMOTE_PIECE_BYTES))
        hierarchy = Hierarchy(tiers, config.write_policy, on_ready, unavailable)
        opened.pop_all()
    return hierarchy


def _check_disk_limit(limit: int, block_bytes: int, block_tokens: int) -> None:
    least = lock_bytes() + file_bytes(slot_bytes(block_tokens, block_bytes), 1)
    if limit < least:
        raise ConfigError(
            f"a disk cache of {limit:,} bytes holds no block of this model: that takes {least:,}. "
            "Give --disk-cache more, or leave it out"
        )
