"""If these fail, ranks that cannot share a device are started on one, or engines that can are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quintet.cli.configuration import inspect_config
from quintet.config.checks.processes_per_device import processes_per_device_problems
from quintet.config.compose import load_experiment
from quintet.runtime.engines.engine_builders import _shared_device_options

APART = ("devices_per_node=2", "actor.devices=[0]", "rollout.devices=[1]", "rollout.processes_per_device=2")
SHARE = "rollout.engine_options.memory_share"


def problems(*placement: str, other: tuple[str, ...] = ()) -> list[str]:
    composed = load_experiment(None, [*(f"placement.{word}" for word in placement), *other])
    return [str(problem) for problem in processes_per_device_problems(composed)]


def test_engines_and_env_hosts_share_devices_without_the_actor() -> None:
    assert problems(*APART) == []
    hosts = ("devices_per_node=2", "envs.devices=[1]", "envs.processes_per_device=3")
    assert problems(*hosts) == []
    assert problems("devices_per_node=2", "actor.devices=[0]", "rollout.devices=[1,1]") == []


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (["devices_per_node=2", "actor.devices=[0,0]"], "the ranks of the actor cannot share one"),
        (["devices_per_node=2", "rollout.processes_per_device=2"], "the actor is on 0-1, too"),
        (["devices_per_node=2", "actor.devices=[0]", "rollout.devices=[0,1,1]"], "the actor is on 0, too"),
        (["envs.processes_per_device=2"], "placement.envs.devices names them"),
        (["envs.devices=[]", "envs.processes_per_device=2"], "the environments have no device without the actor"),
        (["rollout.devices=[]", "rollout.processes_per_device=2"], "the engines have no device without the actor"),
    ],
    ids=str,
)
def test_other_processes_do_not_share_devices(placement: list[str], expected: str) -> None:
    (problem,) = problems(*placement)
    assert expected in problem


def test_an_engine_on_several_devices_has_them_alone() -> None:
    words = ("rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2")
    placement = ("devices_per_node=3", "actor.devices=[0]", "rollout.devices=[1,2]", "rollout.processes_per_device=2")
    (problem,) = problems(*placement, other=words)
    assert "an engine on 2 devices shares none of them" in problem


def test_rlinfs_several_engines_on_the_devices_of_the_actor_are_refused_under_its_key(tmp_path: Path) -> None:
    placement = {"actor": "0-1", "rollout": "0-1:0-3"}
    tree = {"runner": {"task_type": "reasoning"}, "cluster": {"num_nodes": 1, "component_placement": placement}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    refused = "\n".join(map(str, inspect_config(str(tmp_path / "run.yaml"), [], "rlinf", "refuse").unsupported))
    assert "cluster.component_placement.rollout" in refused
    assert "the actor is on 0-1, too, and its process has the engines there" in refused
    assert "cluster.component_placement.actor,rollout=0-1" in refused


def test_engines_on_one_device_take_a_share_of_it_each() -> None:
    """Without a share each vLLM would take nine tenths."""
    (problem,) = problems(*APART, other=(f"{SHARE}=0.6",))
    assert "each of 2 engines on a device takes that share" in problem
    assert f"at most: {SHARE}=0.5" in problem
    placement = [f"placement.{word}" for word in APART]
    for words, share in (([], 0.45), ([f"{SHARE}=0.3"], 0.3), (["placement.rollout.processes_per_device=1"], None)):
        config = load_experiment(None, [*placement, "rollout.engine=vllm", *words]).experiment
        assert _shared_device_options(config).memory_share == share
