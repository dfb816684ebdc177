"""If these fail, a pretrained model is trained on what its user did not ask for, or at a rate that destroys it."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.plan.run_plan import plan_run

PATH = "policy.path=/models/small"
LORA = "policy.lora.rank=8"


def rates(*words: str) -> dict[str, float]:
    config = load_experiment(None, [*words, "warm_start.updates=3", "sft.then_reinforce=true"]).experiment
    sections = {name: getattr(config, name) for name in ("actor", "critic", "warm_start", "sft")}
    return {name: section.optimizer.learning_rate for name, section in sections.items()}


@pytest.mark.parametrize("words", [[PATH], ["sft.path=/models/small"], ["sft.then_reinforce=true"]])
def test_a_policy_that_can_answer_is_not_trained_on_demonstrations_unless_that_is_set(words: list[str]) -> None:
    assert load_experiment(None, words).experiment.warm_start is None
    for setting in ("warm_start={}", "warm_start.updates=250", "warm_start.optimizer.learning_rate=1e-5"):
        warm_start = load_experiment(None, [*words, setting]).experiment.warm_start
        assert warm_start is not None
        assert warm_start.updates == 250


def test_a_new_policy_begins_with_demonstrations() -> None:
    assert load_experiment(None, []).experiment.warm_start is not None


def test_a_new_policy_has_the_rates_of_the_presets() -> None:
    assert rates() == {"actor": 6e-4, "critic": 3e-4, "warm_start": 2e-3, "sft": 1e-3}


@pytest.mark.parametrize("word", [PATH, "sft.path=/models/small"])
def test_a_pretrained_policy_is_not_trained_at_the_rates_of_the_presets(word: str) -> None:
    assert rates(word) == {"actor": 1e-6, "critic": 1e-5, "warm_start": 1e-5, "sft": 1e-5}


def test_adapters_of_a_pretrained_policy_have_ten_times_its_rates() -> None:
    assert rates(PATH, LORA) == {"actor": 1e-5, "critic": 1e-5, "warm_start": 1e-4, "sft": 1e-5}
    assert rates(PATH, "sft.lora.rank=8") == {"actor": 1e-6, "critic": 1e-5, "warm_start": 1e-5, "sft": 1e-4}


def test_a_rate_of_the_user_is_kept_also_beside_other_settings_of_its_optimizer() -> None:
    assert rates(PATH, "actor.optimizer.learning_rate=6e-4")["actor"] == 6e-4
    composed = load_experiment(None, [PATH, "actor.optimizer.schedule=constant"])
    optimizer = composed.experiment.actor.optimizer
    assert (optimizer.learning_rate, optimizer.max_grad_norm) == (1e-6, 0.4)
    assert composed.source("actor.optimizer.learning_rate") == "default"


def warnings(*words: str) -> tuple[str, ...]:
    composed: ComposedConfig = load_experiment(None, [PATH, "warm_start.updates=3", *words])
    return tuple(line for line in plan_run(composed).warnings if "learning_rate" in line)


def test_rates_of_the_user_that_destroy_a_pretrained_policy_are_warned_of() -> None:
    assert warnings() == warnings(LORA) == ()
    assert warnings("actor.optimizer.learning_rate=6e-4") == (
        "actor.optimizer.learning_rate = 0.0006 (command line) suits the small preset policies; "
        "for a pretrained model use about 1e-06",
    )
    assert "use about 1e-05" in "".join(warnings("warm_start.optimizer.learning_rate=2e-3"))
    assert warnings("actor.optimizer.learning_rate=6e-4", LORA) == ()
    assert "use about 0.0001" in "".join(warnings("warm_start.optimizer.learning_rate=2e-3", LORA))
