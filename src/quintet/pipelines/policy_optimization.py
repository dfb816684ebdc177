"""Optimizer steps of critic and actor on the batch of one training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

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
from quintet.training.protocols import Critic

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


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the batches of a step, of maxima the maximum."""
    values: dict[str, list[float]] = {}
    for name, value in (item for batch in metrics for item in batch.items()):
        values.setdefault(name, []).append(value)
    return {
        name: max(each) if name.endswith(("/max", "_max")) else sum(each) / len(each) for name, each in values.items()
    }


class PolicyUpdates:
    """Makes the optimizer steps of one training step."""

    def __init__(self, components: Components, step: int, timings: Timings) -> None:
        config, self._learners = components.config, components.learners
        self._config, self._step, self._timings = config, step, timings
        self._aggregation = Aggregation.from_config(config.algorithm, config.max_episode_tokens)
        self._actor_values, self._critic_values = components.schedules.actor(step), components.schedules.critic(step)
        self._actor_objective, self._critic_objective = (
            PolicyObjective(config.algorithm),
            CriticObjective(config.critic),
        )
        self._trains_actor = self._learners.critic is None or step > config.critic.warmup_steps
        self._metrics = UpdateMetrics()
        self._is_first = True
        self._num_batches = 0

    def update_critic_and_actor(self, batch: Batch) -> None:
        """Make the optimizer steps on a batch, the episodes of the step or, with `training.pipelined`, of one
        mini-batch; none if no token is trained."""
        if not bool(batch.loss_mask.any()):
            return
        for mini_batch, seed in _mini_batches(self._config, batch, self._step, self._num_batches):
            if self._learners.critic is not None:
                self._update_critic(self._learners.critic, mini_batch)
            if self._trains_actor:
                self._update_actor(mini_batch, seed)
        self._num_batches += 1

    def _update_critic(self, critic: Critic, mini_batch: Batch) -> None:
        with self._timings.phase("update_critic"):
            update = critic.update(
                mini_batch,
                self._critic_objective,
                self._aggregation,
                self._critic_values.learning_rate,
                critic_mask(mini_batch, self._config.algorithm.advantage),
                weight_decay=self._critic_values.weight_decay,
            )
        self._metrics.add("critic", update)

    def _update_actor(self, mini_batch: Batch, seed: int) -> None:
        with self._timings.phase("update_actor"):
            update = self._learners.actor.update(
                mini_batch,
                self._actor_objective,
                self._aggregation,
                self._actor_values.learning_rate,
                reference=self._learners.reference if self._actor_objective.full_divergence else None,
                seed=seed,
                weight_decay=self._actor_values.weight_decay,
            )
        # the log-prob gap is measured before the first update moves the weights
        self._metrics.add("actor", update, names=LOG_PROB_GAP if self._is_first else None)
        self._is_first = False

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all updates."""
        return self._metrics.result()


def _mini_batches(config: Experiment, batch: Batch, step: int, first: int) -> Iterator[tuple[Batch, int]]:
    """Yield the mini-batches of all epochs, each with the seed of its update; `first` is the number of the batch's
    first one in the step."""
    training = config.training
    size, remainder = divmod(training.groups_per_step, training.mini_batches)
    unit: Literal["group", "trajectory", "sequence"] = "trajectory" if remainder else "group"
    if training.mini_batch_sequences is not None:
        size, unit = training.mini_batch_sequences, "sequence"
    elif remainder:
        size = training.groups_per_step * training.samples_per_group // training.mini_batches
    for epoch in range(training.epochs):
        order = shuffle_generator(config, step, epoch)
        for index, part in enumerate(mini_batches(batch, size, order, unit), first):
            yield part, derive_seed(config.seed, "update", step, epoch, index)


def shuffle_generator(config: Experiment, step: int, epoch: int) -> torch.Generator | None:
    """Return the generator that shuffles trajectories into mini-batches; None if `actor.shuffle` is off."""
    if not config.actor.shuffle:
        return None
    seed = config.seed if config.actor.shuffle_seed is None else config.actor.shuffle_seed
    return torch.Generator().manual_seed(derive_seed(seed, "order", step, epoch))
