"""Paged KV cache: sequences with block tables, over one pool and one prefix tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quintet.config.plan.kv_blocks import BLOCK, num_blocks, request_blocks
from quintet.rollout.engines.hf.attention_state import AttentionState, CacheShape
from quintet.rollout.engines.hf.block_pool import BlockPool
from quintet.rollout.engines.hf.prefix_tree import BlockNode, PrefixTree, Tokens
from quintet.rollout.engines.hf.recurrent_states import RecurrentStates

BlockTables = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class CachedSequence:
    """A sequence in use: the tokens to prefill, whose blocks it may share, and then its own blocks."""

    tokens: Tokens
    """Prompt, and after a preemption also the response so far."""
    path: list[BlockNode]
    """Blocks of `tokens` in the prefix tree."""
    row: int
    """Row of the block tables."""
    blocks: list[int] = field(default_factory=list)
    """Blocks of its own, behind those of `path`."""
    is_writer: bool = False
    """Whether it writes into the last block of `path`."""
    passed_over: int = 0
    """Prompt tokens of the passes that left it out."""
    _num_complete: int = 0
    """Blocks of `path` that are known to be computed."""

    @property
    def num_computed(self) -> int:
        """Number of first `tokens` whose keys and values are computed, or are computed by the pass that is prepared."""
        path, count = self.path, len(self.tokens)
        while self._num_complete < len(path):
            start = self._num_complete * BLOCK
            if path[self._num_complete].num_computed < min(BLOCK, count - start):
                return start + path[self._num_complete].num_computed
            self._num_complete += 1
        return count

    @property
    def length_in_last(self) -> int:
        """Number of `tokens` in the last block of `path`."""
        return len(self.tokens) - BLOCK * (len(self.path) - 1)

    @property
    def hidden(self) -> Tensor | None:
        """Hidden state of the last of `tokens`, [hidden]; None until it is computed."""
        return self.path[-1].hidden.get(self.length_in_last)

    @hidden.setter
    def hidden(self, state: Tensor) -> None:
        self.path[-1].hidden[self.length_in_last] = state

    def mark_computed(self, end: int) -> None:
        """Record that the first `end` tokens are computed by the pass that is prepared."""
        for index in range(self._num_complete, num_blocks(end)):
            node = self.path[index]
            node.num_computed = max(node.num_computed, min(BLOCK, end - index * BLOCK))


class PagedCache:
    """Keys and values of an engine: sequences in use, and earlier ones as far as there is space."""

    def __init__(
        self,
        shape: CacheShape,
        max_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        """`max_blocks` limits the memory, `max_num_seqs` the sequences in use; each has at most `max_model_len` tokens.
        `recurrent` has the states of recurrent layers; sequences share nothing then."""
        max_blocks = max(max_blocks, request_blocks(max_model_len))
        self.recurrent = recurrent
        self.pool = BlockPool([AttentionState(shape, max_blocks)], max_blocks)
        self.device = shape.device
        self.tree = PrefixTree(self.pool)
        self.tables: BlockTables = np.zeros((max_num_seqs, request_blocks(max_model_len)), np.int32)
        """Blocks of each sequence in use, [rows, blocks]."""
        self._free_rows = list(range(max_num_seqs))[::-1]

    def open(self, tokens: Tokens) -> CachedSequence:
        """Return a new sequence in use.

        Raises:
            PoolExhaustedError: there are not enough blocks.
        """
        path = self.tree.acquire(tokens, is_shared=self.recurrent is None)
        sequence = CachedSequence(tokens, path, self._free_rows.pop())
        self.tables[sequence.row, : len(path)] = [node.block for node in path]
        return sequence

    def make_writable(self, sequence: CachedSequence, position: int) -> None:
        """Give a sequence a block of its own for the token at `position`, the first one or the first in its block.

        Raises:
            PoolExhaustedError: there is no free block.
        """
        index, path = position // BLOCK, sequence.path
        if index < len(path):
            last = path[-1]
            if not last.has_writer and len(last.tokens) == sequence.length_in_last:
                last.has_writer = sequence.is_writer = True
                return
            block = self.tree.allocate()
            self.pool.copy(last.block, block)
            self.tree.release([path.pop()])
        else:
            block = self.tree.allocate()
        sequence.blocks.append(block)
        self.tables[sequence.row, index] = block

    def close(self, sequence: CachedSequence, tokens: Tokens = ()) -> None:
        """End a sequence. Its prompt stays cached, and its response as far as it is in `tokens`, the computed ones."""
        path, blocks = sequence.path, sequence.blocks
        if sequence.is_writer:
            self.tree.end_writing(path, tokens[(len(path) - 1) * BLOCK : len(path) * BLOCK])
        for count, block in enumerate(blocks, 1):
            part = tokens[len(path) * BLOCK : (len(path) + 1) * BLOCK]
            if not part:
                self.pool.free(blocks[count - 1 :])
                break
            self.tree.add_computed(path, part, block)
        self.tree.release(path)
        self._free_rows.append(sequence.row)

    def reset(self) -> None:
        """Forget everything. Sequences in use must not be used any more. The memory stays allocated."""
        self.tree.reset()
        self._free_rows = list(range(len(self.tables)))[::-1]

    def release_memory(self) -> None:
        """Forget everything, and free the memory."""
        self.reset()
        self.pool.release_memory()
        if self.recurrent is not None:
            self.recurrent.release_memory()
