"""If these fail, worker processes change the results of robots, or a broken simulator costs more than its episodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_simulator import REFERENCE

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import ChunkResult, RobotObservation
from quintet.envs.simulators.remote_robots import RobotsInProcess
from quintet.envs.simulators.robot_envs import RobotEnvs, build_robot_envs, share_sizes
from quintet.envs.simulators.robot_messages import chunk_from_message
from quintet.envs.simulators.robot_processes import StageRequest
from quintet.envs.simulators.shared_arrays import SharedArrayReader, SharedArrayWriter
from quintet.envs.validation import InvalidEnvOutputError
from quintet.errors import ConfigError, MachineError
from quintet.records import Outcome

OPTIONS = {"success": {1: [2], 3: [5], 4: [4], 7: [1]}, "failed": {5: [3]}}
STARTS = np.arange(8) % 12


@contextmanager
def robots(num_robots: int, **values: Any) -> Iterator[RobotEnvs]:
    config = SimulatorConfig(simulator=REFERENCE, **({"max_steps": 6, "options": OPTIONS} | values))
    with closing(build_robot_envs(config, num_robots)) as envs:
        yield envs


def rollout(envs: RobotEnvs, num_chunks: int = 4) -> list[RobotObservation | ChunkResult]:
    """Two resets of all stages, with chunks of random actions after each."""
    generator = np.random.default_rng(0)
    results: list[RobotObservation | ChunkResult] = []
    for first in (0, 4):
        for stage in range(envs.num_stages):
            starts = (np.arange(envs.num_robots)[:, None] + stage * envs.num_robots + first + np.arange(3)) % 12
            results.append(envs.reset(stage, starts))
        for _ in range(num_chunks):
            for stage in range(envs.num_stages):
                envs.start_chunk(stage, generator.normal(size=(envs.num_robots, 3, 2)).astype(np.float32))
            results += [envs.finish_chunk(stage) for stage in range(envs.num_stages)]
    return results


def assert_equal(ours: Any, expected: Any) -> None:
    assert type(ours) is type(expected)
    if isinstance(expected, RobotObservation | ChunkResult):
        for field in fields(expected):
            assert_equal(getattr(ours, field.name), getattr(expected, field.name))
    elif isinstance(expected, np.ndarray):
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(ours, expected)
    else:
        assert ours == expected


@pytest.mark.parametrize("auto_reset", [False, True])
def test_results_do_not_depend_on_the_number_of_processes(auto_reset: bool) -> None:
    values = {"auto_reset": auto_reset, "pipeline_stages": 2, "relative_reward": True}
    with robots(8, **values) as local:
        local.record_frames = True
        expected = rollout(local)
        description = local.simulator
    for processes in (1, 3):
        with robots(8, processes=processes, **values) as envs:
            envs.record_frames = True
            assert envs.simulator == description
            results = rollout(envs)
            assert len(results) == len(expected)
            for ours, theirs in zip(results, expected, strict=True):
                assert_equal(ours, theirs)


def test_results_are_not_overwritten_by_later_ones() -> None:
    with robots(4, processes=2) as envs:
        first = envs.reset(0, STARTS[:4])
        images = first.images.copy()
        envs.start_chunk(0, np.zeros((4, 2, 2), np.float32))
        envs.finish_chunk(0)
        np.testing.assert_array_equal(first.images, images)


def test_stages_are_simulated_while_the_caller_computes() -> None:
    with robots(4, processes=2, pipeline_stages=2, options={"seconds": 0.2}) as envs:
        for stage in range(2):
            envs.reset(stage, STARTS[:2])
        started = time.monotonic()
        envs.start_chunk(0, np.zeros((2, 2, 2), np.float32))
        envs.start_chunk(1, np.zeros((2, 2, 2), np.float32))
        assert time.monotonic() - started < 0.2
        time.sleep(1.5)
        finished = time.monotonic()
        envs.finish_chunk(0)
        envs.finish_chunk(1)
        assert time.monotonic() - finished < 0.3


@pytest.mark.parametrize(
    ("fault", "error_type", "message"),
    [("exit", "ProcessDied", "its process ended with status 3"), ("hang", "Timeout", "no result after 1 s")],
)
def test_a_process_that_dies_or_hangs_costs_its_robots_episodes_and_is_replaced(
    fault: str, error_type: str, message: str, tmp_path: Path
) -> None:
    options = OPTIONS | {"fault": fault, "at": 2, "of": 2, "once": str(tmp_path / "done")}
    with robots(8, processes=2, pipeline_stages=2, options=options, chunk_timeout_seconds=1.0) as envs:
        actions = np.ones((4, 3, 2), np.float32)
        for stage, starts in enumerate(([6, 8, 2, 0], [6, 8, 8, 0])):
            envs.reset(stage, np.array(starts))
        for stage in range(2):
            envs.start_chunk(stage, actions)
        for stage in range(2):  # the other stage's robots in the process are lost with it
            result = envs.finish_chunk(stage)
            assert [(episode.robot, episode.outcome) for episode in result.episodes] == [
                (2, Outcome.FAILED),
                (3, Outcome.FAILED),
            ]
            assert result.episodes[0].failure is not None
            assert result.episodes[0].failure.error_type == error_type
            assert message in result.episodes[0].failure.message
            assert result.episodes[0].task == "reach"
            assert result.executed.tolist() == [[True] * 3] * 2 + [[False] * 3] * 2
            assert result.observation.state[:, 1].tolist() == [3, 3, 0, 0]
        envs.start_chunk(0, actions)
        later = envs.finish_chunk(0)
        assert later.executed.any(1).tolist() == [True, True, False, False]
        assert [episode.robot for episode in later.episodes] == [0, 1]
        envs.reset(0, np.array([6, 8, 2, 0]))
        envs.start_chunk(0, actions)
        assert envs.finish_chunk(0).executed.all()


def test_a_process_that_is_killed_between_chunks_costs_its_episodes() -> None:
    with robots(4, processes=2) as envs:
        envs.reset(0, np.array([6, 8, 2, 0]))
        (host, _) = (share.host for share in envs._stages[0]._shares)
        host._processes._processes.signal(host._process, signal.SIGKILL)
        while host._process.failure is None:
            host._processes._processes.wait()
        envs.start_chunk(0, np.ones((4, 3, 2), np.float32))
        result = envs.finish_chunk(0)
        assert [episode.robot for episode in result.episodes] == [0, 1]
        assert "SIGKILL" in str(result.episodes[0].failure)
        assert result.executed.any(1).tolist() == [False, False, True, True]


def test_a_failed_reset_is_a_failure_of_the_next_chunk() -> None:
    with robots(4, processes=2, options={"fault": "exit", "at": 0, "of": 2}) as envs:
        observation = envs.reset(0, np.array([2, 8, 1, 0]))
        assert observation.state[:, 0].tolist() == [0, 0, 1, 0]
        envs.start_chunk(0, np.ones((4, 3, 2), np.float32))
        result = envs.finish_chunk(0)
        assert [(episode.robot, episode.start_state, episode.num_actions) for episode in result.episodes] == [
            (0, 2, 0),
            (1, 8, 0),
        ]
        assert {episode.outcome for episode in result.episodes} == {Outcome.FAILED}


def test_processes_are_ended_by_offload_and_started_again_by_a_reset() -> None:
    with robots(4, processes=2, pipeline_stages=2) as envs:
        for _ in range(2):
            before = envs.reset(0, STARTS[:2])
            processes = [process.number for process in envs._stages[0]._shares[0].host._processes._processes]
            assert len(processes) == 2
            envs.offload()
            assert len(envs._stages[0]._shares[0].host._processes._processes) == 0
            assert_equal(envs.reset(0, STARTS[:2]), before)


def test_memory_does_not_grow_with_the_number_of_chunks() -> None:
    with robots(4, processes=1, auto_reset=True) as envs:
        envs.record_frames = True
        envs.reset(0, STARTS[:4])
        actions = np.ones((4, 3, 2), np.float32)
        counts = []
        for _ in range(3):
            for _ in range(20):
                envs.start_chunk(0, actions)
                envs.finish_chunk(0)
            process = envs._stages[0]._shares[0].host._process
            counts.append((len(os.listdir("/proc/self/fd")), len(process.replies), len(process._requests)))
        assert len(set(counts)) == 1


def test_a_simulator_that_cannot_be_built_is_an_error_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def build(config, num_robots, seed):\n    raise ValueError('no scene')\n")
    for processes in (0, 2):
        config = SimulatorConfig(simulator=f"{file}:build", processes=processes)
        with pytest.raises(ConfigError, match=r"raised ValueError: no scene(?s:.*)mine.py:2"):
            build_robot_envs(config, 2)
    with (
        pytest.raises(MachineError, match="the simulator does not start: ProcessDied: its process ended with status 3"),
        robots(2, processes=2, options={"fault": "exit", "at": 0, "of": 1}) as envs,
    ):
        envs.reset(0, np.array([1, 1]))


def test_a_reset_and_a_chunk_have_their_own_time_limits() -> None:
    requests: list[StageRequest] = []
    process = SimpleNamespace(failure=None, request=lambda request, message: requests.append(request))
    config = SimulatorConfig(reset_timeout_seconds=7.0, chunk_timeout_seconds=3.0)
    stage = RobotsInProcess(SimpleNamespace(running=lambda slot: process), 0, 0, config, 2)  # type: ignore[arg-type]
    for call in ("reset", "step"):
        stage.start(call, {})
    assert [(request.where, request.seconds) for request in requests] == [("reset", 7.0), ("step", 3.0)]


def test_robots_that_cannot_be_divided_into_stages_are_refused() -> None:
    message = r"7 robots cannot be divided .*= 2 stages(?s:.*)set env.environments=6, or env.pipeline_stages=1"
    with pytest.raises(ConfigError, match=message):
        build_robot_envs(SimulatorConfig(simulator=REFERENCE, pipeline_stages=2), 7)
    for num_robots, stages in ((6, 2), (7, 1)):
        with robots(num_robots, pipeline_stages=stages) as envs:
            assert envs.num_robots * envs.num_stages == num_robots
    assert share_sizes(7, 3) == [3, 2, 2]
    assert share_sizes(2, 8) == [1, 1]


RESULT = {
    "observation": {
        "images": np.zeros((2, 1, 4, 4, 3), np.uint8),
        "state": np.zeros((2, 3), np.float32),
        "instructions": ["", ""],
    },
    **{name: np.zeros((2, 3), bool) for name in ("terminated", "truncated", "executed")},
    "rewards": np.zeros((2, 3), np.float32),
    "episodes": [],
    "final": None,
    "frames": None,
}
EPISODE = {
    "robot": 1,
    "start_state": 4,
    "task": "reach",
    "episode_return": 1.0,
    "num_actions": 2,
    "success_once": True,
    "success_at_end": True,
    "outcome": "success",
    "failure": None,
}


def changed(**values: Any) -> Any:
    return RESULT | values


@pytest.mark.parametrize(
    "message",
    [
        [],
        {},
        changed(rewards=np.zeros((3, 3), np.float32)),
        changed(rewards=np.zeros((2, 3))),
        changed(rewards="many"),
        changed(terminated=np.zeros((2, 3), np.uint8)),
        changed(observation=RESULT["observation"] | {"state": np.full((2, 3), np.nan, np.float32)}),
        changed(observation=RESULT["observation"] | {"images": np.zeros((2, 4, 4, 3), np.uint8)}),
        changed(observation=RESULT["observation"] | {"instructions": [""]}),
        changed(final=RESULT["observation"] | {"rows": np.array([0, 2])}),
        changed(frames=np.zeros((2, 1, 4, 4, 3), np.uint8)),
        changed(episodes=[EPISODE | {"robot": 2}]),
        changed(episodes=[EPISODE | {"outcome": "fine"}]),
        changed(episodes=[EPISODE | {"episode_return": None}]),
        changed(episodes=[{}]),
        changed(episodes=3),
    ],
)
def test_an_invalid_result_is_refused(message: Any) -> None:
    assert len(chunk_from_message(RESULT | {"episodes": [EPISODE]}, 2, 3).episodes) == 1
    with pytest.raises(InvalidEnvOutputError):
        chunk_from_message(message, 2, 3)


def test_arrays_of_any_size_pass_through_shared_memory() -> None:
    writer, reader, descriptors = SharedArrayWriter(), SharedArrayReader(), deque[int]()
    sizes = []
    for shape in ((0, 3), (2, 3), (100, 1000), (5,), (1000, 1000)):
        arrays = {"a": np.random.default_rng(1).random(shape).astype(np.float32), "b": np.array([True, False])}
        reference, new = writer.write({"inner": arrays, "text": "x"})
        descriptors.extend(map(os.dup, new))
        for descriptor in new:
            os.close(descriptor)
        sizes.append(len(new))
        message = reader.read(json.loads(json.dumps(reference)), descriptors)
        np.testing.assert_array_equal(message["inner"]["a"], arrays["a"])
        np.testing.assert_array_equal(message["inner"]["b"], arrays["b"])
    assert sizes == [1, 0, 1, 0, 1]
    for invalid in ({"dtype": "object", "shape": [1], "offset": 0}, {"dtype": "uint8", "shape": [-1], "offset": 0}):
        with pytest.raises(ValueError, match="an array of"):
            reader.read({"a": invalid}, descriptors)
    with pytest.raises(ValueError, match="buffer is smaller"):
        reader.read({"a": {"dtype": "uint8", "shape": [1 << 40], "offset": 0}}, descriptors)
