"""Worker process of an environment service: the envs of many sessions, one request after another, in turns.

Forked by `quintet.sandbox.forkserver`. The server sends batches of requests as JSON, the worker one result per request,
with the number of its batch, in the order of the batch and in the format of the client, so that the server passes
results on as they are. The request that is being executed is in shared memory: if the process dies or hangs, the server
knows which one did it.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from quintet.config.native.envs import ENVS, EnvConfig
from quintet.envs.env import Env
from quintet.envs.event_messages import event_message
from quintet.envs.factory import env_adapter, env_factory
from quintet.envs.service.payload import Format, encode_payload, image_message, value_from_message
from quintet.envs.simulators.robot_process_main import StageSimulators, simulator_config
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted, LocalVectorEnv
from quintet.records import Failure
from quintet.reward_sum import sum_rewards
from quintet.runtime.env_service.batch_turns import BatchReceiver, BatchTurns, ReceivedBatch
from quintet.runtime.env_service.vagen_episode import VagenEpisode
from quintet.sandbox.seccomp import limit_resources

RESULT_HEAD = struct.Struct(">IQ")
"""Before a result: its size, and the number of its batch."""
PROGRESS = struct.Struct("qqq")
"""Number of executed requests; of the one that is being executed, the number of its batch, or 0, and its index."""
FLUSH_BYTES, FLUSH_SECONDS = 64 << 10, 0.02
"""Size and age at which results are sent before the end of a batch."""
UNKNOWN = {"lost": "the server has no such environment; it was closed, timed out, or its worker process was lost"}


def preload() -> None:
    """Load before forking everything that is slow to load."""
    env_adapter()
    list(ENVS)


def work(connection: socket.socket, setup: Mapping[str, Any]) -> None:
    """Serve batches until the connection ends; `setup` has the memory limit. The shared memory arrives first."""
    _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
    progress = mmap.mmap(descriptor, PROGRESS.size)
    os.close(descriptor)
    if setup["memory_bytes"] is not None:
        limit_resources(setup["memory_bytes"])
    worker, num_executed = _ServedEnvs(), 0
    output, turns = _Output(connection), BatchTurns()

    def execute(batch: ReceivedBatch) -> None:
        nonlocal num_executed
        PROGRESS.pack_into(progress, 0, num_executed, batch.number, batch.index)
        output.add(batch.number, worker.result(batch))
        num_executed += 1
        PROGRESS.pack_into(progress, 0, num_executed, 0, 0)
        if batch.is_done:
            output.flush()

    receiver = BatchReceiver(connection, turns)
    while receiver.receive():
        turns.execute_next(execute)


class _Output:
    """Results that are sent together."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self._flushed_at = time.monotonic()

    def add(self, batch: int, result: bytes) -> None:
        self._buffer += RESULT_HEAD.pack(len(result), batch) + result
        if len(self._buffer) >= FLUSH_BYTES or time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._connection.sendall(self._buffer)
        self._buffer.clear()
        self._flushed_at = time.monotonic()


@lru_cache(maxsize=64)
def _parse_config(config: str) -> EnvConfig:
    return env_adapter().validate_json(config)


@lru_cache(maxsize=64)
def _factory(config: str) -> Callable[[], Env]:
    """Return the factory of the env with this configuration, JSON."""
    return env_factory(_parse_config(config))


class _Episode:
    """An env with its last observation and its reward so far."""

    def __init__(self, build_env: Callable[[], Env]) -> None:
        self._envs = LocalVectorEnv(build_env)
        self.instruction = ""
        self.reward = 0.0

    def start(self, seed: int) -> EnvEvent:
        # the global generators are equal in all processes forked from one
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._envs.start(0, seed)
        event = self._poll()
        if isinstance(event, EpisodeStarted):
            self.instruction = event.instruction
        return event

    def step(self, actions: Sequence[Any]) -> EnvEvent:
        try:
            decoded = [value_from_message(action) for action in actions]
        except (KeyError, TypeError, ValueError) as error:
            return EpisodeFailed(0, Failure("step", "InvalidAction", str(error)))
        self._envs.step(0, decoded)
        event = self._poll()
        if isinstance(event, ActionsExecuted):
            self.reward = sum_rewards((self.reward, *(step.reward for step in event.steps)))
        return event

    def _poll(self) -> EnvEvent:
        (event,) = self._envs.poll()
        return event

    def close(self) -> None:
        self._envs.close()


class _ServedEnvs:
    """Envs by number."""

    def __init__(self) -> None:
        self._episodes: dict[int, _Episode | VagenEpisode] = {}
        self._robots: dict[int, StageSimulators] = {}

    def result(self, batch: ReceivedBatch) -> bytes:
        """Return the encoded result of the next request. One beyond its maximum size fails, and closes its env."""
        number, method, config, *arguments = batch.take()
        result = self._execute(number, method, batch.configs[config], arguments, batch.form)
        if batch.result_bytes + len(result) > batch.max_bytes:
            self._close(number)
            message = f"{len(result)} bytes; all results of the request may have {batch.max_bytes}"
            result = encode_payload({"failure": [method, "ResultTooLarge", message]}, batch.form)
        batch.result_bytes += len(result)
        return result

    def _execute(self, number: int, method: str, config: str | None, arguments: Sequence[Any], form: Format) -> bytes:
        try:
            return encode_payload(self._result(number, method, config or "", arguments), form)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of an env is recorded as data
            return encode_payload({"failure": [method, type(error).__name__, str(error)[:2000]]}, form)

    def _result(self, number: int, method: str, config: str, arguments: Sequence[Any]) -> Mapping[str, Any]:
        if method == "close":
            return self._close(number)
        if method in ("robots_start", "robots_step"):
            return self._call_robots(number, config, *arguments, is_start=method == "robots_start")
        if method == "start":
            (seed,) = arguments
            self._close(number)
            self._episodes[number] = started = _Episode(_factory(config))
            return event_message(started.start(seed), image_message)
        if method == "vagen_create":
            (vagen,) = arguments
            scoring = getattr(_parse_config(config), "relation_scoring", None)
            self._episodes[number] = VagenEpisode(_factory(config), vagen, scoring)
            return {}
        episode = self._episodes.get(number)
        if episode is None:
            return UNKNOWN
        return _call(episode, method, arguments)

    def _call_robots(
        self, number: int, config: str, request: Mapping[str, Any], *, is_start: bool
    ) -> Mapping[str, Any]:
        if number not in self._robots:
            if not is_start:
                return UNKNOWN
            self._robots[number] = StageSimulators(simulator_config(config), [request["num_robots"]])
        return self._robots[number].execute({"stage": 0, **value_from_message(request)})

    def _close(self, number: int) -> Mapping[str, Any]:
        if number in self._robots:
            self._robots.pop(number).close()
        episode = self._episodes.pop(number, None)
        if episode is not None:
            with suppress(Exception):  # the episode is over
                episode.close()
        return {"closed": True}


def _call(episode: _Episode | VagenEpisode, method: str, arguments: Sequence[Any]) -> Mapping[str, Any]:
    if isinstance(episode, VagenEpisode):
        return episode.call(method, arguments)
    if method == "step":
        return event_message(episode.step(*arguments), image_message)
    return {"reward": episode.reward} if method == "reward" else {"system_prompt": episode.instruction}
