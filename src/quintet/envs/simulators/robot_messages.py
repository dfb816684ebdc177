"""Results of robots as messages between processes: JSON values and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter

from quintet.embodied_records import ChunkResult, RobotEpisode, RobotObservation
from quintet.envs.simulators.vector_env import RobotVectorEnv
from quintet.envs.validation import InvalidEnvOutputError

Message = Mapping[str, Any]
Call = Literal["describe", "reset", "step"]
WHERE: Mapping[Call, str] = {"describe": "start", "reset": "reset", "step": "step"}
"""`Failure.where` of the failure of a call."""


@dataclass(frozen=True, slots=True)
class SimulatorDescription:
    """Sizes and tasks of a simulator in another process; see `Simulator`."""

    action_dim: int
    num_start_states: int
    control_frequency: float
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResetResult:
    """Result of a reset of B robots."""

    observation: RobotObservation
    tasks: np.ndarray
    """Index in `SimulatorDescription.tasks` of each start state, int64 [B, K]; -1 for a task that is not listed."""


_DESCRIPTION, _EPISODE = TypeAdapter(SimulatorDescription), TypeAdapter(RobotEpisode)


def description(env: RobotVectorEnv) -> SimulatorDescription:
    """Return the description of the simulator of an env."""
    simulator = env.simulator
    frequency = float(simulator.control_frequency)
    return SimulatorDescription(simulator.action_dim, simulator.num_start_states, frequency, simulator.tasks)


def reset_result(env: RobotVectorEnv, start_states: np.ndarray) -> ResetResult:
    """Reset the robots of an env, from start states int64 [B, K]."""
    observation = env.reset(start_states)
    index = {task: position for position, task in enumerate(env.simulator.tasks)}
    tasks = [index.get(task, -1) for task in env.tasks(start_states.ravel())]
    return ResetResult(observation, np.array(tasks, np.int64).reshape(start_states.shape))


def observation_message(observation: RobotObservation) -> Message:
    """Return an observation as a message."""
    return {"images": observation.images, "state": observation.state, "instructions": list(observation.instructions)}


def reset_message(result: ResetResult) -> Message:
    """Return the result of a reset as a message."""
    return {"observation": observation_message(result.observation), "tasks": result.tasks}


def chunk_message(result: ChunkResult) -> Message:
    """Return the result of a chunk as a message. Of the final observation it has the rows of episodes that ended."""
    message: dict[str, Any] = {"observation": observation_message(result.observation), "rewards": result.rewards}
    message |= {name: getattr(result, name) for name in ("terminated", "truncated", "executed", "frames")}
    message["final"] = None
    message["episodes"] = [asdict(episode) for episode in result.episodes]
    if result.final_observation is not None:
        rows = np.unique([episode.robot for episode in result.episodes])
        message["final"] = {"rows": rows, **observation_message(result.final_observation.select(rows))}
    return message


def description_from_message(message: Message) -> SimulatorDescription:
    """Return a description.

    Raises:
        InvalidEnvOutputError: it is none.
    """
    try:
        return _DESCRIPTION.validate_python(message)
    except ValueError as error:
        raise InvalidEnvOutputError(f"no description of a simulator: {error}") from error


def reset_from_message(message: Message, num_robots: int) -> ResetResult:
    """Return the result of a reset of `num_robots` robots.

    Raises:
        InvalidEnvOutputError: it is none.
    """
    try:
        tasks = _array(message["tasks"], np.int64, (num_robots, None))
        return ResetResult(_observation(message["observation"], num_robots), tasks)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidEnvOutputError(f"no result of a reset: {error}") from error


def chunk_from_message(message: Message, num_robots: int, num_actions: int) -> ChunkResult:
    """Return the result of a chunk of `num_robots` robots.

    Raises:
        InvalidEnvOutputError: it is none.
    """
    try:
        observation, shape = _observation(message["observation"], num_robots), (num_robots, num_actions)
        frames = message["frames"]
        return ChunkResult(
            observation,
            _array(message["rewards"], np.float32, shape),
            _array(message["terminated"], np.bool_, shape),
            _array(message["truncated"], np.bool_, shape),
            _array(message["executed"], np.bool_, shape),
            _final_observation(observation, message["final"]),
            tuple(_episode(episode, num_robots) for episode in message["episodes"]),
            None if frames is None else _array(frames, np.uint8, (*shape, None, None, 3)),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidEnvOutputError(f"no result of a chunk: {error}") from error


def _observation(message: Message, num_robots: int) -> RobotObservation:
    state = _array(message["state"], np.float32, (num_robots, None))
    if not np.isfinite(state).all():
        raise ValueError("the state has values that are not finite")
    instructions = tuple(map(str, message["instructions"]))
    if len(instructions) != num_robots:
        raise ValueError(f"{len(instructions)} instructions for {num_robots} robots")
    return RobotObservation(_array(message["images"], np.uint8, (num_robots, *[None] * 3, 3)), state, instructions)


def _final_observation(observation: RobotObservation, message: Message | None) -> RobotObservation | None:
    if message is None:
        return None
    rows = _array(message["rows"], np.int64, (None,))
    return observation.with_rows([(rows, _observation(message, len(rows)))])


def _episode(message: Message, num_robots: int) -> RobotEpisode:
    episode = _EPISODE.validate_python(message)
    if not 0 <= episode.robot < num_robots:
        raise ValueError(f"an episode of robot {episode.robot} of {num_robots}")
    return episode


def _array(value: Any, dtype: type[np.generic], shape: Sequence[int | None]) -> np.ndarray:
    """
    Raises:
        ValueError: it is no array of this type and shape; None allows any size.
    """
    is_array = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == len(shape)
    if not is_array or any(size not in (None, actual) for size, actual in zip(shape, value.shape, strict=True)):
        raise ValueError(f"no array of {dtype.__name__} with shape {list(shape)}")
    array: np.ndarray = value
    return array
