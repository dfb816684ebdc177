"""If these fail, other tokens are trained than intended."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.records import Batch
from quintet.rollout.collate import reward_at_end, train_on_observations


def test_training_on_observations_starts_behind_the_first_prompt(make_batch: Callable[..., Batch]) -> None:
    """Two sequences; the prompt before the first response is never trained, later observations are."""
    masks = [[0, 0, 1, 0, 0, 1, 0], [0, 1, 1, 0]]
    batch = make_batch(masks, [[0.0] * 7, [0.0] * 4])
    learnt = train_on_observations(batch).loss_mask
    assert learnt.long().tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    assert torch.equal(train_on_observations(batch).logprobs, batch.logprobs)


def test_turn_rewards_can_move_to_the_last_token(make_batch: Callable[..., Batch]) -> None:
    """An episode of two sequences and an episode of one: the sum of rewards is on the last response token."""
    masks = [[0, 1, 1, 0], [0, 1, 0], [1, 0, 1, 0]]
    rewards = [[0.0, 0.0, 0.5, 0.0], [0.0, 2.0, 0.0], [1.0, 0.0, -3.0, 0.0]]
    batch = make_batch(masks, rewards, trajectory=[0, 0, 1], group=[0, 0])
    assert reward_at_end(batch).rewards.tolist() == [0, 0, 0, 0, 0, 2.5, 0, 0, 0, -2.0, 0]
