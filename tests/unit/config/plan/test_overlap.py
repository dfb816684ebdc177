"""If these fail, a run claims that its rollout overlaps with training although it cannot, or the other way round."""

from __future__ import annotations

import pytest

from quintet.config.checks.unsupported import run_problems
from quintet.config.compose import load_experiment
from quintet.config.plan.overlap import overlap_obstacle, overlaps_training
from quintet.config.plan.run_plan import plan_run

APART = ["placement.devices_per_node=2", "placement.actor.devices=[0]", "placement.rollout.devices=[1]"]
ASYNC = "rollout.async_ratio=1"


@pytest.mark.parametrize(
    ("overrides", "obstacle"),
    [
        ([], "rollout.async_ratio = 0"),
        ([ASYNC], "the engines and actor are on the same devices"),
        ([*APART], "rollout.async_ratio = 0"),
        ([*APART, ASYNC], None),
        (
            [*APART, ASYNC, "algorithm.kl={coefficient: 0.1}", "placement.reference.devices=[1]"],
            "the engines and reference are on the same devices",
        ),
        ([*APART, ASYNC, "algorithm.kl={coefficient: 0.1}", "placement.reference.devices=[0]"], None),
        (
            [*APART, ASYNC, "rollout.recompute_logprobs=true", "placement.logprobs.devices=[1]"],
            "the engines and log-prob workers are on the same devices",
        ),
        (
            ["placement.actor.devices=[]", "placement.rollout.devices=[]", ASYNC],
            "the engines and actor are on the same devices",
        ),
        (["placement.actor.devices=[0]", "placement.rollout.devices=[]", ASYNC], None),
    ],
)
def test_only_engines_beside_all_learners_overlap_with_training(overrides: list[str], obstacle: str | None) -> None:
    config = load_experiment(None, overrides).experiment
    assert overlap_obstacle(config) == obstacle
    assert overlaps_training(config) is (obstacle is None)


@pytest.mark.parametrize(("overrides", "is_refused"), [([ASYNC], True), ([*APART, ASYNC], False)])
def test_a_channel_is_refused_where_there_is_none(overrides: list[str], is_refused: bool) -> None:
    composed = load_experiment(None, [*overrides, "placement.rollout.channel.size=3"])
    problems = {problem.key: problem.message for problem in run_problems(composed)}
    assert ("placement.rollout.channel.size" in problems) is is_refused


@pytest.mark.parametrize(("overrides", "is_warned"), [([ASYNC], False), ([*APART, ASYNC], True)])
def test_a_plan_says_that_an_overlapped_run_is_not_reproducible(overrides: list[str], is_warned: bool) -> None:
    warnings = plan_run(load_experiment(None, overrides)).warnings
    assert any("not reproducible" in warning for warning in warnings) is is_warned
