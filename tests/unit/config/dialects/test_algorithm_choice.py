"""If these fail, an estimator or a loss is lost on the way to another framework, and nobody is told."""

from __future__ import annotations

import pytest

from quintet.config.compose import load_experiment
from quintet.config.dialects.algorithm_choice import option_names
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.value_types import is_function_address
from quintet.config.native.advantages import ADVANTAGE_UNION
from quintet.config.native.losses import LOSS_UNION
from quintet.config.translate import translate

PLAYED = ["env.name=frozenlake"]
ASKED = ["env.name=prompts", "warm_start=null", "data.train_files=[a.parquet]", "reward.kind=math"]
ENVS = {"ragen": PLAYED, "vagen": PLAYED, "verl": ASKED, "rlinf": ASKED, "roll": ASKED}


THEIRS = {
    "ragen": {*("grpo", "gae", "brpo", "arpo", "bi_level_gae", "turn_wise_gae", "rloo", "reinforce_plus_plus")},
    "vagen": {"grpo", "gae", "bi_level_gae", "turn_wise_gae", "gigpo"},
    "verl": {
        *("gae", "grpo", "grpo_passk", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "opo"),
        *("remax", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"),
    },
    "rlinf": {"grpo", "gae", "raw", "grpo_dynamic", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "none"},
    "roll": {"grpo", "gae", "reinforce", "gigpo"},
}
"""Estimators that each framework can be asked for, besides the user's own."""
LOSSES_OF_VERL = {
    *("ppo", "gspo", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl"),
    *("dro", "clip_cov", "kl_cov", "gpg", "reinforce", "custom"),
}
LOSSES = {
    "rlinf": {
        *("ppo", "decoupled_ppo", "distillation", "custom"),
        *("sac", "dsrl", "nft", "dagger", "iql", "rlt", "td3"),
    },
    "verl": LOSSES_OF_VERL | {"distillation"},
    "vagen": LOSSES_OF_VERL,
    "roll": {"ppo", "gspo", "cispo", "reinforce", "kimi", "topr"},
}
"""Losses that each framework can be asked for; the others have PPO's alone."""
OWN = set(ENVS)
"""Frameworks whose key takes a function of the user's own."""


@pytest.mark.parametrize("dialect", ENVS)
@pytest.mark.parametrize("name", ADVANTAGE_UNION.names())
def test_an_estimator_is_said_or_listed_as_lost(dialect: str, name: str) -> None:
    words = [*ENVS[dialect], "policy.preset=null", "policy.path=some/model", f"algorithm.advantage.name={name}"]
    words += ["algorithm.advantage.function=mine.py:own"] * (name == "custom")
    lost = translate(load_experiment(None, words), DIALECTS[dialect]).lost
    said = dialect in OWN if name == "custom" else name in THEIRS[dialect]
    assert ("algorithm.advantage.name" not in lost) == said


@pytest.mark.parametrize("dialect", ENVS)
@pytest.mark.parametrize("name", LOSS_UNION.names())
def test_a_loss_is_said_or_listed_as_lost(dialect: str, name: str) -> None:
    words = [*ENVS[dialect], "policy.preset=null", "policy.path=some/model", f"algorithm.loss.name={name}"]
    words += ["algorithm.loss.function=mine.py:own"] * (name == "custom")
    words += ["reference.path=some/teacher"] * (name == "distillation")
    # RLinf's loss with a critic needs one, and its losses of robots take none of the rest
    words += ["algorithm.advantage.name=gae"] * (name == "decoupled_ppo")
    lost = translate(load_experiment(None, words), DIALECTS[dialect]).lost
    assert ("algorithm.loss.name" not in lost) == (name in LOSSES.get(dialect, {"ppo"}))


@pytest.mark.parametrize(
    ("value", "outside"),
    [
        ("mine.py:own", True),
        ("some dir/mine.py:own", True),
        ("package.module:own", True),
        ("grpo", False),
        ("mine.py", False),
        ("mine.py:", False),
        (":own", False),
        ("mine.py:own()", False),
        ("C:mine.py:own", False),
        (7, False),
        (None, False),
    ],
)
def test_an_address_names_a_file_or_module_and_a_function(value: object, outside: bool) -> None:
    assert is_function_address(value) is outside


def test_the_options_are_those_of_the_schema() -> None:
    assert option_names("algorithm.advantage", "gae") == {"gamma", "lam", "whiten"}
    assert option_names("algorithm.advantage", "brpo") == {"normalize_by_std", "whiten"}
    assert option_names("algorithm.loss", "dppo_kl") == {"clip_low", "clip_high", "max_ratio"}
