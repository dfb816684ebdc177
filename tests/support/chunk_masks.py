"""Masks of actions of robots, for tests that have no simulator."""

from torch import Tensor

from quintet.algorithms.chunks.levels import from_steps, to_steps


def mask_after_end(dones: Tensor) -> Tensor:
    """Return the actions up to and including the one that ended the episode, bool [T, B, C], without automatic resets.

    `dones`, bool [T, B, C], says after which actions an episode ended.
    """
    steps = to_steps(dones)
    ended_before = steps.cumsum(0) - steps.long() > 0
    return from_steps(~ended_before, dones.shape[-1])
