"""Measure how much faster a rollout of robots is in two stages than in one.

    python benchmarks/simulator_stages.py [--robots 8] [--chunks 6] [--rounds 7]
        [--only devices] [--out benchmarks/results/simulator_stages.json]

A worker process simulates, and a chunk of the simulator takes as long as a forward pass of the policy for the same
robots. `devices`: both wait, like a policy and a simulator on devices of their own. `sleep`: the policy, layers of
torch on one core, reads images of 128 × 128 pixels; its time is measured first, and the simulator waits as long.
`physics`: the simulator computes the dynamics of a double pendulum on the other core; this needs two idle cores. With
one stage policy and simulator take turns, with two each computes for one half of the robots while the other does for
the other half. Rounds alternate, so that other load on the machine affects both. `overhead`: a simulator and a policy
that take no time, in this process and in a worker process. Writes one JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from machine import machine
from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import RobotObservation, SimulatorStep
from quintet.envs.simulators.robot_envs import RobotEnvs, build_robot_envs

NUM_ACTIONS, ACTION_DIM, SIDE = 8, 7, 128
DEVICE_SECONDS = 0.1
"""Time of a forward pass and of a chunk, per robot, on devices of their own."""
WIDTH = 768
"""Values of a patch of 16 × 16 pixels, and width of the policy's layers."""


class TimedSimulator:
    """A simulator whose step takes a given time per robot."""

    action_dim = ACTION_DIM
    num_start_states = 1000
    control_frequency = 10.0
    tasks = ("swing",)

    def __init__(self, config: SimulatorConfig, num_robots: int, seed: int) -> None:
        self.num_robots = num_robots
        self._seconds, self._iterations = config.options.get("seconds", 0.0), config.options.get("iterations", 0)
        self._state = np.zeros((num_robots, 4))

    def task(self, start_state: int) -> str:
        return "swing"

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        self._state[robots] = np.random.default_rng(start_states[0]).normal(size=(len(robots), 4))

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        time.sleep(self._seconds * len(robots))
        for robot, action in zip(robots.tolist(), actions, strict=True):
            self._state[robot] = swing(self._state[robot], float(action[0]), self._iterations)
        nothing = np.zeros(len(robots), bool)
        return SimulatorStep(np.zeros(len(robots), np.float32), nothing, nothing)

    def observe(self, robots: np.ndarray) -> RobotObservation:
        state = self._state[robots].astype(np.float32)
        images = np.zeros((len(robots), 1, SIDE, SIDE, 3), np.uint8)
        images[:] = (np.abs(state[:, :1, None, None, None]) * 100).astype(np.uint8)
        return RobotObservation(images, state, ("swing",) * len(robots))

    def render(self, robots: np.ndarray) -> np.ndarray:
        return self.observe(robots).images[:, 0]

    def close(self) -> None:
        pass


def swing(state: np.ndarray, torque: float, iterations: int) -> np.ndarray:
    """Return the state of a double pendulum after some steps of semi-implicit Euler integration."""
    mass = np.eye(2)
    angles, speeds = state[:2].copy(), state[2:].copy()
    for _ in range(iterations):
        difference = angles[0] - angles[1]
        mass[0, 0], mass[0, 1] = 2.0, np.cos(difference)
        mass[1, 0] = mass[0, 1]
        force = np.sin(difference) * np.array([-(speeds[1] ** 2), speeds[0] ** 2]) - 9.81 * np.sin(angles) * (2.0, 1.0)
        speeds += 1e-4 * np.linalg.solve(mass, force + np.array([torque, 0.0]))
        angles += 1e-4 * speeds
    return np.concatenate((angles, speeds))


class Policy:
    """Linear layers on the patches of images, whose time is proportional to the number of robots."""

    def __init__(self, num_layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._layers = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(num_layers)]

    def __call__(self, observation: RobotObservation) -> np.ndarray:
        hidden = torch.from_numpy(observation.images).reshape(-1, WIDTH).float() / 255.0
        for layer in self._layers:
            hidden = torch.tanh(hidden @ layer)
        size = NUM_ACTIONS * ACTION_DIM
        actions = hidden.reshape(len(observation.state), -1, WIDTH)[:, 0, :size]
        return actions.reshape(-1, NUM_ACTIONS, ACTION_DIM).numpy()


