"""From settings to the tiers behind a pool."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from anaphora.blocks.hashing import Namespace
from anaphora.blocks.manager import KVCacheManager
from anaphora.engine.config import EngineConfig
from anaphora.engine.tiering.blocks import PoolBlocks
from anaphora.engine.tiering.kv_tiers import Bell, KVTiers
from anaphora.tiers.build import TierConfig, open_hierarchy
from anaphora.tiers.memory import populate
from anaphora.tiers.saving import WritePolicy
from anaphora.tiers.store import Space

_AT_START = 512 << 20
"""Bytes of the pool that are taken from the system at the start: loads into untouched memory take up to four times as
long."""
_CODEC_BYTES = 32
"""What the tiers' headers have room for."""


def open_tiers(config: EngineConfig, namespace: Namespace, memory: memoryview) -> Callable[[KVCacheManager], KVTiers]:
    """Open what `config` asks for; the result makes the tiers of a cache whose blocks lie in `memory`.

    Raises ConfigError for a limit that holds no block, a folder in use and a URL nobody knows.
    """
    policy = WritePolicy(config.cache_write_policy)
    bell = Bell()
    hierarchy = open_hierarchy(
        TierConfig(
            ram_bytes=config.ram_cache or None,
            ram_policy=config.ram_eviction_policy,
            disk_directory=Path(config.disk_cache) if config.disk_cache else None,
            disk_bytes=config.disk_cache_bytes,
            disk_policy=config.disk_eviction_policy,
            remote_url=config.remote_cache or None,
            write_policy=policy,
        ),
        config.block_bytes,
        config.block_size,
        pool=memory,
        on_ready=bell.ring,
    )
    longest = -(-config.max_model_len // config.block_size) * config.block_bytes
    ready = memory[: min(longest, _AT_START)]  # the pool hands its blocks out in order
    Thread(target=populate, args=(ready,), name="pool-memory", daemon=True).start()
    blocks = PoolBlocks(memory, config.block_bytes, space_of(namespace, config.model_name))

    def attach(cache: KVCacheManager) -> KVTiers:
        through, preemption = policy is WritePolicy.THROUGH, config.preemption
        return KVTiers(hierarchy, cache, blocks, bell, write_through=through, preemption=preemption)

    return attach


def space_of(namespace: Namespace, model: str) -> Space:
    """What all blocks of the model in this form share, whatever the adapter or the salt (which `namespace` lacks)."""
    digest = hashlib.blake2b(namespace.key, digest_size=16).digest()
    codec, _, version = namespace.kv_dtype.rpartition("/")
    return Space(digest, model, f"{codec[: _CODEC_BYTES - len(version) - 1]}/{version}")
