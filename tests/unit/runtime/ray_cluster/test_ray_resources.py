"""If these fail, a cluster's CPU nodes stay idle, or components get nodes without their devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from quintet.config.torchrun import RankInfo
from quintet.errors import ConfigError
from quintet.runtime.ray_cluster.launcher import RankCommand, _order, _resources_per_node

GPU_NODE, CPU_NODE = {"GPU": 2.0, "CPU": 8.0}, {"CPU": 4.0}
GPUS, CPUS = {"GPU": 2.0, "CPU": 1.0}, {"CPU": 2.0}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, float]]:
    ray: Any = pytest.importorskip("ray", reason="pip install 'quintet[ray]'")
    nodes: list[Mapping[str, float]] = []
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": node} for node in nodes])
    return nodes


def command(size: int, *cpu_ranks: int) -> RankCommand:
    return RankCommand([], "", RankInfo(0, size, 0, 2), 0.0, 8.0, lambda rank: None, cpu_ranks=frozenset(cpu_ranks))


def test_a_node_that_only_hosts_environments_needs_no_gpu(cluster: list[Mapping[str, float]]) -> None:
    cluster += [CPU_NODE, GPU_NODE]
    assert _resources_per_node(command(4, 2, 3)) == [GPUS, CPUS]
    with pytest.raises(ConfigError, match="needs 2 nodes with 2 GPUs each; the cluster has 2, with 0, 2 GPUs"):
        _resources_per_node(command(4, 3))
    with pytest.raises(ConfigError, match="needs 1 nodes with 2 GPUs each and 2 nodes with 2 CPUs each"):
        _resources_per_node(command(6, 2, 3, 4, 5))


def test_engines_on_one_device_need_one_gpu(cluster: list[Mapping[str, float]]) -> None:
    cluster += [GPU_NODE]
    ranks = RankInfo(0, 5, 0, 5)
    shared = RankCommand([], "", ranks, 0.0, 8.0, lambda rank: None, gpus_per_node=2)
    assert _resources_per_node(shared) == [GPUS]
    cluster[0] = {"CPU": 5.0}
    assert _resources_per_node(shared) == [{"CPU": 5.0}]


def test_each_node_gets_a_bundle_with_its_resources() -> None:
    hosts = ["10.0.0.9", "10.0.0.10", "10.0.0.2"]
    assert _order(hosts, [GPUS, CPUS, CPUS]) == [0, 2, 1]
    assert _order(hosts, [GPUS, GPUS, GPUS]) == [2, 0, 1]
