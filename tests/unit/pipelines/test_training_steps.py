"""If these fail, a run validates after other steps than configured."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.pipelines.training_steps import TrainingStep


@pytest.mark.parametrize(("every", "validated"), [(2, [2, 4, 5]), (0, [5]), (-1, [])])
def test_a_validation_follows_every_nth_step_and_the_last(every: int, validated: list[int]) -> None:
    config = load_experiment(None, [f"validation.every_steps={every}"]).experiment
    steps = [TrainingStep(number, is_last=number == 5) for number in range(1, 6)]
    assert [step.number for step in steps if step.is_validated(config)] == validated
