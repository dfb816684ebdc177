"""Channels between engines and environments: observations that wait for an engine, and actions that wait for their
environment.

Both run in the thread of the agent loop, so nothing blocks here: environments are not stepped while the queue of
observations is full, and engines are not while that of actions is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.envs.vector_env import EnvEvent, VectorEnv
from quintet.records import FinishReason, Generation, Request
from quintet.rollout.channel import Channel
from quintet.rollout.engines.engine import RequestEngine

Actions = tuple[int, Sequence[Any]]
"""An episode, and the actions of its last response."""


class ObservationQueue:
    """`RequestEngine` behind a queue of requests, one per observation: they wait here for an engine, not in it.

    Responses whose actions find no room stay here, too, and the engine is not stepped until they do.
    """

    def __init__(self, engine: RequestEngine, slots: int, channel: Channel[Request], actions: Channel[Actions]) -> None:
        """`slots` is how many requests the engine runs at the same time; without a limit of `channel` it gets all."""
        self._engine = engine
        self._slots: float = slots if channel.size else math.inf
        self._channel, self._actions = channel, actions
        self._submitted: set[int] = set()
        """Requests that the engine has."""
        self._responses: deque[Generation] = deque()
        """Responses that have not been returned."""

    @property
    def busy(self) -> bool:
        """Whether a step does anything: not while the queue of actions is full."""
        has_work = bool(self._responses or len(self._channel)) or self._engine.busy
        return has_work and not self._actions.is_full

    def add_request(self, request: Request) -> None:
        if self._channel.is_full:
            # the response to the request before had no action, so that it has not left the engines to the others
            self.submit_oldest()
        self._channel.put_nowait(request)
        self._submit()

    def _submit(self) -> None:
        while len(self._channel) and len(self._submitted) < self._slots:
            self.submit_oldest()

    def submit_oldest(self) -> None:
        """Give the engine the oldest request, whether it has a free slot or not."""
        request = self._channel.get(0)
        if request is None:
            return
        try:
            self._engine.add_request(request)
            self._submitted.add(request.id)
        except ValueError:
            # the prompt is longer than the engine's context
            self._responses.append(Generation(request.id, (), (), FinishReason.CONTEXT, 0))

    def step(self) -> list[Generation]:
        if not self._responses:
            self._submit()
            self._responses.extend(self._engine.step())
            self._submitted.difference_update(generation.id for generation in self._responses)
            self._submit()
        count = min(self._actions.room, len(self._responses))
        return [self._responses.popleft() for _ in range(int(count))]

    def abort(self, ids: Collection[int]) -> list[Generation]:
        self._channel.remove(lambda request: request.id in ids)
        aborted = [generation for generation in self._responses if generation.id in ids]
        self._responses = deque(generation for generation in self._responses if generation.id not in ids)
        self._submitted.difference_update(ids)
        return aborted + self._engine.abort(ids)

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()


class ActionQueue:
    """`VectorEnv` behind a queue of actions. While the queue of observations is full, no further environment is started
    or stepped, and those that have been keep their observations."""

    def __init__(
        self, envs: VectorEnv, engine: ObservationQueue, channel: Channel[Actions], observations: Channel[Request]
    ) -> None:
        self._envs, self._engine = envs, engine
        self._channel, self._observations = channel, observations
        self._starts: deque[tuple[int, int]] = deque()
        """Episodes that have not been started, and their seeds."""
        self._events: deque[EnvEvent] = deque()
        """Events that have not been returned."""
        self._idle_since = self._blocked_since = math.inf
        """Since when environments have waited for actions, and for room; seconds of the monotonic clock."""

    @property
    def seconds(self) -> float:
        return self._envs.seconds

    def start(self, episode: int, seed: int) -> None:
        self._idle_since = math.inf
        self._starts.append((episode, seed))
        self._start_requests(limited=False)

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        self._channel.put_nowait((episode, actions))
        self._start_requests(limited=False)

    def _start_requests(self, *, limited: bool = True) -> None:
        """Start as many requests as there is room for observations; where there is a limit, only if `limited`."""
        room = 0 if self._events or not (limited or not self._observations.size) else self._observations.room
        while room > 0 and (len(self._channel) or self._starts):
            room -= 1
            if (entry := self._channel.get(0)) is not None:
                self._envs.step(*entry)
            else:
                self._envs.start(*self._starts.popleft())

    def drop(self, episode: int) -> None:
        self._channel.remove(lambda entry: entry[0] == episode)
        self._starts = deque(entry for entry in self._starts if entry[0] != episode)
        self._events = deque(event for event in self._events if event.episode != episode)
        self._envs.drop(episode)

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        """See `VectorEnv.poll`. The caller only waits if the engines do: one of the observations then makes room."""
        started = time.monotonic()
        engines_are_blocked = self._channel.is_full
        self._count_waiting(started)
        if wait and self._observations.is_full:
            self._engine.submit_oldest()
        self._start_requests()
        self._events.extend(self._envs.poll(wait=wait and not self._events, seconds=seconds))
        count = min(self._observations.room, len(self._events))
        events = [self._events.popleft() for _ in range(int(count))]
        ended = time.monotonic()
        if wait:
            self._channel.add_waiting(put_seconds=(ended - started) * engines_are_blocked)
            self._observations.add_waiting(get_seconds=(ended - started) * (not engines_are_blocked))
        self._idle_since = math.inf if self.pending else ended
        self._blocked_since = ended if self.pending and self._observations.is_full else math.inf
        return events

    def _count_waiting(self, now: float) -> None:
        """Count the time since the last call in which environments have waited."""
        self._channel.add_waiting(get_seconds=max(0.0, now - self._idle_since))
        self._observations.add_waiting(put_seconds=max(0.0, now - self._blocked_since))

    @property
    def pending(self) -> bool:
        return self._envs.pending or bool(self._events or self._starts or len(self._channel))

    def pop_metrics(self) -> Mapping[str, float]:
        """See `VectorEnv.pop_metrics`; with those of the channels."""
        return {**self._envs.pop_metrics(), **self._observations.pop_metrics(), **self._channel.pop_metrics()}

    def close(self) -> None:
        self._starts.clear()
        self._events.clear()
        self._envs.close()


def with_turn_channels(
    config: Experiment, engine: RequestEngine, envs: VectorEnv, num_engines: int = 1
) -> tuple[RequestEngine, VectorEnv]:
    """Return engine and environments behind the channels that the configuration names or limits; without any, as they
    are."""
    placement = config.placement
    if placement.envs.channel.is_default and placement.rollout.action_channel.is_default:
        return engine, envs
    observations: Channel[Request] = Channel.from_config(placement.envs.channel)
    actions: Channel[Actions] = Channel.from_config(placement.rollout.action_channel)
    queue = ObservationQueue(engine, num_engines * config.rollout.max_concurrent, observations, actions)
    return queue, ActionQueue(envs, queue, actions, observations)
