"""What vLLM makes of the bytes it has for KV: blocks, tokens, concurrency, and the shortest prefix it reuses.

Read from vLLM 0.32.0; equal to its own code for every model and setting in the golden rows. The bytes themselves
(device memory x utilisation - weights - activations - graphs) are estimated elsewhere.
"""

from __future__ import annotations

from math import gcd, lcm

from anaphora.geometry.model import Keeps, ModelGeometry
from anaphora.planning.protocol import Capacity, EngineSettings, GroupCapacity
from anaphora.planning.vllm_groups import Group, group_layers
from anaphora.planning.vllm_specs import Kind, block_sizes, layer_specs

_LARGE_DEVICE = 70 << 30
_LARGEST_DEVICE = 160 << 30


class VllmMemory:
    """vLLM 0.32's arithmetic."""

    name = "vllm"

    def capacity(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> Capacity:
        """Blocks, tokens and concurrency for `available_bytes` per device. Raises ConfigError, UnsupportedModel."""
        groups = self._groups(geometry, settings)
        block_bytes = self._block_bytes(groups, geometry, settings)
        num_blocks = available_bytes // block_bytes
        in_flight = self.in_flight_tokens(geometry, settings)
        per_request = sum(group.blocks(settings.max_model_len, in_flight) for group in groups)
        concurrency = num_blocks / per_request
        return Capacity(
            available_bytes=available_bytes,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            block_size=block_sizes(geometry, settings)[0],
            groups=tuple(_describe(group, settings.max_model_len, in_flight) for group in groups),
            blocks_per_request=per_request,
            max_concurrency=concurrency,
            tokens=int(concurrency * settings.max_model_len),
            tokens_older=num_blocks // len(groups) * min(group.block_size for group in groups),
            reuse_step=self._reuse_step(groups, geometry, settings),
        )

    def longest_context(self, geometry: ModelGeometry, settings: EngineSettings, available_bytes: int) -> int:
        """The longest request that fits beside the block vLLM keeps back; 0 when not even one token does."""
        groups = self._groups(geometry, settings)
        block_bytes = self._block_bytes(groups, geometry, settings)
        blocks = (available_bytes - block_bytes) // block_bytes
        in_flight = self.in_flight_tokens(geometry, settings)
        low, high = 0, settings.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            if sum(group.blocks(middle, in_flight) for group in groups) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def prefix_caching(self, geometry: ModelGeometry, settings: EngineSettings) -> bool:
        """Whether prefixes are reused: on unless said otherwise, but off without attention and in CPU MLA."""
        if settings.device == "cpu" and any(layer.keeps is Keeps.LATENT for layer in geometry.layers):
            return False
        if settings.enable_prefix_caching is not None:
            return settings.enable_prefix_caching
        return any(layer.kv_heads or layer.side for layer in geometry.layers)

    def in_flight_tokens(self, geometry: ModelGeometry, settings: EngineSettings) -> int:
        """Tokens scheduled and not yet settled: one batch, and one more with asynchronous scheduling on a GPU."""
        batched = settings.max_num_batched_tokens or self._default_batch(geometry, settings)
        stages = settings.pipeline_parallel_size
        return batched * (stages + (settings.device != "cpu" and stages == 1))

    def _default_batch(self, geometry: ModelGeometry, settings: EngineSettings) -> int:
        """`vllm serve`'s max_num_batched_tokens, by device."""
        if settings.device == "cpu":
            default = 2048 * settings.tensor_parallel_size * settings.pipeline_parallel_size
            whole = any(layer.keeps is Keeps.LATENT for layer in geometry.layers)  # no chunked prefill
            return max(settings.max_model_len, default) if whole else default
        if settings.device_memory_bytes >= _LARGEST_DEVICE:
            return 16384
        a100 = settings.compute_capability == 80
        return 8192 if settings.device_memory_bytes >= _LARGE_DEVICE and not a100 else 2048

    def _groups(self, geometry: ModelGeometry, settings: EngineSettings) -> list[Group]:
        specs = layer_specs(geometry, settings, self.prefix_caching(geometry, settings))
        packed = any(layer.keeps is Keeps.COMPRESSED for layer in geometry.layers)
        return group_layers(specs, block_outermost=packed)

    def _block_bytes(self, groups: list[Group], geometry: ModelGeometry, settings: EngineSettings) -> int:
        """Of the widest group on the fullest pipeline stage: the ranks agree on the smallest number of blocks."""
        stages = _stages(len(geometry.layers), settings.pipeline_parallel_size)
        return max(group.on_layers(stage).block_bytes for group in groups for stage in stages)

    def _reuse_step(self, groups: list[Group], geometry: ModelGeometry, settings: EngineSettings) -> int:
        """Tokens a hit is a multiple of: the block, or what the blocks of all groups have in common.

        Where a state's block is longer than what the blocks share, states are kept at the finer step.
        """
        sizes = [group.block_size for group in groups]
        if len(groups) == 1:
            return block_sizes(geometry, settings)[0]
        step = lcm(*sizes)
        if not self.prefix_caching(geometry, settings):
            return step
        states = [group.block_size for group in groups if group.members[0].spec.kind is Kind.STATE]
        finest = gcd(*sizes)
        chunked = any(group.members[0].spec.kind is Kind.CHUNKED and group.block_size != finest for group in groups)
        return finest if any(size > finest for size in states) and not chunked else step


def _describe(group: Group, max_len: int, in_flight: int) -> GroupCapacity:
    first = group.members[0].spec
    return GroupCapacity(
        first.kind.value, len(group.members), group.block_size, first.window, group.blocks(max_len, in_flight)
    )


def _stages(num_layers: int, stages: int) -> list[range]:
    """vLLM's split: even, the rest to the stages before the last one."""
    sizes = [num_layers // stages] * stages
    for i in range(2, num_layers % stages + 2):
        sizes[-i] += 1
    starts = [sum(sizes[:i]) for i in range(stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
