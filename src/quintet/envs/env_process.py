"""Handle of a worker process that runs one env; the worker itself is `quintet.envs.env_process_main`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quintet import trace
from quintet.config.native.envs import EnvProcessesConfig
from quintet.envs.validation import (
    INVALID_OUTPUT,
    InvalidEnvOutputError,
    observation_from_message,
    step_from_message,
    validate_actions,
    validate_instruction,
)
from quintet.envs.vector_env import ActionsExecuted, EpisodeStarted, failure_from_message
from quintet.records import Failure, Step
from quintet.sandbox.json_lines import LineBuffer, LineTooLongError, decode, encode
from quintet.sandbox.worker_processes import WorkerProcess

START_SECONDS = 120.0
"""Time limit of importing a user's file or a simulator."""
MAX_LINE_BYTES = 1 << 28

STARTING: Final = "start"
RESETTING: Final = "reset"
STEPPING: Final = "step"
CLOSING: Final = "close"
WAITING: Final = "wait"
"""States of a process; the first three are also values of `Failure.where`."""


@dataclass(slots=True, eq=False)
class EnvProcess(WorkerProcess):
    """Worker process and its state. The deadline is the end of the state's time limit; `episode` is the caller's number
    of the current episode, `seed` its start state."""

    limits: EnvProcessesConfig
    env: str = "env"
    """Name of the env, for traces."""
    episode: int | None = None
    seed: int = 0
    num_episodes: int = 0
    """Number of episodes started so far."""
    _state: str = WAITING
    _entered: int = 0
    """Begin of the current state, of `time.perf_counter_ns`."""
    _num_actions: int = 0
    """Number of actions in the current request."""
    _steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = LineBuffer(MAX_LINE_BYTES)
        self._enter(STARTING)

    @property
    def idle(self) -> bool:
        """Whether the process has no episode and no request."""
        return self._state == WAITING and self.episode is None

    @property
    def waits_for_policy(self) -> bool:
        """Whether its episode has no request in progress."""
        return self._state == WAITING and self.episode is not None

    @property
    def where(self) -> str:
        """`Failure.where` of a failure that happens now."""
        return self._state if self._state in (STARTING, RESETTING) else STEPPING

    @property
    def time_limit(self) -> float:
        """Time limit of the current state, seconds."""
        limits = self.limits
        by_state = {STARTING: START_SECONDS, STEPPING: limits.step_timeout_seconds, WAITING: math.inf}
        return by_state.get(self._state, limits.reset_timeout_seconds)

    def start_episode(self, episode: int, seed: int) -> None:
        """Start an episode, possibly before the worker is ready."""
        self.episode, self.seed = episode, seed
        self.num_episodes += 1
        if self.ready:
            self._enter(RESETTING)
        self._send({"open": seed})

    def step(self, actions: Sequence[Any]) -> None:
        """Execute actions."""
        self._num_actions = len(actions)
        self._enter(STEPPING)
        self._send({"move": list(actions)})

    def close_episode(self) -> None:
        """End the episode and keep the process."""
        self.episode = None
        self._enter(CLOSING)
        self._send({"close": True})

    def receive(self) -> Iterator[EpisodeStarted | ActionsExecuted | Failure]:
        """Yield the events since the last call; a `Failure` is the last one."""
        try:
            for line in self.receive_lines():
                event = self._parse(line)
                if event is not None:
                    yield event
        except (InvalidEnvOutputError, LineTooLongError) as error:
            yield Failure(self.where, INVALID_OUTPUT, str(error))

    def _enter(self, state: str) -> None:
        if self._state != WAITING and trace.is_recording():
            trace.add_span(self._state, self._entered, f"{self.env} worker {self.number}", episode=self.episode)
        self._state, self._entered = state, time.perf_counter_ns()
        self.deadline = time.monotonic() + self.time_limit
        self.ready = state != STARTING

    def _send(self, message: Mapping[str, Any]) -> None:
        self.send(encode(message), min(self.time_limit, START_SECONDS))

    def _parse(self, line: bytes) -> EpisodeStarted | ActionsExecuted | Failure | None:
        try:
            message = decode(line)
            if error := message.get("broken") or message.get("failure"):
                return failure_from_message(str(error.get("where", STARTING)), error)
            return self._handle(message)
        except InvalidEnvOutputError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise InvalidEnvOutputError(f"the worker process sent {line!r:.100}") from error

    def _handle(self, message: Mapping[str, Any]) -> EpisodeStarted | ActionsExecuted | None:
        if self._state == STARTING and message["ready"]:
            self._enter(WAITING if self.episode is None else RESETTING)
        elif self._state == RESETTING:
            return self._started(message["opened"])
        elif self._state == STEPPING:
            return self._stepped(message)
        elif message["closed"]:
            self._enter(WAITING)
        return None

    def _started(self, message: Mapping[str, Any]) -> EpisodeStarted | None:
        instruction, actions = validate_instruction(message["instruction"]), validate_actions(message["actions"])
        observation = observation_from_message(message["observation"])
        self._enter(WAITING)
        return None if self.episode is None else EpisodeStarted(self.episode, instruction, actions, observation)

    def _stepped(self, message: Mapping[str, Any]) -> ActionsExecuted | None:
        self._steps.append(step_from_message(message["step"]))
        if len(self._steps) > self._num_actions:
            raise InvalidEnvOutputError(f"its process made {len(self._steps)} steps for {self._num_actions} actions")
        self._enter(WAITING if message["last"] else STEPPING)
        if self.episode is None or not message["last"]:
            return None
        steps, self._steps = tuple(self._steps), []
        return ActionsExecuted(self.episode, steps)

    def timeout_failure(self) -> Failure:
        """Return the failure of a process that exceeded its time limit."""
        problems = {STARTING: "not ready", RESETTING: "no first observation", STEPPING: "no step"}
        problem = problems.get(self._state, "not closed")
        return Failure(self.where, "Timeout", f"{problem} after {self.time_limit:g} s: its process was killed")
