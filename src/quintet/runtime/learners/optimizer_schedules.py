"""Learning rates and weight decays of the learners by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.training.optim.lr_schedule import learning_rate, resolve_schedule, weight_decay

STATE_KEY = "actor_schedule"


@dataclass(frozen=True, slots=True)
class ScheduledValues:
    """Learning rate and weight decay of one optimizer step."""

    learning_rate: float
    weight_decay: float


class OptimizerSchedules:
    """Schedules of actor and critic; the actor's may come from a checkpoint instead of the configuration."""

    def __init__(self, config: Experiment) -> None:
        self._config = config
        self._first_step = 0
        self._restored: OptimizerConfig | None = None

    def actor(self, step: int) -> ScheduledValues:
        """Return the actor's values in `step`."""
        return self._scheduled_values(self._restored or self._config.actor.optimizer, step)

    def critic(self, step: int) -> ScheduledValues:
        """Return the critic's values in `step`."""
        return self._scheduled_values(self._config.critic.optimizer, step)

    def _scheduled_values(self, optimizer: OptimizerConfig, step: int) -> ScheduledValues:
        completed, total = step - self._first_step, self._config.training.steps
        return ScheduledValues(learning_rate(optimizer, completed, total), weight_decay(optimizer, completed, total))

    def state(self) -> dict[str, Any]:
        """Return the actor's schedule for a checkpoint, as JSON values."""
        schedule = self._restored or resolve_schedule(self._config.actor.optimizer, self._config.training.steps)
        return {STATE_KEY: schedule.model_dump(mode="json")}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the checkpoint's schedule if `use_checkpoint_opt_param_scheduler` asks for it."""
        megatron = self._config.actor.megatron
        if megatron is not None and megatron.use_checkpoint_opt_param_scheduler and STATE_KEY in state:
            self._restored = OptimizerConfig.model_validate(state[STATE_KEY], strict=False)

    def start_at(self, step: int) -> None:
        """Start the schedules after `step`, the last one of a checkpoint that is loaded without its schedules."""
        self._first_step = step
