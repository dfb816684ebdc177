"""Many episodes at a time: requests now, events when they complete."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet import trace
from quintet.envs.env import Env
from quintet.envs.validation import (
    INVALID_OUTPUT,
    InvalidEnvOutputError,
    validate_actions,
    validate_instruction,
    validate_observation,
    validate_step,
)
from quintet.records import Failure, Observation, Step
from quintet.sandbox.sandboxed_process import error_message


@dataclass(frozen=True, slots=True)
class EpisodeStarted:
    """First observation of an episode."""

    episode: int
    instruction: str
    actions: tuple[str, ...]
    """Valid action words."""
    observation: Observation


@dataclass(frozen=True, slots=True)
class ActionsExecuted:
    """Steps of an episode, one per action, up to the action that ended the episode."""

    episode: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """Failure of an episode's env: it raised, hung, died or returned invalid output."""

    episode: int
    failure: Failure


EnvEvent = EpisodeStarted | ActionsExecuted | EpisodeFailed


class VectorEnv(Protocol):
    """Envs of many episodes. The caller numbers the episodes; each has at most one request in progress."""

    @property
    def seconds(self) -> float:
        """Time that this process has spent in envs or waiting for them."""

    def start(self, episode: int, seed: int) -> None:
        """Begin an episode; completes with `EpisodeStarted` or `EpisodeFailed`."""

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        """Execute valid actions until the episode ends; completes with `ActionsExecuted` or `EpisodeFailed`."""

    def drop(self, episode: int) -> None:
        """Discard an episode, whether it has ended or a request is in progress; it produces no further events."""

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        """Return the events since the last call.

        Args:
            wait: wait for an event if requests are in progress.
            seconds: maximum time to wait (approximate); None waits without a limit.

        Raises:
            UserError: no env can run any more.
        """

    @property
    def pending(self) -> bool:
        """Whether requests are in progress or events are waiting."""

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call."""

    def close(self) -> None:
        """End all episodes and worker processes."""


class LocalVectorEnv:
    """`VectorEnv` with the envs in this process, each request executed at once; the steps of envs with `prepare_steps`
    (see `quintet.envs.env`) together in `poll`. An env that hangs blocks the run."""

    def __init__(self, build_env: Callable[[], Env]) -> None:
        self._build_env = build_env
        self._envs: dict[int, Env] = {}
        self._events: list[EnvEvent] = []
        self._waiting: list[tuple[int, int | Sequence[Any]]] = []
        """Seed or actions of episodes whose requests `poll` executes, in their order."""
        self.seconds = 0.0

    def start(self, episode: int, seed: int) -> None:
        self._waiting.append((episode, seed))
        if len(self._waiting) == 1:
            self._execute()

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        self._waiting.append((episode, actions))
        if len(self._waiting) == 1 and not hasattr(self._envs.get(episode), "prepare_steps"):
            self._execute()

    def drop(self, episode: int) -> None:
        """See `VectorEnv.drop`. Errors while closing the env are ignored because its episode is over."""
        env = self._envs.pop(episode, None)
        if env is not None:
            close_env(env)
        self._waiting = [request for request in self._waiting if request[0] != episode]
        if self._events:
            self._events = [event for event in self._events if event.episode != episode]

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        self._execute()
        events, self._events = self._events, []
        return events

    @property
    def pending(self) -> bool:
        return bool(self._events or self._waiting)

    def pop_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        for episode in list(self._envs):
            self.drop(episode)

    def _execute(self) -> None:
        """Execute the waiting requests in their order."""
        started = time.perf_counter()
        requests, self._waiting = self._waiting, []
        if len(requests) > 1:
            self._prepare(requests)
        for episode, request in requests:
            with trace.span("reset" if isinstance(request, int) else "step", "envs", episode=episode):
                event = self._start(episode, request) if isinstance(request, int) else self._step(episode, request)
            self._events.append(event)
        self.seconds += time.perf_counter() - started

    def _prepare(self, requests: Sequence[tuple[int, int | Sequence[Any]]]) -> None:
        """Call `prepare_steps`, if the envs have it, with the first action of each waiting episode."""
        steps = [
            (self._envs[episode], request[0])
            for episode, request in requests
            if not isinstance(request, int) and episode in self._envs
        ]
        prepare = getattr(steps[0][0], "prepare_steps", None) if steps else None
        try:
            if prepare is not None:
                prepare(steps)
        except Exception:  # noqa: BLE001 - the step of each env raises its own error
            return

    def _start(self, episode: int, seed: int) -> EnvEvent:
        where = "start"
        try:
            env = self._envs[episode] = self._build_env()
            instruction, actions = validate_instruction(env.instruction()), validate_actions(env.actions)
            where = "reset"
            observation = validate_observation(env.reset(seed))
            return EpisodeStarted(episode, instruction, episode_actions(env, actions), observation)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of an env is recorded as data
            return EpisodeFailed(episode, failure_from_error(where, error))

    def _step(self, episode: int, actions: Sequence[Any]) -> EnvEvent:
        try:
            return ActionsExecuted(episode, tuple(execute_actions(self._envs[episode], actions)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of an env is recorded as data
            return EpisodeFailed(episode, failure_from_error("step", error))


def episode_actions(env: Env, actions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the actions of the episode that was started, given those from before.

    Raises:
        InvalidEnvOutputError: they are not valid.
    """
    return actions if tuple(env.actions) == actions else validate_actions(env.actions)


def execute_actions(env: Env, actions: Sequence[Any]) -> Iterator[Step]:
    """Execute one action after another until the episode ends.

    Raises:
        InvalidEnvOutputError: the env returned something else than a step.
    """
    for action in actions:
        step = validate_step(env.step(action))
        yield step
        if step.terminated or step.truncated:
            return


def close_env(env: Env) -> None:
    """Close an env and ignore its errors because the episode is over."""
    try:
        env.close()
    except (Exception, SystemExit):  # noqa: BLE001 - see the docstring
        return


def failure_from_error(where: str, error: BaseException) -> Failure:
    """Record an error of an env, with the line of its file; `where` is `start`, `reset` or `step`."""
    if isinstance(error, InvalidEnvOutputError):
        return Failure(where, INVALID_OUTPUT, str(error))
    return failure_from_message(where, error_message(error))


def failure_from_message(where: str, message: Mapping[str, Any]) -> Failure:
    """Convert an `error_message` of a worker process."""
    hint = f"; {message['hint']}" if message.get("hint") else ""
    return Failure(where, str(message["kind"]), f"{message['message']}{hint}")
