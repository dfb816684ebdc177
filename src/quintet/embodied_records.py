"""Records of robots in simulators: observations, the results of action chunks, and the batch to train on.

B is the number of robots, C the actions of a chunk, D the dimension of an action, T the chunks of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quintet.records import Failure, Outcome

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RobotObservation:
    """Observations of a batch of robots."""

    images: np.ndarray
    """RGB, uint8 [B, cameras, height, width, 3]; 0 cameras for a policy that only reads the state."""
    state: np.ndarray
    """Proprioception, float32 [B, S]; S may be 0."""
    instructions: tuple[str, ...]
    """Task of each robot [B]."""

    def select(self, indices: np.ndarray) -> RobotObservation:
        """Return the observations of some robots, in the order of `indices`."""
        return RobotObservation(
            self.images[indices], self.state[indices], tuple(self.instructions[index] for index in indices)
        )

    def with_rows(self, parts: Iterable[tuple[np.ndarray, RobotObservation]]) -> RobotObservation:
        """Return a copy in which some rows, int64 [n], are those of an observation of n robots."""
        images, state = self.images.copy(), self.state.copy()
        instructions = list(self.instructions)
        for rows, part in parts:
            images[rows], state[rows] = part.images, part.state
            for row, instruction in zip(rows.tolist(), part.instructions, strict=True):
                instructions[row] = instruction
        return RobotObservation(images, state, tuple(instructions))


@dataclass(frozen=True, slots=True)
class RobotEpisode:
    """A finished episode of one robot."""

    robot: int
    """Index of the robot in its batch."""
    start_state: int
    task: str
    """Name of the task within its suite."""
    episode_return: float
    """Sum of rewards."""
    num_actions: int
    success_once: bool
    """Whether the task was solved at some time."""
    success_at_end: bool
    """Whether it was solved after the last action."""
    outcome: Outcome
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Result of one chunk of actions of B robots."""

    observation: RobotObservation
    """After the last action; with `auto_reset` the first of the next episode where one ended."""
    rewards: np.ndarray
    """float32 [B, C]."""
    terminated: np.ndarray
    """bool [B, C], True where an action solved or failed the task."""
    truncated: np.ndarray
    """bool [B, C], True where an action was the last that `max_steps` allows."""
    executed: np.ndarray
    """bool [B, C], False for actions after the end of an episode or a failure; robots do not move then, and the
    rewards are 0."""
    final_observation: RobotObservation | None = None
    """The last observation of the episodes that ended, before their reset; rows of other robots are as `observation`.
    None without `auto_reset`, or if no episode ended."""
    episodes: tuple[RobotEpisode, ...] = ()
    """The episodes that ended in this chunk."""
    frames: np.ndarray | None = None
    """RGB of each action for videos, uint8 [B, C, height, width, 3]; None if none are recorded."""


