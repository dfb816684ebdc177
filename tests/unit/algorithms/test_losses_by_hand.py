"""If these fail, a loss pushes the weights otherwise than its paper says: each one's value and slope, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from quintet.algorithms.losses.custom import loss_from_config
from quintet.algorithms.losses.targets import PolicyLoss, PolicyLossInputs
from quintet.config.native.losses import LOSSES, LossConfig
from quintet.errors import ConfigError


def ln(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def told(
    loss: dict[str, Any],
    now: torch.Tensor,
    old: torch.Tensor,
    advantages: list[float],
    weights: list[float] | None = None,
    **rest: torch.Tensor,
) -> tuple[PolicyLoss, list[float]]:
    """The parts, and the slope of Σ weight · loss at each token; without weights all are 1."""
    rule, options = loss_from_config(TypeAdapter(LossConfig).validate_python(loss))
    each = torch.ones(len(now)) if weights is None else torch.tensor(weights)
    targets = PolicyLossInputs(each, old, torch.tensor(advantages, dtype=torch.float64), **rest)
    now = now.clone().requires_grad_()
    parts = rule(now, targets, options)
    (slope,) = torch.autograd.grad((parts.loss * each).sum(), now)
    return parts._replace(loss=parts.loss.detach()), slope.tolist()


def test_decoupled_ppo_weights_by_the_proximal_ratio_and_drops_large_weights() -> None:
    config = {"name": "decoupled_ppo", "clip_low": 0.2, "clip_high": 0.2, "max_weight": 1.5}
    old, engine = ln(0.2, 0.2), ln(0.25, 0.1)
    parts, slope = told(config, ln(0.22, 0.22), old, [1.0, 1.0], rollout_logprobs=engine)
    assert parts.loss.tolist() == pytest.approx([-1.1 * 0.8, -1.1 * 2.0])
    assert slope == pytest.approx([-0.88, -2.2])
    rule, options = loss_from_config(TypeAdapter(LossConfig).validate_python(config))
    assert rule.mask is not None
    targets = PolicyLossInputs(torch.ones(2), old, torch.ones(2), rollout_logprobs=engine)
    assert rule.mask(targets, options).tolist() == [True, False]
    alone = PolicyLossInputs(torch.ones(2), old, torch.ones(2))
    assert rule.mask(alone, options).tolist() == [True, True]  # the engine's words are the old policy's


def test_gspo_has_one_ratio_per_sequence_and_token_gradients() -> None:
    sequence = torch.tensor([0, 0, 4])
    parts, slope = told(
        {"name": "gspo", "clip_low": 0.2, "clip_high": 0.3},
        ln(0.4, 0.2, 0.4),
        ln(0.2, 0.2, 0.2),
        [1.0, -1.0, 1.0],
        sequence=sequence,
    )
    root = math.sqrt(2.0)  # the geometric mean of 2 and 1
    assert parts.loss.tolist() == pytest.approx([-1.3, root, -1.3])
    assert parts.clipped.tolist() == [True, False, True]
    assert slope == pytest.approx([0.0, root, 0.0])


def test_gmpo_clips_logarithms_in_the_advantages_direction() -> None:
    high = math.log(1.5)
    parts, slope = told(
        {"name": "gmpo", "clip_low": high, "clip_high": high},
        ln(0.4, 0.1, 0.1, 0.4),
        ln(0.2, 0.2, 0.2, 0.2),
        [2.0, 2.0, -1.0, -1.0],
        weights=[0.5, 0.5, 0.5, 0.5],
        sequence=torch.tensor([0, 0, 1, 1]),
    )
    good = math.sqrt(1.5 * 0.5)  # 2 is held at 1.5, 0.5 is not held
    bad = math.sqrt(2.0 / 1.5)  # 0.5 is held at 1 / 1.5, 2 is not held
    assert parts.loss.tolist() == pytest.approx([-2 * good, -2 * good, bad, bad])
    assert parts.clipped.tolist() == [True, True, False, False]
    assert parts.clipped_lower.tolist() == [False, False, True, True]
    assert slope == pytest.approx([0.0, -2 * good * 0.5, 0.0, bad * 0.5])


def test_gmpo_takes_the_gaps_weights_as_their_geometric_mean() -> None:
    config = {"name": "gmpo"}
    assert LOSSES.get("gmpo").load().applies_correction  # type: ignore[attr-defined]
    here = ln(0.2, 0.2)
    correction = torch.tensor([4.0, 1.0], dtype=torch.float64)
    parts, _ = told(config, here, here, [1.0, 1.0], sequence=torch.tensor([0, 0]), correction=correction)
    assert parts.loss.tolist() == pytest.approx([-2.0, -2.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    config = {"name": "cispo", "clip_low": 0.2, "clip_high": 0.3}
    now = ln(0.6, 0.05, 0.2)
    parts, slope = told(config, now, ln(0.2, 0.2, 0.2), [1.0, -2.0, 1.0])
    assert parts.loss.tolist() == pytest.approx([-1.3 * now[0].item(), 2 * 0.8 * now[1].item(), -now[2].item()])
    assert slope == pytest.approx([-1.3, 1.6, -1.0])
    assert parts.clipped.tolist() == [True, True, False]


def test_the_sapo_gate_has_slope_1_at_ratio_1() -> None:
    config = {"name": "sapo", "temperature_positive": 2.0, "temperature_negative": 4.0}
    parts, slope = told(config, ln(0.2, 0.3, 0.3), ln(0.2, 0.2, 0.2), [1.0, 1.0, -1.0])
    sigmoid = lambda x: 1.0 / (1.0 + math.exp(-x))  # noqa: E731
    up, down = sigmoid(2.0 * 0.5), sigmoid(4.0 * 0.5)
    assert parts.loss.tolist() == pytest.approx([-1.0, -up * 2.0, down])
    assert slope == pytest.approx([-1.0, -4.0 * up * (1 - up) * 1.5, 4.0 * down * (1 - down) * 1.5])
    assert not parts.clipped.any()


def test_dppo_tv_learns_where_the_probability_moved_little() -> None:
    config = {"name": "dppo_tv", "clip_low": 0.1, "clip_high": 0.15, "max_ratio": 2.0}
    now, old = ln(0.3, 0.4, 0.05, 0.3, 0.09), ln(0.2, 0.2, 0.2, 0.2, 0.03)
    parts, slope = told(config, now, old, [1.0, 1.0, -1.0, -1.0, 1.0])
    # rose by 0.1 (kept), by 0.2 (left out); fell by 0.15 (left out); rose though bad (kept); ratio 3 is held at 2
    assert slope == pytest.approx([-1.5, 0.0, 0.0, 1.5, -2.0])
    assert parts.clipped.tolist() == [False, True, True, False, False]
    assert parts.clipped_lower.tolist() == [False, False, False, False, True]
    assert parts.loss[0].item() == pytest.approx(-1.5 * math.log(0.3))


def test_dppo_kl_measures_two_coins() -> None:
    now, old = ln(0.3, 0.3), ln(0.2, 0.2)
    divergence = 0.2 * math.log(0.2 / 0.3) + 0.8 * math.log(0.8 / 0.7)
    for bound, slope in ((divergence * 1.01, [-1.5, 1.5]), (divergence * 0.99, [0.0, 1.5])):
        config = {"name": "dppo_kl", "clip_low": bound, "clip_high": bound}
        assert told(config, now, old, [1.0, -1.0])[1] == pytest.approx(slope)  # the bad token may rise back


@pytest.mark.parametrize("config", [{"name": "dro", "beta": 0.5}, {"name": "kimi", "tau": 0.5}])
def test_dro_and_kimi_pull_the_log_ratio_to_zero(config: dict[str, Any]) -> None:
    now, old = ln(0.4), ln(0.2)
    parts, slope = told(config, now, old, [1.0])
    gap = math.log(2.0)
    assert parts.loss.tolist() == pytest.approx([-math.log(0.4) + 0.25 * gap**2])
    assert slope == pytest.approx([-1.0 + 0.5 * gap])


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_plain_policy_gradient(name: str) -> None:
    parts, slope = told({"name": name}, ln(0.25, 0.5), ln(0.9, 0.9), [2.0, -1.0])
    assert parts.loss.tolist() == pytest.approx([2 * math.log(4.0), -math.log(2.0)])
    assert slope == pytest.approx([-2.0, 1.0])


def test_topr_imitates_the_good_and_tapers_the_bad() -> None:
    config = {"name": "topr", "positive_weight": 2.0, "negative_weight": 0.5}
    parts, slope = told(config, ln(0.9, 0.1, 0.9), ln(0.2, 0.2, 0.2), [1.0, -1.0, -1.0])
    assert slope == pytest.approx([-2.0, 0.25, 0.5])  # bad: ratios 0.5 and 4.5, the latter held at 1
    assert parts.clipped_lower.tolist() == [False, False, True]


def test_distillation_takes_the_teachers_view_for_the_advantage() -> None:
    config = {"name": "distillation", "clip_low": 0.2, "clip_high": 0.2}
    now, old, teacher = ln(0.2, 0.2), ln(0.2, 0.2), ln(0.4, 0.1)
    parts, slope = told(config, now, old, [9.0, 9.0], ref_logprobs=teacher)
    assert parts.loss.tolist() == pytest.approx([-math.log(2.0), math.log(2.0)])
    assert slope == pytest.approx([-math.log(2.0), math.log(2.0)])
    with pytest.raises(ValueError, match="teacher"):
        told(config, now, old, [1.0, 1.0])


def test_distillation_clamps_the_divergence_and_may_take_the_current_log_probs() -> None:
    """Divergences by hand: ln(0.3 / 0.6) = -ln 2 with the current policy, ln(0.2 / 0.6) = -ln 3 with the old one."""
    config = {"name": "distillation", "clip_high": 1.0}
    now, old, teacher = ln(0.3), ln(0.2), ln(0.6)
    for logprobs, maximum, advantage in (
        ("old", None, math.log(3.0)),
        ("current", None, math.log(2.0)),
        ("current", 0.5, 0.5),
    ):
        options = config | {"policy_logprobs": logprobs, "max_divergence": maximum}
        parts, slope = told(options, now, old, [9.0], ref_logprobs=teacher)
        assert parts.loss.tolist() == slope == pytest.approx([-1.5 * advantage])


def test_distillation_may_differentiate_the_divergence() -> None:
    """With x = ln(0.4 / 0.2) = ln 2: k2 is x²/2 with slope x, k3 is 1/2 - 1 + x with slope 1 - 1/2."""
    now, teacher, x = ln(0.4), ln(0.2), math.log(2.0)
    for estimator, loss, expected in (("k2", x**2 / 2.0, x), ("k3", x - 0.5, 0.5), ("abs", x, 1.0)):
        options = {"name": "distillation", "gradient": "direct", "estimator": estimator, "weight": 2.0}
        correction = torch.tensor([0.25])  # of policy gradients only
        parts, slope = told(options, now, ln(0.1), [9.0], ref_logprobs=teacher, correction=correction)
        assert (parts.loss.tolist(), slope) == (pytest.approx([2.0 * loss]), pytest.approx([2.0 * expected]))
    with pytest.raises(ValueError, match="k1"):
        TypeAdapter(LossConfig).validate_python({"name": "distillation", "gradient": "direct"})


def test_distillation_adds_the_policy_loss_on_rewards() -> None:
    """By hand: ratio 1.5, task -9 · 1.28 (clipped), teacher 0.5 · -ln 3 · 1.2 (clipped), both times the correction."""
    options = {"name": "distillation", "weight": 0.5, "task": {"name": "ppo"}}
    correction = torch.tensor([0.25])
    parts, slope = told(options, ln(0.3), ln(0.2), [9.0], ref_logprobs=ln(0.6), correction=correction)
    assert parts.loss.tolist() == pytest.approx([0.25 * (-9.0 * 1.28 - 0.5 * math.log(3.0) * 1.2)])
    assert slope == [0.0]
    assert parts.clipped.tolist() == [True]


def selection(config: dict[str, Any], now: torch.Tensor, advantages: list[float], seed: int = 0) -> list[bool]:
    rule, options = loss_from_config(TypeAdapter(LossConfig).validate_python(config))
    assert rule.select is not None
    targets = PolicyLossInputs(torch.ones(len(now)), now.clone(), torch.tensor(advantages, dtype=torch.float64))
    return rule.select(now, targets, options, torch.Generator().manual_seed(seed)).tolist()


def test_kl_cov_holds_the_tokens_of_highest_covariance() -> None:
    now = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    advantages = [3.0, 0.0, -1.0, -2.0]  # around their means: log-probs ±1.5, ±0.5, advantages 3, 0, -1, -2
    assert selection({"name": "kl_cov", "share": 0.25}, now, advantages) == [True, False, False, False]
    assert selection({"name": "kl_cov", "share": 0.5}, now, advantages) == [True, False, False, True]
    assert selection({"name": "kl_cov", "share": 0.0}, now, advantages) == [False] * 4
    marked = torch.tensor([True, False])
    config = {"name": "kl_cov", "coefficient": 0.5}
    parts, slope = told(config, ln(0.4, 0.4), ln(0.2, 0.2), [1.0, 1.0], selected=marked)
    assert parts.loss.tolist() == pytest.approx([-2.0 + 0.5 * math.log(2.0), -2.0])
    assert slope == pytest.approx([-2.0 + 0.5, -2.0])


def test_clip_cov_draws_among_tokens_within_bounds() -> None:
    now = torch.tensor([-1.0, -2.0, -3.0, -4.0, -2.5], dtype=torch.float64)
    advantages = [3.0, 0.0, -1.0, -2.0, 0.0]  # covariances 4.5, 0, 0.5, 3, 0
    config = {"name": "clip_cov", "share": 0.2, "min_covariance": 0.4, "max_covariance": 4.0}
    drawn = {tuple(selection(config, now, advantages, seed)) for seed in range(20)}
    assert drawn == {(False, False, True, False, False), (False, False, False, True, False)}
    assert selection(config, now, advantages, 1) == selection(config, now, advantages, 1)
    parts, slope = told(
        {"name": "clip_cov", "clip_high": 0.2},
        ln(0.4, 0.2),
        ln(0.2, 0.2),
        [-1.0, 1.0],
        selected=torch.tensor([1, 0]) > 0,
    )
    assert parts.loss.tolist() == pytest.approx([0.0, -1.0])
    assert slope == pytest.approx([0.0, -1.0])
    with pytest.raises(ValueError, match="selected"):
        told({"name": "clip_cov"}, now, now, advantages)


def test_clip_cov_never_selects_tokens_that_ppo_clips() -> None:
    rule, options = loss_from_config(
        TypeAdapter(LossConfig).validate_python({"name": "clip_cov", "min_covariance": -9.0})
    )
    assert rule.select is not None
    old, now = ln(0.2, 0.2), ln(0.2, 0.9)
    targets = PolicyLossInputs(torch.ones(2), old, torch.tensor([1.0, 1.0], dtype=torch.float64))
    for seed in range(5):
        assert rule.select(now, targets, options, torch.Generator().manual_seed(seed)).tolist() == [True, False]


BOUNDS = [
    ({"name": "ppo", "clip_low": 0.5}, 0.2, -1.0, 0.5),
    ({"name": "ppo", "clip_high": 0.5}, 3.0, 1.0, -1.5),
    ({"name": "decoupled_ppo", "clip_dual": 3.0}, 5.0, -1.0, 3.0),
    ({"name": "gspo", "clip_low": 0.5}, 0.2, -1.0, 0.5),
    ({"name": "cispo", "clip_low": 0.5}, 0.2, 1.0, -0.5 * math.log(0.02)),
    # the teacher's probability is half as large as the old one: advantage -ln 2
    ({"name": "distillation", "clip_dual": 3.0}, 5.0, 9.0, 3.0 * math.log(2.0)),
]
"""A loss with another bound than by default, a ratio, an advantage and the value by hand."""


@pytest.mark.parametrize(("config", "ratio", "advantage", "expected"), BOUNDS)
def test_a_bound_of_the_configuration_holds(
    config: dict[str, Any], ratio: float, advantage: float, expected: float
) -> None:
    rest = {"sequence": torch.tensor([0]), "ref_logprobs": ln(0.05)}
    parts, _ = told(config, ln(0.1 * ratio), ln(0.1), [advantage], **rest)
    assert parts.loss.tolist() == pytest.approx([expected])


def test_clip_cov_masks_the_configured_share() -> None:
    now, advantages = torch.arange(10, dtype=torch.float64) / 2.0, [0.5 * token for token in range(10)]
    config = {"name": "clip_cov", "min_covariance": -9.0, "max_covariance": 9.0}
    assert [sum(selection(config | {"share": share}, now, advantages)) for share in (0.1, 0.3)] == [1, 3]


def test_gspo_without_sequence_indices_is_an_error() -> None:
    with pytest.raises(ValueError, match="sequence"):
        told({"name": "gspo"}, ln(0.2), ln(0.2), [1.0])


@pytest.mark.parametrize(
    "name", sorted(entry.name for entry in LOSSES if entry.name not in ("clip_cov", "kl_cov", "gmpo"))
)
def test_ratios_beyond_all_bounds_stay_finite(name: str) -> None:
    now = torch.tensor([-500.0, -1e-9, -500.0, -1e-9])
    old = torch.tensor([-1e-9, -500.0, -1e-9, -500.0])
    rest = {"sequence": torch.arange(4), "ref_logprobs": old - 1.0, "rollout_logprobs": now}
    parts, slope = told({"name": name}, now, old, [1.0, 1.0, -1.0, -1.0], **rest)
    assert all(math.isfinite(value) for value in [*parts.loss.tolist(), *slope])


OUTSIDE = """
import torch
from quintet.algorithms.losses.targets import PolicyLoss

def squares(logprobs, targets, options):
    nothing = torch.zeros_like(logprobs, dtype=torch.bool)
    return PolicyLoss(options["strength"] * logprobs.square(), nothing, nothing, logprobs)

def forgetful(logprobs, targets, options):
    return logprobs.sum()
"""


def test_a_custom_loss_function_is_used(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OUTSIDE)
    config = {"name": "custom", "function": f"{file}:squares", "options": {"strength": 2.0}}
    parts, slope = told(config, torch.tensor([3.0]), torch.zeros(1), [1.0])
    assert (parts.loss.tolist(), slope) == ([18.0], [12.0])
    with pytest.raises(ConfigError, match="PolicyLoss"):
        told({**config, "function": f"{file}:forgetful"}, torch.tensor([3.0]), torch.zeros(1), [1.0])
    with pytest.raises(ConfigError, match="square"):
        told({**config, "function": f"{file}:square"}, torch.tensor([3.0]), torch.zeros(1), [1.0])
