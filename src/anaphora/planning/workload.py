"""What users ask for, and how many of their requests a pool of blocks holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from anaphora.errors import ConfigError
from anaphora.planning.protocol import Capacity

_MOST = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests at once, each this long, each beginning with the same prefix."""

    context: int
    """Tokens of one request, prompt and answer."""
    concurrency: int = 1
    shared_prefix: int = 0
    """Tokens that all requests begin with."""

    def __post_init__(self) -> None:
        """Raises ConfigError for impossible wishes."""
        for name in ("context", "concurrency"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"--{name} is {value}; give a positive whole number")
            if value > _MOST:
                raise ConfigError(f"--{name} is {value}; no engine holds that many, give {_MOST:,} or less")
        if not 0 <= self.shared_prefix < self.context:
            raise ConfigError(
                f"--shared-prefix {self.shared_prefix} must be at least 0 and shorter than the context of "
                f"{self.context} tokens"
            )


def shared_blocks(capacity: Capacity, prefix: int) -> int:
    """Blocks of the common pool that requests with the same first `prefix` tokens hold together.

    Only whole reuse steps count. A window's blocks move on with each request and a state is its own.
    """
    if capacity.reuse_step == 0:
        return 0
    reused = prefix // capacity.reuse_step * capacity.reuse_step
    return sum(
        min(group.blocks_per_request, reused // group.block_size)
        for group in capacity.groups
        if group.window is None and group.keeps != "state" and group.pool_blocks is None
    )


def requests_that_fit(capacity: Capacity, prefix: int = 0) -> int:
    """Requests at `max_model_len` that hold all their blocks at once. State changes: none."""
    shared = shared_blocks(capacity, prefix)
    own = capacity.blocks_per_request - shared
    usable = capacity.num_blocks - capacity.kept_back - shared
    most = usable // own if own > 0 else usable
    if shared and most <= 0 and usable + shared >= capacity.blocks_per_request:
        most = 1
    for group in capacity.groups:
        if group.pool_blocks is not None:
            most = min(most, group.pool_blocks // group.blocks_per_request)
    return max(0, most)


def needed_bytes(capacity: Capacity, requests: int, prefix: int = 0) -> int:
    """Bytes that `requests` at `max_model_len` take, the blocks kept back included.

    Where layers have pools of their own the whole is scaled: the pools keep their proportion.
    """
    if any(group.pool_blocks is not None for group in capacity.groups) and capacity.max_concurrency > 0:
        if capacity.max_concurrency == float("inf"):
            return 0
        exact = len(capacity.groups) == 1 and capacity.groups[0].keeps == "slot"
        return (
            requests * capacity.block_bytes
            if exact
            else floor(capacity.available_bytes * requests / capacity.max_concurrency)
        )
    shared = shared_blocks(capacity, prefix)
    blocks = requests * (capacity.blocks_per_request - shared) + shared + capacity.kept_back
    return blocks * capacity.block_bytes
