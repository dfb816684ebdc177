"""If these fail, the losses of action policies depend on micro-batches, or train on the wrong actions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from quintet.algorithms.chunks.advantages import add_chunk_advantages
from quintet.algorithms.chunks.objective import ChunkObjective
from quintet.config.native.experiment import Experiment
from quintet.config.native.losses import LOSSES
from quintet.embodied_records import ActionStatistics, ChunkBatch
from support.chunk_masks import mask_after_end

CHUNKS, ROBOTS, ACTIONS, DIM = 3, 4, 2, 3


def experiment(**algorithm: Any) -> Experiment:
    kl = {"estimator": "k3", "coefficient": 0.1}
    defaults = {"entropy_coefficient": 0.01, "kl": kl, "reward_level": "chunk", "advantage": {"name": "gae"}}
    critic = {"shares_policy": True, "value_clip": 0.2, "huber_delta": 0.5}
    return Experiment.model_validate({"algorithm": {**defaults, **algorithm}, "critic": critic})


def rollout(config: Experiment, seed: int = 0) -> ChunkBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size = ACTIONS if config.algorithm.reward_level == "action" else 1
    dones = torch.zeros(CHUNKS, ROBOTS, ACTIONS, dtype=torch.bool)
    dones[1, 0, 0] = dones[0, 1, 1] = dones[2, 2, 1] = True
    logprobs = normal(CHUNKS, ROBOTS, ACTIONS, DIM)
    return ChunkBatch(
        inputs={},
        actions=torch.zeros(CHUNKS, ROBOTS, ACTIONS, DIM),
        logprobs=logprobs,
        rewards=normal(CHUNKS, ROBOTS, ACTIONS),
        dones=dones,
        loss_mask=mask_after_end(dones),
        group=torch.tensor([0, 0, 1, 1]).expand(CHUNKS, ROBOTS),
        values=normal(CHUNKS, ROBOTS, size),
        last_values=normal(ROBOTS, size),
        ref_logprobs=logprobs + 0.1 * normal(*logprobs.shape),
        rollout_logprobs=logprobs + 0.3 * normal(*logprobs.shape),
    )


def statistics(batch: ChunkBatch, seed: int = 1) -> ActionStatistics:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch.logprobs.shape, generator=generator, dtype=torch.float64)
    assert batch.values is not None
    values = batch.values + 0.5 * torch.randn(batch.values.shape, generator=generator, dtype=torch.float64)
    return ActionStatistics((batch.logprobs + 0.3 * noise).requires_grad_(), noise.abs(), values.requires_grad_())


def select(current: ActionStatistics, index: torch.Tensor) -> ActionStatistics:
    assert current.values is not None
    return ActionStatistics(current.logprobs[index], current.entropies[index], current.values[index])


SUPPORTED = [entry.name for entry in LOSSES if getattr(entry.config, "supports_chunks", False)]


@pytest.mark.parametrize("loss", SUPPORTED)
@pytest.mark.parametrize(
    ("level", "reward_level", "aggregation"),
    [
        ("token", "action", "token-mean"),
        ("action", "chunk", "seq-mean-token-mean"),
        ("chunk", "chunk", "token-mean"),
        ("token", "chunk", "seq-mean-token-mean"),
    ],
)
def test_micro_batches_and_ranks_do_not_change_loss_gradient_or_metrics(
    loss: str, level: str, reward_level: str, aggregation: str
) -> None:
    options = {"max_weight": 1.1} if loss == "decoupled_ppo" else {}
    config = experiment(
        loss={"name": loss, **options},
        level=level,
        entropy_level="action",
        reward_level=reward_level,
        aggregation=aggregation,
    )
    batch = add_chunk_advantages(rollout(config), config)[0].flatten()
    objective, current = ChunkObjective(config), statistics(batch)
    whole, metrics = objective.loss(current, batch, objective.normalizer(batch))
    gradients = torch.autograd.grad(whole, [current.logprobs, current.values])

    parts = torch.tensor([7, 0, 3, 11, 1, 4, 2, 9, 5, 10, 6, 8]).split([5, 1, 6])
    torch.testing.assert_close(
        sum(divisors(objective, batch.select(part)) for part in parts), divisors(objective, batch)
    )
    sums: dict[str, torch.Tensor] = {}
    for part in parts:
        total, values = objective.loss(select(current, part), batch.select(part), objective.normalizer(batch))
        for name, value in {**values, "total": total}.items():
            sums[name] = sums.get(name, torch.zeros(())) + value
    torch.testing.assert_close(sums.pop("total"), whole)
    assert sums.keys() == metrics.keys()
    for name, value in metrics.items():
        torch.testing.assert_close(sums[name], value, msg=name)
    parts_gradients = torch.autograd.grad(sums["actor/total_loss"], [current.logprobs, current.values])
    for of_parts, of_whole in zip(parts_gradients, gradients, strict=True):
        torch.testing.assert_close(of_parts, of_whole)


def divisors(objective: ChunkObjective, batch: ChunkBatch) -> torch.Tensor:
    """The divisors of one rank's chunk steps, before those of all ranks are added."""
    local: list[torch.Tensor] = []

    def record(totals: torch.Tensor) -> torch.Tensor:
        local.append(totals)
        return totals

    objective.normalizer(batch, record)
    return local[0]


