"""Execution of tool calls in worker processes: a call that hangs, dies or raises only costs its own result."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quintet.config.native.env_section import EnvProcessesConfig
from quintet.config.native.envs import CustomEnvConfig
from quintet.config.native.interactions import InteractionsConfig
from quintet.config.native.tool_calls import ToolCallsConfig
from quintet.envs.subprocess_env import SubprocessVectorEnv
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeStarted
from quintet.records import Step
from quintet.tools.registry import run_tool_configs, tool_schemas
from quintet.tools.tool import ToolResult
from quintet.tools.tool_env import ERROR

ENV = "quintet.tools.tool_env:ToolEnv"


@dataclass(slots=True)
class _Session:
    """Calls of an episode. `env` is the number of its process's episode; None before the first call and after a
    failure, which ends the process."""

    seed: int
    """Seed of the random generators of its process."""
    calls: deque[Mapping[str, Any]] = field(default_factory=deque)
    results: list[ToolResult] = field(default_factory=list)
    env: int | None = None
    running: str | None = None
    """Tool of the call that is being executed."""


def request_envs(
    config: ToolCallsConfig | InteractionsConfig, env: str, arguments: dict[str, Any]
) -> SubprocessVectorEnv:
    """Return the worker processes of a `RequestEnv`, with the limits of the configuration."""
    limits = EnvProcessesConfig(
        max_processes=config.max_processes, step_timeout_seconds=config.timeout_seconds, memory_gib=config.memory_gib
    )
    return SubprocessVectorEnv(CustomEnvConfig(path=env, arguments=arguments), limits)


class ToolExecutor:
    """Executes the calls of many episodes at a time; the calls of one episode run one after another in one process."""

    def __init__(self, config: ToolCallsConfig) -> None:
        configs = run_tool_configs(config)
        tools = {name: tool.model_dump(mode="json") for name, tool in configs.items()}
        for schema in tool_schemas(config):
            # schemas of functions are slow to infer
            tools[schema["function"]["name"]]["parameters"] = schema["function"]["parameters"]
        self._max_concurrent = {name: tool.max_concurrent for name, tool in configs.items()}
        self._num_running: Counter[str] = Counter()
        self._waiting: deque[int] = deque()
        """Episodes whose next call exceeds the limit of its tool."""
        self._envs = request_envs(config, ENV, {"tools": tools})
        self._sessions: dict[int, _Session] = {}
        self._episodes: dict[int, int] = {}
        """Episode of each env."""
        self._numbers = count()
        self.num_calls = 0
        """Executed calls."""
        self.num_failed = 0
        """Calls whose result is an error message."""

    @property
    def pending(self) -> bool:
        """Whether calls are being executed."""
        return any(session.calls for session in self._sessions.values())

    def submit(self, episode: int, calls: Sequence[Mapping[str, Any]], seed: int = 0) -> None:
        """Start one or more calls of an episode, see `call_message`; `seed` is the episode's."""
        session = self._sessions.setdefault(episode, _Session(seed))
        session.calls.extend(calls)
        self._execute_next(episode, session)

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[tuple[int, list[ToolResult]]]:
        """Return the episodes whose calls have been executed, with their results; `wait` waits for an event, up to
        `seconds` if given."""
        finished = [self._handle(event) for event in self._envs.poll(wait=wait, seconds=seconds)]
        return [result for result in finished if result is not None]

    def drop(self, episode: int) -> None:
        """End an episode and its tools; unfinished calls have no result."""
        session = self._sessions.pop(episode, None)
        if session is not None:
            self._end_env(session)
            self._end_call(session)

    def close(self) -> None:
        """End all processes."""
        for waiting in (self._sessions, self._num_running, self._waiting):
            waiting.clear()
        self._envs.close()

    def _execute_next(self, episode: int, session: _Session) -> None:
        if session.env is not None:
            name = session.calls[0]["name"]
            limit = self._max_concurrent.get(name)
            if limit is not None and self._num_running[name] >= limit:
                self._waiting.append(episode)
                return
            session.running = name
            self._num_running[name] += 1
            self._envs.step(session.env, [session.calls[0]])
            return
        session.env = next(self._numbers)
        self._episodes[session.env] = episode
        self._envs.start(session.env, session.seed)

    def _handle(self, event: EnvEvent) -> tuple[int, list[ToolResult]] | None:
        episode = self._episodes[event.episode]
        session = self._sessions[episode]
        if isinstance(event, EpisodeStarted):
            self._execute_next(episode, session)
            return None
        if isinstance(event, ActionsExecuted):
            result, failed = _result(event.steps[0])
        else:
            self._end_env(session)
            result, failed = ToolResult(f"{ERROR}{event.failure.message}", 0.0), True
        self._end_call(session)
        session.calls.popleft()
        session.results.append(result)
        self.num_calls += 1
        self.num_failed += failed
        if session.calls:
            self._execute_next(episode, session)
            return None
        results, session.results = session.results, []
        return episode, results

    def _end_call(self, session: _Session) -> None:
        """Mark the call of a session as ended, and execute the next calls of waiting episodes."""
        if session.running is None:
            return
        self._num_running[session.running] -= 1
        session.running = None
        for episode in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            if episode in self._sessions:
                self._execute_next(episode, self._sessions[episode])

    def _end_env(self, session: _Session) -> None:
        if session.env is not None:
            self._envs.drop(session.env)
            del self._episodes[session.env]
            session.env = None


def _result(step: Step) -> tuple[ToolResult, bool]:
    """Return the result of a call, and whether it is an error message."""
    reward = step.reward if step.info.get("has_reward") else None
    return ToolResult(step.observation.text, reward), bool(step.info.get("failed"))
