"""Demonstrations of a simulator's expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.data.robot_demonstrations.dataset import RobotDemonstration
from quintet.embodied_records import RobotObservation
from quintet.envs.simulators.registry import build_simulator
from quintet.envs.simulators.simulator import Simulator
from quintet.envs.simulators.start_states import RobotStartStates
from quintet.errors import ConfigError
from quintet.seeds import derive_seed

MAX_TRIES_PER_SUCCESS: Final = 20
"""Tried episodes per successful one, above which the expert is considered unfit for the task."""
MAX_ROBOTS: Final = 16
"""Robots that the expert moves at the same time."""
StartStates = Callable[[int, int], np.ndarray]
"""`(first, count) -> start states`, int64 [count]."""


class SimulatorWithExpert(Simulator, Protocol):
    """A simulator that knows how its tasks are solved."""

    def expert_actions(self, robots: np.ndarray) -> np.ndarray:
        """Return the expert's next actions for the robots, int64 [n]: float32 [n, D]."""


class RecordedDataset:
    """Demonstrations in memory; see `RobotDataset`."""

    def __init__(self, name: str, episodes: Sequence[RobotDemonstration]) -> None:
        self.name = name
        self._episodes = episodes
        self.lengths = tuple(len(episode.actions) for episode in episodes)
        self.action_dim = episodes[0].actions.shape[1] if episodes else 0
        cameras = episodes[0].observations.images.shape[1] if episodes else 0
        self.cameras = tuple(f"camera{number}" for number in range(cameras))

    def episode(self, index: int, *, with_images: bool = True) -> RobotDemonstration:
        """See `RobotDataset.episode`; images are always there."""
        del with_images
        return self._episodes[index]


@dataclass(slots=True)
class _Recording:
    observations: list[RobotObservation] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)

    def finish(self) -> RobotDemonstration:
        return RobotDemonstration(
            RobotObservation(
                np.concatenate([observation.images for observation in self.observations]),
                np.concatenate([observation.state for observation in self.observations]),
                tuple(observation.instructions[0] for observation in self.observations),
            ),
            np.stack(self.actions),
        )


@contextmanager
def expert_episodes(
    env: SimulatorConfig, episodes: int, epsilon: float = 0.0
) -> Iterator[tuple[Simulator, Iterator[RobotDemonstration]]]:
    """Build a simulator; return it and an iterator of the episodes of its expert, see `collect_expert_episodes`, from
    start states that are in neither training nor validation.

    Raises:
        ConfigError: the simulator cannot be built, or has too few start states.
    """
    with closing(build_simulator(env, min(MAX_ROBOTS, episodes), env.seed)) as simulator:
        states = RobotStartStates(env, simulator.num_start_states)
        yield (
            simulator,
            collect_expert_episodes(
                simulator,
                states.demonstrations,
                episodes,
                max_steps=env.max_steps,
                epsilon=epsilon,
                seed=env.seed,
            ),
        )


def collect_expert_episodes(
    simulator: Simulator,
    start_states: StartStates,
    episodes: int,
    *,
    max_steps: int,
    epsilon: float = 0.0,
    seed: int = 0,
) -> Iterator[RobotDemonstration]:
    """Yield episodes that the simulator's expert has solved, in the order of start states. They do not depend on the
    number of robots.

    With probability `epsilon` an action that is executed is a random one, uniform in [-1, 1]; the expert's action is
    recorded, so that a policy learns how to recover. Episodes that do not succeed in `max_steps` actions are left out.

    Raises:
        ConfigError: the simulator has no expert, or fewer than one in `MAX_TRIES_PER_SUCCESS` episodes succeeds.
    """
    if not callable(getattr(simulator, "expert_actions", None)):
        hint = "name a simulator with an expert, or data sets: warm_start.files=[DIRECTORY]"
        raise ConfigError("the simulator has no expert, a method `expert_actions`", key="env.simulator", hint=hint)
    expert = cast("SimulatorWithExpert", simulator)
    count = attempts = 0
    while count < episodes:
        if attempts >= MAX_TRIES_PER_SUCCESS * (count + 2):
            message = f"the expert solved {count} episodes in {attempts} tries of {max_steps} actions"
            hint = "increase env.max_steps, or make the task easier"
            raise ConfigError(message, key="env.max_steps", value=max_steps, hint=hint)
        numbers = range(attempts, attempts + simulator.num_robots)
        rngs = [np.random.default_rng(derive_seed(seed, "expert", number)) for number in numbers]
        batch = _run(expert, start_states(attempts, simulator.num_robots), rngs, max_steps, epsilon)
        attempts += simulator.num_robots
        for demonstration in batch[: episodes - count]:
            count += 1
            yield demonstration


def _run(
    simulator: SimulatorWithExpert,
    start_states: np.ndarray,
    rngs: Sequence[np.random.Generator],
    max_steps: int,
    epsilon: float,
) -> list[RobotDemonstration]:
    """Return the episodes of all robots that succeed."""
    robots = np.arange(simulator.num_robots)
    simulator.reset(robots, start_states)
    recordings = [_Recording() for _ in robots]
    solved: dict[int, RobotDemonstration] = {}
    for _ in range(max_steps):
        if not len(robots):
            break
        observation, actions = simulator.observe(robots), simulator.expert_actions(robots)
        executed = actions.copy()
        for row, robot in enumerate(robots.tolist()):
            recordings[robot].observations.append(observation.select(np.array([row])))
            recordings[robot].actions.append(actions[row])
            if epsilon and rngs[robot].random() < epsilon:
                executed[row] = rngs[robot].uniform(-1, 1, actions.shape[1])
        step = simulator.step(robots, executed)
        ended = step.success.copy()
        if step.failed is not None:
            ended |= step.failed
        ended |= np.isin(robots, list(step.failures))
        solved |= {int(robot): recordings[robot].finish() for robot in robots[step.success]}
        robots = robots[~ended]
    return [solved[robot] for robot in sorted(solved)]
