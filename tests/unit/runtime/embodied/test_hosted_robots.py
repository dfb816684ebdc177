"""If these fail, a lost worker of robots costs more than the episodes of its robots, or actions are sampled with other
weights than the learner's."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from robot_policies import observe, robot_experiment
from scripted_simulator import REFERENCE
from standalone_workers import ThreadWorker
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSampling, ChunkResult
from quintet.envs.simulators.robot_envs import RobotEnvs, build_robot_envs
from quintet.errors import MachineError
from quintet.policies.vla.build import create_action_preset, load_action_policy
from quintet.records import Outcome
from quintet.runtime.calls.connection import WorkerConnection, WorkerLostError
from quintet.runtime.calls.messages import MessageSocket, RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import HOSTED_ROBOTS
from quintet.runtime.embodied.hosted_robots import RestartableWorker, hosted_robot_envs, start_call
from quintet.runtime.embodied.policy_copies import ActionPolicyCopies
from quintet.training.parallel.rendezvous import RankDiedError

SUCCESS = {"success": {1: [2], 6: [4]}}
ACTIONS = np.ones((4, 3, 2), np.float32)


METHODS = ("reset", "step_chunk", "offload")


class EchoWorker(WorkerConnection):
    """Returns the methods of calls when it is told to answer; `build` fails."""

    def __init__(self) -> None:
        self._sockets = socket.socketpair()
        ours, self._remote = map(MessageSocket, self._sockets)
        super().__init__(1, os.getpid(), "this one", ours)

    def answer(self) -> None:
        method = self._remote.receive_call().method
        if method == "build":
            self._remote.send_error(ValueError("the call failed"))
        else:
            self._remote.send_result(method)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture
def worker() -> Iterator[EchoWorker]:
    with closing(EchoWorker()) as started:
        yield started


def start_calls(worker: EchoWorker, *methods: str) -> list[Callable[[], Any]]:
    return [start_call(worker, RemoteCall(HOSTED_ROBOTS, method, {})) for method in methods]


def test_results_belong_to_their_calls_in_any_order(worker: EchoWorker) -> None:
    first, second, third = start_calls(worker, *METHODS)
    for _ in METHODS:
        worker.answer()
    assert [third(), first(), second()] == [METHODS[2], METHODS[0], METHODS[1]]


def test_a_failed_call_does_not_shift_the_results_of_later_calls(worker: EchoWorker) -> None:
    first, second, third = start_calls(worker, "build", "reset", "offload")
    for _ in METHODS:
        worker.answer()
    assert second() == "reset"
    with pytest.raises(RemoteCallError, match="the call failed"):
        first()
    assert third() == "offload"


def test_every_call_to_a_lost_worker_fails_and_results_that_arrived_before_remain(worker: EchoWorker) -> None:
    first, second, third = start_calls(worker, *METHODS)
    worker.answer()
    worker.answer()
    assert second() == "step_chunk"
    worker.mark_lost("has ended")
    for finish in (*start_calls(worker, "reset"), third):
        with pytest.raises(WorkerLostError, match=r"the worker of rank 1 .* has ended"):
            finish()
    assert first() == "reset"


def test_a_worker_that_was_started_again_does_not_answer_calls_to_the_one_before(worker: EchoWorker) -> None:
    with closing(EchoWorker()) as restarted:
        restartable = RestartableWorker(worker, lambda: [restarted])
        first = start_calls(worker, "reset")
        restartable.take_restarted()
        assert restartable.connection is worker  # it is not lost yet
        worker.mark_lost("has ended")
        restartable.take_restarted()
        assert restartable.connection is restarted
        (second,) = start_calls(restarted, "offload")
        restarted.answer()
        assert second() == "offload"
        for finish in (*first, *start_calls(worker, "reset")):
            with pytest.raises(WorkerLostError, match="has ended"):
                finish()


class Workers:
    """Workers of ranks 1 and 2, which are lost and started again."""

    def __init__(self) -> None:
        self.by_rank = {rank: ThreadWorker(rank) for rank in (1, 2)}
        self._arrived: dict[int, list[WorkerConnection]] = {1: [], 2: []}
        self.restartable = [
            RestartableWorker(worker, self._take_connected_workers(rank)) for rank, worker in self.by_rank.items()
        ]

    def _take_connected_workers(self, rank: int) -> Any:
        def take() -> list[WorkerConnection]:
            taken, self._arrived[rank] = self._arrived[rank], []
            return taken

        return take

    def lose(self, rank: int) -> None:
        self.by_rank[rank].lose()
        self.by_rank[rank].mark_lost("has ended")

    def restart(self, rank: int) -> None:
        self.by_rank[rank] = ThreadWorker(rank)
        self._arrived[rank].append(self.by_rank[rank])

    def close(self) -> None:
        for worker in self.by_rank.values():
            worker.lose()


@pytest.fixture
def workers() -> Iterator[Workers]:
    with closing(Workers()) as started:
        yield started


def experiment(policy: Mapping[str, Any] | None = None, **env: Any) -> Experiment:
    values = {"name": "simulator", "simulator": REFERENCE, "max_steps": 6, "options": SUCCESS, **env}
    return robot_experiment(dict(policy or {"preset": "state-mlp"}), env=values, training={"threads": 1})


def chunk(envs: RobotEnvs, stage: int = 0) -> ChunkResult:
    envs.start_chunk(stage, ACTIONS)
    return envs.finish_chunk(stage)


def failed(result: ChunkResult) -> list[int]:
    return [episode.robot for episode in result.episodes if episode.outcome is Outcome.FAILED]


def test_a_lost_worker_costs_the_episodes_of_its_robots_and_one_that_is_started_again_takes_part(
    workers: Workers,
) -> None:
    config = experiment()
    envs = hosted_robot_envs(workers.restartable, config, 4, is_validation=False)
    envs.reset(0, np.array([4, 6, 1, 3]))
    first = chunk(envs)
    assert [(episode.robot, episode.start_state, episode.outcome) for episode in first.episodes] == [
        (2, 1, Outcome.SUCCESS)
    ]
    workers.lose(2)
    lost = chunk(envs)
    assert [(episode.robot, episode.start_state, episode.task) for episode in lost.episodes if episode.failure] == [
        (3, 3, "push")
    ]
    assert lost.episodes[-1].failure is not None
    assert lost.episodes[-1].failure.error_type == "WorkerLostError"
    assert "rank 2" in lost.episodes[-1].failure.message
    # robot 1 has succeeded with its fourth action, robot 0 has reached `max_steps`
    assert lost.executed.tolist() == [[True] * 3, [True, False, False], [False] * 3, [False] * 3]
    envs.reset(0, np.array([4, 6, 1, 3]))
    assert failed(chunk(envs)) == [2, 3]
    workers.restart(2)
    with closing(build_robot_envs(config.simulator_config(is_validation=False), 4)) as expected:
        for each in (envs, expected):
            each.reset(0, np.array([4, 6, 1, 3]))
        for _ in range(2):
            ours, theirs = chunk(envs), chunk(expected)
            assert ours.episodes == theirs.episodes
            np.testing.assert_array_equal(ours.executed, theirs.executed)
            np.testing.assert_array_equal(ours.observation.state, theirs.observation.state)
            np.testing.assert_array_equal(ours.observation.images, theirs.observation.images)


def test_a_run_whose_workers_of_robots_are_all_lost_ends_with_their_names(workers: Workers) -> None:
    envs = hosted_robot_envs(workers.restartable, experiment(), 4, is_validation=False)
    for rank in (1, 2):
        workers.lose(rank)
    with pytest.raises(MachineError, match=r"the simulator does not start: WorkerLostError: .* rank 1"):
        envs.reset(0, np.arange(4))


def test_a_worker_that_is_started_again_between_the_resets_of_two_stages_runs_the_second(workers: Workers) -> None:
    envs = hosted_robot_envs(workers.restartable, experiment(pipeline_stages=2), 8, is_validation=False)
    envs.reset(0, np.arange(4))
    workers.lose(2)
    workers.restart(2)
    envs.reset(1, np.arange(4))
    first = chunk(envs, 0)
    assert failed(first) == [2, 3]
    assert first.episodes[-1].failure is not None
    assert first.episodes[-1].failure.message.endswith("has ended")
    assert failed(chunk(envs, 1)) == []
    envs.reset(0, np.arange(4))
    assert failed(chunk(envs, 0)) == []


def test_robots_of_validations_are_built_although_a_worker_is_lost(workers: Workers) -> None:
    training = hosted_robot_envs(workers.restartable, experiment(), 4, is_validation=False)
    workers.lose(1)
    envs = hosted_robot_envs(workers.restartable, experiment(), 4, is_validation=True)
    assert envs.simulator == training.simulator
    envs.reset(0, np.arange(4))
    assert failed(chunk(envs)) == [0, 1]
    workers.restart(1)
    for each in (envs, training):
        each.reset(0, np.arange(4))
        assert failed(chunk(each)) == []


def test_offloading_robots_of_a_lost_worker_does_not_end_the_run(workers: Workers) -> None:
    envs = hosted_robot_envs(workers.restartable, experiment(), 4, is_validation=False)
    envs.reset(0, np.arange(4))
    workers.lose(1)
    envs.offload()
    envs.reset(0, np.arange(4))
    assert failed(chunk(envs)) == [0, 1]


FRAGILE = """
import os
from scripted_simulator import ScriptedSimulator

