"""If these fail, leaving the reference costs something else than was configured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quintet.algorithms.kl import KlControl, kl_estimate, penalize_rewards, token_divergence
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig, RewardKlConfig

NOW = torch.tensor([0.4, 0.1], dtype=torch.float64).log()
REFERENCE = torch.tensor([0.2, 0.2], dtype=torch.float64).log()
X = math.log(2.0)


def penalty_and_gradient(estimator: str, *, swapped: bool = False) -> tuple[list[float], list[float]]:
    now = NOW.clone().requires_grad_()
    config = KlConfig.model_validate({"estimator": estimator, "swapped": swapped})
    kl = token_divergence(now, REFERENCE, config, None)
    (slope,) = torch.autograd.grad(kl.sum(), now)
    return kl.tolist(), slope.tolist()


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [X, -X], [1.0, 1.0]),
        ("abs", [X, X], [1.0, -1.0]),
        ("k2", [X * X / 2, X * X / 2], [X, -X]),
        ("k3", [0.5 - 1 + X, 2.0 - 1 - X], [1 - 0.5, 1 - 2.0]),
        ("k1+", [X, -X], [X, -X]),
        ("abs+", [X, X], [X, -X]),
        ("k3+", [0.5 - 1 + X, 2.0 - 1 - X], [X, -X]),
    ],
)
def test_estimates_by_hand(estimator: str, values: list[float], slopes: list[float]) -> None:
    kl, slope = penalty_and_gradient(estimator)
    assert kl == pytest.approx(values)
    assert slope == pytest.approx(slopes)


@pytest.mark.parametrize(
    ("estimator", "values", "slopes"),
    [
        ("k1", [-X, X], [-1.0, -1.0]),
        ("k3", [2.0 - 1 - X, 0.5 - 1 + X], [2.0 - 1, 0.5 - 1]),
        ("k3+", [2.0 - 1 - X, 0.5 - 1 + X], [X, -X]),
    ],
)
def test_policy_and_reference_may_change_places(estimator: str, values: list[float], slopes: list[float]) -> None:
    kl, slope = penalty_and_gradient(estimator, swapped=True)
    assert kl == pytest.approx(values)
    assert slope == pytest.approx(slopes)


def test_the_k3_estimate_is_clamped() -> None:
    far = kl_estimate(torch.tensor([-300.0, 300.0]), torch.zeros(2), "k3")
    assert far.tolist() == [10.0, 10.0]


def test_missing_kl_inputs_and_unknown_estimators_are_errors() -> None:
    with pytest.raises(ValueError, match="full divergence"):
        token_divergence(NOW, REFERENCE, KlConfig(estimator="full"), None)
    with pytest.raises(ValueError, match="reference"):
        token_divergence(NOW, None, KlConfig(), None)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(NOW, REFERENCE, "k4")


@pytest.mark.parametrize("changes", [{"estimator": "k1"}, {"estimator": "full"}])
def test_the_kl_penalty_applies_to_response_tokens_only(changes: dict[str, Any]) -> None:
    config = KlConfig.model_validate({"apply_to": "reward", "coefficient": 0.5, **changes})
    full = torch.tensor([0.3, 0.7], dtype=torch.float64)
    mask = torch.tensor([False, True])
    rewards = penalize_rewards(torch.ones(2).double(), NOW, REFERENCE, mask, KlControl.from_config(config), full)
    cost = 0.7 if config.estimator == "full" else -X
    assert rewards.tolist() == pytest.approx([1.0, 1.0 - 0.5 * cost])


def reward_control(*, beside_loss: bool, **options: Any) -> KlControl:
    """The divergence in the rewards, either the only one or beside one in the loss."""
    algorithm = (
        AlgorithmConfig(kl=KlConfig(), reward_kl=RewardKlConfig(**options))
        if beside_loss
        else AlgorithmConfig(kl=KlConfig(apply_to="reward", **options))
    )
    assert algorithm.kl_in_reward is not None
    return KlControl.from_config(algorithm.kl_in_reward)


def test_a_penalty_beside_a_divergence_in_the_loss_has_its_own_estimator() -> None:
    """log(2) for the first token and -log(2) for the second, whose absolute value counts."""
    control = reward_control(beside_loss=True, estimator="abs", coefficient=1.0)
    rewards = penalize_rewards(torch.zeros(2).double(), NOW, REFERENCE, torch.ones(2, dtype=torch.bool), control)
    assert rewards.tolist() == pytest.approx([-X, -X])


@pytest.mark.parametrize("beside_loss", [False, True])
def test_the_adaptive_kl_coefficient_changes_by_at_most_a_fifth(*, beside_loss: bool) -> None:
    """Worked out by hand: β (1 + clip(KL / target - 1, ±0.2) n / horizon)."""
    control = reward_control(beside_loss=beside_loss, coefficient=0.2, target=0.1, horizon=100)
    control.observe(0.11, 10)
    assert control.coefficient == pytest.approx(0.2 * 1.01)
    control.observe(5.0, 10)
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02)
    control.observe(0.0, 10)
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02 * 0.98)
    fixed = KlControl.from_config(KlConfig(coefficient=0.2))
    fixed.observe(5.0, 10)
    assert fixed.coefficient == 0.2