class RemotePolicy:
    """A policy on another device: this process waits a given time per robot."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, observation: RobotObservation) -> np.ndarray:
        time.sleep(self._seconds * len(observation.state))
        return np.zeros((len(observation.state), NUM_ACTIONS, ACTION_DIM), np.float32)


def rollout(envs: RobotEnvs, policy: Policy | RemotePolicy, chunks: int) -> float:
    """Run `chunks` chunks of all stages; return the seconds."""
    stages = range(envs.num_stages)
    observations = [envs.reset(stage, np.arange(envs.num_robots)) for stage in stages]
    started = time.perf_counter()
    for chunk in range(chunks):
        for stage in stages:
            if chunk:
                observations[stage] = envs.finish_chunk(stage).observation
            envs.start_chunk(stage, policy(observations[stage]))
    for stage in stages:
        envs.finish_chunk(stage)
    return time.perf_counter() - started


def build(robots: int, stages: int, processes: int, options: dict[str, Any]) -> RobotEnvs:
    """Return robots of `TimedSimulator`."""
    config = SimulatorConfig(
        simulator=f"{Path(__file__).resolve()}:TimedSimulator",
        options=options,
        pipeline_stages=stages,
        processes=processes,
        max_steps=1_000_000,
    )
    return build_robot_envs(config, robots)


def median(function: Any, rounds: int = 9) -> float:
    """Return the median of the seconds of a call."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def compare(
    robots: int, chunks: int, rounds: int, policy: Policy | RemotePolicy, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure rollouts in one and in two stages."""
    with ExitStack() as stack:
        envs = {stages: stack.enter_context(closing(build(robots, stages, 1, options))) for stages in (1, 2)}
        times: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(rounds):
            for stages, each in envs.items():
                times[stages].append(rollout(each, policy, chunks))
    medians = {stages: statistics.median(seconds) for stages, seconds in times.items()}
    return {
        "options": options,
        "seconds": {"sequential": times[1], "pipelined": times[2]},
        "median_speedup": medians[1] / medians[2],
        "fastest_speedup": min(times[1]) / min(times[2]),
    }


def overhead(robots: int, chunks: int) -> dict[str, Any]:
    """Measure the milliseconds of a chunk of a simulator that takes no time."""
    observation = RobotObservation(
        np.zeros((robots, 1, SIDE, SIDE, 3), np.uint8), np.zeros((robots, 4)), ("",) * robots
    )
    policy = Policy(0)
    actions = policy(observation)
    result = {}
    for name, processes in (("in_process", 0), ("worker_process", 1)):
        with closing(build(robots, 1, processes, {})) as envs:
            seconds = rollout(envs, lambda _: actions, 10 * chunks)  # type: ignore[arg-type]
            result[name] = 1e3 * seconds / (10 * chunks)
    return {"milliseconds_per_chunk": result, "image_bytes": robots * SIDE * SIDE * 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--robots", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=["devices", "sleep", "physics", "overhead"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/simulator_stages.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (options.robots, options.chunks, options.rounds)
    report: dict[str, Any] = {
        "machine": machine(),
        "robots": options.robots,
        "actions_per_chunk": NUM_ACTIONS,
        "chunks": options.chunks,
    }
    for name in options.only:
        if name == "devices":
            simulator = {"seconds": DEVICE_SECONDS / NUM_ACTIONS}
            report[name] = compare(*sizes, RemotePolicy(DEVICE_SECONDS), simulator)
        elif name == "overhead":
            report[name] = overhead(options.robots, options.chunks)
        else:
            policy = Policy(options.layers)
            report[name] = compare(*sizes, policy, calibrated(name, policy, options.robots))
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(name, report[name].get("median_speedup", report[name]))


def calibrated(name: str, policy: Policy, robots: int) -> dict[str, Any]:
    """Return the options of a simulator whose chunk takes as long as a forward pass."""
    images = np.zeros((robots, 1, SIDE, SIDE, 3), np.uint8)
    observation = RobotObservation(images, np.zeros((robots, 4), np.float32), ("",) * robots)
    seconds = median(lambda: policy(observation)) / (robots * NUM_ACTIONS)
    if name == "sleep":
        return {"seconds": seconds}
    return {"iterations": max(round(seconds / median(lambda: swing(np.ones(4), 0.1, 50)) * 50), 1)}


if __name__ == "__main__":
    main()
