"""If these fail, a framework's keys for devices place components elsewhere than they say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.cli.configuration import inspect_config
from quintet.cli.plan_table import print_plan
from quintet.cli.ranks import hide_other_gpus
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.dialects.conversion import converter_of, exported_values
from quintet.config.dialects.registry import DIALECTS
from quintet.config.native.experiment import Experiment
from quintet.config.plan.placement import check_placement
from quintet.config.plan.process_layout import ProcessLayout, process_layout
from quintet.config.plan.run_plan import plan_run
from quintet.config.translate import translate
from quintet.errors import ConfigError


def composed(path: Path, dialect: str, tree: dict[str, Any]) -> ComposedConfig:
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return inspect_config(str(file), [], dialect, "refuse").composed


def planned(path: Path, dialect: str, tree: dict[str, Any]) -> Experiment:
    return composed(path, dialect, tree).experiment


def exported_to_rlinf(config: Experiment) -> dict[str, Any]:
    rlinf = DIALECTS["rlinf"]
    return exported_values(config, rlinf.narrowed(converter_of(rlinf).base_tree(config)))


def layout(path: Path, dialect: str, tree: dict[str, Any]) -> ProcessLayout:
    return process_layout(planned(path, dialect, tree))


@pytest.mark.proves("verl", "trainer.nnodes", "trainer.n_gpus_per_node", "actor_rollout_ref.hybrid_engine")
@pytest.mark.proves("vagen", "trainer.nnodes", "trainer.n_gpus_per_node")
@pytest.mark.parametrize("dialect", ["verl", "vagen"])
def test_nodes_and_gpus_per_node_are_processes(tmp_path: Path, dialect: str) -> None:
    trainer = {"trainer": {"nnodes": 2, "n_gpus_per_node": 4}, "actor_rollout_ref": {"hybrid_engine": True}}
    placed = layout(tmp_path, dialect, trainer)
    assert (placed.num_nodes, placed.per_node, placed.learner_ranks) == (2, 4, tuple(range(8)))
    assert placed.standalone_ranks == ()


@pytest.mark.proves("ragen", "trainer.nnodes", "system.n_gpus")
def test_ragens_gpus_are_those_of_each_node(tmp_path: Path) -> None:
    placed = layout(tmp_path, "ragen", {"trainer": {"nnodes": 2}, "system": {"n_gpus": 4}})
    assert (placed.num_nodes, placed.per_node) == (2, 4)


@pytest.mark.proves("ragen", "system.cuda_visible_devices", "system.multi_processing")
@pytest.mark.parametrize(("visible", "expected"), [("2,3", "2,3"), (1, "1"), ("-1", "")])
def test_ragens_visible_devices_are_those_that_the_run_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: object, expected: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    system = {"cuda_visible_devices": visible, "multi_processing": "ray"}
    hide_other_gpus(planned(tmp_path, "ragen", {"system": system}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.proves("rlinf", "cluster.num_nodes", "cluster.component_placement.actor,inference,rollout", "rollout.mode")
def test_rlinfs_components_run_on_their_global_ranks(tmp_path: Path) -> None:
    cluster = {"num_nodes": 2, "component_placement": {"rollout": "0-3", "actor": "4-7"}}
    tree = {"runner": {"task_type": "reasoning"}, "cluster": cluster}
    placed = layout(tmp_path, "rlinf", tree)
    assert placed.num_nodes == 2
    assert {placed.devices[rank] for rank in placed.learner_ranks} == {4, 5, 6, 7}
    assert {placed.devices[rank] for rank in placed.standalone["rollout"]} == {0, 1, 2, 3}
    shared = {"num_nodes": 1, "component_placement": {"actor,inference,rollout": "0-3"}}
    assert layout(tmp_path, "rlinf", {**tree, "cluster": shared}).standalone_ranks == ()


@pytest.mark.proves("rlinf", "actor.group_name", "rollout.group_name")
def test_rlinfs_worker_groups_are_named_in_the_plan_and_in_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = {"component_placement": {"rollout": "0", "actor": "1"}, "num_nodes": 1}
    tree = {
        "runner": {"task_type": "reasoning"},
        "cluster": placed,
        "actor": {"group_name": "Trainers"},
        "rollout": {"group_name": "Samplers"},
    }
    config = composed(tmp_path, "rlinf", tree)
    assert process_layout(config.experiment).describe_rank(1) == "rank 1 (Samplers)"
    print_plan(plan_run(config))
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert ["Trainers", "1"] in lines
    assert ["Samplers", "0"] in lines
    assert translate(config, DIALECTS["rlinf"]).lost == {}


@pytest.mark.proves("rlinf", "env.group_name")
def test_rlinfs_environments_are_named_on_the_ranks_that_host_them(tmp_path: Path) -> None:
    placed = {"component_placement": {"env": "0", "actor,rollout": "1"}, "num_nodes": 1}
    named = planned(tmp_path, "rlinf", {"runner": {"task_type": "embodied"}, "env": {"group_name": "Robots"}})
    assert "Robots" in process_layout(named).describe_rank(0)
    tree = {"runner": {"task_type": "embodied"}, "cluster": placed, "env": {"group_name": "Robots"}}
    assert layout(tmp_path, "rlinf", tree).describe_rank(1) == "rank 1 (Robots)"


@pytest.mark.proves("rlinf", "cluster.component_placement.actor,inference,rollout", "rollout.recompute_logprobs")
@pytest.mark.parametrize(
    ("kl", "recomputes", "expected"),
    [
        (0.1, True, ("logprobs", "reference")),
        (0.0, True, ("logprobs",)),
        (0.1, False, ("reference",)),
    ],
)
def test_rlinfs_inference_computes_the_log_probs_that_the_run_needs(
    tmp_path: Path, kl: float, recomputes: bool, expected: tuple[str, ...]
) -> None:
    components = {"actor": "0", "rollout": "0", "inference": "1-2"}
    tree = {
        "runner": {"task_type": "reasoning"},
        "cluster": {"num_nodes": 1, "component_placement": components},
        "algorithm": {"kl_beta": kl},
        "rollout": {"recompute_logprobs": recomputes},
    }
    config = planned(tmp_path, "rlinf", tree)
    (learners,) = process_layout(config).standalone_learners
    assert (learners.components, learners.ranks) == (expected, (1, 2))
    assert exported_to_rlinf(config)["cluster.component_placement.inference"] == "1-2"


def test_rlinfs_inference_is_not_placed_if_its_log_probs_have_different_devices() -> None:
    words = ["devices_per_node=3", "actor.devices=[0]", "rollout.devices=[0]", "reference.devices=[1]"]
    overrides = [*(f"placement.{word}" for word in words), "algorithm.kl={}", "rollout.recompute_logprobs=true"]
    overrides += ["env.name=prompts", "data.train_files=[rows.jsonl]", "warm_start=null"]
    for logprobs, placed in (("[1]", True), ("[2]", False)):
        config = load_experiment(None, [*overrides, f"placement.logprobs.devices={logprobs}"]).experiment
        keys = [key for key in exported_to_rlinf(config) if key.startswith("cluster.component_placement.")]
        assert any("inference" in key for key in keys) is placed


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_rlinfs_inference_beside_the_actor_needs_no_process_of_its_own(tmp_path: Path, kl: float) -> None:
    tree = {
        "runner": {"task_type": "reasoning"},
        "cluster": {"num_nodes": 1, "component_placement": {"actor,inference,rollout": "0-3"}},
        "algorithm": {"kl_beta": kl},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    inspected = inspect_config(str(file), [], "rlinf", "refuse")
    assert not [problem for problem in inspected.unsupported if "placement" in problem.key]


def test_rlinfs_inference_with_nothing_to_compute_is_refused_with_the_reason(tmp_path: Path) -> None:
    tree = {
        "runner": {"task_type": "reasoning"},
        "cluster": {"num_nodes": 1, "component_placement": {"actor,rollout": "0-1", "inference": "2-3"}},
        "algorithm": {"kl_beta": 0.0},
        "rollout": {"recompute_logprobs": False},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    inspected = inspect_config(str(file), [], "rlinf", "refuse")
    (problem,) = (problem for problem in inspected.unsupported if "placement" in problem.key)
    assert problem.source.startswith("cluster.component_placement.inference: ")
    assert "no log-probs to compute" in problem.message
    with pytest.raises(ConfigError, match=r"component_placement.inference: .*no log-probs to compute"):
        check_placement(inspected.composed)


@pytest.mark.proves(
    "roll",
    "actor_train.device_mapping",
    "actor_infer.device_mapping",
    "actor_infer.num_gpus_per_worker",
    "reference.device_mapping",
    "critic.device_mapping",
)
def test_rolls_workers_run_on_the_devices_of_their_mappings(tmp_path: Path) -> None:
    tree = {
        "adv_estimator": "gae",
        "actor_train": {"device_mapping": "list(range(0,4))"},
        "critic": {"device_mapping": "list(range(0,4))"},
        "reference": {"device_mapping": "list(range(0,4))"},
        "actor_infer": {"device_mapping": "list(range(4,8))", "num_gpus_per_worker": 2},
    }
    config = planned(tmp_path, "roll", tree)
    placed = process_layout(config)
    assert placed.learner_ranks == (0, 1, 2, 3)
    assert placed.standalone == {"rollout": (4, 5, 6, 7)}
    assert config.placement.rollout.devices_per_worker == 2
    assert config.rollout.engine_options.tensor_parallel == 2
    assert config.placement.critic.devices == config.placement.reference.devices == (0, 1, 2, 3)


@pytest.mark.proves("verl", "trainer.ray_wait_register_center_timeout")
def test_processes_wait_for_each_other_as_long_as_verl_says(tmp_path: Path) -> None:
    config = planned(tmp_path, "verl", {"trainer": {"ray_wait_register_center_timeout": 17}})
    assert config.placement.join_timeout_seconds == 17
