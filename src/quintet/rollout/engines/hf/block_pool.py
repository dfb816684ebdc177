"""Pool of blocks: what all layers keep of a fixed number of tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quintet.rollout.engines.hf.paged_attention import LayerState


class BlockPool:
    """Numbers of blocks, allocated one by one, and the states of layers that are in them."""

    def __init__(self, states: Sequence[LayerState], num_blocks: int) -> None:
        """The pool has at most `num_blocks` blocks."""
        self.num_blocks = num_blocks
        self.state_by_layer = {layer: state for state in states for layer in state.layers}
        self._states = states
        self._free: list[int] = []
        """Blocks that were in use."""
        self._num_touched = 0
        """Blocks that have been in use since the pool was empty: 0 … `_num_touched` - 1."""

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated."""
        return self.num_blocks - self._num_touched + len(self._free)

    @property
    def num_used(self) -> int:
        """Number of allocated blocks."""
        return self._num_touched - len(self._free)

    @property
    def block_bytes(self) -> int:
        """Memory of a block in all layers."""
        return sum(state.block_bytes for state in self._states)

    def allocate(self) -> int:
        """Return a free block, of which there must be one."""
        if self._free:
            return self._free.pop()
        self._num_touched += 1
        for state in self._states:
            state.reserve(self._num_touched)
        return self._num_touched - 1

    def free(self, blocks: Iterable[int]) -> None:
        """Return blocks to the pool."""
        self._free.extend(blocks)

    def copy(self, source: int, target: int) -> None:
        """Copy what all layers keep from one block to another."""
        for state in self._states:
            state.copy(source, target)

    def reset(self) -> None:
        """Make all blocks free. Their memory stays allocated."""
        self._free.clear()
        self._num_touched = 0

    def release_memory(self) -> None:
        """Make all blocks free, and free their memory."""
        self.reset()
        for state in self._states:
            state.release_memory()
