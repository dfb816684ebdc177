"""If these fail, learning rates follow another schedule than that of the run, or of the checkpoint that it resumes."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.native.experiment import Experiment
from quintet.runtime.learners.optimizer_schedules import OptimizerSchedules


def schedules(rate: float, steps: int = 10, **actor: Any) -> OptimizerSchedules:
    optimizer = {"learning_rate": rate, "warmup_steps": 0, "schedule": "linear", "min_learning_rate_ratio": 0.0}
    return OptimizerSchedules(
        Experiment.model_validate({"actor": {"optimizer": optimizer, **actor}, "training": {"steps": steps}})
    )


def test_the_learning_rate_falls_over_the_steps_of_training() -> None:
    rates = [schedules(1.0, steps=4).actor(step).learning_rate for step in range(1, 5)]
    assert rates == pytest.approx([0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize(("restored", "rate"), [(True, 0.5), (False, 2.0)])
def test_megatrons_schedule_may_continue_that_of_the_checkpoint(*, restored: bool, rate: float) -> None:
    """Half of the learning rate is left after half of the steps: of 1 in the checkpoint, of 4 in the configuration."""
    current = schedules(4.0, megatron={"use_checkpoint_opt_param_scheduler": restored})
    current.load(schedules(1.0).state())
    assert current.actor(5).learning_rate == pytest.approx(rate)
