"""If these fail, a check is proved by no configuration, or the files of a framework do not pass it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quintet.config.checks import unsupported
from quintet.config.checks.processes import planned_rank
from quintet.config.checks.unsupported import CHECKS
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import conversion_problems, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.problems import ConfigProblem

NATIVE: dict[str, list[str]] = {
    "executor_problems": ["rollout.engine=vllm", "rollout.engine_options.executor=ray"],
    "backend_problems": ["actor.backend=megatron", "policy.attention=sdpa"],
    "sharding_problems": [
        "placement.devices_per_node=2",
        "actor.backend=fsdp",
        "actor.sharding.sync_every_micro_batch=true",
        "policy.lora={rank: 4}",
        "actor.parallel.pipeline=2",
    ],
    "overlap_problems": ["training.pipelined=true"],
    "channel_problems": ["placement.rollout.channel.queue=groups", "rollout.async_ratio=1"],
    "sharded_reward_problems": [
        "placement.devices_per_node=3",
        "placement.actor.devices=[0,1]",
        "placement.rollout.devices=[2]",
        "rollout.async_ratio=1",
        "reward.model.path=some/model",
        "reward.model.min_sharded_parameters=1",
    ],
    "judge_problems": ["reward.judge.server={path: some/model, engine: hf, arguments: {depth: 1}}"],
    "distillation_problems": ["sft={episodes: {}, distillation: {}}"],
    "processes_per_device_problems": ["placement.rollout.processes_per_device=2"],
    "chunk_algorithm_problems": ["algorithm.bootstrap=done"],
    "env_host_problems": [
        "placement.devices_per_node=3",
        "placement.actor.devices=[0,1]",
        "placement.rollout.devices=[2]",
        "placement.envs.devices=[2]",
    ],
    "weight_transfer_problems": ["placement.weight_transfer=tcp"],
    "vision_problems": ["env.name=frozenlake", "env.render=vision"],
    "svg_problems": ["env.name=svg", "env.dataset=missing"],
    "tool_problems": [
        "env.name=prompts",
        "warm_start=null",
        "data.train_files=[rows.jsonl]",
        "rollout.tool_calls={file: missing.yaml}",
    ],
    "video_problems": ["tracking.video={}"],
    "profile_problems": ["tracking.profile={ranks: [7]}"],
    "robot_problems": ["env={name: simulator, simulator: bandit}", "rollout.engine=vllm"],
}
"""A refused native configuration for each check."""

FRAMEWORKS: dict[str, dict[str, Any]] = {
    "ragen": {},
    "rlinf": {"runner": {"task_type": "math"}, "rollout": {"model": {"model_path": "some/model"}}},
    "roll": {"actor_train": {"data_args": {"file_name": "train.json"}}},
    "vagen": {},
    "verl": {},
}
"""The least configuration of each framework that is converted."""


def test_a_run_passes_every_check() -> None:
    assert [check.__name__ for check in CHECKS] == list(NATIVE)


@pytest.mark.parametrize("name", NATIVE)
def test_each_check_refuses_a_native_configuration(name: str) -> None:
    composed = load_experiment(None, NATIVE[name])
    (check,) = (check for check in CHECKS if check.__name__ == name)
    problems = [str(problem) for problem in check(composed)]
    assert problems
    refused = [str(problem) for problem in unsupported.run_problems(composed, planned_rank(composed.experiment))]
    assert set(problems) <= set(refused)


@pytest.mark.parametrize("framework", DIALECTS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_sees_the_configurations_of_each_framework(
    check: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ConfigProblem("seed", 1, "test", f"refused by {check.__name__}")

    def refuse(composed: ComposedConfig) -> Iterator[ConfigProblem]:
        yield refused

    monkeypatch.setattr(
        unsupported, "CHECKS", tuple(refuse if other is check else other for other in unsupported.CHECKS)
    )
    result = convert(config_from_tree(FRAMEWORKS[framework], "given.yaml:1"), DIALECTS[framework], to_plan=True)
    assert refused in conversion_problems(result, planned_rank(result.composed.experiment))
