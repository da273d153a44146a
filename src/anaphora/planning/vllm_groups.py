"""vLLM's grouping of layers: every group has its own block table, all draw blocks from one pool.

Read from vLLM 0.32.0, v1/core/kv_cache_utils.py (get_kv_cache_groups and what it calls). Blocks of all groups
weigh the same, so the pool's block is as wide as the widest group:

    one kind                     -> one group of all layers
    kinds with unequal pages     -> longer blocks for the smaller pages, or padding
    full 12, linear 36           -> 4 groups of 12: a block holds 12 layers' pages
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anaphora.errors import UnsupportedModel
from anaphora.planning.vllm_specs import CacheSpec, Kind

_FULL_LIKE = {Kind.FULL, Kind.MLA}
_SLIDING_LIKE = {Kind.SLIDING, Kind.SLIDING_MLA}


@dataclass(frozen=True, slots=True)
class Member:
    """One spec of one layer."""

    layer: int
    spec: CacheSpec


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table."""

    members: tuple[Member, ...]

    @property
    def block_size(self) -> int:
        return self.members[0].spec.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over the group's layers."""
        return sum(member.spec.page_bytes for member in self.members)

    def blocks(self, max_len: int, in_flight: int) -> int:
        """Blocks of this group's table that a request of `max_len` holds at most."""
        return max(member.spec.blocks(max_len, in_flight) for member in self.members)

    def on_layers(self, layers: range) -> Group:
        """What a pipeline stage holds of it; may be empty."""
        return Group(tuple(member for member in self.members if member.layer in layers))


def group_layers(specs: Sequence[Sequence[CacheSpec]], *, block_outermost: bool) -> list[Group]:
    """Specs by layer -> groups. `block_outermost`: pages of unequal size lie side by side in a block (DeepSeek V4).

    Raises UnsupportedModel when pages cannot be made equal.
    """
    members = [Member(i, spec) for i, layer in enumerate(specs) for spec in layer]
    if not members:
        return []
    if len({member.spec for member in members}) == 1 or uniform([member.spec for member in members]):
        return [Group(tuple(members))]
    if block_outermost and len({member.spec.page_bytes for member in members}) > 1:
        return _packed(members)
    return _equal_pages(_unify_pages(members))


def uniform(specs: Sequence[CacheSpec]) -> bool:
    """Whether all need the same number of token slots, so that one block table serves them."""
    if len({spec.block_size for spec in specs}) > 1:
        return False
    first = specs[0]
    kinds = {spec.kind for spec in specs}
    if first.kind in _FULL_LIKE:
        return kinds <= _FULL_LIKE
    if first.kind is Kind.STATE:
        return len(set(specs)) == 1
    alike = _SLIDING_LIKE if first.kind is Kind.SLIDING else {first.kind}
    return kinds <= alike and len({spec.window for spec in specs}) == 1


def _unify_pages(members: list[Member]) -> list[Member]:
    """Longer blocks for smaller pages that divide the largest; padding for states and for pages that do not."""
    largest = max(member.spec.page_bytes for member in members)

    def enlarge(spec: CacheSpec) -> CacheSpec:
        if spec.page_bytes == largest:
            return spec
        ratio, rest = divmod(largest, spec.page_bytes)
        if spec.kind is Kind.STATE or (rest and spec.kind not in (Kind.MLA, Kind.SLIDING_MLA)):
            return replace(spec, page_bytes=largest)
        if rest:
            raise UnsupportedModel("vLLM cannot make the pages of these layers equal (MLA beside another size)")
        return replace(spec, page_bytes=largest, block_size=spec.block_size * ratio)

    return [replace(member, spec=enlarge(member.spec)) for member in members]


def _equal_pages(members: list[Member]) -> list[Group]:
    """Kinds cut into groups of as many layers as the rarest kind has (or the commonest, when that is near)."""
    kinds: dict[CacheSpec, list[Member]] = defaultdict(list)
    for member in members:
        kinds[member.spec].append(member)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for layers in kinds.values():
        number = -(-len(layers) // size)
        groups += [Group(tuple(layers[i::number])) for i in range(number)]
    return groups


def _packed(members: list[Member]) -> list[Group]:
    """DeepSeek V4: buckets of one kind, cut so that no group is much wider than it must be.

    Buckets with as many layers in every page size are cut into equal repeats of that pattern. Where there is no such
    bucket with several page sizes, sliding layers are cut to fit into the block that the others need anyway.
    """
    buckets: list[list[Member]] = []
    for member in members:
        for bucket in buckets:
            if uniform([*(other.spec for other in bucket), member.spec]):
                bucket.append(member)
                break
        else:
            buckets.append([member])
    pages = [_by_page(bucket) for bucket in buckets]
    repeats = [max(map(len, page.values())) for page in pages]
    balanced = [len(set(map(len, page.values()))) == 1 for page in pages]
    floor = max(
        (n for n, page, even in zip(repeats, pages, balanced, strict=True) if even and len(page) > 1), default=0
    )
    even_repeats = [n for n, even in zip(repeats, balanced, strict=True) if even]
    per_group = _least_padding(even_repeats, floor) if floor else None

    def split_into(index: int) -> int:
        return -(-repeats[index] // per_group) if per_group and balanced[index] else 1

    free = [per_group is None and bucket[0].spec.kind in _SLIDING_LIKE for bucket in buckets]
    needed = max(
        sum(-(-len(layers) // (len(bucket) if free[i] else split_into(i))) * page for page, layers in pages[i].items())
        for i, bucket in enumerate(buckets)
    )
    groups: list[Group] = []
    for i, bucket in enumerate(buckets):
        number = split_into(i)
        if free[i]:
            number = max(number, -(-len(bucket) // max(needed // bucket[0].spec.page_bytes, 1)))
        if number == 1:
            groups.append(Group(tuple(bucket)))
            continue
        patterns = list(zip(*pages[i].values(), strict=False))
        groups += [Group(tuple(m for repeat in patterns[k::number] for m in repeat)) for k in range(number)]
    return groups


def _by_page(bucket: list[Member]) -> dict[int, list[Member]]:
    pages: dict[int, list[Member]] = defaultdict(list)
    for member in bucket:
        pages[member.spec.page_bytes].append(member)
    return pages


def _least_padding(values: Sequence[int], lowest: int) -> int:
    """The chunk size that wastes least when every value is rounded up to a multiple; the largest of equals."""
    return min(range(lowest, max(values) + 1), key=lambda d: (sum(-value % d for value in values), -d), default=lowest)
