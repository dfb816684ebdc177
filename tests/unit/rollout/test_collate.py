"""If these fail, other tokens are trained than intended."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vision_models import batch_of, process, prompt_with, turn

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


def test_observations_with_different_images_are_different_states() -> None:
    """A group's turns share a state only if their images are equal, too; texts are all `<image>`."""
    shown = [process(8, 8, seed) for seed in (0, 1, 0)]
    batch = batch_of([turn(prompt_with(image), (17,), (image,)) for image in shown])
    assert batch.observation_group is not None
    states = [set(part.tolist()) for part in batch.observation_group.split(batch.lengths.tolist())]
    assert states[0] == states[2] != states[1]


def test_images_are_in_a_batch_once_with_positions_of_their_rows_and_columns() -> None:
    wide, square = process(8, 24), process(16, 16)
    batch = batch_of(
        [turn(prompt_with(wide, square), (17,), (wide, square))], [turn(prompt_with(wide), (18,), (wide,))]
    )
    assert batch.image_keys is not None
    assert batch.image_grids is not None
    assert batch.image_patches is not None
    assert batch.image_keys.tolist() == sorted([wide.key, square.key])
    assert len(batch.image_patches) == int(batch.image_grids.prod(1).sum()) == 7
    assert batch.positions[:8].tolist() == [
        [0] * 3,
        [1] * 3,
        [2] * 3,
        [3, 3, 3],
        [3, 3, 4],
        [3, 3, 5],
        [6] * 3,
        [7] * 3,
    ]
    assert batch_of([turn((20, 21), (22,))]).positions.tolist() == [0, 1, 2]
