"""The prefix index: a tree of token-verified nodes, one node per block of tokens, one block per cache group.

    root (namespace) -- node [t0 .. t15] -- node [t16 .. t31] -- node [t32 .. t36]   (a partial tail)
                             blocks: one BlockId per group, NULL_BLOCK where the group has none

A lookup goes by BlockHash (a dict), then compares the parent and the token ids: a walk from the root has
compared every token of the prefix, in windowed groups too whose early blocks are long gone. A node without
blocks stays while a child, or a table that ends there, needs it as a link.

Every node keeps the children that have a block in *all* groups sorted by their packed tokens. The child
sharing the longest run with a prompt is a neighbour of where the prompt would stand, so a root with many
thousand children is bisected, not scanned (the walk of a radix tree, SGLang's RadixAttention, arXiv 2312.07104).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import attrgetter

from anaphora.blocks.hashing import TOKEN_BYTES, HashChain, block_hash, keyed
from anaphora.errors import BlockStateError
from anaphora.types import NULL_BLOCK, BlockHash, BlockId


class Node:
    """Up to block_size tokens after their parent. A root has no parent, and its namespace key as tokens."""

    __slots__ = ("blocks", "depth", "hash", "missing", "parent", "refs", "sources", "tokens")

    def __init__(self, parent: Node | None, digest: BlockHash, tokens: bytes, num_groups: int) -> None:
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent is not None else -1
        """Nodes before it, the root not counted."""
        self.hash = digest
        self.tokens = tokens
        """Packed; see hashing.pack_tokens."""
        self.blocks = [NULL_BLOCK] * num_groups
        self.missing = num_groups
        """Groups without a block."""
        self.sources: list[Node] = []
        """Children that miss no group, sorted by tokens."""
        self.refs = 0
        """Children and pins: while not 0 the node stays."""

    @property
    def above(self) -> Node:
        """The parent of a node that is no root."""
        assert self.parent is not None
        return self.parent


_tokens_of = attrgetter("tokens")


class PrefixIndex:
    """Finds blocks by what they hold. State changes: child, root, attach, detach, pin, unpin, clear."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.epoch = 0
        """Grows with `clear`; nodes of an earlier epoch are no longer in the tree."""
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[BlockHash, Node] = {}
        self._num_pins = 0

    def __len__(self) -> int:
        """Nodes, roots not counted."""
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        """Whether this very node hangs in the tree (roots are not looked for)."""
        return self._nodes.get(node.hash) is node

    @property
    def num_entries(self) -> int:
        """(group, node) pairs with a block. O(nodes)."""
        return sum(self.num_groups - node.missing for node in self._nodes.values())

    # Queries

    def find_root(self, chain: HashChain) -> Node | None:
        return self._roots.get(chain.namespace_key)

    def walk(self, root: Node, chain: HashChain, limit: int) -> list[Node]:
        """Nodes of the chain's first blocks, at most `limit`, as far as every token agrees."""
        path: list[Node] = []
        get, node = self._nodes.get, root
        for digest, tokens in zip(chain.hashes[:limit], chain.packed, strict=False):
            child = get(digest)
            if child is None or child.parent is not node or child.tokens != tokens:
                break
            path.append(child)
            node = child
        return path

    def longest_run(self, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The child, present in every group, that shares the longest run with `tokens`, and the run in tokens."""
        at = bisect_left(parent.sources, tokens, key=_tokens_of)
        best: Node | None = None
        run = 0
        for child in parent.sources[max(0, at - 1) : at + 1]:
            common = _common_tokens(child.tokens, tokens)
            if common > run:
                best, run = child, common
        return best, run

    def is_extended(self, parent: Node, tokens: bytes) -> bool:
        """Whether a child present in every group holds `tokens` and more."""
        at = bisect_right(parent.sources, tokens, key=_tokens_of)
        return at < len(parent.sources) and parent.sources[at].tokens.startswith(tokens)

    def shorter_siblings(self, node: Node) -> list[Node]:
        """Siblings present in every group whose tokens are a proper prefix of the node's, longest first."""
        sources, found = node.above.sources, []
        key = node.tokens[:-TOKEN_BYTES]
        while key and (at := bisect_right(sources, key, key=_tokens_of)):
            left = sources[at - 1]  # the greatest one <= key: it starts with every prefix of key that is there
            if key.startswith(left.tokens):
                found.append(left)
                key = left.tokens[:-TOKEN_BYTES]
            else:
                key = key[: _common_tokens(key, left.tokens) * TOKEN_BYTES]
        return found

    # Changes

    def root(self, chain: HashChain) -> Node:
        """The namespace's root, made when missing."""
        root = self._roots.get(chain.namespace_key)
        if root is None:
            root = Node(None, chain.root, chain.namespace_key, self.num_groups)
            self._roots[chain.namespace_key] = root
        return root

    def child(self, parent: Node, digest: BlockHash, tokens: bytes) -> Node | None:
        """The child of that content, made when missing; None when the hash already stands for other content."""
        node = self._nodes.get(digest)
        if node is None:
            node = self._nodes[digest] = Node(parent, digest, tokens, self.num_groups)
            parent.refs += 1
        elif node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def attach(self, node: Node, group: int, block: BlockId) -> None:
        """From now on `block` is found as the group's KV of this node."""
        node.blocks[group] = block
        node.missing -= 1
        if node.missing == 0:
            sources = node.above.sources
            if sources:
                insort(sources, node, key=_tokens_of)
            else:
                sources.append(node)

    def detach(self, node: Node, group: int) -> None:
        """The group's block is found no more. Links that nobody needs any longer go."""
        if node.missing == 0:
            sources = node.above.sources
            del sources[bisect_left(sources, node.tokens, key=_tokens_of) if len(sources) > 1 else 0]
        node.blocks[group] = NULL_BLOCK
        node.missing += 1
        self._prune(node)

    def pin(self, node: Node) -> None:
        """Keep the node, and so its ancestors, in the tree: a table grows from here."""
        node.refs += 1
        self._num_pins += 1

    def unpin(self, node: Node) -> None:
        node.refs -= 1
        self._num_pins -= 1
        self._prune(node)

    def clear(self) -> None:
        """Forget everything, pins included. The caller has detached every block."""
        self._roots.clear()
        self._nodes.clear()
        self._num_pins = 0
        self.epoch += 1

    def _prune(self, node: Node) -> None:
        while node.refs == 0 and node.missing == self.num_groups:
            if node.parent is None:
                del self._roots[node.tokens]
                return
            del self._nodes[node.hash]
            node = node.parent
            node.refs -= 1

    # Proof

    def check_invariants(self) -> None:
        """Raises BlockStateError when links, hashes, orders or counts do not agree. O(nodes)."""
        children: dict[Node, list[Node]] = {root: [] for root in self._roots.values()}
        starts = {root: keyed(key) for key, root in self._roots.items()}
        for digest, node in self._nodes.items():  # in order of creation: parents come first
            parent = node.parent
            if parent is None or parent not in starts:
                raise BlockStateError("a node's parent is not in the prefix index")
            children[node] = []
            children[parent].append(node)
            start = starts[node] = starts[parent]
            if digest != node.hash or node.hash != block_hash(start, parent.hash, node.tokens):
                raise BlockStateError("a node's hash is not that of its tokens")
            if node.missing != node.blocks.count(NULL_BLOCK):
                raise BlockStateError(f"a node counts {node.missing} groups missing, its blocks are {node.blocks}")
            if node.refs == 0 and node.missing == self.num_groups:
                raise BlockStateError("a node without blocks, children or pins is still in the prefix index")
        pins = 0
        for node, below in children.items():
            if node.sources != sorted((c for c in below if c.missing == 0), key=_tokens_of):
                raise BlockStateError("a node's list of children present in every group is wrong")
            pins += node.refs - len(below)
            if node.refs < len(below) or (node.parent is None and node.refs == 0):
                raise BlockStateError(f"a node has {len(below)} children and {node.refs} refs")
        if pins != self._num_pins:
            raise BlockStateError(f"{self._num_pins} pins were given, nodes hold {pins}")


def _common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the common prefix of two packed sequences."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
