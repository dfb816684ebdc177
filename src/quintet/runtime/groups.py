"""Handles that the controller holds on learners, engines and environments, wherever they run.

This module imports no implementation: see `local_learners.py` and `remote_learners.py` for learners, and
`rollout/agent_loop.py` and `rollout/single_turn_loop.py` for environments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quintet.records import Trajectory
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.training.checkpoint.async_save import WriteFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Policy(Protocol):
    """A policy whose weights engines load."""

    @property
    def model(self) -> PreTrainedModel:
        """This process's model."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names."""


class PolicyGroup(Protocol):
    """The policy on all ranks, trained or frozen."""

    @property
    def has_full_weights(self) -> bool:
        """Whether this rank holds all of the policy's weights, so that an engine in its process can compute with its
        module; the same on all ranks of a run."""

    @property
    def actor(self) -> Policy:
        """The policy."""


class SavedLearners(Protocol):
    """Learners whose state is part of checkpoints."""

    def save(self, directory: Path) -> WriteFiles:
        """Copy the state that `checkpoint.contents` names; return the function that writes rank 0's copies into the
        checkpoint. The other ranks write theirs into the checkpoint at `directory` in the background."""

    def extra_state(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON values; the same on all ranks."""


class CheckpointedLearners(SavedLearners, Protocol):
    """Learners that continue from checkpoints."""

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """Load the `contents` of the checkpoint at `directory`, and the `extra_state` saved with it.

        Raises:
            MachineError: the checkpoint belongs to another model.
        """


class EnvGroup(Protocol):
    """Environments, or prompts with a reward scorer, that the policy is rolled out in."""

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        """Run all episodes to their end; yield trajectories in the order in which they end."""

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call."""

    def close(self) -> None:
        """Abort running episodes and stop the environment processes."""
