"""If these fail, engines on other ranks lose requests, generate with old weights, or stop the run when one dies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from standalone_workers import through_the_wire

from quintet.config.compose import load_experiment
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.engines.weight_source import TensorWeights, WeightSource
from quintet.runtime.calls.connection import WorkerLostError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ACTOR, ENGINE, STEPS_PER_CALL
from quintet.runtime.engines.engine_builders import has_engine, ranks_per_engine
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.engine_weights import EngineWeights
from quintet.runtime.engines.engine_worker import LocalEngineWorker
from quintet.runtime.engines.remote_engines import RemoteEngines
from quintet.runtime.engines.weight_sources import PolicyWeights
from quintet.sampling import StructuredOutput
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.rendezvous import RankDiedError

CONTEXT = 100


class CountingEngine:
    """Samples its rank, one token per step."""

    weight_version = 0
    max_model_len = CONTEXT

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.running: dict[int, tuple[Request, int]] = {}
        self.loaded: list[dict[str, float]] = []
        self.actions: list[str] = []
        self.dies = False
        self.on_step: Callable[[], None] = lambda: None

    @property
    def busy(self) -> bool:
        return bool(self.running)

    def add_request(self, request: Request) -> None:
        if request.structured_output is not None:
            raise ValueError("invalid structured output")
        self.running[request.id] = (request, 0)

    def step(self) -> list[Generation]:
        self.on_step()
        if self.dies:
            raise EngineError("device lost")
        self.running = {number: (request, length + 1) for number, (request, length) in self.running.items()}
        finished = [number for number, (request, length) in self.running.items() if length == request.max_tokens]
        return [self._finish(number, FinishReason.LENGTH) for number in finished]

    def abort(self, ids: Collection[int]) -> list[Generation]:
        return [self._finish(number, FinishReason.ABORT) for number in ids if number in self.running]

    def _finish(self, number: int, reason: FinishReason) -> Generation:
        _, length = self.running.pop(number)
        return Generation(number, (self.rank,) * length, (-0.5,) * length, reason, self.weight_version)

    def load_weights(self, version: int, weights: WeightSource) -> None:
        self.weight_version = version
        self.loaded.append({name: float(tensor) for name, tensor in weights.tensors()})

    def sleep(self) -> None:
        self.actions.append("sleep")

    def close(self) -> None:
        self.actions.append("close")


@dataclass(eq=False)
class ConnectedRank:
    """`WorkerConnection` to a rank in this process, which executes calls at once; they pass through their encoding."""

    rank: int
    worker: LocalEngineWorker
    calls: list[tuple[str, int]]
    """Methods that were called and results that were taken on all ranks, in order."""
    lost_reason: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    def start(self, call: RemoteCall) -> Any:
        if self.lost_reason is not None:
            raise WorkerLostError(f"{self.name} {self.lost_reason}")
        received = through_the_wire(call)
        assert received.target == ENGINE
        self.calls.append((received.method, self.rank))
        result = getattr(self.worker, received.method)(**received.arguments)
        return SimpleNamespace(finish=partial(self._finish, result))

    def _finish(self, result: Any) -> Any:
        self.calls.append(("result", self.rank))
        return result


class Ranks:
    """`Transport` to ranks from 1 on in this process."""

    def __init__(self, world_size: int = 3) -> None:
        self.world_size = world_size
        self.built: dict[int, list[CountingEngine]] = {}
        """Engines by rank, in the order in which they were built."""
        self.gathered = 0
        """Number of tensors that all ranks have gathered."""
        self.calls: list[tuple[str, int]] = []
        self.has_full_weights = False
        self.workers: Any = [
            ConnectedRank(rank, LocalEngineWorker(self.policy(rank)), self.calls) for rank in range(1, world_size)
        ]

    def methods(self, rank: int) -> list[str]:
        return [method for method, called in self.calls if called == rank and method != "result"]

    def policy(self, rank: int) -> Any:
        """The policy as it is on a rank."""
        actor = SimpleNamespace(weights=self.weights, model=None)
        return SimpleNamespace(ranks=RankGroup(rank, self.world_size), has_full_weights=False, actor=actor)

    def call(self, call: RemoteCall) -> Any:
        raise NotImplementedError

    def call_others(self, call: RemoteCall) -> Any:
        raise NotImplementedError

    def broadcast(self, call: RemoteCall, except_ranks: Collection[int] = ()) -> Any:
        assert (call.target, call.method) == (ACTOR, "weights")
        for worker in self.workers:
            for _ in self.weights() if worker.rank not in except_ranks else ():
                pass
        return self.weights()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            self.gathered += 1
            yield name, torch.tensor(float(self.gathered))

    @contextmanager
    def translated_errors(self, worker: object) -> Iterator[None]:
        try:
            yield
        except WorkerLostError as error:
            raise RankDiedError(str(error)) from error

    def check_alive(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return with_engines(monkeypatch, Ranks())


def with_engines(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Ranks:
    """Let the ranks build counting engines."""

    def builder(config: object, policy: Path, learners: Any) -> Callable[[], CountingEngine]:
        def build() -> CountingEngine:
            engine = CountingEngine(learners.ranks.rank)
            ranks.built.setdefault(engine.rank, []).append(engine)
            return engine

        return build

    monkeypatch.setattr("quintet.runtime.engines.engine_worker.engine_builder", builder)
    return ranks


@pytest.fixture
def remote(ranks: Ranks) -> RemoteEngines:
    return remote_engines(ranks)


def remote_engines(ranks: Ranks, *overrides: str) -> RemoteEngines:
    config = load_experiment(None, (f"placement.devices_per_node={ranks.world_size}", *overrides)).experiment
    weights = PolicyWeights(ranks.policy(0), ranks, EngineWeights(config, ranks.weights))
    return RemoteEngines(ranks, (), config, Path("policy"), weights)


@pytest.fixture
def weights(remote: RemoteEngines) -> PolicyWeights:
    return remote.weights


def sync(group: RoutedEngines, weights: PolicyWeights, version: int) -> None:
    weights.stage()
    group.load_weights(version, weights)


@pytest.fixture
def local() -> CountingEngine:
    return CountingEngine(0)


@pytest.fixture
def group(remote: RemoteEngines, local: CountingEngine, weights: PolicyWeights) -> RoutedEngines:
    return RoutedEngines([RestartingEngine(lambda: local, weights), *remote.engines()])


def request(number: int, tokens: int = 8) -> Request:
    return Request(id=number, prompt=(1, number), max_tokens=tokens, seed=number)


def run(group: RoutedEngines) -> dict[int, Generation]:
    generations: dict[int, Generation] = {}
    for _ in range(50):
        for generation in group.step() if group.busy else ():
            assert generation.id not in generations
            generations[generation.id] = generation
    assert not group.busy
    return generations


def test_every_rank_generates_its_share(group: RoutedEngines) -> None:
    for number in range(9):
        group.add_request(request(number))
    generations = run(group)
    sampled = [generation.tokens for _, generation in sorted(generations.items())]
    assert sampled == [(number % 3,) * 8 for number in range(9)]
    assert generations[1].logprobs == (-0.5,) * 8


def test_all_ranks_step_at_the_same_time_and_few_messages_are_sent(
    group: RoutedEngines, ranks: Ranks, local: CountingEngine
) -> None:
    for number in range(3):
        group.add_request(request(number, tokens=3 * STEPS_PER_CALL))
    ranks.calls.clear()
    local.on_step = lambda: ranks.calls.append(("step", 0))
    run(group)
    steps = [("step", 1), ("step", 2), *[("step", 0)] * STEPS_PER_CALL, ("result", 1), ("result", 2)]
    assert ranks.calls == steps * 3


def test_no_message_is_sent_while_only_rank_0_has_requests(group: RoutedEngines, ranks: Ranks) -> None:
    group.add_request(request(0))
    run(group)
    assert [ranks.methods(rank) for rank in (1, 2)] == [["build"], ["build"]]


def test_responses_of_one_rank_may_come_later_than_those_of_another(group: RoutedEngines) -> None:
    lengths = {0: 2, 1: 9, 2: 4, 3: 3, 4: 1, 5: 17}
    for number, length in lengths.items():
        group.add_request(request(number, length))
    assert {number: len(generation.tokens) for number, generation in run(group).items()} == lengths


def test_all_ranks_load_the_weights_that_are_gathered_once(
    group: RoutedEngines, weights: PolicyWeights, ranks: Ranks, local: CountingEngine
) -> None:
    sync(group, weights, 3)
    # each of the three ranks gathers two tensors
    assert ranks.gathered == 6
    assert len(local.loaded) == len(ranks.built[1][0].loaded) == len(ranks.built[2][0].loaded) == 1
    group.add_request(request(0))
    group.add_request(request(1))
    assert [generation.weight_version for generation in run(group).values()] == [3, 3]


def test_weights_that_only_rank_0_has_are_sent_to_the_others(group: RoutedEngines, ranks: Ranks) -> None:
    group.load_weights(1, TensorWeights([("a", torch.tensor(1.0)), ("b", torch.tensor(2.0))]))
    assert [engines[0].loaded for engines in ranks.built.values()] == [[{"a": 1.0, "b": 2.0}]] * 2
    assert ranks.gathered == 0


def test_every_rank_advances_in_the_first_step_after_a_weight_sync(
    group: RoutedEngines, weights: PolicyWeights, ranks: Ranks
) -> None:
    """The order of responses would depend on where they are generated otherwise."""
    sync(group, weights, 1)
    for number in range(3):
        group.add_request(request(number, tokens=STEPS_PER_CALL))
    assert len(group.step()) == 3


def test_a_lost_rank_ends_the_run(group: RoutedEngines, ranks: Ranks) -> None:
    for number in range(3):
        group.add_request(request(number))
    ranks.workers[1].lost_reason = "has ended"
    with pytest.raises(RankDiedError, match="rank 2 has ended"):
        group.step()


def test_an_engine_that_dies_of_new_weights_is_replaced_and_loads_them_alone(
    group: RoutedEngines, weights: PolicyWeights, ranks: Ranks
) -> None:
    def die(version: int, weights: WeightSource) -> None:
        raise EngineError("out of memory")

    ranks.built[1][0].load_weights = die  # type: ignore[method-assign]
    sync(group, weights, 3)
    for number in range(3):
        group.add_request(request(number))
    assert {generation.weight_version for generation in run(group).values()} == {3}
    assert [len(engine.loaded) for engine in (*ranks.built[1], *ranks.built[2])] == [0, 1, 1]
    # each of the three ranks gathers two tensors, for the sync and for the new engine
    assert ranks.gathered == 12


def test_nothing_is_gathered_if_every_engine_computes_with_the_module_of_its_rank(
    remote: RemoteEngines, ranks: Ranks
) -> None:
    class Sharing(CountingEngine):
        def load_weights(self, version: int, weights: WeightSource) -> None: ...

    policy = ranks.policy(0)
    policy.has_full_weights, policy.actor.model = True, torch.nn.Linear(1, 1)
    remote.weights = PolicyWeights(policy, ranks, remote.weights._staged)
    group = RoutedEngines([RestartingEngine(lambda: Sharing(0), remote.weights), *remote.engines()])
    ranks.gathered = 0
    sync(group, remote.weights, 1)
    assert ranks.gathered == 4, "only the two other engines read weights"


@pytest.mark.parametrize("shares_weights", [False, True])
def test_weights_are_loaded_again_under_the_same_version(
    remote: RemoteEngines, weights: PolicyWeights, ranks: Ranks, shares_weights: bool
) -> None:
    """A warm start validates several times as version 0; rank 0 may not read the weights at all."""

    class Sharing(CountingEngine):
        def load_weights(self, version: int, weights: WeightSource) -> None: ...

    first = Sharing(0) if shares_weights else CountingEngine(0)
    group = RoutedEngines([RestartingEngine(lambda: first, weights), *remote.engines()])
    for _ in range(3):
        sync(group, weights, 0)
    for engines in ranks.built.values():
        values = [loaded["a"] for loaded in engines[0].loaded]
        assert len(values) == 3
        assert values == sorted(set(values))


def test_a_dead_engine_that_fails_while_it_takes_a_request_is_replaced(group: RoutedEngines, ranks: Ranks) -> None:
    def die(request: Request) -> None:
        raise EngineError("process ended")

    ranks.built[1][0].add_request = die  # type: ignore[method-assign]
    group.add_request(request(0))
    group.add_request(request(1))
    assert [generation.finish_reason for _, generation in sorted(run(group).items())] == ["length"] * 2
    assert len(ranks.built[1]) == 2


def test_an_engine_that_shares_the_learners_weights_does_not_keep_the_others_from_loading(
    remote: RemoteEngines, weights: PolicyWeights, ranks: Ranks
) -> None:
    class Sharing(CountingEngine):
        def load_weights(self, version: int, weights: WeightSource) -> None: ...

    group = RoutedEngines([RestartingEngine(lambda: Sharing(0), weights), *remote.engines()])
    sync(group, weights, 3)
    assert [engine.weight_version for engines in ranks.built.values() for engine in engines] == [3, 3]
    assert len(ranks.built[2][0].loaded) == 1


def test_the_requests_of_a_dead_engine_go_to_others_and_it_is_replaced_with_the_current_weights(
    group: RoutedEngines, weights: PolicyWeights, ranks: Ranks
) -> None:
    sync(group, weights, 5)
    for number in range(3):
        group.add_request(request(number))
    ranks.built[1][0].dies = True
    generations = run(group)
    assert [generations[number].finish_reason for number in range(3)] == ["length"] * 3
    assert generations[1].tokens[0] in (0, 2)
    assert len(ranks.built[1]) == 2
    assert ranks.built[1][0].actions == ["close"]
    assert ranks.built[1][1].weight_version == 5
    assert len(ranks.built[2][0].loaded) == 1, "the others already have these weights"
    assert group.pop_metrics() == {"engine/restarts": 1, "engine/requests_reassigned": 1}
    group.add_request(request(7))
    group.add_request(request(8))
    assert sorted(generation.tokens[0] for generation in run(group).values()) == [0, 1]


def test_a_request_that_an_engine_refuses_fails_alone(group: RoutedEngines) -> None:
    group.add_request(request(0))
    refused = Request(1, (1, 2), 8, 1, stop_token_ids=(3,), structured_output=StructuredOutput("regex", "("))
    group.add_request(refused)
    generations = run(group)
    assert generations[1].finish_reason is FinishReason.FAILED
    assert generations[1].failure is not None
    assert "invalid structured output" in generations[1].failure.message
    with pytest.raises(ValueError, match="the prompt has 100 tokens, the context 100"):
        [group.add_request(Request(number, (number,) * CONTEXT, 1, 0)) for number in (2, 3)]


def test_aborted_requests_return_what_they_have(group: RoutedEngines) -> None:
    for number in range(3):
        group.add_request(request(number))
    group.step()
    group.add_request(request(3))
    group.add_request(request(4))
    aborted = {generation.id: len(generation.tokens) for generation in group.abort([0, 1, 4, 77])}
    assert aborted == {0: STEPS_PER_CALL, 1: STEPS_PER_CALL, 4: 0}
    assert sorted(run(group)) == [2, 3]


def test_all_ranks_sleep_once(group: RoutedEngines, ranks: Ranks) -> None:
    group.sleep()
    assert [engines[0].actions for engines in ranks.built.values()] == [["sleep"], ["sleep"]]


def test_ranks_whose_devices_belong_to_another_engine_take_part_in_the_weight_sync(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines of two devices on ranks 0 and 2 of 4."""
    ranks = with_engines(monkeypatch, Ranks(world_size=4))
    remote = remote_engines(ranks, "rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2")
    weights = remote.weights
    group = RoutedEngines([RestartingEngine(lambda: CountingEngine(0), weights), *remote.engines()])
    assert len(group.engines) == 2
    sync(group, weights, 3)
    assert ranks.gathered == 4 * 2
    group.sleep()
    for number in range(4):
        group.add_request(request(number))
    assert sorted(generation.tokens[0] for generation in run(group).values()) == [0, 0, 2, 2]
    assert ranks.built[2][0].actions == ["sleep"]


@pytest.mark.parametrize(("rank", "expected"), [(1, False), (2, True), (3, False), (4, False)])
def test_only_the_first_rank_of_an_engines_devices_builds_it(rank: int, expected: bool) -> None:
    """Five ranks: the last one has no partner."""
    overrides = ("rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2", "placement.devices_per_node=5")
    assert has_engine(load_experiment(None, overrides).experiment, RankGroup(rank, 5)) is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 1),
        (("rollout.engine=vllm",), 1),
        (("rollout.engine=vllm", "rollout.engine_options.tensor_parallel=2"), 2),
        (("rollout.engine=sglang-server",), None),
        (("rollout.engine_options.tensor_parallel=8", "placement.nodes=2", "placement.devices_per_node=4"), None),
    ],
)
def test_engines_start_where_their_devices_are_on_one_node(overrides: Sequence[str], expected: int | None) -> None:
    assert ranks_per_engine(load_experiment(None, overrides).experiment) == expected
