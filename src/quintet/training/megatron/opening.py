"""Megatron's learners from a configuration; megatron-core is imported when the first of them is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.config.native import Experiment, OptimizerConfig
from quintet.training.megatron.package import require_megatron

if TYPE_CHECKING:
    from quintet.training.megatron.learner import MegatronActor, MegatronCritic, MegatronScorer

__all__ = ["open_megatron_actor", "open_megatron_critic", "open_megatron_reference"]


def open_megatron_actor(config: Experiment, policy: Path, optimizer: OptimizerConfig | None = None) -> MegatronActor:
    """The policy's learner on all processes of `torch.distributed`, from the weights that `actor.megatron` names, or
    else from the Hugging Face directory `policy`. All processes call it; one alone needs no process group.

    Raises:
        ConfigError: megatron-core isn't installed, or it can't do what is asked for; the message says why.
        MachineError: weights are missing.
    """
    require_megatron()
    from quintet.training.megatron.building import build_actor

    return build_actor(config, policy, optimizer or config.actor.optimizer)


def open_megatron_critic(
    config: Experiment, policy: Path, weights: Mapping[str, Tensor] | None = None
) -> MegatronCritic:
    """The critic's learner, grown from the Hugging Face directory `policy`, or from weights under the names that are
    used there; raises as `open_megatron_actor` does."""
    require_megatron()
    from quintet.training.megatron.building import build_critic

    return build_critic(config, policy, weights)


def open_megatron_reference(config: Experiment, policy: Path) -> MegatronScorer:
    """A model that only scores, from the Hugging Face directory `policy`; raises as `open_megatron_actor` does."""
    require_megatron()
    from quintet.training.megatron.building import build_reference

    return build_reference(config, policy)
