"""If these fail, advantages and losses of action policies are not RLinf's, or no longer differ where those are wrong.

The numbers are those of RLinf's own functions (release 0.2, float64), see `scripts/make_rlinf_golden.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintet.algorithms.chunks.advantages import add_chunk_advantages
from quintet.algorithms.chunks.objective import ChunkObjective
from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionStatistics, ChunkBatch
from support.chunk_masks import mask_after_end

STORED = np.load(Path(__file__).parent / "golden" / "rlinf_chunks.npz")
NUMBERS: dict[str, float] = json.loads(str(STORED["numbers"]))
ROWS = torch.from_numpy(STORED["in|rows"])
LOSSES: dict[str, dict[str, Any]] = {
    "actor": {"name": "ppo", "clip_dual": None},
    "actor_critic": {"name": "ppo", "clip_dual": 1.5},
    "decoupled_actor_critic": {"name": "decoupled_ppo", "max_weight": 1.3},
}
LEVELS = [("action", "token"), ("action", "action"), ("chunk", "token"), ("chunk", "action"), ("chunk", "chunk")]
ESTIMATORS = [("masked", "gae"), ("masked", "grpo"), ("auto_reset", "gae")]
UPDATES = [
    (kind, estimator, loss) for kind, estimator in ESTIMATORS for loss in (LOSSES if estimator == "gae" else ["actor"])
]
METRICS = {
    "actor/policy_loss": "actor/pg_loss",
    "actor/policy_loss_abs": "actor/pg_loss_abs",
    "critic/value_loss": "critic/vf_loss",
}
RATIO_METRICS = {
    "actor/ratio": "actor/ratio",
    "actor/ratio_abs": "actor/ratio_abs",
    "actor/clipped_ratio": "actor/clipped_ratio",
    "actor/dual_cliped_ratio": "actor/dual_clipped_ratio",
    "actor/approx_kl": "actor/ppo_kl",
    "actor/clip_fraction": "actor/pg_clipfrac",
    "actor/proximal_ratio": "actor/ratio",
    "actor/clipped_proximal_ratio": "actor/clipped_ratio",
    "actor/proximal_approx_kl": "actor/ppo_kl",
}


def stored(name: str) -> torch.Tensor:
    return torch.from_numpy(STORED[name])


def experiment(kind: str, reward_level: str, estimator: str, level: str = "token", loss: str = "actor") -> Experiment:
    advantage = {"name": "gae", "gamma": 0.97, "lam": 0.9} if estimator == "gae" else {"name": "grpo"}
    algorithm = {
        "advantage": advantage,
        "loss": {"clip_low": 0.2, "clip_high": 0.28, **LOSSES[loss]},
        "level": level,
        "reward_level": reward_level,
        "aggregation": "seq-mean-token-mean" if kind == "masked" else "token-mean",
    }
    critic = {"shares_policy": True, "value_clip": 0.2, "huber_delta": 0.7}
    return Experiment.model_validate({"algorithm": algorithm, "critic": critic})


def rollout(kind: str, config: Experiment) -> ChunkBatch:
    size = 3 if config.algorithm.reward_level == "action" else 1
    dones, values = stored(f"in|{kind}|dones")[1:], stored(f"in|{kind}|values")[..., :size]
    is_decoupled = config.algorithm.loss.name == "decoupled_ppo"
    logprobs = stored(f"in|{kind}|logprobs")
    return ChunkBatch(
        inputs={},
        actions=torch.zeros(logprobs.shape),
        logprobs=stored(f"in|{kind}|proximal_logprobs") if is_decoupled else logprobs,
        rollout_logprobs=logprobs if is_decoupled else None,
        rewards=stored(f"in|{kind}|rewards"),
        dones=dones,
        loss_mask=mask_after_end(dones) if kind == "masked" else torch.ones_like(dones),
        group=torch.tensor([0, 0, 0, 1, 1, 1]).expand(dones.shape[:2]),
        values=values[:-1],
        last_values=values[-1],
    )


def close(actual: torch.Tensor, expected: torch.Tensor | float) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), atol=1e-6, rtol=1e-6)


def test_loss_mask_and_the_weights_of_episodes() -> None:
    config = experiment("masked", "action", "gae")
    batch = rollout("masked", config)
    assert torch.equal(batch.loss_mask, stored("out|masked|loss_mask"))
    weights = add_chunk_advantages(batch, config)[0].loss_weights
    assert weights is not None
    close(weights, batch.loss_mask * 12.0 / stored("out|masked|loss_mask_sum"))


@pytest.mark.parametrize("reward_level", ["action", "chunk"])
@pytest.mark.parametrize(("kind", "estimator"), ESTIMATORS)
def test_advantages_and_returns(kind: str, estimator: str, reward_level: str) -> None:
    config = experiment(kind, reward_level, estimator)
    batch, _ = add_chunk_advantages(rollout(kind, config), config)
    key = f"out|{kind}|{reward_level}|{estimator}"
    assert batch.advantages is not None
    assert batch.returns is not None
    mask = batch.loss_mask if reward_level == "action" else batch.loss_mask.any(-1, keepdim=True)
    close(batch.advantages, stored(f"{key}|advantages") * mask)
    if estimator == "gae":
        close(batch.returns, stored(f"{key}|returns") * mask)


@pytest.mark.parametrize(("reward_level", "level"), LEVELS)
@pytest.mark.parametrize(("kind", "estimator", "loss_type"), UPDATES)
def test_losses_gradients_and_metrics(kind: str, estimator: str, loss_type: str, reward_level: str, level: str) -> None:
    key = f"out|{kind}|{reward_level}|{estimator}|{level}|{loss_type}"
    config = experiment(kind, reward_level, estimator, level, loss_type)
    batch = add_chunk_advantages(rollout(kind, config), config)[0].flatten().select(ROWS)
    assert batch.values is not None
    current = ActionStatistics(
        stored(f"in|{kind}|new_logprobs").flatten(0, 1)[ROWS].requires_grad_(),
        stored(f"in|{kind}|entropies").flatten(0, 1)[ROWS],
        stored(f"in|{kind}|new_values").flatten(0, 1)[ROWS][:, : batch.values.shape[-1]].clone().requires_grad_(),
    )
    objective = ChunkObjective(config)
    loss, metrics = objective.loss(current, batch, objective.normalizer(batch))
    if loss_type == "actor":
        loss = metrics["actor/pg_loss"]
    gradients = torch.autograd.grad(loss, [current.logprobs, current.values], allow_unused=True)
    close(loss, NUMBERS[f"{key}|loss"])
    close(gradients[0].flatten(1), stored(f"{key}|grad|logprobs"))
    if loss_type != "actor":
        close(gradients[1], stored(f"{key}|grad|values"))
    for theirs, name in METRICS.items():
        if f"{key}|metric|{theirs}" in NUMBERS:
            close(metrics[name], NUMBERS[f"{key}|metric|{theirs}"])
    compare_ratio_metrics(key, metrics, kind, reward_level, level)


def compare_ratio_metrics(key: str, metrics: dict[str, torch.Tensor], kind: str, reward_level: str, level: str) -> None:
    """RLinf's masks have one entry for all tokens of an action, or for all actions of a chunk. It divides by the number
    of entries what it summed over tokens or actions, except for four means of ratios of tokens."""
    sizes = {"token": 2, "action": 1, "chunk": 1}[level] * (3 if reward_level == "chunk" and level != "chunk" else 1)
    factor = sizes if kind == "masked" else 1
    for theirs, name in RATIO_METRICS.items():
        number = NUMBERS.get(f"{key}|metric|{theirs}")
        if number is None:
            continue
        is_expanded = level == "token" and theirs in ("actor/ratio", "actor/ratio_abs", "actor/clipped_ratio")
        is_expanded |= level == "token" and theirs == "actor/dual_cliped_ratio"
        close(metrics[name] * (1 if is_expanded else factor), number)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_entropy(level: str) -> None:
    config = experiment("auto_reset", "chunk", "gae")
    config = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"entropy_level": level, "entropy_coefficient": 0.5})}
    )
    batch = add_chunk_advantages(rollout("auto_reset", config), config)[0].flatten().select(ROWS)
    objective = ChunkObjective(config)
    assert batch.values is not None
    current = ActionStatistics(batch.logprobs, stored("in|auto_reset|entropies").flatten(0, 1)[ROWS], batch.values)
    loss, metrics = objective.loss(current, batch, objective.normalizer(batch))
    expected = NUMBERS[f"out|auto_reset|entropy|{level}"]
    close(metrics["actor/entropy"], expected)
    close(loss, metrics["actor/pg_loss"] + metrics["critic/vf_loss"] - 0.5 * expected)
