"""Worker process that simulates a share of the robots of every stage.

Forked by `quintet.sandbox.forkserver`; what a simulator prints goes to standard error. Requests and replies are JSON
lines. Requests: `{"stage": …, "call": "describe" | "reset" | "step", …}`, executed one after another. Replies:
`{"result": …}` or `{"failure": [where, type, message]}`. Arrays of results are in shared memory, a segment per stage,
whose descriptor is sent with the first reply that uses it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.service.payload import JSON, decode_payload, value_from_message
from quintet.envs.simulators.robot_messages import WHERE, chunk_message, description, reset_message, reset_result
from quintet.envs.simulators.shared_arrays import SharedArrayWriter
from quintet.envs.simulators.vector_env import RobotVectorEnv, build_vector_env
from quintet.envs.vector_env import failure_from_error
from quintet.sandbox.json_lines import LineBuffer, encode


def work(connection: socket.socket, setup: Mapping[str, Any]) -> None:
    """Serve requests until the connection ends; `setup` has the configuration of the simulator and the number of robots
    of each stage."""
    config = simulator_config(json.dumps(setup["env"]))
    worker = StageSimulators(config, setup["num_robots"])
    writers = [SharedArrayWriter() for _ in setup["num_robots"]]
    for line in LineBuffer().read(connection):
        request = value_from_message(decode_payload(line, JSON))
        message, descriptors = writers[request["stage"]].write(worker.execute(request))
        reply = encode(message)
        sent = socket.send_fds(connection, [reply], descriptors) if descriptors else 0
        connection.sendall(reply[sent:])
        for descriptor in descriptors:
            os.close(descriptor)


def simulator_config(text: str) -> SimulatorConfig:
    """Return the configuration of a simulator from JSON."""
    adapter: TypeAdapter[SimulatorConfig] = TypeAdapter(SimulatorConfig)
    return adapter.validate_json(text)


class StageSimulators:
    """Executes requests for the robots of each stage, whose simulators are built by the first request."""

    def __init__(self, config: SimulatorConfig, num_robots: Sequence[int]) -> None:
        self._config, self._num_robots = config, num_robots
        self._envs: dict[int, RobotVectorEnv] = {}

    def execute(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the reply to a request."""
        calls = {"describe": self._describe, "reset": self._reset, "step": self._step}
        try:
            return {"result": calls[request["call"]](request)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a simulator is recorded as data
            where = WHERE.get(request["call"], request["call"])
            failure = failure_from_error(where, error)
            return {"failure": [failure.where, failure.error_type, failure.message]}

    def close(self) -> None:
        """Free the simulators."""
        for env in self._envs.values():
            env.close()

    def _describe(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return asdict(description(self._env(request["stage"])))

    def _reset(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        states = np.array(request["start_states"], np.int64)
        return reset_message(reset_result(self._env(request["stage"]), states))

    def _step(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        env = self._env(request["stage"])
        env.record_frames = request["record_frames"]
        return chunk_message(env.step_chunk(request["actions"]))

    def _env(self, stage: int) -> RobotVectorEnv:
        if stage not in self._envs:
            self._envs[stage] = build_vector_env(self._config, self._num_robots[stage])
        return self._envs[stage]
