"""If these fail, environments on other nodes give other numbers, or a dead node costs episodes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from standalone_workers import ThreadWorker, start_worker

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.start_states import env_start
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted, VectorEnv
from quintet.errors import MachineError
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.listener import ControllerAddress, WorkerListener
from quintet.runtime.calls.messages import RemoteCallError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ENGINE
from quintet.runtime.env_hosts import hosted_vector_env

EPISODES = 8
TURNS = 6
COUNTER = """
import os
from quintet.records import Observation, Step

class Counter:
    actions = ("Up",)

    def instruction(self):
        return "Count."

    def reset(self, seed):
        self.count = seed
        return Observation(str(seed))

    def step(self, action):
        if self.count == 3:
            raise RuntimeError("it does not count to four")
        self.count += 1
        return Step(Observation(self.text()), 1.0, False, False)

    def text(self):
        return str(self.count)

    def close(self):
        pass

class Process(Counter):
    def text(self):
        return str(os.getpid())
"""


def experiment(*overrides: str) -> Experiment:
    return load_experiment(
        None, ("placement.devices_per_node=3", "placement.envs.devices=[1,2]", *overrides)
    ).experiment


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counter.py").write_text(COUNTER)
    return tmp_path


def play(
    envs: VectorEnv,
    starts: Sequence[int],
    after_turn: Callable[[int], None] = lambda turn: None,
    turn_of: Callable[[Iterable[int]], int] = max,
) -> list[EnvEvent]:
    """Play episodes with random actions, which depend on the episode and its turn alone; return all events.
    `after_turn` gets the turn of all, by default that of the furthest episode."""
    choices = {number: random.Random(number) for number in range(len(starts))}
    actions: dict[int, Sequence[str]] = {}
    turns = dict.fromkeys(choices, 0)
    events: list[EnvEvent] = []
    for number, start in enumerate(starts):
        envs.start(number, start)
    while envs.pending:
        for event in envs.poll(wait=True):
            events.append(event)
            number = event.episode
            if isinstance(event, EpisodeStarted):
                actions[number] = event.actions
            ended = isinstance(event, ActionsExecuted) and event.steps[-1].terminated
            if isinstance(event, EpisodeFailed) or ended or turns[number] == TURNS:
                envs.drop(number)
                continue
            turns[number] += 1
            envs.step(number, choices[number].choices(actions[number], k=2))
        after_turn(turn_of(turns.values()))
    return events


def by_episode(events: Sequence[EnvEvent]) -> Mapping[int, list[EnvEvent]]:
    return {number: [event for event in events if event.episode == number] for number in range(EPISODES)}


def without_hosts(config: Experiment, starts: Sequence[int] = range(EPISODES)) -> list[EnvEvent]:
    envs = build_run_envs(config)
    try:
        return play(envs, starts)
    finally:
        envs.close()


def test_a_host_takes_no_result_of_another_component_on_its_rank() -> None:
    worker = ThreadWorker(1)
    engine_call = worker.start(RemoteCall(ENGINE, "control", {"action": "sleep"}))
    envs = hosted_vector_env([worker], experiment())
    assert len(play(envs, range(2))) > 2
    with pytest.raises(RemoteCallError, match="the engine was called before it was built"):
        engine_call.finish()


def test_episodes_on_hosts_are_those_of_one_process_in_the_same_order() -> None:
    config = experiment("env.slippery=true")
    envs = hosted_vector_env([ThreadWorker(1), ThreadWorker(2)], config)
    events = play(envs, range(EPISODES))
    assert events == without_hosts(config)
    assert any(isinstance(event, ActionsExecuted) and len(event.steps) == 2 for event in events)
    assert envs.pop_metrics() == {"env/episodes_reassigned": 0}
    assert envs.seconds > 0


def test_an_episode_goes_to_the_host_with_the_fewest_and_stays_there() -> None:
    envs = hosted_vector_env([ThreadWorker(1), ThreadWorker(2)], experiment())
    for number in range(5):
        envs.start(number, number)
    hosts = {number: envs._episodes[number].host for number in range(5)}
    assert [host.connection.rank for host in hosts.values() if host] == [1, 2, 1, 2, 1]
    envs.poll(wait=True)
    for number in (0, 2):
        envs.drop(number)
    envs.start(5, 5)
    assert envs._episodes[5].host is hosts[4]
    envs.step(4, ["Up"])
    assert envs._episodes[4].host is hosts[4]
    assert [event.episode for event in envs.poll()] == [5, 4]


def test_several_envs_on_hosts_are_those_of_one_process() -> None:
    config = experiment("envs.lake={}", "envs.boxes={env: {name: sokoban}}")
    starts = [env_start(number % 2, 3 * number) for number in range(EPISODES)]
    envs = hosted_vector_env([ThreadWorker(1), ThreadWorker(2)], config)
    assert play(envs, starts) == without_hosts(config, starts)


@pytest.mark.parametrize("processes", ["null", "2"])
def test_your_own_env_runs_on_hosts_and_its_failure_costs_one_episode(counter: Path, processes: str) -> None:
    config = experiment(f"env={{name: custom, path: 'counter.py:Counter', processes: {processes}}}")
    envs = hosted_vector_env([ThreadWorker(1), ThreadWorker(2)], config)
    played = by_episode(play(envs, range(EPISODES)))
    assert played == by_episode(without_hosts(config))
    failed = {number for number, events in played.items() if isinstance(events[-1], EpisodeFailed)}
    assert failed == {0, 1, 2, 3}
    envs.close()


def test_an_env_that_no_host_can_load_is_named(counter: Path) -> None:
    config = experiment("env={name: custom, path: 'counter.py:Missing'}")
    with pytest.raises(MachineError, match="Missing"):
        hosted_vector_env([ThreadWorker(1)], config)


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("turn", [0, 1, 4])
def test_a_lost_host_changes_no_episode(lost: int, turn: int) -> None:
    config = experiment("env.slippery=true", "env.floor_density=1.0")
    workers = {rank: ThreadWorker(rank) for rank in (1, 2)}
    envs = hosted_vector_env(list(workers.values()), config)

    def lose(now: int) -> None:
        if now == turn:
            workers[lost].lose()

    if not turn:
        workers[lost].lose()
    assert play(envs, range(EPISODES), lose) == without_hosts(config)
    assert 1 <= envs.pop_metrics()["env/episodes_reassigned"] <= 4


def test_a_lost_host_with_worker_processes_changes_no_episode() -> None:
    config = experiment("env.slippery=true", "env.floor_density=1.0", "env.processes=3")
    workers = {rank: ThreadWorker(rank) for rank in (1, 2)}
    envs = hosted_vector_env(list(workers.values()), config)
    events = play(envs, range(EPISODES), lambda turn: workers[2].lose() if turn == 3 else None)
    assert by_episode(events) == by_episode(without_hosts(config))
    assert 1 <= envs.pop_metrics()["env/episodes_reassigned"] <= 4
    workers[1].lose()


def test_an_episode_that_waits_for_the_policy_continues_on_another_host() -> None:
    config = experiment("env.floor_density=1.0")
    workers = {rank: ThreadWorker(rank) for rank in (1, 2)}
    envs, local = hosted_vector_env(list(workers.values()), config), build_run_envs(config)
    for each in (envs, local):
        each.start(0, 5)
        each.start(1, 6)
    assert envs.poll(wait=True) == local.poll()
    workers[1].lose()
    for each in (envs, local):
        each.step(1, ["Up"])
    assert envs.poll(wait=True) == local.poll()
    for each in (envs, local):
        each.step(0, ["Left", "Down"])
    assert envs.poll(wait=True) == local.poll()


def test_an_episode_that_its_seed_does_not_reproduce_fails_and_says_so(counter: Path) -> None:
    config = experiment("env={name: custom, path: 'counter.py:Process', processes: 8}")
    workers = {rank: ThreadWorker(rank) for rank in (1, 2)}
    envs = hosted_vector_env(list(workers.values()), config)
    lose = lambda turn: workers[1].lose() if turn >= 2 and not workers[1].lost_reason else None  # noqa: E731
    # the first host has every second episode; one of them has executed actions and continues
    events = by_episode(play(envs, range(4, 4 + EPISODES), lose, lambda turns: max(list(turns)[::2])))
    failures = {
        number: played[-1].failure for number, played in events.items() if isinstance(played[-1], EpisodeFailed)
    }
    assert failures
    assert {(failure.where, failure.error_type) for failure in failures.values()} == {("step", "NotReproducible")}
    assert all(len(events[number]) == TURNS + 1 for number in events if number not in failures)
    envs.close()


def test_an_episode_that_takes_three_hosts_with_it_fails() -> None:
    arrived: list[WorkerConnection] = []

    def take_connected_workers() -> list[WorkerConnection]:
        taken, arrived[:] = list(arrived), []
        return taken

    worker = ThreadWorker(1)
    envs = hosted_vector_env([worker], experiment(), take_connected_workers)
    envs.start(0, 0)
    for _ in range(2):
        worker.lose()
        worker = ThreadWorker(1)
        arrived.append(worker)
        (event,) = envs.poll(wait=True)
        assert isinstance(event, EpisodeStarted | ActionsExecuted)
        envs.step(0, ["Up"])
    worker.lose()
    (event,) = envs.poll(wait=True)
    assert isinstance(event, EpisodeFailed)
    assert (event.failure.where, event.failure.error_type) == ("step", "WorkerLostError")
    assert "rank 1" in event.failure.message


def test_a_run_without_living_hosts_ends_with_a_message() -> None:
    workers = [ThreadWorker(1), ThreadWorker(2)]
    envs = hosted_vector_env(workers, experiment("placement.join_timeout_seconds=1"))
    for worker in workers:
        worker.lose()
    envs.start(0, 0)
    with pytest.raises(MachineError, match=r"all env hosts have been lost for 1 seconds \(placement\.join_timeout"):
        envs.poll(wait=True)


@pytest.fixture
def listener() -> Iterator[WorkerListener]:
    listener = WorkerListener("127.0.0.1", {1: "", 2: ""}, "the run", lost_seconds=3.0)
    yield listener
    listener.close()


def test_a_process_that_hangs_costs_nothing_and_one_that_is_started_again_joins(listener: WorkerListener) -> None:
    config = experiment("env.slippery=true", "env.floor_density=1.0")
    address = ControllerAddress.of(listener)
    processes: dict[int, subprocess.Popen[bytes]] = {rank: start_worker(address, rank) for rank in (1, 2)}
    try:
        workers = listener.wait_for([1, 2], 60.0)
        envs = hosted_vector_env(workers, config, partial(listener.take_connected_workers, [1, 2]))
        expected = without_hosts(config)

        def stop(turn: int) -> None:
            if turn == 3:
                os.kill(processes[2].pid, signal.SIGSTOP)

        assert play(envs, range(EPISODES), stop) == expected
        assert 1 <= envs.pop_metrics()["env/episodes_reassigned"] <= 4
        for process in processes.values():
            process.kill()
            process.wait()
        processes[2] = start_worker(address, 2)
        assert play(envs, range(EPISODES)) == expected
        assert {episode.connection.worker.pid for episode in envs._hosts.values()} == {processes[2].pid}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
