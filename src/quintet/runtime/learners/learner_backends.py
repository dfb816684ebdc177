"""Learner backends by the value of `<learner>.backend`, each imported when it is first used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.training import SftConfig
from quintet.registry import Registry

if TYPE_CHECKING:  # `quintet plan` reads the registry and does without torch
    from quintet.training.parallel.process_group import RankGroup
    from quintet.training.protocols import Learner, LocalActor, LocalCritic, LogProbScorer, PolicyCopy


class LearnerBackend(Protocol):
    """Builds the learners of one backend. `policy` is the directory of the policy's initial model."""

    def build_actor(self, config: Experiment, policy: Path, optimizer: OptimizerConfig, ranks: RankGroup) -> LocalActor:
        """Build the actor of the policy.

        Raises:
            MachineError: the directory contains no model.
            ConfigError: the backend is not installed, or does not support the configuration.
        """

    def build_sft_actor(self, config: Experiment, sft: SftConfig, base: Path, ranks: RankGroup) -> LocalActor:
        """Build the learner of supervised fine-tuning of the model at `base`; raises as `build_actor` does."""

    def build_critic(self, config: Experiment, actor: Learner, policy: Path, ranks: RankGroup) -> LocalCritic:
        """Build a critic from the model at `critic.path`, or from the current policy. `actor` is the learner of the
        policy or, in another process, has its weights alone."""

    def build_reference(self, config: Experiment, actor: Learner, policy: Path, ranks: RankGroup) -> LogProbScorer:
        """Build the reference from the model at `reference.path`, or from the current policy; see `build_critic`."""

    def build_policy_scorer(self, config: Experiment, policy: Path, ranks: RankGroup) -> PolicyCopy:
        """Build a scorer with the settings of the actor, without an optimizer, for copies of its weights; raises as
        `build_actor` does."""


LEARNER_BACKENDS: Registry[LearnerBackend] = Registry("learner backend", entry_points="quintet.learner_backends")
LEARNER_BACKENDS.add_file(__file__, "learner_backends.yaml")


def load_backend(name: str) -> LearnerBackend:
    """Import a backend.

    Raises:
        ConfigError: the name is unknown.
    """
    return LEARNER_BACKENDS.get(name).load()()
