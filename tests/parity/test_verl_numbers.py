"""If these fail, our numbers aren't verl's: values and gradients that its own functions gave (release 0.9.1)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from quintet.algorithms.advantages import gae, grpo
from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.kl import KlControl, kl_estimate
from quintet.algorithms.losses import ppo_clip, value_clip
from quintet.algorithms.tokens import whiten
from quintet.config.native import GaeConfig, GrpoConfig, KlConfig
from quintet.records import Batch

GOLDEN = Path(__file__).parent / "golden"
GIVEN = {
    name: torch.from_numpy(values) for name, values in np.load(GOLDEN / "verl_core_algos_in.npz").items() if values.ndim
}
TOLD = {
    name: torch.from_numpy(np.asarray(values)) for name, values in np.load(GOLDEN / "verl_core_algos_out.npz").items()
}
ROWS, WIDTH = GIVEN["response_mask"].shape
MASK = GIVEN["response_mask"].bool()


def packed() -> Batch:
    """verl's padded rows as trajectories of one sequence each, what isn't the policy's own among them."""
    last = torch.zeros_like(MASK)
    for row, mask in enumerate(MASK):
        last[row, mask.nonzero().max()] = True
    size = ROWS * WIDTH
    return Batch(
        tokens=torch.zeros(size, dtype=torch.long),
        positions=torch.arange(WIDTH).repeat(ROWS),
        lengths=torch.full((ROWS,), WIDTH),
        loss_mask=MASK.flatten(),
        turn=torch.zeros(size, dtype=torch.long),
        turn_end=last.flatten(),
        trajectory=torch.arange(ROWS),
        group=GIVEN["index"].long(),
        logprobs=GIVEN["old_log_probs"].flatten(),
        rewards=(GIVEN["token_level_rewards"] * MASK).flatten(),
        values=(GIVEN["values"] * MASK).flatten(),
    )


def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-5, rtol=1e-5)


def own(values: torch.Tensor) -> torch.Tensor:
    return values.view(ROWS, WIDTH)[MASK]


def test_the_golden_rewards_lie_on_the_policys_own_tokens() -> None:
    assert not GIVEN["token_level_rewards"][~MASK].any()


@pytest.mark.parametrize(("flag", "name"), [(True, "std"), (False, "nostd")])
def test_grpo(flag: bool, name: str) -> None:
    advantages, _ = grpo(packed(), GrpoConfig(normalize_by_std=flag))
    same(own(advantages), TOLD[f"adv|grpo|{name}|advantages"][MASK])


def test_gae() -> None:
    advantages, returns = gae(packed(), GaeConfig(gamma=0.99, lam=0.95))
    same(own(advantages), TOLD["adv|gae|advantages"][MASK])
    same(own(returns), TOLD["adv|gae|returns"][MASK])


def test_whitening() -> None:
    same(own(whiten(GIVEN["advantages"].flatten(), MASK.flatten())), TOLD["whiten|masked_whiten"][MASK])


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize(("ours", "theirs"), [("k1", "k1"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_and_its_gradient(ours: str, theirs: str, plus: str) -> None:
    logprobs = GIVEN["log_probs"].clone().requires_grad_()
    kl = kl_estimate(logprobs, GIVEN["ref_log_probs"], ours + plus)
    torch.autograd.backward(kl.sum())
    same(own(kl.detach()), TOLD[f"kl|{theirs}{plus}"][MASK])
    assert logprobs.grad is not None
    same(own(logprobs.grad), TOLD[f"klgrad|{theirs}{plus}"][MASK])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_clipped_policy_loss_and_its_aggregation(mode: str) -> None:
    flat = {name: GIVEN[name].flatten() for name in ("log_probs", "old_log_probs", "advantages")}
    parts = ppo_clip(flat["log_probs"], flat["old_log_probs"], flat["advantages"], 0.2, 0.2, 3.0)
    weights = token_weights(mode, MASK.flatten(), packed().token_trajectory)
    same((parts.loss * weights).sum(), TOLD[f"loss|vanilla|{mode}"])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_clipped_value_loss(mode: str) -> None:
    flat = {name: GIVEN[name].flatten() for name in ("vpreds", "values", "returns")}
    parts = value_clip(flat["vpreds"], flat["values"], flat["returns"], 0.5)
    weights = token_weights(mode, MASK.flatten(), packed().token_trajectory)
    same((parts.loss * weights).sum(), TOLD[f"value|{mode}"])


def test_a_steered_coefficient_moves_by_a_fifth_at_most() -> None:
    """Worked out by hand: β (1 + clip(KL / target - 1, ±0.2) n / horizon)."""
    control = KlControl.of(KlConfig(place="reward", coefficient=0.2, target=0.1, horizon=100))
    control.observe(0.11, 10)
    assert control.coefficient == pytest.approx(0.2 * 1.01)
    control.observe(5.0, 10)
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02)
    control.observe(0.0, 10)
    assert control.coefficient == pytest.approx(0.2 * 1.01 * 1.02 * 0.98)
    fixed = KlControl.of(KlConfig(coefficient=0.2))
    fixed.observe(5.0, 10)
    assert fixed.coefficient == 0.2