@pytest.mark.parametrize("level", ["token", "action"])
def test_actions_after_the_end_of_an_episode_have_no_gradient_with_rewards_of_actions(level: str) -> None:
    config = experiment(level=level, reward_level="action", kl=None, entropy_coefficient=0.0)
    batch = add_chunk_advantages(rollout(config), config)[0].flatten()
    objective, current = ChunkObjective(config), statistics(batch)
    loss, _ = objective.loss(current, batch, objective.normalizer(batch))
    (gradient,) = torch.autograd.grad(loss, current.logprobs)
    assert not gradient[~batch.loss_mask].any()
    assert gradient[batch.loss_mask].any(-1).float().mean() > 0.3


def single_chunk() -> ChunkBatch:
    """One chunk of two actions with three dimensions each, all of which are trained."""
    return ChunkBatch(
        inputs={},
        actions=torch.zeros(1, 2, 3),
        logprobs=torch.zeros(1, 2, 3),
        rewards=torch.zeros(1, 2),
        dones=torch.zeros(1, 2, dtype=torch.bool),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
        group=torch.zeros(1, dtype=torch.long),
        values=torch.zeros(1, 1),
        advantages=torch.ones(1, 1),
        returns=torch.ones(1, 1),
    )


def chunk_metrics(**algorithm: Any) -> dict[str, float]:
    """Metrics of a chunk whose tokens have become twice as likely, with an entropy of 0.5 each, and a value of 0.9."""
    objective, batch = ChunkObjective(experiment(kl=None, **algorithm)), single_chunk()
    current = ActionStatistics(torch.full((1, 2, 3), math.log(2)), torch.full((1, 2, 3), 0.5), torch.full((1, 1), 0.9))
    _, metrics = objective.loss(current, batch, objective.normalizer(batch))
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(("level", "ratio"), [("token", 2), ("action", 2**3), ("chunk", 2**6)])
def test_a_ratio_is_of_the_configured_unit(level: str, ratio: float) -> None:
    assert chunk_metrics(level=level)["actor/ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(("level", "entropy"), [("token", 0.5), ("action", 1.5), ("chunk", 3.0)])
def test_an_entropy_is_of_the_configured_unit(level: str, entropy: float) -> None:
    assert chunk_metrics(entropy_level=level)["actor/entropy"] == pytest.approx(entropy)


def test_values_are_clipped_and_large_errors_count_linearly() -> None:
    """The value 0.9 is clipped to 0.2, and the error is 0.8: by hand δ (|e| - δ / 2) with δ = 0.5."""
    assert chunk_metrics()["critic/vf_loss"] == pytest.approx(0.5 * (0.8 - 0.25))


def test_an_update_with_a_large_mean_ratio_is_skipped() -> None:
    objective = ChunkObjective(experiment(stop_ratio=2.0))
    assert objective.skips_update({"actor/ratio": 2.1})
    assert not objective.skips_update({"actor/ratio": 1.9})


def test_the_loss_of_values_is_left_out_without_a_critic() -> None:
    config = experiment(advantage={"name": "grpo"})
    batch = add_chunk_advantages(replace(rollout(config), values=None, last_values=None), config)[0].flatten()
    current = statistics(replace(batch, values=batch.advantages))
    objective = ChunkObjective(config)
    loss, metrics = objective.loss(current, batch, objective.normalizer(batch))
    assert "critic/vf_loss" not in metrics
    assert torch.autograd.grad(loss, current.values, allow_unused=True) == (None,)
