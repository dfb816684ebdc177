"""Prefix tree over blocks of tokens, by which requests share the keys and values of what they begin with.

A node is a block. Its tokens follow those of its parent, so the path to it is the beginning of the sequences that use
it. Only a full block has children; siblings may begin with the same tokens and differ later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from quintet.config.plan.kv_blocks import BLOCK
from quintet.rollout.engines.hf.block_pool import BlockPool

Tokens: TypeAlias = tuple[int, ...]


class PoolExhaustedError(Exception):
    """All blocks are in use by running requests."""


@dataclass(eq=False, slots=True)
class BlockNode:
    """A block of the pool and the tokens whose keys and values are in it, or will be."""

    tokens: Tokens
    block: int
    parent: BlockNode | None
    num_computed: int = 0
    """Tokens whose keys and values are computed, or are computed by the pass that is being prepared."""
    users: int = 0
    """Number of sequences whose path contains the node."""
    has_writer: bool = False
    """Whether a running sequence writes its response into the block, behind `tokens`."""
    children: list[BlockNode] = field(default_factory=list)
    """Sorted by their tokens."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states [hidden] behind the first k tokens, where a prompt ends."""


class PrefixTree:
    """Blocks of the sequences in use and of earlier ones, under the current weights.

    Blocks that no sequence uses are evicted when the pool has no free ones: the least recently used leaf first.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._root = BlockNode((), -1, None)
        self._unused: OrderedDict[BlockNode, None] = OrderedDict()
        """Nodes without users, least recently used first. Children come before their parents, because they are
        released before them and used together with them."""

    @property
    def num_available(self) -> int:
        """Number of blocks that can be allocated, some of them by eviction."""
        return self.pool.num_free + len(self._unused)

    def reset(self) -> None:
        """Forget all nodes."""
        self._root.children.clear()
        self._unused.clear()
        self.pool.reset()

    def num_new_blocks(self, tokens: Tokens) -> int:
        """Return how many of the available blocks `acquire` would take, at most."""
        node, shared = self._root, 0
        for start in range(0, len(tokens), BLOCK):
            part = tokens[start : start + BLOCK]
            child, common = _closest(node, part)
            if child is None or common < len(part):
                break
            shared += bool(child.users)
            node = child
        return -(-len(tokens) // BLOCK) - shared

    def acquire(self, tokens: Tokens, *, is_shared: bool = True) -> list[BlockNode]:
        """Return the nodes of a sequence, with one more user each, until `release`. What is not cached is added, and
        has to be computed. Unless it `is_shared`, the sequence has nodes of its own, which no other one finds.

        Raises:
            PoolExhaustedError: there are not enough blocks.
        """
        path: list[BlockNode] = []
        node = self._root if is_shared else BlockNode((), -1, None)
        try:
            for start in range(0, len(tokens), BLOCK):
                node = self._child(node, tokens[start : start + BLOCK])
                path.append(node)
        except PoolExhaustedError:
            self.release(path)
            raise
        return path

    def release(self, path: Sequence[BlockNode]) -> None:
        """Remove one user from each node. Nodes without users stay cached, without the tokens that are not computed."""
        for node in reversed(path):
            node.users -= 1
            if not node.users:
                self._unused[node] = None
                if node.num_computed < len(node.tokens):
                    self._drop_uncomputed(node)

    def allocate(self) -> int:
        """Return a free block, if necessary by eviction.

        Raises:
            PoolExhaustedError: there is none.
        """
        if not self.pool.num_free:
            if not self._unused:
                raise PoolExhaustedError
            self._remove(next(iter(self._unused)))
        return self.pool.allocate()

    def end_writing(self, path: list[BlockNode], tokens: Tokens) -> None:
        """End the writing of a sequence into the last block of its path. Up to a full block of the `tokens` behind the
        node's parent are cached; none beyond the node's own forgets what was written."""
        node = path[-1]
        node.has_writer = False
        if len(tokens) <= len(node.tokens):
            return
        existing, common = _closest(_parent(node), tokens)
        if existing is not None and common == len(tokens):
            path[-1] = self._use(existing)
            self.release([node])
        else:
            self._set_tokens(node, tokens)
            node.num_computed = len(tokens)

    def add_computed(self, path: list[BlockNode], tokens: Tokens, block: int) -> None:
        """Append a node to a path: a block whose `tokens` are computed, or the node that has the same ones."""
        parent = path[-1] if path else self._root
        existing, common = _closest(parent, tokens)
        if existing is not None and common == len(tokens):
            self.pool.free([block])
            path.append(self._use(existing))
        else:
            path.append(self._add(BlockNode(tokens, block, parent, len(tokens))))

    def _child(self, parent: BlockNode, tokens: Tokens) -> BlockNode:
        """Return the child that begins with the tokens, with one more user."""
        nearest, common = _closest(parent, tokens)
        if nearest is not None and common == len(tokens):
            return self._use(nearest)
        if nearest is not None and common == len(nearest.tokens) and not nearest.has_writer:
            self._set_tokens(nearest, tokens)
            return self._use(nearest)
        num_computed = 0 if nearest is None else min(common, nearest.num_computed)
        if nearest is None or not num_computed:
            return self._add(BlockNode(tokens, self.allocate(), parent))
        self._use(nearest)  # must not be evicted
        try:
            block = self.allocate()
            self.pool.copy(nearest.block, block)
        finally:
            self.release([nearest])
        return self._add(BlockNode(tokens, block, parent, num_computed))

    def _add(self, node: BlockNode) -> BlockNode:
        insort(_parent(node).children, node, key=_tokens)
        node.users = 1
        return node

    def _use(self, node: BlockNode) -> BlockNode:
        if not node.users:
            del self._unused[node]
        node.users += 1
        return node

    def _set_tokens(self, node: BlockNode, tokens: Tokens) -> None:
        siblings = _parent(node).children
        siblings.remove(node)
        node.tokens = tokens
        insort(siblings, node, key=_tokens)

    def _drop_uncomputed(self, node: BlockNode) -> None:
        if node.num_computed:
            self._set_tokens(node, node.tokens[: node.num_computed])
        else:
            self._remove(node)

    def _remove(self, node: BlockNode) -> None:
        """Remove an unused leaf."""
        del self._unused[node]
        _parent(node).children.remove(node)
        self.pool.free([node.block])


def _tokens(node: BlockNode) -> Tokens:
    return node.tokens


def _parent(node: BlockNode) -> BlockNode:
    if node.parent is None:
        raise ValueError("the root has no parent")
    return node.parent


def _closest(parent: BlockNode, tokens: Tokens) -> tuple[BlockNode | None, int]:
    """Return the child that has the most first tokens in common with `tokens`, and their number; None without any."""
    children = parent.children
    index = bisect_left(children, tokens, key=_tokens)
    best, longest = None, 0
    for child in children[index : index + 1] + children[max(index - 1, 0) : index]:
        common = common_length(child.tokens, tokens)
        if common > longest:
            best, longest = child, common
    return best, longest


def common_length(first: Tokens, second: Tokens) -> int:
    """Return the number of first tokens that two sequences have in common."""
    if first == second:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
