"""Collation of trajectories into a packed `Batch`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import trajectory_rewards, trajectory_sums
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.policies.vision.image_tokens import mrope_positions
from quintet.records import Batch, ImageInput, Trajectory


@dataclass(slots=True)
class _Columns:
    """Columns of a batch as Python lists."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turn_end: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    observation_group: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    trajectory: list[int] = field(default_factory=list)

    def start_sequence(self, trajectory: int) -> None:
        self.lengths.append(0)
        self.trajectory.append(trajectory)

    def add_prompt(self, tokens: Sequence[int], turn: int) -> None:
        self._extend(tokens, turn, trained=False)
        self.logprobs += [0.0] * len(tokens)
        self.turn_end += [False] * len(tokens)
        self.rewards += [0.0] * len(tokens)

    def add_response(self, tokens: Sequence[int], logprobs: Sequence[float], reward: float, turn: int) -> None:
        """Add response tokens, with the reward on the last one."""
        self._extend(tokens, turn, trained=True)
        self.logprobs += logprobs
        self.turn_end += [False] * (len(tokens) - 1) + [True]
        self.rewards += [0.0] * (len(tokens) - 1) + [reward]

    def _extend(self, tokens: Sequence[int], turn: int, *, trained: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [trained] * len(tokens)
        self.turn += [turn] * len(tokens)
        self.lengths[-1] += len(tokens)


def train_on_observations(batch: Batch) -> Batch:
    """Return the batch with observations included in the loss mask: all tokens behind the first prompt of a sequence
    except images, which a policy never samples. Their log-probs are unknown and stay 0."""
    num_trained = batch.loss_mask.long().cumsum(0)
    starts = batch.lengths.cumsum(0) - batch.lengths
    before = torch.where(starts > 0, num_trained[(starts - 1).clamp(min=0)], 0)
    behind = num_trained > before.repeat_interleave(batch.lengths)
    return replace(batch, loss_mask=batch.loss_mask | (behind & ~_is_image(batch.tokens)))


def _is_image(tokens: Tensor) -> Tensor:
    """Return the image tokens and the marks before and after each image, bool [N]."""
    inside = tokens < 0
    marks = inside.clone()
    marks[:-1] |= inside[1:]
    marks[1:] |= inside[:-1]
    return marks


def reward_at_end(batch: Batch, *, across_groups: bool = False) -> Batch:
    """Return the batch with the sum of each episode's rewards on its last response token; see `trajectory_rewards`.

    A sum that equals the episode's `baseline` up to rounding becomes the baseline."""
    trained = batch.loss_mask.nonzero().squeeze(-1)
    owner = batch.token_trajectory[trained]
    first = torch.zeros_like(batch.group)
    last = first.scatter_reduce(0, owner, trained, "amax", include_self=False)
    totals = trajectory_rewards(batch, across_groups=across_groups)
    if batch.baseline is not None:
        baseline = RewardSums.from_rewards(batch.baseline, torch.arange(len(totals)), len(totals))
        totals = torch.where(trajectory_sums(batch).equals(baseline), batch.baseline, totals)
    return replace(batch, rewards=torch.zeros_like(batch.rewards).index_copy(0, last, totals))


def collate(trajectories: Iterable[Trajectory]) -> Batch:
    """Pack trajectories into a batch. A turn that does not continue the previous one starts a new sequence;
    trajectories without a turn (their env failed at the start) are left out."""
    columns = _Columns()
    completed = [trajectory for trajectory in trajectories if trajectory.turns]
    state_ids: dict[tuple[int, str, tuple[int, ...]], int] = {}
    for index, trajectory in enumerate(completed):
        for number, turn in enumerate(trajectory.turns):
            if not turn.continues:
                columns.start_sequence(index)
            columns.add_prompt(turn.prompt, number)
            columns.add_response(turn.tokens, turn.logprobs, turn.reward, number)
            shown = tuple(image.key for image in turn.image_inputs)
            state = state_ids.setdefault((trajectory.group, turn.observation, shown), len(state_ids))
            columns.observation_group += [state] * (len(turn.prompt) + len(turn.tokens))
    lengths = torch.tensor(columns.lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    images = {image.key: image for episode in completed for turn in episode.turns for image in turn.image_inputs}
    batch = Batch(
        tokens=torch.tensor(columns.tokens),
        positions=torch.arange(len(columns.tokens)) - starts,
        lengths=lengths,
        loss_mask=torch.tensor(columns.loss_mask),
        turn=torch.tensor(columns.turn),
        turn_end=torch.tensor(columns.turn_end),
        trajectory=torch.tensor(columns.trajectory),
        group=torch.tensor([trajectory.group for trajectory in completed]),
        logprobs=torch.tensor(columns.logprobs, dtype=torch.float32),
        rewards=torch.tensor(columns.rewards, dtype=torch.float32),
        observation_group=torch.tensor(columns.observation_group),
        reward_components=_reward_parts(completed),
        response_tokens=torch.tensor([trajectory.response_tokens for trajectory in completed]),
        truncated=torch.tensor([trajectory.truncated for trajectory in completed]),
    )
    return with_images(batch, images.values()) if images else batch


def with_images(batch: Batch, images: Iterable[ImageInput]) -> Batch:
    """Return the batch with its images and the positions of image tokens."""
    ordered = sorted(images, key=lambda image: image.key)
    grids = torch.tensor([image.grid for image in ordered])
    patches = torch.frombuffer(bytearray().join(image.patches for image in ordered), dtype=torch.uint8)
    sequences = np.split(batch.tokens.numpy(), batch.lengths.cumsum(0)[:-1].numpy())
    return replace(
        batch,
        positions=torch.from_numpy(np.concatenate([mrope_positions(sequence) for sequence in sequences])),
        image_keys=torch.tensor([image.key for image in ordered]),
        image_grids=grids,
        image_patches=patches.view(int(grids.prod(1).sum()), -1),
    )


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, Tensor] | None:
    """Reward components by name, [R] each; 0 for trajectories without the component."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_components})
    return {name: torch.tensor([t.reward_components.get(name, 0.0) for t in trajectories]) for name in names} or None
