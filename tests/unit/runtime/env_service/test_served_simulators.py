"""If these fail, an environment service changes results of robots, or a lost server costs more than its episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_services import env_service, request
from scripted_simulator import REFERENCE

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import ChunkResult, RobotObservation
from quintet.envs.service import robot_session
from quintet.envs.simulators.robot_envs import RobotEnvs, build_robot_envs
from quintet.errors import MachineError
from quintet.records import Outcome
from quintet.runtime.env_service.app import EnvServiceServer
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.sessions import SessionLimits
from quintet.runtime.http_service.request_error import RequestError

OPTIONS = {"success": {1: [2], 3: [5], 4: [4], 7: [1]}}
ACTIONS = np.ones((4, 3, 2), np.float32)
NOTHING_FAILS = np.array([6, 8, 2, 0])


@contextmanager
def robots(num_robots: int, *servers: EnvServiceServer, **values: Any) -> Iterator[RobotEnvs]:
    service = {"urls": [server.url for server in servers], "timeout_seconds": 30.0, "max_retries": 0}
    values = {"max_steps": 6, "options": OPTIONS, "service": service if servers else None} | values
    with closing(build_robot_envs(SimulatorConfig(simulator=REFERENCE, **values), num_robots)) as envs:
        yield envs


def rollout(envs: RobotEnvs) -> Iterator[Any]:
    generator = np.random.default_rng(0)
    envs.record_frames = True
    for stage in range(envs.num_stages):
        starts = (np.arange(envs.num_robots)[:, None] + stage * envs.num_robots + np.arange(3)) % 12
        yield from _values(envs.reset(stage, starts))
    for _ in range(4):
        for stage in range(envs.num_stages):
            envs.start_chunk(stage, generator.normal(size=(envs.num_robots, 3, 2)).astype(np.float32))
        for stage in range(envs.num_stages):
            yield from _values(envs.finish_chunk(stage))


def _values(record: Any) -> Iterator[Any]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, RobotObservation | ChunkResult):
            yield from _values(value)
        else:
            yield (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_a_service_gives_the_results_of_a_run_without_one(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"auto_reset": True, "pipeline_stages": 2, "relative_reward": True}
    with robots(8, **values) as envs:
        expected = list(rollout(envs))
    monkeypatch.setattr(robot_session, "is_installed", lambda name: form == "msgpack")
    with (
        env_service(REFERENCE) as first,
        env_service(REFERENCE) as second,
        robots(8, first, second, processes=2, **values) as envs,
    ):
        assert list(rollout(envs)) == expected


def test_a_worker_process_that_dies_costs_the_episodes_of_its_robots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"fault": "exit", "at": 2, "of": 2, "once": "done"}
    with env_service(REFERENCE) as server, robots(4, server, processes=2, options=options) as envs:
        envs.reset(0, NOTHING_FAILS)
        envs.start_chunk(0, ACTIONS)
        result = envs.finish_chunk(0)
        assert [(episode.robot, episode.outcome) for episode in result.episodes] == [
            (2, Outcome.FAILED),
            (3, Outcome.FAILED),
        ]
        assert "its process ended with status 3" in str(result.episodes[0].failure)
        assert result.executed.any(1).tolist() == [True, True, False, False]
        envs.reset(0, NOTHING_FAILS)
        envs.start_chunk(0, ACTIONS)
        assert envs.finish_chunk(0).executed.all()


def test_a_server_that_is_lost_costs_its_robots_until_it_is_back() -> None:
    with env_service(REFERENCE) as first, env_service(REFERENCE) as second, robots(4, first, second) as envs:
        envs.reset(0, NOTHING_FAILS)
        second.close()
        envs.start_chunk(0, ACTIONS)
        result = envs.finish_chunk(0)
        assert [episode.robot for episode in result.episodes] == [2, 3]
        assert {episode.failure.error_type for episode in result.episodes if episode.failure} == {"ServerLost"}
        envs.reset(0, NOTHING_FAILS)
        envs.start_chunk(0, ACTIONS)
        assert envs.finish_chunk(0).executed.any(1).tolist() == [True, True, False, False]
        with env_service(REFERENCE, port=int(second.url.rpartition(":")[2])):
            envs.reset(0, NOTHING_FAILS)
            envs.start_chunk(0, ACTIONS)
            assert envs.finish_chunk(0).executed.all()


def test_a_session_that_timed_out_during_an_update_is_created_again() -> None:
    limits = SessionLimits(idle_seconds=0.2)
    with env_service(REFERENCE, limits=limits) as server, robots(4, server) as envs:
        for _ in range(2):
            envs.reset(0, NOTHING_FAILS)
            envs.start_chunk(0, ACTIONS)
            assert envs.finish_chunk(0).executed.all()
            _wait_until_closed(server)


def _wait_until_closed(server: EnvServiceServer) -> None:
    for _ in range(1000):
        if json.loads(request(server.url, "GET", "/health")[2])["sessions"] == 0:
            return
    raise AssertionError("the session was not closed")


def test_offloading_frees_the_simulators_of_the_server() -> None:
    with env_service(REFERENCE) as server, robots(4, server, processes=2) as envs:
        envs.reset(0, NOTHING_FAILS)
        assert json.loads(request(server.url, "GET", "/health")[2])["active_environments"] == 2
        envs.offload()
        assert json.loads(request(server.url, "GET", "/health")[2])["active_environments"] == 0
        envs.reset(0, NOTHING_FAILS)
        envs.start_chunk(0, ACTIONS)
        assert envs.finish_chunk(0).executed.all()


@pytest.mark.attack
def test_a_server_refuses_other_simulators_and_files_outside_of_its_directory() -> None:
    with (
        env_service("frozenlake") as server,
        pytest.raises(MachineError, match="has no environment"),
        robots(4, server),
    ):
        pass
    served = ServedEnvs([REFERENCE])
    with pytest.raises(RequestError, match=r"env.options.scene = '/etc/passwd' is outside of the directory"):
        served.config({"name": "simulator", "simulator": REFERENCE, "options": {"scene": "/etc/passwd"}})
    with pytest.raises(RequestError, match="max_steps"):
        served.config({"name": "simulator", "simulator": REFERENCE, "max_steps": 0})


@pytest.mark.parametrize("robots_call", [{"call": "reset"}, {"call": "run", "num_robots": 1}, {"num_robots": 1}])
def test_an_invalid_call_of_a_simulator_is_refused(robots_call: Any) -> None:
    with env_service(REFERENCE) as server:
        config = {"name": "simulator", "simulator": REFERENCE}
        session = json.loads(request(server.url, "POST", "/sessions", {"env": config})[2])["session"]
        body = {"requests": [{"env": "a", "robots": robots_call}]}
        assert request(server.url, "POST", f"/sessions/{session}/exchange", body)[0] == 400