class Fragile(ScriptedSimulator):
    def __init__(self, config, num_robots, seed):
        if os.path.exists(config.options["broken"]):
            raise RuntimeError("the GPU is busy")
        super().__init__(config, num_robots, seed)
"""


def test_robots_that_a_restarted_worker_cannot_build_say_why_and_are_built_at_the_next_reset(
    workers: Workers, tmp_path: Path
) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    broken = tmp_path / "broken"
    config = experiment(simulator=f"{tmp_path}/fragile.py:Fragile", options={"broken": str(broken)})
    envs = hosted_robot_envs(workers.restartable, config, 4, is_validation=False)
    workers.lose(2)
    workers.restart(2)
    broken.touch()
    envs.reset(0, np.arange(4))
    result = chunk(envs)
    assert failed(result) == [2, 3]
    assert result.episodes[0].failure is not None
    assert result.episodes[0].failure.where == "reset"
    assert "RuntimeError: the GPU is busy" in result.episodes[0].failure.message
    broken.unlink()
    envs.reset(0, np.arange(4))
    assert failed(chunk(envs)) == []


def test_a_simulator_that_no_worker_can_build_ends_the_run_with_the_message_of_its_error(workers: Workers) -> None:
    config = experiment(simulator="no_such_file.py:Robots")
    with pytest.raises(MachineError, match=r"^env\.simulator.*no_such_file"):
        hosted_robot_envs(workers.restartable, config, 4, is_validation=False)


POLICY = {"preset": "state-mlp", "overrides": {"hidden": 8}}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    create_action_preset(tmp_path / "policy", experiment(POLICY), seed=0)
    return tmp_path / "policy"


def sample_inputs(module: Any) -> dict[str, Tensor]:
    observation = observe(5)
    state = np.ascontiguousarray(observation.state[:, :3])
    return dict(module.prepare(type(observation)(observation.images[:, :0], state, observation.instructions)))


def shifted(module: torch.nn.Module, by: float) -> dict[str, Tensor]:
    return {name: tensor.detach() + by for name, tensor in module.named_parameters()}


def build_copies(workers: Workers, config: Experiment, policy: Path, module: torch.nn.Module) -> ActionPolicyCopies:
    return ActionPolicyCopies(list(workers.by_rank.values()), config, policy, lambda: iter(module.named_parameters()))


def test_copies_of_the_policy_sample_what_the_learner_would_with_its_new_weights(
    workers: Workers, policy: Path
) -> None:
    config = experiment(POLICY)
    module: Any = load_action_policy(policy, config)
    with closing(
        ActionPolicyCopies(list(workers.by_rank.values()), config, policy, lambda: iter(module.named_parameters()))
    ) as copies:
        inputs, uniforms = sample_inputs(module), torch.rand(5, module.action_chunk, module.action_dim)
        for by in (0.0, 0.1):
            module.load_state_dict(shifted(module, by))
            copies.sync_weights()
            with torch.no_grad():
                expected = module.sample(inputs, uniforms, ActionSampling())
            sample = copies.sample(inputs, uniforms, ActionSampling())
            torch.testing.assert_close(sample.actions, expected.actions)
            torch.testing.assert_close(sample.logprobs, expected.logprobs)
            torch.testing.assert_close(sample.values, expected.values)


@pytest.mark.parametrize("action", ["sample", "sync_weights"])
def test_a_lost_copy_of_the_policy_ends_the_run_although_its_worker_was_started_again(
    workers: Workers, policy: Path, action: str
) -> None:
    config = experiment(POLICY)
    module: Any = load_action_policy(policy, config)
    with closing(
        ActionPolicyCopies(list(workers.by_rank.values()), config, policy, lambda: iter(module.named_parameters()))
    ) as copies:
        copies.sync_weights()
        # the worker simulates robots, too, which do not need what the one before had
        envs = hosted_robot_envs(workers.restartable, config, 4, is_validation=False)
        workers.lose(2)
        workers.restart(2)
        envs.reset(0, np.arange(4))
        assert failed(chunk(envs)) == []
        message = r"the worker of rank 2 \(process \d+\) has ended, and the run needs its copy of the policy"
        inputs = sample_inputs(module)
        calls = {
            "sample": lambda: copies.sample(inputs, None, ActionSampling()),
            "sync_weights": lambda: copies.sync_weights(),
        }
        with pytest.raises(RankDiedError, match=message) as raised:
            calls[action]()
        assert "from the last checkpoint" in str(raised.value)


def test_a_policy_that_cannot_be_built_names_the_worker(workers: Workers, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"^rank [12]: .*missing"):
        build_copies(workers, experiment(POLICY), tmp_path / "missing", torch.nn.Module())
