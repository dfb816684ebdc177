"""Vector env in worker processes: an env that raises, hangs, dies or returns invalid output only costs its own episode.

The processes are forked from a fork server that has imported the env, and run one episode after another. A process that
exceeds a time limit is killed with all its descendants. Nothing blocks unless asked to: the agent loop polls between
the decode steps of an engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quintet.config.native.envs import ENVS, CustomEnvConfig, EnvProcessesConfig, InteractiveEnvSection
from quintet.envs.env_process import EnvProcess
from quintet.envs.vector_env import EnvEvent, EpisodeFailed
from quintet.errors import ConfigError, MachineError
from quintet.records import Failure
from quintet.sandbox.worker_processes import MAX_FAILED_STARTS, ProcessEnd, WorkerProcesses

WORKER = "quintet.envs.env_process_main"


class SubprocessVectorEnv:
    """See `VectorEnv`. The processes end with the run, however the run ends."""

    def __init__(self, config: InteractiveEnvSection, limits: EnvProcessesConfig) -> None:
        self.seconds = 0.0
        self._config, self._limits = config, limits
        memory = None if limits.memory_gib is None else int(limits.memory_gib * (1 << 30))
        self._setup = {"env": config.model_dump(mode="json"), "memory_bytes": memory}
        self._processes = WorkerProcesses(f"{WORKER}:work", self._receive, self._process_ended, self._server_died)
        self._process_by_episode: dict[int, EnvProcess] = {}
        self._queue: deque[tuple[int, int]] = deque()
        self._events: list[EnvEvent] = []
        self._pending: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._start_failure: Failure | None = None

    def start(self, episode: int, seed: int) -> None:
        self._pending.add(episode)
        self._queue.append((episode, seed))

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        started = time.perf_counter()
        if episode in self._failures:
            self._events.append(EpisodeFailed(episode, self._failures.pop(episode)))
        else:
            self._pending.add(episode)
            self._process_by_episode[episode].step(actions)
        self.seconds += time.perf_counter() - started

    def drop(self, episode: int) -> None:
        """See `VectorEnv.drop`. The process is kept if it has no request in progress, and killed otherwise."""
        started = time.perf_counter()
        self._pending.discard(episode)
        self._failures.pop(episode, None)
        if self._events:
            self._events = [event for event in self._events if event.episode != episode]
        process = self._process_by_episode.pop(episode, None)
        if process is None:
            self._queue = deque(entry for entry in self._queue if entry[0] != episode)
        elif process.waits_for_policy:
            process.close_episode()
        else:
            self._processes.kill(process)
        self.seconds += time.perf_counter() - started

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        started = time.perf_counter()
        if self._processes or self._queue:
            self._process_io(0.0)
        while wait and self._pending and not self._events:
            self._process_io(math.inf if seconds is None else seconds)
            wait = seconds is None
        events, self._events = self._events, []
        self.seconds += time.perf_counter() - started
        return events

    @property
    def pending(self) -> bool:
        return bool(self._pending or self._events)

    def pop_metrics(self) -> Mapping[str, float]:
        return {}

    def check(self) -> None:
        """Start a process before there is an episode for it.

        Raises:
            ConfigError: the process fails because the env cannot be loaded.
            MachineError: no process can be started.
        """
        while self._start_failure is None and not any(process.ready for process in self._processes):
            if not self._processes:
                self._fork()
            self._process_io(math.inf)
        if self._start_failure is not None:
            failure, self._start_failure = self._start_failure, None
            message = (
                failure.message if failure.error_type == "ConfigError" else f"{failure.error_type}: {failure.message}"
            )
            field = "path" if isinstance(self._config, CustomEnvConfig) else "name"
            raise ConfigError(message, key=f"env.{field}", value=getattr(self._config, field))

    def close(self) -> None:
        self._processes.close()
        for episodes in (self._process_by_episode, self._queue, self._pending, self._events, self._failures):
            episodes.clear()

    # ---- receiving

    def _process_io(self, seconds: float) -> None:
        """Handle arrived results, waiting up to `seconds` for one, and start queued episodes."""
        self._assign_queued()
        self._processes.wait(seconds)
        self._assign_queued()

    def _receive(self, process: EnvProcess) -> None:
        for event in process.receive():
            if isinstance(event, Failure):
                self._fail(process, event)
                return
            self._pending.discard(event.episode)
            self._events.append(event)
        if process.ready:
            self._processes.mark_ready(process)

    def _process_ended(self, process: EnvProcess, end: ProcessEnd) -> None:
        """Fail the episode of a process; an episode that had not begun when the fork server died is queued."""
        if end.with_server and not process.ready and process.episode is not None:
            self._queue.append((process.episode, process.seed))
            self._process_by_episode.pop(process.episode)
        elif end.timed_out:
            self._fail(process, process.timeout_failure())
        else:
            self._fail(process, Failure(process.where, "ProcessDied", end.describe("env processes")))

    def _server_died(self) -> None:
        """
        Raises:
            MachineError: the last fork servers died, too, before any worker was ready.
        """
        if self._processes.num_failed_servers >= MAX_FAILED_STARTS:
            raise MachineError("cannot start processes for envs", "see their output above")

    # ---- starting

    def _assign_queued(self) -> None:
        """Start queued episodes as far as there are processes."""
        idle = [p for p in self._processes if p.idle and not self._is_used_up(p)] if self._queue else []
        while self._queue:
            process = idle.pop() if idle else self._fork()
            if process is None:
                return
            episode, seed = self._queue.popleft()
            self._process_by_episode[episode] = process
            process.start_episode(episode, seed)

    def _is_used_up(self, process: EnvProcess) -> bool:
        limit = self._limits.episodes_per_process
        return limit is not None and process.num_episodes >= limit

    def _fork(self) -> EnvProcess | None:
        """Fork a process if the limit allows one more, if need be in place of a used-up one."""
        if len(self._processes) >= self._limits.max_processes:
            used_up = next((p for p in self._processes if p.idle and self._is_used_up(p)), None)
            if used_up is None:
                return None
            self._processes.kill(used_up)
        modules = (WORKER, _env_module(self._config))
        create = partial(EnvProcess, limits=self._limits, env=self._config.name)
        return self._processes.fork(create, self._setup, modules)

    # ---- ending

    def _fail(self, process: EnvProcess, failure: Failure) -> None:
        """Kill a failed process and record the failure of its episode."""
        self._processes.kill(process)
        episode = process.episode
        if episode is None:
            self._start_failure = self._start_failure or (None if process.ready else failure)
            return
        self._process_by_episode.pop(episode, None)
        if episode in self._pending:
            self._pending.discard(episode)
            self._events.append(EpisodeFailed(episode, failure))
        else:
            # the policy is generating: report the failure at the next step
            self._failures[episode] = failure


def _env_module(config: InteractiveEnvSection) -> str:
    """Return the module or file of an env."""
    if isinstance(config, CustomEnvConfig):
        return config.path
    target = ENVS.get(config.name).target
    return target.partition(":")[0] if isinstance(target, str) else target.__module__