@dataclass(frozen=True, slots=True)
class ChunkBatch:
    """Chunk steps to train on. Fields have the shape [T, B, …], or [N, …] after `flatten` with N = T · B.

    `values` and the unit of rewards, dones, advantages and returns follow the level of rewards: one per chunk (V = 1)
    or one per action (V = C).
    """

    inputs: Mapping[str, torch.Tensor]
    """Inputs of the policy by name, each [T, B, …]."""
    actions: torch.Tensor
    """What the policy sampled, [T, B, C, D]: action tokens (int64) or actions (float32)."""
    logprobs: torch.Tensor
    """float32 [T, B, C, D], nats, at sampling."""
    rewards: torch.Tensor
    """float32 [T, B, C]."""
    dones: torch.Tensor
    """bool [T, B, C], after each action."""
    loss_mask: torch.Tensor
    """bool [T, B, C], False after an episode's end and for robots whose simulator failed."""
    group: torch.Tensor
    """int64 [T, B], group of the episode."""
    truncated: torch.Tensor | None = None
    """bool [T, B, C], the `dones` that a step limit caused; None if there is no automatic reset."""
    final_values: torch.Tensor | None = None
    """float32 [T, B, V], value of the last observation of an episode that was truncated in this chunk, with
    `algorithm.bootstrap: done` of every one that ended in it, 0 elsewhere. None without automatic resets."""
    values: torch.Tensor | None = None
    """float32 [T, B, V], value before each chunk or action."""
    last_values: torch.Tensor | None = None
    """float32 [B, V], value after the last chunk."""
    advantages: torch.Tensor | None = None
    """float32 [T, B, V]."""
    returns: torch.Tensor | None = None
    """float32 [T, B, V]."""
    loss_weights: torch.Tensor | None = None
    """float32 [T, B, C], weight of each action in the loss, 0 outside `loss_mask`: 1, or with `seq-mean-token-mean`
    such that all episodes have the same weight."""
    rollout_logprobs: torch.Tensor | None = None
    """float32 [T, B, C, D], nats, at sampling, if `logprobs` are the learner's before the updates of the step."""
    ref_logprobs: torch.Tensor | None = None
    """float32 [T, B, C, D], nats, of the reference policy."""

    @property
    def num_chunks(self) -> int:
        """Number of chunk steps, N."""
        return int(self.logprobs.shape[:-2].numel())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> ChunkBatch:
        """Return the batch with `function` applied to every tensor that has the leading dimensions [T, B]."""
        changes: dict[str, Any] = {"inputs": {name: function(tensor) for name, tensor in self.inputs.items()}}
        for each in fields(self):
            tensor = getattr(self, each.name)
            if each.name not in ("inputs", "last_values") and tensor is not None:
                changes[each.name] = function(tensor)
        return replace(self, **changes)

    def flatten(self) -> ChunkBatch:
        """Return the batch with all chunk steps in one dimension, [N, …]."""
        return replace(self, last_values=None).map(lambda tensor: tensor.flatten(0, 1))

    def select(self, indices: torch.Tensor) -> ChunkBatch:
        """Return some chunk steps of a flattened batch."""
        return self.map(lambda tensor: tensor[indices])


@dataclass(frozen=True, slots=True)
class ActionSample:
    """Actions that a policy sampled for B robots."""

    actions: torch.Tensor
    """[B, C, D]: action tokens (int64) or normalized actions (float32)."""
    logprobs: torch.Tensor
    """float32 [B, C, D], nats."""
    values: torch.Tensor | None = None
    """float32 [B, V]; None without a value head."""


@dataclass(frozen=True, slots=True)
class ActionStatistics:
    """Log-probs of given actions under a policy."""

    logprobs: torch.Tensor
    """float32 [B, C, D], nats."""
    entropies: torch.Tensor
    """float32 [B, C, D], nats."""
    values: torch.Tensor | None = None
    """float32 [B, V]; None without a value head."""


@dataclass(frozen=True, slots=True)
class ActionSampling:
    """Sampling parameters of actions; log-probs are those of the same distribution."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the likeliest tokens of each action dimension, also for log-probs; 0 keeps all."""


@dataclass(frozen=True, slots=True)
class SimulatorStep:
    """Result of one action of the robots that acted; n of them."""

    rewards: np.ndarray
    """float32 [n], as the simulator gives them."""
    success: np.ndarray
    """bool [n], whether the task is solved now."""
    failed: np.ndarray | None = None
    """bool [n], whether the episode cannot be solved anymore; None if the simulator does not say."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """Failures of the simulator by robot; these robots need a reset."""


@dataclass(frozen=True, slots=True)
class RecordedVideo:
    """A complete video file."""

    step: int
    split: Literal["train", "validation"]
    path: Path


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A rollout of all robots of a run. Start states and random numbers follow from it."""

    step: int
    """Training step."""
    seed: int
    """Of the random numbers of actions."""
    robots: int
    passes: int
    """Passes over all robots, each from a reset."""
    chunks: int
    """Chunks per pass."""
    temperature: float
    """0 is greedy."""
    top_k: int
    """0 keeps all tokens of an action dimension."""
    first_episode: int | None = None
    """Number of the first episode of a validation; None in training."""
    is_recorded: bool = True
    """Whether people may see the episodes, if `tracking` says so; False for the checks of a warm start, which are no
    part of a step."""
