"""If these fail, pipelined training runs with an algorithm whose results it changes, or is refused without need."""

from __future__ import annotations

import pytest

from quintet.config.checks.channels import channel_problems
from quintet.config.checks.overlap import overlap_problems
from quintet.config.compose import load_experiment
from quintet.config.plan.overlap import overlaps_training

PIPELINED = (
    "placement.devices_per_node=2",
    "placement.actor.devices=[0]",
    "placement.rollout.devices=[1]",
    "training.pipelined=true",
    "actor.shuffle=false",
    "algorithm.drop_groups_without_signal=false",
)

LOGPROBS = ("placement.devices_per_node=3", "placement.logprobs.devices=[2]")
"""Workers that keep the weights before the first update of a step."""


def refused(*overrides: str) -> list[str]:
    composed = load_experiment(None, [*PIPELINED, *overrides])
    return [problem.key for problem in (*overlap_problems(composed), *channel_problems(composed))]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm.advantage.name=rloo"],
        ["algorithm.advantage={name: gdpo, whiten: false}"],
        ["algorithm.kl={coefficient: 0.1}", "placement.reference.devices=[0]"],
        ["algorithm.shaping={center: group}"],
        ["rollout.async_ratio=1"],
        ["placement.rollout.channel.size=2"],
        [*LOGPROBS, "rollout.recompute_logprobs=true"],
        [*LOGPROBS, "algorithm.train_on_observations=true"],
        [*LOGPROBS, "algorithm.correction={level: sequence}"],
        [*LOGPROBS, "algorithm.loss.name=decoupled_ppo"],
    ],
)
def test_algorithms_that_look_at_one_group_at_a_time_can_be_pipelined(overrides: list[str]) -> None:
    assert refused(*overrides) == []
    assert overlaps_training(load_experiment(None, [*PIPELINED, *overrides]).experiment)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("placement.rollout.devices=[0]", "training.pipelined"),
        ("training.mini_batches=1", "training.mini_batches"),
        ("training.mini_batches=64", "training.mini_batches"),
        ("training.epochs=2", "training.epochs"),
        ("training.mini_batch_sequences=8", "training.mini_batch_sequences"),
        ("actor.shuffle=true", "actor.shuffle"),
        ("algorithm.filter.keep_share=0.5", "algorithm.filter.keep_share"),
        ("algorithm.filter.max_mean=0.9", "algorithm.filter.max_mean"),
        ("algorithm.filter.top_p=0.9", "algorithm.filter.top_p"),
        ("algorithm.filter.drop_zero=true", "algorithm.filter.drop_zero"),
        ("algorithm.advantage.deviation_weight=true", "algorithm.advantage.deviation_weight"),
        ("rollout.recompute_logprobs=true", "rollout.recompute_logprobs"),
        ("rollout.engine_options.offload=true", "rollout.engine_options.offload"),
        ("algorithm.train_on_observations=true", "algorithm.train_on_observations"),
        ("algorithm.advantage.name=brpo", "algorithm.advantage.name"),
        ("algorithm.advantage.name=gpg", "algorithm.advantage.name"),
        ("algorithm.advantage.name=remax", "algorithm.advantage.name"),
        ("algorithm.advantage.name=optimal_token_baseline", "algorithm.advantage.name"),
        ("algorithm.advantage.whiten=true", "algorithm.advantage.whiten"),
        ("algorithm.drop_groups_without_signal=true", "algorithm.drop_groups_without_signal"),
        ("algorithm.shaping.divide=batch", "algorithm.shaping.divide"),
    ],
)
def test_what_looks_at_the_whole_step_is_refused(override: str, key: str) -> None:
    assert refused(override) == [key]


def test_weights_of_a_correction_that_are_normalized_over_the_step_are_refused() -> None:
    assert refused(*LOGPROBS, "algorithm.correction={level: token, normalize: true}") == [
        "algorithm.correction.normalize"
    ]
