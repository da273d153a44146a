"""The question every engine's memory model answers: so many bytes for KV, how many blocks, tokens and requests?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anaphora.errors import ConfigError
from anaphora.geometry.model import ModelGeometry

_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the size of a cache depends on, by vLLM's names; None = the engine's own default."""

    max_model_len: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    model_dtype_bytes: int = 2
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool | None = None
    device: str = "cuda"
    compute_capability: int = 90
    """Of the GPU, times ten: 80 A100, 89 Ada, 90 Hopper, 100 Blackwell, 120 consumer Blackwell."""
    device_memory_bytes: int = 80 << 30
    """Of one device; some engines choose defaults by it."""

    def __post_init__(self) -> None:
        """Raises ConfigError for what is no positive number."""
        for name in ("max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "model_dtype_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a positive whole number")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST:
                raise ConfigError(f"{name} is {value}; give a positive whole number up to {_MOST:,}, or leave it out")


@dataclass(frozen=True, slots=True)
class GroupCapacity:
    """Layers of one block table."""

    keeps: str
    layers: int
    block_size: int
    """Tokens one block of this group spans."""
    window: int | None
    blocks_per_request: int
    """Blocks a request at `max_model_len` holds at most."""
    pool_blocks: int | None = None
    """Blocks of a pool of its own; None: all groups draw from the common one."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine makes of the bytes it has for KV, on one device."""

    available_bytes: int
    block_bytes: int
    """Bytes of one block of the pool, all the layers of its widest group."""
    num_blocks: int
    block_size: int
    """Tokens a block of the main attention spans."""
    groups: tuple[GroupCapacity, ...]
    blocks_per_request: int
    """Blocks one request at `max_model_len` takes, over all groups."""
    max_concurrency: float
    """Requests at `max_model_len` that fit at once."""
    tokens: int
    """The figure the engine prints: `max_concurrency` requests, in tokens."""
    tokens_older: int
    """The figure older versions printed, from the blocks of one group."""
    reuse_step: int
    """A cached prefix is reused in steps of this many tokens; a shorter one never is. 0: nothing is reused."""
    kept_back: int = 1
    """Blocks the engine never gives to a request."""

    @property
    def request_bytes(self) -> int:
        """Bytes one request at `max_model_len` takes from the pool."""
        return self.blocks_per_request * self.block_bytes

    @property
    def fits_one_request(self) -> bool:
        """Whether the engine starts: some blocks are kept back."""
        return self.request_bytes <= self.available_bytes - self.kept_back * self.block_bytes


class MemoryModel(Protocol):
    """One engine's arithmetic."""

    name: str

    def capacity(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> Capacity:
        """Blocks, tokens and concurrency for `available_bytes` per device. Raises ConfigError, UnsupportedModel."""
        ...

    def longest_context(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> int:
        """The longest request that fits, at most `settings.max_model_len`; 0 when not even one token does."""
        ...
