"""Engines and environments that only sleep, for benchmarks of the controller."""

from __future__ import annotations

import ctypes
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeStarted
from quintet.records import FinishReason, Generation, Observation, Request, Step
from quintet.rollout.engines.weight_source import WeightSource

STEPS_PER_CALL = 4
"""Decode steps between two exchanges with the controller, as for other engines."""
CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_CLOEXEC, TFD_TIMER_ABSTIME = 1, os.O_NONBLOCK, os.O_CLOEXEC, 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec` of Linux."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Timer:
    """A descriptor that becomes readable at a time of `time.monotonic`, without a thread."""

    def __init__(self) -> None:
        self.fd = _LIBC.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)

    def set(self, deadline: float) -> None:
        nanoseconds, seconds = math.modf(deadline)
        spec = _TimerSpec(0, 0, int(seconds), int(nanoseconds * 1e9))
        _LIBC.timerfd_settime(self.fd, TFD_TIMER_ABSTIME, ctypes.byref(spec), None)


@dataclass(slots=True)
class _Running:
    request: Request
    first_step: int
    version: int
    version_changes: list[tuple[int, int]] = field(default_factory=list)


class SleepingEngine:
    """Samples one token per decode step of `seconds` for each of up to `slots` requests; `response` returns the tokens
    of a request. Its process would compute; here a timer expires."""

    max_model_len = 1 << 30

    def __init__(self, seconds: float, slots: int, response: Callable[[Request], tuple[int, ...]]) -> None:
        self._seconds, self._slots, self._response = seconds, slots, response
        self._timer = Timer()
        self._deadline: float | None = None
        self._num_steps = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[int, int]] = []
        self.weight_version = 0
        self.load_seconds = 0.0
        self.busy_times: list[tuple[float, float, int]] = []
        """Start, end and weight version of each call."""

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting or self._deadline)

    def add_request(self, request: Request) -> None:
        self._waiting.append(request)

    def start_step(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            self._running[request.id] = _Running(request, self._num_steps, self.weight_version)
            heappush(self._ends, (self._num_steps + len(self._response(request)), request.id))
        now = time.monotonic()
        self._deadline = now + STEPS_PER_CALL * self._seconds
        self._timer.set(self._deadline)
        self.busy_times.append((now, self._deadline, self.weight_version))

    def fileno(self) -> int:
        return self._timer.fd

    def step(self) -> list[Generation]:
        if self._deadline is None:
            return []
        if (left := self._deadline - time.monotonic()) > 0:
            time.sleep(left)
        self._deadline = None
        os.read(self._timer.fd, 8)
        self._num_steps += STEPS_PER_CALL
        ended = []
        while self._ends and self._ends[0][0] <= self._num_steps:
            number = heappop(self._ends)[1]
            if number in self._running:
                ended.append(self._generation(self._running.pop(number), FinishReason.STOP))
        return ended

    def _generation(self, running: _Running, reason: FinishReason) -> Generation:
        tokens = self._response(running.request) if reason is FinishReason.STOP else ()
        changes = tuple(running.version_changes)
        return Generation(running.request.id, tokens, (-1.0,) * len(tokens), reason, running.version, changes)

    def abort(self, ids: Collection[int]) -> list[Generation]:
        aborted = [self._running.pop(number) for number in ids if number in self._running]
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        return [self._generation(running, FinishReason.ABORT) for running in aborted]

    def load_weights(self, version: int, weights: WeightSource) -> None:
        time.sleep(self.load_seconds)
        self.weight_version = version
        for running in self._running.values():
            running.version_changes.append((self._num_steps - running.first_step, version))

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    def close(self) -> None:
        os.close(self._timer.fd)


class SleepingEnvs:
    """Environments in other processes, whose steps take `seconds` each; episodes do not end by themselves."""

    def __init__(self, seconds: float) -> None:
        self.seconds = 0.0
        self._delay = seconds
        self._due: deque[tuple[float, EnvEvent]] = deque()
        self._observation = Observation(" P _ O _\n _ _ G _\n")

    def start(self, episode: int, seed: int) -> None:
        event = EpisodeStarted(episode, "Walk to the goal.", ("Left", "Down", "Right", "Up"), self._observation)
        self._due.append((time.monotonic(), event))

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        steps = tuple(Step(self._observation, 0.0, terminated=False, truncated=False, info={}) for _ in actions)
        self._due.append((time.monotonic() + self._delay, ActionsExecuted(episode, steps)))

    def drop(self, episode: int) -> None:
        """Its event is ignored."""

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        if wait and self._due:
            time.sleep(max(0.0, self._due[0][0] - time.monotonic()))
        events, now = [], time.monotonic()
        while self._due and self._due[0][0] <= now:
            events.append(self._due.popleft()[1])
        return events

    @property
    def pending(self) -> bool:
        return bool(self._due)

    def pop_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        """There are no processes."""


def lognormal_length(seed: int, median: int, sigma: float, maximum: int) -> int:
    """Return the length of a response, tokens: log-normal, at least 16 and at most `maximum`."""
    length = median * math.exp(sigma * random.Random(seed).gauss(0.0, 1.0))
    return min(maximum, max(16, round(length)))
