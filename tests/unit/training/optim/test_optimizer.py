"""If these fail, a run learns with another step size, weight decay or optimizer than its configuration says."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from loss_grid import ragged_batch
from torch import nn

from quintet.algorithms.objective import CriticObjective, CrossEntropyObjective
from quintet.config.native.learners import CriticConfig, OptimizerConfig
from quintet.errors import ConfigError
from quintet.policies.causal_lm import ValueModel
from quintet.policies.model_loading import load_model
from quintet.training.learner import ActorLearner, CriticLearner
from quintet.training.learner_setup import LearnerSetup
from quintet.training.optim.lr_schedule import weight_decay
from quintet.training.optim.optimizer import build_optimizer, hidden_matrices
from quintet.training.packing import MicroBatchBudget


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # from 0.1 to 0.3 in 10 steps
        ("constant", {1: 0.3, 5: 0.3, 10: 0.3}),
        ("linear", {1: 0.12, 5: 0.2, 10: 0.3, 12: 0.3}),
        # 0.1 + 0.2 · (1 + cos(π (1 - step / 10))) / 2, by hand: cos(π/2) = 0, cos(0.8 π) = -0.809017
        ("cosine", {2: 0.1 + 0.2 * 0.0954915, 5: 0.2, 10: 0.3}),
    ],
)
def test_weight_decay_schedules_agree_with_megatron(schedule: str, expected: dict[int, float]) -> None:
    config = OptimizerConfig.model_validate(
        {"weight_decay": 0.3, "weight_decay_start": 0.1, "weight_decay_schedule": schedule}
    )
    assert {step: weight_decay(config, step, 10) for step in expected} == pytest.approx(expected, abs=1e-6)
    same = config.model_copy(update={"weight_decay_start": None})
    assert {weight_decay(same, step, 10) for step in range(1, 11)} == {0.3}


def test_each_step_uses_its_scheduled_weight_decay(policy_directory: Path) -> None:
    """By hand, with gradient descent: what gets no gradient, the row of a token that never comes, shrinks by rate ×
    decay."""
    model, unseen = ValueModel(load_model(policy_directory)), 338
    critic = CriticLearner(
        model, OptimizerConfig(kind="sgd", weight_decay=0.5), LearnerSetup(budget=MicroBatchBudget(64))
    )
    row = model.body.embed_tokens.weight
    assert not bool((ragged_batch().tokens == unseen).any())
    for decay, kept in ((0.0, 1.0), (0.2, 1 - 0.1 * 0.2), (None, 1 - 0.1 * 0.5)):
        before = row[unseen].detach().clone()
        critic.update(ragged_batch(), CriticObjective(CriticConfig()), "token-mean", 0.1, weight_decay=decay)
        torch.testing.assert_close(row[unseen].detach(), before * kept)


def test_muon_updates_hidden_matrices_and_adamw_the_rest(policy_directory: Path) -> None:
    """Held against torch's own optimizers on copies of the same gradients, two steps."""
    models = [load_model(policy_directory) for _ in range(2)]
    config = OptimizerConfig(kind="muon", learning_rate=1e-2, weight_decay=0.1)
    ours = build_optimizer(config, models[0].parameters(), hidden_matrices(models[0]))
    names = {id(parameter): name for name, parameter in models[1].named_parameters()}
    inside = [p for p in models[1].parameters() if "_proj.weight" in names[id(p)]]
    rest = [p for p in models[1].parameters() if "_proj.weight" not in names[id(p)]]
    assert len(inside) == 14
    muon = torch.optim.Muon(inside, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(2):
        for model in models:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in (ours, muon, adam):
            optimizer.step()
    for (name, mine), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_muon_of_a_critic_leaves_its_head_to_adamw(policy_directory: Path) -> None:
    model = ValueModel(load_model(policy_directory))
    matrices = hidden_matrices(model)
    assert not any(matrix is model.head.weight or matrix is model.body.embed_tokens.weight for matrix in matrices)
    assert len(matrices) == 14


def test_muons_momentum_is_restored_from_a_checkpoint(policy_directory: Path) -> None:
    config = OptimizerConfig(kind="muon", learning_rate=1e-2)
    actors = [
        ActorLearner(load_model(policy_directory), config, LearnerSetup(budget=MicroBatchBudget(64))) for _ in range(2)
    ]
    batch = ragged_batch()
    first = actors[0].update(batch, CrossEntropyObjective(), "token-mean", 1e-2)["sft/loss"]
    actors[1].strategy.load_weights(dict(actors[0].weights()).items())
    actors[1].optimizer.load_state_dict(copy.deepcopy(actors[0].optimizer.state_dict()))
    assert any("momentum_buffer" in fields for fields in actors[0].optimizer.state.values())
    losses = [actor.update(batch, CrossEntropyObjective(), "token-mean", 1e-2)["sft/loss"] for actor in actors]
    assert losses[0] == losses[1] < first
    assert all(torch.equal(a, b) for a, b in zip(*(dict(x.weights()).values() for x in actors), strict=True))


def test_muon_rejects_flat_parameters() -> None:
    with pytest.raises(ConfigError, match="matrices"):
        build_optimizer(OptimizerConfig(kind="muon"), [nn.Parameter(torch.ones(9))])
