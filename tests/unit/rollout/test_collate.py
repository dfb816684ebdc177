"""If these fail, other tokens are trained than intended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from vision_models import batch_of, process, prompt_with, turn

from quintet.algorithms.advantages.custom import estimate
from quintet.config.native.advantages import ADVANTAGE_UNION
from quintet.policies.vision.image_tokens import image_tokens
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


def test_images_in_observations_are_never_trained() -> None:
    """Nor the marks around them, which a policy cannot sample either."""
    image = process(8, 8)
    batch = batch_of([turn((20, 21), (17, 2)), turn((5, *prompt_with(image)), (18, 2), (image,), continues=True)])
    assert batch.tokens.tolist() == [20, 21, 17, 2, 5, 20, 21, 3, *image_tokens(image), 4, 22, 18, 2]
    learnt = train_on_observations(batch).loss_mask.long().tolist()
    assert learnt == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1]


WINDOWS = [True, False]
"""Whether the second turn continues the sequence of the first; otherwise the window has slid."""


@pytest.mark.parametrize("continues", WINDOWS)
@pytest.mark.parametrize("name", ["bi_level_gae", "gae", "turn_wise_gae"])
def test_advantages_do_not_depend_on_images_between_the_turns(name: str, continues: bool) -> None:
    """Turn ends and masks are those of the responses, however many image tokens are before them."""
    image = process(16, 24)
    config = ADVANTAGE_UNION.config_class(name)(name=name, lam=0.9, whiten=False)
    results = []
    for second in (prompt_with(image, image), (20, 21)):
        turns = [
            turn((20,), (17, 2)),
            turn(second, (18, 19, 2), (image,) if len(second) > 2 else (), continues=continues),
        ]
        rewarded = [replace(each, reward=reward) for each, reward in zip(turns, (0.5, 1.0), strict=True)]
        batch = batch_of(rewarded)
        responses = batch.loss_mask.nonzero().flatten()
        assert batch.tokens[responses].tolist() == [17, 2, 18, 19, 2]
        assert batch.tokens[batch.turn_end].tolist() == [2, 2]
        assert batch.rewards[batch.turn_end].tolist() == [0.5, 1.0]
        values = torch.zeros(len(batch.tokens))
        values[responses] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
        advantages, returns = estimate(replace(batch, values=values), config)
        assert not advantages[~batch.loss_mask].any()
        results.append((advantages[responses], returns[responses]))
    torch.testing.assert_close(results[0], results[1])
