"""If these fail, a run on a simulator starts with settings that it ignores or cannot follow."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.checks.robots import robot_problems
from quintet.config.compose import load_experiment
from quintet.config.plan.robot_batches import robot_arithmetic
from quintet.errors import ConfigError

ROBOTS = ["env.name=simulator", "env.simulator=arm", "policy.preset=arm-vla"]
GRPO = [*ROBOTS, "training.groups_per_step=4", "training.samples_per_group=4", "training.mini_batches=4"]


def problems(*overrides: str) -> dict[str, Any]:
    return {problem.key: problem for problem in robot_problems(load_experiment(None, list(overrides)))}


def test_a_run_of_robots_has_no_problems() -> None:
    assert problems(*GRPO) == {}
    assert problems(*GRPO, "algorithm.advantage.name=gae", "critic.shares_policy=true") == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.advantage.name=gae", ("value head", "critic.shares_policy=true")),
        ("env.fixed_start_states=false", ("must start from the same state", "env.fixed_start_states=true")),
        ("rollout.engine=vllm", ("computes its actions itself", "rollout.engine=hf")),
        ("actor.backend=megatron", ("no action policies", "actor.backend=fsdp2")),
        ("actor.parallel.tensor=2", ("not split over devices", "actor.parallel.tensor=1")),
        ("rollout.async_ratio=1", ("do not overlap", "rollout.async_ratio=0")),
        ("rollout.window_size=2", ("actions, not text", "rollout.window_size=")),
        ("rollout.top_p=0.9", ("actions, not text", "rollout.top_p=1.0")),
    ],
)
def test_what_robots_cannot_follow_is_refused(override: str, words: tuple[str, ...]) -> None:
    found = " ".join(f"{problem.message} {problem.hint}" for problem in problems(*GRPO, override).values())
    assert [word for word in words if word not in found] == []


def test_what_no_robot_reads_is_refused_rather_than_ignored() -> None:
    changes = {
        "rollout.think": "false",
        "rollout.response_format": "strict",
        "rollout.action_separator": ";",
        "rollout.ignore_case": "false",
        "rollout.numbered_actions": "true",
        "rollout.unknown_actions": "skip",
        "rollout.strip_special_tokens": "true",
        "rollout.format_penalty": "-1.0",
        "rollout.format_reward": "1.0",
        "rollout.min_p": "0.1",
        "validation.sampling.min_p": "0.1",
        "rollout.end_token": "2",
        "rollout.pad_token": "0",
        "rollout.max_start_tokens": "64",
        "rollout.max_observation_tokens": "64",
        "rollout.max_concurrent": "8",
        "validation.prompts_per_device": "4",
        "policy.vision.max_pixels": "4096",
        "training.start_states": "50",
        "training.shuffle_start_states": "false",
        "reference.path": "DIRECTORY",
        "critic.path": "DIRECTORY",
        "actor.balance_ranks": "false",
    }
    found = problems(*GRPO, *(f"{key}={value}" for key, value in changes.items()))
    assert set(found) == set(changes)
    assert "come from their simulator" in found["training.start_states"].message
    assert found["rollout.think"].hint == "rollout.think=true"
    assert "not on prompts" in problems(*GRPO, "data.shuffle=false")["data"].message


def test_an_option_that_a_simulator_does_not_take_is_refused_before_it_is_built() -> None:
    found = problems(*GRPO, "env.options={control: elbow, speed: 2}")
    assert "env.options.control = 'elbow'" in found["env.options.control"].message
    assert "'tip' or 'joint'" in found["env.options.control"].message
    assert "arm has no such option, but control, " in found["env.options.speed"].message
    assert found["env.options.speed"].hint == "env.options={control: 'elbow'}"
    assert problems(*GRPO, "env.simulator=mine.py:Robots", "env.options={speed: 2}") == {}


def test_maniskill_must_have_the_robot_that_the_policy_controls() -> None:
    panda = [*GRPO, "env.simulator=maniskill", "policy.vla={policy_setup: panda-qpos}"]
    problem = problems(*panda)["policy.vla.policy_setup"]
    assert "env.options.policy_setup = 'widowx_bridge'" in problem.message
    assert problems(*panda, "env.options.policy_setup=panda-qpos") == {}


@pytest.mark.parametrize(
    "override", ["critic.shares_policy=true", "placement.offload_envs=true", "policy.vla={images: 2}"]
)
def test_what_only_robots_read_is_refused_elsewhere(override: str) -> None:
    (problem,) = problems(override).values()
    assert "only a run on a simulator" in problem.message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.mini_batches=7"], "it does not divide the 2,048 samples of a step, 16 robots × 1 epoch × 128"),
        (["env.environments=12"], "nearest valid value: env.environments=16, or training.groups_per_step=3"),
        (["env.pipeline_stages=3"], "the 16 robots are no multiple of 12"),
        (
            ["placement.devices_per_node=4", "env.pipeline_stages=2", "env.environments=16"],
            "the 16 robots are no multiple of 32, from 4 processes",
        ),
    ],
)
def test_robots_and_samples_that_do_not_divide_are_refused_with_the_nearest_value(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_experiment(None, [*GRPO, *overrides])
    assert words in str(error.value)


def test_an_epoch_may_have_several_episodes() -> None:
    composed = load_experiment(None, [*GRPO, "env.max_steps=80", "env.steps_per_epoch=160", "env.auto_reset=true"])
    numbers = robot_arithmetic(composed.experiment)
    assert (numbers.chunk_steps_per_epoch, numbers.samples, numbers.samples_per_mini_batch) == (40, 640, 160)
    assert numbers.image_bytes == 640 * 3 * 256 * 256


@pytest.mark.parametrize(
    ("simulator", "action_dim", "executed"),
    [("metaworld", 7, 4), ("metaworld", 4, None), ("libero", 7, None)],
)
def test_the_plan_says_that_metaworld_executes_four_of_seven_dimensions(
    simulator: str, action_dim: int, executed: int | None
) -> None:
    """RLinf takes the first three and the last of seven, and trains on the log-probs of all."""
    policy = ["policy.preset=null", "policy.path=some/policy", "policy.kind=openvla_oft"]
    changes = [f"env.simulator={simulator}", f"policy.vla.action_dim={action_dim}"]
    numbers = robot_arithmetic(load_experiment(None, [*GRPO, *policy, *changes]).experiment)
    assert numbers.executed_dimensions == executed


def test_the_plan_knows_the_chunks_of_presets() -> None:
    from quintet.config.plan.chunk_steps import PRESET_CHUNKS
    from quintet.policies.vla.action_presets import ACTION_PRESETS

    assert {name: preset.action_chunk for name, preset in ACTION_PRESETS.items()} == PRESET_CHUNKS
