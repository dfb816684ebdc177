"""If these fail, a simulator that is installed starts or moves differently from run to run, or is shown wrongly.

Each needs its package: run pytest in the environment of `scripts/install_simulator.sh`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.simulators.registry import build_simulator
from quintet.envs.simulators.simulator import Simulator
from quintet.errors import ConfigError, MachineError

ROBOTS = np.arange(2)


@dataclass(frozen=True)
class Case:
    """A task, and what its package says about it."""

    task: str
    action_dim: int
    state_size: int
    frequency: float
    cameras: int = 1
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "metaworld": Case("reach-v3", 4, 4, 80.0, config={"options": {"wait_steps": 2}}),
    "gymnasium_robotics": Case("FetchPush-v4", 4, 28, 25.0),
    "robosuite": Case("Lift", 7, 8, 20.0, cameras=2),
    "libero": Case(
        "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate",
        7,
        8,
        20.0,
        cameras=2,
        config={"task_suite": "libero_spatial", "options": {"wait_steps": 2}},
    ),
}


@pytest.fixture(params=CASES, scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Simulator]]:
    name = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    case = CASES[name]
    config = SimulatorConfig(simulator=name, task=case.task, camera_height=32, camera_width=48, **case.config)
    try:
        simulator = build_simulator(config, 2, 0)
    except MachineError as error:
        pytest.skip(str(error))
    yield case, simulator
    simulator.close()


def play(simulator: Simulator, start_states: list[int]) -> list[np.ndarray]:
    """Return states and images before and after the same three actions of both robots."""
    simulator.reset(ROBOTS, np.array(start_states))
    observed = [simulator.observe(ROBOTS)]
    for actions in np.random.default_rng(0).uniform(-1, 1, (3, simulator.action_dim)).astype(np.float32):
        step = simulator.step(ROBOTS, np.stack([actions, actions]))
        assert not step.failures, step.failures
        assert np.isfinite(step.rewards).all()
        assert not step.success.any()
        observed.append(simulator.observe(ROBOTS))
    return [part for each in observed for part in (each.state, each.images)]


def test_robots_are_simulated_and_seen(built: tuple[Case, Simulator]) -> None:
    case, simulator = built
    assert (simulator.action_dim, simulator.tasks) == (case.action_dim, (case.task,))
    assert simulator.control_frequency == pytest.approx(case.frequency)
    observed = play(simulator, [3, 5])
    assert observed[0].shape == (2, case.state_size)
    assert observed[1].shape == (2, case.cameras, 32, 48, 3)
    # Something is seen, and it differs between start states and changes with the motion.
    assert observed[1].std() > 5
    assert (observed[1][0] != observed[1][1]).any()
    assert (observed[1] != observed[-1]).any()
    picture = simulator.render(ROBOTS)
    assert (picture.shape, picture.dtype) == ((2, 32, 48, 3), np.uint8)
    assert all(simulator.observe(ROBOTS).instructions)


def test_a_start_state_is_the_same_for_each_robot_and_each_time(built: tuple[Case, Simulator]) -> None:
    _, simulator = built
    first, again = play(simulator, [3, 5]), play(simulator, [5, 3])
    for before, after in zip(first, again, strict=True):
        np.testing.assert_array_equal(before, after[::-1])


@pytest.mark.parametrize("name", ["metaworld", "gymnasium_robotics", "robosuite"])
def test_an_unknown_task_is_refused_and_the_nearest_works(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    task = CASES[name].task
    with pytest.raises(ConfigError, match=f"did you mean '{task}'"):
        build_simulator(SimulatorConfig(simulator=name, task=task[:-1]), 1, 0)
    build_simulator(SimulatorConfig(simulator=name, task=task), 1, 0).close()
