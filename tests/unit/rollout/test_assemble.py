"""If these fail, other tokens are learnt than those that were meant."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.records import Batch
from quintet.rollout.assemble import learn_observations, reward_at_end


def test_observations_are_learnt_from_the_first_answer_on(make_batch: Callable[..., Batch]) -> None:
    """Two sequences; the prompt before the first answer is never learnt, what the world said later is."""
    masks = [[0, 0, 1, 0, 0, 1, 0], [0, 1, 1, 0]]
    batch = make_batch(masks, [[0.0] * 7, [0.0] * 4])
    learnt = learn_observations(batch).loss_mask
    assert learnt.long().tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert torch.equal(learn_observations(batch).logprobs, batch.logprobs)


def test_rewards_of_turns_can_lie_at_the_end(make_batch: Callable[..., Batch]) -> None:
    """A game of two sequences and a game of one: each has its sum on the policy's last token."""
    masks = [[0, 1, 1, 0], [0, 1, 0], [1, 0, 1, 0]]
    rewards = [[0.0, 0.0, 0.5, 0.0], [0.0, 2.0, 0.0], [1.0, 0.0, -3.0, 0.0]]
    batch = make_batch(masks, rewards, trajectory=[0, 0, 1], group=[0, 0])
    assert reward_at_end(batch).rewards.tolist() == [0, 0, 0, 0, 0, 2.5, 0, 0, 0, -2.0, 0]
