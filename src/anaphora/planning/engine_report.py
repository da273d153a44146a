"""What a running engine says of its own memory, in one form for all engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Everything optional: None or missing = not said. Bytes are of one rank, the tightest where they differ."""

    engine: str
    """A key of planning.engines.ENGINES."""
    source: str
    """The log or the address it was read from."""
    version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    utilization: float | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int | None = None
    eager: bool | None = None
    """No CUDA graphs."""
    only_named: bool = False
    """The source lists every setting that is not the engine's default, so what is None here is the default."""
    device_bytes: int | None = None
    """Of one device, as the driver reports it."""
    free_bytes: int | None = None
    """Free before the engine loaded anything."""
    allowed_bytes: int | None = None
    """The engine's share, KV included."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the names of a Budget's parts: weights, activations, libraries, CUDA graphs, compute buffer."""
    available_bytes: int | None = None
    """For KV (states included)."""
    num_blocks: int | None = None
    tokens: int | None = None
    """Capacity of the cache, as the engine prints it."""
    max_concurrency: float | None = None
    needed_bytes: int | None = None
    """Of one request, from a start that was refused for want of memory."""
    longest: int | None = None
    """The longest max_model_len, from such a start."""
    precision: int = GIB // 100
    """Bytes to which the figures are printed."""
    refused: str | None = None
    """Why the engine did not start, in its own words."""
    remarks: tuple[str, ...] = ()

    @property
    def short_version(self) -> tuple[int, int] | None:
        """(major, minor) of a numbered release."""
        numbers = (self.version or "").removeprefix("v").split(".")
        if len(numbers) < 2 or not (numbers[0].isdigit() and numbers[1].isdigit()):
            return None
        return int(numbers[0]), int(numbers[1])
