"""If these fail, float16 gradients vanish, or a run is thrown off by one that overflows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_grid import ragged_batch

from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective
from quintet.config.native.learners import CriticConfig, OptimizerConfig, ShardingConfig
from quintet.policies.causal_lm import ValueModel
from quintet.policies.model_loading import load_model
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.optim.loss_scale import LossScale
from quintet.training.packing import MicroBatchBudget


def actor(directory: Path, scale: LossScale | None) -> ActorLearner:
    return ActorLearner(
        load_model(directory), OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(60), loss_scale=scale)
    )


@pytest.mark.proves(
    "rlinf", "actor.fsdp_config.grad_scaler.init_scale", "actor.fsdp_config.grad_scaler.growth_interval"
)
def test_the_loss_scale_starts_and_grows_as_configured() -> None:
    asked = ShardingConfig(grad_scaler=True, grad_scaler_start=8.0, grad_scaler_growth_steps=2)
    scale = LossScale.from_config(asked)
    assert scale is not None
    seen = []
    for finite in (True, True, False, True, True, True):
        scale.update(finite=finite)
        seen.append(scale.factor)
    assert seen == [8.0, 16.0, 8.0, 8.0, 16.0, 16.0]
    other = LossScale(growth_steps=2)
    other.load_state_dict(scale.state_dict())
    other.update(finite=True)
    scale.update(finite=True)
    assert other.factor == scale.factor


def test_the_default_loss_scale_is_torchs() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu")
    assert ours.factor == theirs.get_scale()
    assert ours._growth_steps == theirs.get_growth_interval()
    assert LossScale.from_config(ShardingConfig()) is None


@pytest.mark.proves("rlinf", "actor.fsdp_config.grad_scaler.enabled")
def test_loss_scaling_does_not_change_updates(policy_directory: Path) -> None:
    plain, scaled = actor(policy_directory, None), actor(policy_directory, LossScale(4096.0))
    batch = ragged_batch()
    for _ in range(3):
        one = plain.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)
        other = scaled.update(batch, CrossEntropyObjective(), "token-mean", 1e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    theirs = dict(scaled.weights())
    for name, value in plain.weights():
        torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-6)


def test_an_update_without_gradients_is_no_error(policy_directory: Path) -> None:
    """Of a critic's mini-batch whose tokens are all masked out nothing is left that has a gradient."""
    model, batch = ValueModel(load_model(policy_directory)), ragged_batch()
    batch = replace(batch, values=batch.advantages, returns=batch.advantages)
    critic = CriticLearner(
        model, OptimizerConfig(), LearnerSetup(budget=MicroBatchBudget(60), loss_scale=LossScale(1024.0))
    )
    metrics = critic.update(
        batch, CriticObjective(CriticConfig()), "token-mean", 1e-3, torch.zeros_like(batch.loss_mask)
    )
    assert (metrics["grad_norm"], metrics["skipped"]) == (0.0, 0.0)


def test_an_overflow_skips_the_step_and_halves_the_loss_scale(policy_directory: Path) -> None:
    scale = LossScale(1024.0)
    learner = actor(policy_directory, scale)
    before = {name: value.clone() for name, value in learner.weights()}
    with torch.no_grad():
        learner.model.lm_head.weight[0, 0] = float("inf")
        before["model.embed_tokens.weight"][0, 0] = float("inf")
    metrics = learner.update(replace(ragged_batch()), CrossEntropyObjective(), "token-mean", 1e-3)
    assert metrics["skipped"] == 1.0
    assert scale.factor == 512.0
    assert all(torch.equal(before[name], value) for name, value in learner.weights())
