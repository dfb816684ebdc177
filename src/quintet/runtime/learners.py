"""Learners from a configuration: what learns, what judges, and how their weights lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintet.config.native import Experiment, OptimizerConfig
from quintet.policies.causal_lm import ValueModel, load_model
from quintet.runtime.engines import policy_dtype
from quintet.training.learner import ActorLearner, CriticLearner, Scorer
from quintet.training.packing import Budget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["open_actor", "open_critic", "open_reference"]


def open_actor(
    config: Experiment, model: PreTrainedModel, optimizer: OptimizerConfig, temperature: float = 1.0
) -> ActorLearner:
    """What trains that policy; `temperature` divides its logits."""
    return ActorLearner(
        model,
        optimizer,
        budget=Budget.of(config.actor.budget, config.training),
        inference_budget=Budget.of(config.actor.inference_budget, config.training),
        dtype=policy_dtype(config),
        temperature=temperature,
    )


def open_critic(config: Experiment, policy: PreTrainedModel) -> CriticLearner:
    """A critic grown from the model that the configuration names, or from the policy as it is now."""
    path, trusted = config.critic.path, config.policy.trust_remote_code
    return CriticLearner(
        ValueModel(load_model(path, trust_remote_code=trusted) if path else policy),
        config.critic.optimizer,
        budget=Budget.of(config.critic.budget, config.training),
        inference_budget=Budget.of(config.critic.inference_budget, config.training),
        dtype=policy_dtype(config),
    )


def open_reference(config: Experiment, actor: ActorLearner) -> Scorer:
    """The model that the configuration names, or the policy as it is now, which stays as it is."""
    budget = Budget.of(config.reference.inference_budget, config.training)
    if config.reference.path is None:
        return actor.scorer.frozen(budget)
    model = load_model(config.reference.path, trust_remote_code=config.policy.trust_remote_code)
    return Scorer(
        model.requires_grad_(requires_grad=False),
        budget=budget,
        dtype=policy_dtype(config),
        temperature=config.rollout.temperature,
    )
