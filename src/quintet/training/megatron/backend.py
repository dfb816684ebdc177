"""Megatron's learners from a configuration; megatron-core is imported when the first one is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.training.megatron.core_package import require_megatron

if TYPE_CHECKING:
    from quintet.training.megatron.learner import MegatronActor, MegatronCritic, MegatronScorer


def build_megatron_actor(
    config: Experiment, policy_dir: Path, optimizer: OptimizerConfig | None = None
) -> MegatronActor:
    """Build the actor on all ranks of `torch.distributed`, from the weights that `actor.megatron` names, or from the
    Hugging Face directory `policy_dir`. All ranks call it; a single one needs no process group.

    Raises:
        ConfigError: megatron-core is not installed, or it does not support the configuration.
        MachineError: weights are missing.
    """
    require_megatron()
    from quintet.training.megatron.build import build_actor

    return build_actor(config, policy_dir, optimizer or config.actor.optimizer)


def build_megatron_critic(
    config: Experiment, policy_dir: Path, weights: Mapping[str, Tensor] | None = None
) -> MegatronCritic:
    """Build the critic from the Hugging Face directory `policy_dir`, or from `weights` under Hugging Face names.

    Raises as `build_megatron_actor` does.
    """
    require_megatron()
    from quintet.training.megatron.build import build_critic

    return build_critic(config, policy_dir, weights)


def build_megatron_reference(config: Experiment, policy_dir: Path) -> MegatronScorer:
    """Build a scorer from the Hugging Face directory `policy_dir`; raises as `build_megatron_actor` does."""
    require_megatron()
    from quintet.training.megatron.build import build_reference

    return build_reference(config, policy_dir)
