"""If these fail, an estimator or a loss is lost on the way to another framework, and nobody is told."""

from __future__ import annotations

from typing import get_args

import pytest

from quintet.config import load_experiment
from quintet.config.dialects.chosen import is_outside, options_of
from quintet.config.dialects.dialect import DIALECTS
from quintet.config.native.advantages import AdvantageConfig
from quintet.config.native.losses import LossConfig
from quintet.config.translate import translate

PLAYED = ["world.name=frozenlake"]
ASKED = ["world.name=prompts", "warm_start=null", "data.train_files=[a.parquet]", "reward.kind=math"]
WORLDS = {"ragen": PLAYED, "vagen": PLAYED, "verl": ASKED, "rlinf": ASKED, "roll": ASKED}


def names(kinds: object) -> list[str]:
    return [name for kind in get_args(get_args(kinds)[0]) for name in get_args(kind.model_fields["name"].annotation)]


THEIRS = {
    "ragen": {*("grpo", "gae", "brpo", "arpo", "bi_level_gae", "turn_wise_gae", "rloo", "reinforce_plus_plus")},
    "vagen": {"grpo", "gae", "bi_level_gae", "turn_wise_gae"},
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
    *("dro", "clip_cov", "kl_cov", "gpg", "reinforce", "outside"),
}
LOSSES = {
    "rlinf": {"ppo", "decoupled_ppo", "distillation", "sac", "nft", "outside"},
    "verl": LOSSES_OF_VERL,
    "vagen": LOSSES_OF_VERL,
    "roll": {"ppo", "gspo", "cispo", "reinforce", "kimi", "topr"},
}
"""Losses that each framework can be asked for; the others have PPO's alone."""
OWN = set(WORLDS)
"""Frameworks whose key takes a function of the user's own."""


@pytest.mark.parametrize("dialect", WORLDS)
@pytest.mark.parametrize("name", names(AdvantageConfig))
def test_an_estimator_is_said_or_listed_as_lost(dialect: str, name: str) -> None:
    words = [*WORLDS[dialect], "policy.preset=null", "policy.path=some/model", f"algorithm.advantage.name={name}"]
    words += ["algorithm.advantage.function=mine.py:own"] * (name == "outside")
    lost = translate(load_experiment(None, words), DIALECTS[dialect]).lost
    said = dialect in OWN if name == "outside" else name in THEIRS[dialect]
    assert ("algorithm.advantage.name" not in lost) == said


@pytest.mark.parametrize("dialect", WORLDS)
@pytest.mark.parametrize("name", names(LossConfig))
def test_a_loss_is_said_or_listed_as_lost(dialect: str, name: str) -> None:
    words = [*WORLDS[dialect], "policy.preset=null", "policy.path=some/model", f"algorithm.loss.name={name}"]
    words += ["algorithm.loss.function=mine.py:own"] * (name == "outside")
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
    assert is_outside(value) is outside


def test_the_options_are_those_of_the_schema() -> None:
    assert options_of("algorithm.advantage", "gae") == {"gamma", "lam", "whiten"}
    assert options_of("algorithm.advantage", "brpo") == {"normalize_by_std", "whiten"}
    assert options_of("algorithm.loss", "dppo_kl") == {"clip_low", "clip_high", "max_ratio"}
