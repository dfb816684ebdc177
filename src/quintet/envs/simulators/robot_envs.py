"""The robots of a run, in stages: one stage is simulated while the policy computes the actions of another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quintet.config.native.envs import EnvServiceConfig, SimulatorConfig
from quintet.embodied_records import ChunkResult, RobotObservation
from quintet.envs.simulators.remote_robots import RobotsInProcess
from quintet.envs.simulators.robot_host import LocalRobots, RobotHost
from quintet.envs.simulators.robot_processes import RobotProcesses
from quintet.envs.simulators.robot_stage import RobotStage
from quintet.envs.simulators.vector_env import build_vector_env
from quintet.errors import ConfigError


class RobotEnvs:
    """Stages of robots with the same simulator; each has `num_robots`.

    With worker processes or an environment service the stages are simulated at the same time as the caller computes. A
    simulator that crashes, hangs or returns invalid values costs the episodes of its robots, which have the outcome
    `FAILED`; they take part again after the next `reset` of their stage.
    """

    def __init__(self, stages: Sequence[RobotStage]) -> None:
        """
        Raises:
            ConfigError: the simulator is not configured or not installed.
            MachineError: no simulator starts.
        """
        self._stages = stages
        self.num_stages, self.num_robots = len(stages), stages[0].num_robots
        self.record_frames = False
        """Render a picture of the robots of the first stage after each action, for videos."""
        descriptions = [stage.describe() for stage in stages]
        self.simulator = descriptions[0]
        """Dimension of actions, start states, frame rate and tasks."""

    @property
    def num_start_states(self) -> int:
        """Number of distinct start states."""
        return self.simulator.num_start_states

    def reset(self, stage: int, start_states: np.ndarray) -> RobotObservation:
        """Start an episode of each robot of a stage from `start_states`, int64 [B] or [B, K]; the automatic resets of a
        robot use the next column, and the last one repeatedly."""
        return self._stages[stage].reset(start_states)

    def start_chunk(self, stage: int, actions: np.ndarray) -> None:
        """Start to move the robots of a stage by `actions`, float32 [B, C, D]."""
        self._stages[stage].start_chunk(actions, record_frames=self.record_frames and stage == 0)

    def finish_chunk(self, stage: int) -> ChunkResult:
        """Return the result of the last chunk of a stage."""
        return self._stages[stage].finish_chunk()

    def offload(self) -> None:
        """Free the memory of the simulators. Episodes do not continue: `reset` rebuilds the stages."""
        for stage in self._stages:
            stage.offload()

    def close(self) -> None:
        """Free the simulators and end their processes."""
        for stage in self._stages:
            stage.close()


def build_robot_envs(config: SimulatorConfig, num_robots: int) -> RobotEnvs:
    """Return `num_robots` robots in `config.pipeline_stages` stages of equal size, simulated in this process, in worker
    processes, or on an environment service.

    Raises:
        ConfigError: `num_robots` is no multiple of the stages, or the simulator is not configured or not installed.
        MachineError: no simulator starts.
    """
    stages = config.pipeline_stages
    if num_robots % stages:
        message = f"{num_robots} robots cannot be divided into env.pipeline_stages = {stages} stages of equal size"
        lower = num_robots - num_robots % stages
        hint = f"set env.environments={lower or stages}, or env.pipeline_stages=1"
        raise ConfigError(message, key="env.pipeline_stages", value=stages, hint=hint)
    return RobotEnvs(build_stages(config, num_robots // stages))


def build_stages(config: SimulatorConfig, num_robots: int) -> list[RobotStage]:
    """Return the stages of `num_robots` robots each; raises as `build_robot_envs` does."""
    return [RobotStage(hosts, auto_reset=config.auto_reset) for hosts in _hosts(config, num_robots)]


def _hosts(config: SimulatorConfig, num_robots: int) -> list[list[RobotHost]]:
    """Return the hosts of each stage of `num_robots` robots."""
    stages = range(config.pipeline_stages)
    if config.service is not None:
        return [_service_hosts(config, config.service, num_robots) for _ in stages]
    if config.processes == 0:
        return [[LocalRobots(build_vector_env(config, num_robots))] for _ in stages]
    sizes = share_sizes(num_robots, config.processes)
    processes = RobotProcesses(config, [[size] * len(stages) for size in sizes])
    return [
        [RobotsInProcess(processes, slot, stage, config, size) for slot, size in enumerate(sizes)] for stage in stages
    ]


def _service_hosts(config: SimulatorConfig, service: EnvServiceConfig, num_robots: int) -> list[RobotHost]:
    """Return the hosts of a stage: a session on each server, with `config.processes` shares."""
    from quintet.envs.service.robot_session import RobotSession, RobotsInSession

    sessions = [RobotSession(url, config, service) for url in service.urls]
    sizes = share_sizes(num_robots, max(config.processes, 1) * len(sessions))
    return [
        RobotsInSession(sessions[number % len(sessions)], f"share {number}", size) for number, size in enumerate(sizes)
    ]


def share_sizes(num_robots: int, max_shares: int) -> list[int]:
    """Return the sizes of at most `max_shares` shares of robots, none of them empty, that differ by at most one."""
    shares = min(num_robots, max_shares)
    return [num_robots // shares + (index < num_robots % shares) for index in range(shares)]
