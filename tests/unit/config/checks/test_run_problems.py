"""If these fail, a check is proved by no configuration, or the files of a framework do not pass it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from refusals import CASES, FRAMEWORKS, NEVER, REFUSED_BEFORE, UNSET

from quintet import hardware
from quintet.config.checks import unsupported
from quintet.config.checks.processes import planned_rank
from quintet.config.checks.unsupported import CHECKS
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import conversion_problems, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.releases import all_keys
from quintet.config.dotted import is_inside, unflatten
from quintet.config.problems import ConfigProblem
from quintet.config.torchrun import RankInfo
from quintet.errors import ConfigError

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

LEAST: dict[str, dict[str, Any]] = {
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
    result = convert(config_from_tree(LEAST[framework], "given.yaml:1"), DIALECTS[framework], to_plan=True)
    assert refused in conversion_problems(result, planned_rank(result.composed.experiment))


VALUE_CHECKS = ("unsupported_value_problems", "engine_problems")
"""Checks of single values, whose problems a conversion describes by the framework's keys."""
PROCESSES = {"unsupported_value_problems": 1, "process_problems": 2}
"""Processes of the run; of other checks as many as it needs."""
GPUS = {"sharding_problems": 1}


@pytest.fixture
def on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without packages of engines, whose working directory has two models and a loss."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "is_installed", lambda name: False)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "qwen2", **sizes, "num_key_value_heads": 2, "vocab_size": 128}
    encoder = {"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64}
    patches = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    for name, config in {
        "text_model": text,
        "vision_model": {**text, "model_type": "qwen2_5_vl", "vision_config": {**encoder, **patches}},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "loss.py").write_text("def loss(): ...\n")
    return monkeypatch


def refusals(check: str, framework: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages about a configuration, each by its first line."""
    monkeypatch.setattr(hardware, "num_gpus", lambda: GPUS.get(check, 0))
    monkeypatch.setattr(hardware, "sees_gpu", lambda: check in GPUS)
    size = PROCESSES.get(check)
    if size is not None:
        variables = {"RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
    tree = unflatten(keys)
    result = convert(config_from_tree(tree, "given.yaml:1"), DIALECTS[framework], to_plan=size is None)
    rank = planned_rank(result.composed.experiment) if size is None else RankInfo(0, size, 0, size)
    return [problem.message for problem in conversion_problems(result, rank)]


def test_each_check_is_proved_with_each_framework_or_cannot_refuse_it() -> None:
    names = (*VALUE_CHECKS, *NATIVE, "process_problems")
    unset = [(check, framework) for check, (_, frameworks) in UNSET.items() for framework in frameworks]
    assert sorted(DIALECTS) == sorted(FRAMEWORKS)
    assert sorted([*CASES, *unset, *REFUSED_BEFORE, *NEVER]) == sorted(product(names, FRAMEWORKS))


@pytest.mark.parametrize(("check", "framework"), CASES)
def test_each_check_refuses_what_a_framework_can_express(
    check: str, framework: str, on_this_machine: pytest.MonkeyPatch
) -> None:
    keys, message = CASES[check, framework]
    found = [text for text in refusals(check, framework, keys, on_this_machine) if text.startswith(message)]
    assert len(found) == 1
    if check not in VALUE_CHECKS:
        others = [other for other in CHECKS if other.__name__ != check]
        on_this_machine.setattr(unsupported, "CHECKS", others)
        on_this_machine.setattr(unsupported, check, lambda composed, rank: ())
        assert not [text for text in refusals(check, framework, keys, on_this_machine) if text.startswith(message)]


@pytest.mark.parametrize("check", UNSET)
def test_no_key_of_a_framework_sets_what_a_check_refuses(check: str) -> None:
    natives, frameworks = UNSET[check]
    for name in frameworks:
        dialect = DIALECTS[name]
        specs = [spec for each in filter(None, (dialect, dialect.base)) for _, spec in all_keys(each)]
        setting = [spec.key for spec in specs for key in spec.native if any(is_inside(key, top) for top in natives)]
        assert setting == [], name


@pytest.mark.parametrize(("check", "framework"), REFUSED_BEFORE)
def test_a_conversion_refuses_what_a_check_then_never_sees(
    check: str, framework: str, on_this_machine: pytest.MonkeyPatch
) -> None:
    keys, message = REFUSED_BEFORE[check, framework]
    try:
        found = refusals(check, framework, keys, on_this_machine)
    except ConfigError as error:
        found = error.message.splitlines()
    assert [text for text in found if text.startswith(message)]
