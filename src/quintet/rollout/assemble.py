"""Trajectories to a packed `Batch`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quintet.records import Batch, Trajectory

__all__ = ["assemble", "learn_observations", "reward_at_end"]


@dataclass(slots=True)
class _Columns:
    """A batch being written, one list a tensor."""

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turn_end: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    saw: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    trajectory: list[int] = field(default_factory=list)

    def begin(self, trajectory: int) -> None:
        self.lengths.append(0)
        self.trajectory.append(trajectory)

    def read(self, tokens: Sequence[int], turn: int) -> None:
        """Tokens the policy was given."""
        self._extend(tokens, turn, own=False)
        self.logprobs += [0.0] * len(tokens)
        self.turn_end += [False] * len(tokens)
        self.rewards += [0.0] * len(tokens)

    def wrote(self, tokens: Sequence[int], logprobs: Sequence[float], reward: float, turn: int) -> None:
        """Tokens the policy produced; the reward stands at the last."""
        self._extend(tokens, turn, own=True)
        self.logprobs += logprobs
        self.turn_end += [False] * (len(tokens) - 1) + [True]
        self.rewards += [0.0] * (len(tokens) - 1) + [reward]

    def _extend(self, tokens: Sequence[int], turn: int, *, own: bool) -> None:
        self.tokens += tokens
        self.loss_mask += [own] * len(tokens)
        self.turn += [turn] * len(tokens)
        self.lengths[-1] += len(tokens)


def learn_observations(batch: Batch) -> Batch:
    """The batch with what the world said under the loss mask, too: every token of a sequence behind the
    prompt that the policy first answered. Their log-probs are unknown and stay 0."""
    own = batch.loss_mask.long().cumsum(0)
    starts = batch.lengths.cumsum(0) - batch.lengths
    before = torch.where(starts > 0, own[(starts - 1).clamp(min=0)], 0)
    return replace(batch, loss_mask=own > before.repeat_interleave(batch.lengths))


def reward_at_end(batch: Batch) -> Batch:
    """The batch with the sum of each game's rewards on the last of the policy's tokens in it."""
    own = batch.loss_mask.nonzero().squeeze(-1)
    owner = batch.token_trajectory[own]
    size = len(batch.group)
    last = torch.zeros(size, dtype=torch.long).scatter_reduce(0, owner, own, "amax", include_self=False)
    total = batch.rewards.new_zeros(size).index_add(0, batch.token_trajectory, batch.rewards)
    return replace(batch, rewards=torch.zeros_like(batch.rewards).index_copy(0, last, total))


def assemble(trajectories: Iterable[Trajectory]) -> Batch:
    """Pack trajectories; those without a turn (their world failed at once) are left out.

    A turn that doesn't continue the sequence before it begins a new one.
    """
    columns = _Columns()
    played = [trajectory for trajectory in trajectories if trajectory.turns]
    seen: dict[tuple[int, str], int] = {}
    for index, trajectory in enumerate(played):
        for number, turn in enumerate(trajectory.turns):
            if not turn.continues:
                columns.begin(index)
            columns.read(turn.prompt, number)
            columns.wrote(turn.tokens, turn.logprobs, turn.reward, number)
            state = seen.setdefault((trajectory.group, turn.observation), len(seen))
            columns.saw += [state] * (len(turn.prompt) + len(turn.tokens))
    lengths = torch.tensor(columns.lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return Batch(
        tokens=torch.tensor(columns.tokens),
        positions=torch.arange(len(columns.tokens)) - starts,
        lengths=lengths,
        loss_mask=torch.tensor(columns.loss_mask),
        turn=torch.tensor(columns.turn),
        turn_end=torch.tensor(columns.turn_end),
        trajectory=torch.tensor(columns.trajectory),
        group=torch.tensor([trajectory.group for trajectory in played]),
        logprobs=torch.tensor(columns.logprobs, dtype=torch.float32),
        rewards=torch.tensor(columns.rewards, dtype=torch.float32),
        saw=torch.tensor(columns.saw),
        parts=_parts(played),
    )


def _parts(played: Sequence[Trajectory]) -> dict[str, Tensor] | None:
    """What rewards are made of, [R] each; a part that a trajectory lacks is 0 there."""
    names = sorted({name for trajectory in played for name in trajectory.parts})
    return {name: torch.tensor([t.parts.get(name, 0.0) for t in played]) for name in names} or None
