"""Worker process that runs one episode's env at a time, controlled by JSON lines.

Forked by `quintet.sandbox.forkserver`; an env's prints go to standard error. Requests: `{"open": seed}`,
`{"move": [action, …]}`, `{"close": true}`. It sends `{"ready": true}` or `{"broken": error}` once, then
`{"opened": {…}}`, a `{"step": {…}, "last": …}` per executed action, `{"closed": true}`, or `{"failure": {…}}`.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quintet.config.native.envs import ENVS
from quintet.envs.env import Env
from quintet.envs.factory import env_adapter, env_factory
from quintet.envs.validation import (
    observation_message,
    step_message,
    validate_actions,
    validate_instruction,
    validate_observation,
)
from quintet.envs.vector_env import close_env, episode_actions, execute_actions, failure_from_error
from quintet.sandbox.sandboxed_process import serve
from quintet.sandbox.seccomp import limit_resources

Message = Mapping[str, Any]


def preload() -> None:
    """Load before forking everything that is slow to load."""
    env_adapter()
    # searches the installed packages for entry points
    list(ENVS)


def work(connection: socket.socket, setup: Message) -> None:
    """Serve requests until the connection ends; `setup` has the env's configuration and memory limit."""
    serve(connection, lambda: _EpisodeEnv(_prepare(setup)).execute)


def _prepare(setup: Message) -> Callable[[], Env]:
    if setup["memory_bytes"] is not None:
        limit_resources(setup["memory_bytes"])
    return env_factory(env_adapter().validate_json(json.dumps(setup["env"])))


class _EpisodeEnv:
    """Executes the requests of one episode after another."""

    def __init__(self, build_env: Callable[[], Env]) -> None:
        self._build_env = build_env
        self._env: Env | None = None
        self._where = "start"

    def execute(self, message: Message) -> Iterator[Message]:
        """Yield the replies to a request."""
        try:
            if "open" in message:
                yield self._start(message["open"])
            elif "move" in message:
                yield from self._step(message["move"])
            else:
                self._close()
                yield {"closed": True}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of an env is recorded as data
            failure = failure_from_error(self._where, error)
            yield {"failure": {"where": failure.where, "kind": failure.error_type, "message": failure.message}}

    def _start(self, seed: int) -> Message:
        # the global generators are equal in all processes forked from one
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._where = "start"
        env = self._env = self._build_env()
        instruction, actions = validate_instruction(env.instruction()), validate_actions(env.actions)
        self._where = "reset"
        observation = observation_message(validate_observation(env.reset(seed)))
        actions = episode_actions(env, actions)
        self._where = "step"
        return {"opened": {"instruction": instruction, "actions": actions, "observation": observation}}

    def _step(self, actions: Sequence[Any]) -> Iterator[Message]:
        if self._env is None:
            raise AssertionError("a step before the start of an episode")
        for count, step in enumerate(execute_actions(self._env, actions), 1):
            last = count == len(actions) or step.terminated or step.truncated
            yield {"step": step_message(step), "last": last}

    def _close(self) -> None:
        if self._env is not None:
            close_env(self._env)
            self._env = None
