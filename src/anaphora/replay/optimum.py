"""The most any policy could hit: Belady's MIN (1966) for prefixes, with the whole trace known.

What is used again last goes first. A child is never used again before its parent, so of equals the deeper goes
first and prefix closure holds by itself. Exact for the server's pool, in which all blocks of a prompt are active
together (brute force over all evictions proves it on tiny traces). Needs the future: memory grows with the trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush

_NEVER = 1 << 60


def next_uses(prompts: Sequence[Sequence[Hashable]]) -> list[list[int]]:
    """For every block of every prompt: the number of the next prompt that has it, or a number beyond all."""
    following: dict[Hashable, int] = {}
    uses: list[list[int]] = [[]] * len(prompts)
    for number in range(len(prompts) - 1, -1, -1):
        blocks = prompts[number]
        uses[number] = [following.get(block, _NEVER) for block in blocks]
        following.update(dict.fromkeys(blocks, number))
    return uses


def optimum(prompts: Sequence[Sequence[Hashable]], num_blocks: int, uses: list[list[int]] | None = None) -> int:
    """Blocks that hit in a pool of num_blocks, at best. `uses`: `next_uses(prompts)`, when asked for several sizes."""
    uses = next_uses(prompts) if uses is None else uses
    cached: dict[Hashable, int] = {}
    """Block -> its next use."""
    heap: list[tuple[int, int, int]] = []
    """(-next use, -depth, serial of the block)."""
    names: dict[int, Hashable] = {}
    serial = hits = 0
    for number, (blocks, following) in enumerate(zip(prompts, uses, strict=True)):
        kept = blocks[:num_blocks]
        found = 0
        while found < len(kept) and kept[found] in cached:
            found += 1
        hits += found
        excess = len(cached) + len(kept) - found - num_blocks
        while excess > 0:
            use, _, which = heappop(heap)
            block = names.pop(which)
            # Blocks of this prompt are in the heap as used now, behind every block that is used later.
            if cached.get(block) == -use > number:
                del cached[block]
                excess -= 1
        for depth, (block, use) in enumerate(zip(kept, following, strict=False)):
            cached[block] = use
            serial += 1
            names[serial] = block
            heappush(heap, (-use, -depth, serial))
        if len(heap) > 4 * num_blocks + 64:
            live = [item for item in heap if cached.get(names[item[2]]) == -item[0]]
            names = {item[2]: names[item[2]] for item in live}
            heap = live
            heapify(heap)
    return hits
