"""Learners from a configuration: what learns, what judges, and how their weights lie."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quintet.config.native import Experiment, OptimizerConfig
from quintet.policies.adapters import has_lora, merge
from quintet.policies.causal_lm import PolicyModule, ValueModel, load_model
from quintet.runtime.engines import policy_dtype
from quintet.training.kept import KeptPolicy
from quintet.training.lay import Lay, Whole, take_weights
from quintet.training.learner import ActorLearner, CriticLearner, Scorer
from quintet.training.mesh import Mesh
from quintet.training.packing import Budget
from quintet.training.ranks import Ranks
from quintet.training.scaling import LossScale

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from quintet.config.native.learners import LearnerConfig

__all__ = ["open_actor", "open_critic", "open_reference"]

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ALONE = Ranks()


def _spread(own: LearnerConfig, ranks: Ranks) -> Mesh:
    return Mesh.over(ranks, own.parallel, own.sharding.group_size)


def _lay(config: Experiment, own: LearnerConfig, module: nn.Module, mesh: Mesh) -> Lay:
    """How the module's weights lie. torch's sharding is loaded where there is something to shard."""
    if mesh.devices is None:
        return Whole(module)
    from quintet.training.sharding import lay_out

    return lay_out(module, own.backend, mesh, own.sharding, own.memory, policy_dtype(config))


def _dtype(config: Experiment, own: LearnerConfig) -> torch.dtype:
    """Type of matrix products."""
    return TYPES[own.sharding.autocast] if own.sharding.autocast else policy_dtype(config)


def open_actor(
    config: Experiment,
    model: PreTrainedModel,
    optimizer: OptimizerConfig,
    temperature: float = 1.0,
    ranks: Ranks = ALONE,
) -> ActorLearner:
    """What trains that policy on those ranks, each of which brings the same weights; `temperature` divides its
    logits."""
    mesh = _spread(config.actor, ranks)
    return ActorLearner(
        model,
        optimizer,
        budget=Budget.of(config.actor.budget, config.training),
        inference_budget=Budget.of(config.actor.inference_budget, config.training),
        dtype=_dtype(config, config.actor),
        temperature=temperature,
        ranks=mesh.data,
        lay=_lay(config, config.actor, PolicyModule(model), mesh),
        scale=LossScale.of(config.actor.sharding),
    )


def open_critic(config: Experiment, actor: ActorLearner, policy: Path, ranks: Ranks = ALONE) -> CriticLearner:
    """A critic grown from the model that the configuration names, or from the policy as it is now, which began as the
    model at `policy`; adapters are merged, and all weights are trained."""
    path, trusted = config.critic.path, config.policy.trust_remote_code
    grown = load_model(path, trust_remote_code=trusted) if path else _plain(config, actor, policy)
    model, mesh = ValueModel(grown), _spread(config.critic, ranks)
    if has_lora(model.body):
        merge(model.body)
    return CriticLearner(
        model,
        config.critic.optimizer,
        budget=Budget.of(config.critic.budget, config.training),
        inference_budget=Budget.of(config.critic.inference_budget, config.training),
        dtype=_dtype(config, config.critic),
        ranks=mesh.data,
        lay=_lay(config, config.critic, model, mesh),
        scale=LossScale.of(config.critic.sharding),
    )


def open_reference(config: Experiment, actor: ActorLearner, policy: Path, ranks: Ranks = ALONE) -> Scorer:
    """The model that the configuration names, or the policy as it is now, which stays as it is; the policy began as
    the model at `policy`. Where adapters alone are trained, it is the policy's own model with those of now."""
    own, budget = config.reference, Budget.of(config.reference.inference_budget, config.training)
    if own.path is None and has_lora(actor.model):
        return KeptPolicy(actor.scorer, budget)
    if own.path is None and ranks.size == 1:
        return actor.scorer.frozen(budget)
    trusted = config.policy.trust_remote_code
    model = load_model(own.path, trust_remote_code=trusted) if own.path else _plain(config, actor, policy)
    if model is actor.model:
        model = copy.deepcopy(model)
    mesh = _spread(own, ranks)
    return Scorer(
        model.requires_grad_(requires_grad=False),
        budget=budget,
        dtype=_dtype(config, own),
        temperature=config.rollout.temperature,
        ranks=mesh.data,
        lay=_lay(config, own, PolicyModule(model), mesh),
    )


def _plain(config: Experiment, actor: ActorLearner, policy: Path) -> PreTrainedModel:
    """The policy as it is now as a model of its own whose weights are whole; where they are so already, itself."""
    if isinstance(actor.lay, Whole):
        return actor.model
    trusted = config.policy.trust_remote_code
    model = load_model(policy, trust_remote_code=trusted, overrides=config.policy.overrides)
    take_weights(model, actor.weights())
    return model
