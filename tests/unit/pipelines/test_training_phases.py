"""If these fail, a step of training puts rewards, masks or updates elsewhere than its configuration says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.pipelines.experience import add_log_probs, add_reference_log_probs, collate_rollout
from quintet.pipelines.policy_optimization import PolicyUpdates
from quintet.pipelines.rollout_step import Rollout
from quintet.pipelines.timings import Timings
from quintet.pipelines.training_warnings import TrainingWarnings
from quintet.records import Batch, FinishReason, Outcome, Trajectory, Turn
from quintet.runtime.learners.optimizer_schedules import OptimizerSchedules


def turn(prompt: tuple[int, ...], tokens: tuple[int, ...], reward: float, *, continues: bool) -> Turn:
    logprobs = (-0.5,) * len(tokens)
    return Turn("", prompt, continues, tokens, logprobs, 0, "", (), True, reward, FinishReason.STOP)


def two_turns(config: Experiment) -> Batch:
    """Two prompt tokens, two of a response with reward 1, one of an observation and two of a response with reward 2."""
    turns = turn((1, 2), (3, 4), 1.0, continues=False), turn((5,), (6, 7), 2.0, continues=True)
    return collate_rollout(Rollout([Trajectory("lake", 0, 0, 0, turns, Outcome.SUCCESS)], {}), config)


def experiment(*overrides: str) -> Experiment:
    return load_experiment(None, overrides).experiment


class Learner:
    """Actor, critic and reference, which count their calls and score every token with -1."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.updates = 0
        self.scorer = self

    def compute_log_probs(self, batch: Batch) -> torch.Tensor:
        return -batch.loss_mask.float()

    def update(self, *_: Any, **__: Any) -> dict[str, float]:
        self.updates += 1
        return {}


@pytest.mark.parametrize(
    ("turn_rewards", "rewards"), [("true", [0, 0, 0, 1, 0, 0, 2]), ("false", [0, 0, 0, 0, 0, 0, 3])]
)
def test_rewards_are_at_the_end_of_turns_or_of_the_episode(turn_rewards: str, rewards: list[float]) -> None:
    assert two_turns(experiment(f"algorithm.turn_rewards={turn_rewards}")).rewards.tolist() == rewards


@pytest.mark.parametrize(("trained", "mask"), [("true", [0, 0, 1, 1, 1, 1, 1]), ("false", [0, 0, 1, 1, 0, 1, 1])])
def test_observations_are_trained_on_only_if_configured(trained: str, mask: list[int]) -> None:
    config, learner = experiment(f"algorithm.train_on_observations={trained}"), Learner()
    learners = SimpleNamespace(policy_scorer=lambda _step: learner, actor=learner)
    components: Any = SimpleNamespace(config=config, learners=learners)
    batch, _ = add_log_probs(components, two_turns(config), 1)
    assert batch.loss_mask.int().tolist() == mask


def test_the_reference_is_replaced_in_every_nth_step() -> None:
    config, steps = experiment("algorithm.kl={refresh_every_steps: 2}"), list[int]()
    for step in range(1, 6):
        snapshot = lambda step=step: steps.append(step)  # noqa: E731
        learners = SimpleNamespace(reference=Learner(), snapshot_reference=snapshot)
        components: Any = SimpleNamespace(config=config, learners=learners)
        add_reference_log_probs(components, two_turns(config), step)
    assert steps == [2, 4]


def test_the_policy_is_not_updated_while_the_critic_warms_up() -> None:
    config = experiment("algorithm.advantage.name=gae", "critic.warmup_steps=2", "training.mini_batches=1")
    learners = SimpleNamespace(actor=Learner(), critic=Learner(), reference=None)
    components: Any = SimpleNamespace(config=config, learners=learners, schedules=OptimizerSchedules(config))
    updates = []
    for step in (1, 2, 3):
        PolicyUpdates(components, step, Timings()).update_critic_and_actor(two_turns(config))
        updates.append((learners.critic.updates, learners.actor.updates))
    assert updates == [(1, 0), (2, 0), (3, 1)]


def test_training_ends_after_the_configured_number_of_steps_without_a_group() -> None:
    warnings = TrainingWarnings(experiment("algorithm.filter.stop_after_empty_steps=2"))
    kept = [0.0, 0.5, 0.0, 0.0]
    reasons = [warnings.reason_to_end(step, {"training/groups_kept": share}) for step, share in enumerate(kept, 1)]
    assert reasons[:3] == [None] * 3
    assert "training ended after step 4" in str(reasons[3])
