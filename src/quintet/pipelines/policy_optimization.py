"""Optimizer steps of critic and actor on the batch of one training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from quintet.algorithms.advantages.gae import critic_mask
from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyObjective
from quintet.config.native.experiment import Experiment
from quintet.pipelines.timings import Timings
from quintet.records import Batch
from quintet.runtime.components import Components
from quintet.seeds import derive_seed
from quintet.training.packing import mini_batches

LOG_PROB_GAP = {
    "probs_diff_max": "training/rollout_probs_diff_max",
    "probs_diff_mean": "training/rollout_probs_diff_mean",
    "kl_mean": "rollout_corr/kl",
    "k3_kl_mean": "rollout_corr/k3_kl",
    "above_limit_mean": "training/rollout_probs_diff_beyond",
}
"""Full names of an update's metrics of the gap between the engine's and the learner's log-probs."""
STOPPED_UPDATES = "actor/stopped_updates"
"""Number of updates that were not made because of `algorithm.loss.stop_ratio`."""


class UpdateMetrics:
    """Metrics of several updates: means over mini-batches, and sums of counts."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._counts = {STOPPED_UPDATES}

    def add(self, learner: str, update: Mapping[str, float], *, names: Mapping[str, str] | None = None) -> None:
        """Add the metrics of an update of the `learner`; `names` are full names of metrics beyond the usual ones."""
        skipped = f"{learner}/skipped_updates"
        self._counts.add(skipped)
        names = {"grad_norm": f"{learner}/grad_norm", "lr": f"{learner}/lr", "skipped": skipped, **(names or {})}
        for name, value in update.items():
            if "/" in name or name in names:
                self._values.setdefault(names.get(name, name), []).append(value)

    def result(self) -> dict[str, float]:
        """Return the metrics of all updates."""
        return {
            name: sum(values) if name in self._counts else sum(values) / len(values)
            for name, values in self._values.items()
        }


def update_critic_and_actor(components: Components, batch: Batch, step: int, timings: Timings) -> dict[str, float]:
    """Make all optimizer steps of one training step and return their metrics; none if no token is trained."""
    if not bool(batch.loss_mask.any()):
        return {}
    config, learners = components.config, components.learners
    aggregation = Aggregation.from_config(config.algorithm, config.max_episode_tokens)
    actor_values, critic_values = components.schedules.actor(step), components.schedules.critic(step)
    actor_objective, critic_objective = PolicyObjective(config.algorithm), CriticObjective(config.critic)
    critic, actor_is_trained = learners.critic, learners.critic is None or step > config.critic.warmup_steps
    reference = learners.reference if actor_objective.full_divergence else None
    metrics, is_first = UpdateMetrics(), True
    for mini_batch, seed in _mini_batches(config, batch, step):
        if critic is not None:
            with timings.phase("update_critic"):
                update = critic.update(
                    mini_batch,
                    critic_objective,
                    aggregation,
                    critic_values.learning_rate,
                    critic_mask(mini_batch, config.algorithm.advantage),
                    weight_decay=critic_values.weight_decay,
                )
            metrics.add("critic", update)
        if actor_is_trained:
            with timings.phase("update_actor"):
                update = learners.actor.update(
                    mini_batch,
                    actor_objective,
                    aggregation,
                    actor_values.learning_rate,
                    reference=reference,
                    seed=seed,
                    weight_decay=actor_values.weight_decay,
                )
            # the log-prob gap is measured before the first update moves the weights
            metrics.add("actor", update, names=LOG_PROB_GAP if is_first else None)
            is_first = False
    return metrics.result()


def _mini_batches(config: Experiment, batch: Batch, step: int) -> Iterator[tuple[Batch, int]]:
    """Yield the mini-batches of all epochs, each with the seed of its update."""
    training = config.training
    size, remainder = divmod(training.groups_per_step, training.mini_batches)
    if remainder:
        size = training.groups_per_step * training.samples_per_group // training.mini_batches
    for epoch in range(training.epochs):
        order = shuffle_generator(config, step, epoch)
        for index, part in enumerate(mini_batches(batch, size, order, full_groups=not remainder)):
            yield part, derive_seed(config.seed, "update", step, epoch, index)


def shuffle_generator(config: Experiment, step: int, epoch: int) -> torch.Generator | None:
    """Return the generator that shuffles trajectories into mini-batches; None if `actor.shuffle` is off."""
    if not config.actor.shuffle:
        return None
    seed = config.seed if config.actor.shuffle_seed is None else config.actor.shuffle_seed
    return torch.Generator().manual_seed(derive_seed(seed, "order", step, epoch))
