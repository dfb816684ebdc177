"""If these fail, a run ends because one of its engines is lost, or is started again, at a particular moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standalone_workers import ThreadWorker

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import WeightSource
from quintet.runtime.calls.transport import Transport
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.engine_weights import EngineWeights
from quintet.runtime.engines.engine_worker import LocalEngineWorker
from quintet.runtime.engines.remote_engines import RemoteEngines
from quintet.runtime.engines.weight_sources import PolicyWeights
from quintet.runtime.worker import Worker


class OneTokenEngine:
    """Answers every request with the version of its weights."""

    max_model_len = 50

    def __init__(self) -> None:
        self.weight_version = 0
        self.requests: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def add_request(self, request: Request) -> None:
        self.requests.append(request)

    def step(self) -> list[Generation]:
        requests, self.requests = self.requests, []
        return [Generation(each.id, (1,), (0.0,), FinishReason.STOP, self.weight_version) for each in requests]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        assert dict(weights.tensors())
        self.weight_version = version

    def sleep(self) -> None: ...

    def close(self) -> None: ...


class Cluster:
    """Workers of ranks 1 and 2 in threads; those that were started again are there when they are asked for."""

    def __init__(self) -> None:
        self.workers = {rank: ThreadWorker(rank) for rank in (1, 2)}
        self.restarted: list[ThreadWorker] = []
        self.build_errors: list[Exception] = []
        """Errors of the next builds."""

    def lose(self, *ranks: int) -> None:
        for rank in ranks:
            self.workers[rank].lose()

    def restart(self, *ranks: int) -> None:
        for rank in ranks:
            self.workers[rank] = ThreadWorker(rank)
            self.restarted.append(self.workers[rank])

    def take(self, ranks: Collection[int]) -> Sequence[ThreadWorker]:
        taken = [worker for worker in self.restarted if worker.rank in ranks]
        self.restarted = [worker for worker in self.restarted if worker not in taken]
        return taken

    def builder(self, *_: object) -> Callable[[], OneTokenEngine]:
        if self.build_errors:
            raise self.build_errors.pop()
        return OneTokenEngine

    def connect(self) -> tuple[RemoteEngines, Callable[[], list[RestartingEngine]]]:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            yield "weight", torch.ones(3)

        transport = Transport(local=Worker())
        learners: Any = SimpleNamespace(actor=SimpleNamespace(weights=weights), has_full_weights=False)
        source = PolicyWeights(learners, transport, EngineWeights(experiment(), weights))
        remote = RemoteEngines(transport, list(self.workers.values()), experiment(), Path("policy"), source, self.take)
        return remote, remote.engines


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr("quintet.runtime.engines.engine_worker.engine_builder", cluster.builder)
    monkeypatch.setattr("quintet.runtime.engines.engine_worker.configure_process", lambda config: None)
    return cluster


def experiment() -> Experiment:
    overrides = ("placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.rollout.devices=[1,2]")
    return load_experiment(None, (*overrides, "placement.weight_transfer=tcp")).experiment


def sync(group: RoutedEngines, remote: RemoteEngines, version: int) -> None:
    remote.weights.stage()
    group.load_weights(version, remote.weights)


def generate(group: RoutedEngines, count: int = 8) -> list[Generation]:
    for number in range(count):
        group.add_request(Request(number, (1, number), 4, seed=number))
    generations, end = [], time.monotonic() + 20
    while group.busy:
        assert time.monotonic() < end
        generations += group.step()
    assert sorted(generation.id for generation in generations) == list(range(count))
    return generations


def wait_until_all_live(group: RoutedEngines) -> None:
    end = time.monotonic() + 20
    while group._dead:
        assert time.monotonic() < end
        generate(group)


def test_two_engines_that_were_started_again_while_idle_join_at_the_next_weight_sync(cluster: Cluster) -> None:
    """The first one to notice its loss must not change the other, which still has to notice its own."""
    remote, engines = cluster.connect()
    group = RoutedEngines(engines())
    sync(group, remote, 1)
    group.sleep()
    generate(group)
    cluster.lose(1, 2)
    cluster.restart(1, 2)
    sync(group, remote, 2)
    assert {generation.weight_version for generation in generate(group)} == {2}
    wait_until_all_live(group)
    assert group.pop_metrics()["engine/restarts"] == 2
    remote.close()


def test_an_engine_that_cannot_be_built_at_once_after_a_restart_is_built_again(cluster: Cluster) -> None:
    """The memory of the lost process may not be free yet."""
    remote, engines = cluster.connect()
    group = RoutedEngines(engines())
    sync(group, remote, 1)
    cluster.lose(2)
    cluster.build_errors = [RuntimeError("CUDA out of memory"), ValueError("no free memory for the KV cache")]
    cluster.restart(2)
    sync(group, remote, 2)
    wait_until_all_live(group)
    assert {generation.weight_version for generation in generate(group)} == {2}
    assert group.pop_metrics()["engine/restarts"] == 3
    remote.close()


def test_an_engine_that_can_never_be_built_ends_the_run_with_the_cause(cluster: Cluster) -> None:
    remote, engines = cluster.connect()
    group = RoutedEngines(engines())
    cluster.build_errors = [ValueError("no free memory")] * 9
    cluster.lose(1, 2)
    cluster.restart(1, 2)
    with pytest.raises(MachineError, match=r"the engine died 4 times in a row \(last, .*no free memory"):
        generate(group)
    remote.close()


@pytest.mark.parametrize("during_build", [False, True])
def test_an_engine_that_is_lost_at_the_start_joins_when_it_was_started_again(
    cluster: Cluster, during_build: bool
) -> None:
    if not during_build:
        cluster.lose(2)
    remote, engines = cluster.connect()
    if during_build:
        cluster.workers[2].mark_lost("has ended")
    group = RoutedEngines(engines())
    sync(group, remote, 1)
    assert {generation.weight_version for generation in generate(group)} == {1}
    assert group._dead == {1}
    cluster.restart(2)
    wait_until_all_live(group)
    assert {generation.weight_version for generation in generate(group)} == {1}
    remote.close()


def test_a_first_build_that_fails_ends_the_run_with_the_rank_and_the_cause(cluster: Cluster) -> None:
    cluster.build_errors = [RuntimeError("CUDA out of memory")]
    _, engines = cluster.connect()
    with pytest.raises(MachineError, match=r"rank \d cannot build its engine: RuntimeError: CUDA out of memory"):
        engines()


def test_a_restarted_process_that_is_lost_again_at_once_is_waited_for(cluster: Cluster) -> None:
    remote, engines = cluster.connect()
    group = RoutedEngines(engines())
    cluster.lose(2)
    cluster.restart(2)
    cluster.workers[2].mark_lost("has ended")
    sync(group, remote, 1)
    generate(group)
    cluster.restart(2)
    wait_until_all_live(group)
    remote.close()


def test_an_engine_that_dies_before_it_reads_broadcast_weights_keeps_no_other_engine_waiting() -> None:
    received: list[int] = []

    class Failing(OneTokenEngine):
        def load_weights(self, version: int, weights: WeightSource) -> None:
            raise RuntimeError("device lost")

    worker = LocalEngineWorker()
    worker._engine = Failing()  # type: ignore[assignment]
    group: Any = SimpleNamespace(
        device=torch.device("cpu"), broadcast=lambda buffers: received.extend(len(buffer) for buffer in buffers)
    )
    worker._received_weights.join(group)
    source = EngineWeights(experiment(), lambda: iter([("weight", torch.ones(3))]))
    source.stage()
    report = worker.load_broadcast_weights(1, source._staged.shared_tensors, {})
    assert report is not None
    assert report.failure is not None
    assert report.failure.message.startswith("device lost")
    assert sum(received) >= 12
    source.close()
