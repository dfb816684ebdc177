"""Engines that compute beside the controller, in a thread each."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Collection, Iterable

from quintet.records import FinishReason, Generation, Request
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.weight_source import WeightSource


class ThreadedEngine:
    """Finishes all of its requests in each step, which takes `seconds`; the tokens are its number and the request's
    seed."""

    max_model_len = 100

    def __init__(self, number: int = 0, seconds: float = 0.0) -> None:
        self.number, self.seconds = number, seconds
        self.weight_version = 0
        self.requests: dict[int, Request] = {}
        self.loaded: list[tuple[int, dict[str, float]]] = []
        self.step_times: list[tuple[float, float]] = []
        self.load_seconds = 0.0
        self.dies = False
        self.prefix_resets = 0
        self._is_stepping = False
        self._reader, self._writer = socket.socketpair()

    @property
    def busy(self) -> bool:
        return bool(self.requests) or self._is_stepping

    def add_request(self, request: Request) -> None:
        self._check_idle()
        self.requests[request.id] = request

    def finish_calls(self) -> None:
        self._check_idle()

    def start_step(self) -> None:
        self._check_idle()
        self._is_stepping = True
        threading.Thread(target=self._compute, daemon=True).start()

    def _compute(self) -> None:
        started = time.monotonic()
        time.sleep(self.seconds)
        self.step_times.append((started, time.monotonic()))
        self._writer.send(b"1")

    def fileno(self) -> int:
        return self._reader.fileno()

    def step(self) -> list[Generation]:
        assert self._is_stepping, "the step was not started"
        self._reader.recv(1)
        self._is_stepping = False
        if self.dies:
            self.requests.clear()
            raise EngineError(f"engine {self.number} died")
        return self._finish(list(self.requests), FinishReason.STOP)

    def _finish(self, ids: Iterable[int], reason: FinishReason) -> list[Generation]:
        requests = [self.requests.pop(each) for each in ids if each in self.requests]
        return [
            Generation(request.id, (self.number, request.seed), (-0.5, -0.5), reason, self.weight_version)
            for request in requests
        ]

    def _check_idle(self) -> None:
        if self._is_stepping:
            raise AssertionError("an engine was called during its step")

    def abort(self, ids: Collection[int]) -> list[Generation]:
        self._check_idle()
        return self._finish(ids, FinishReason.ABORT)

    def load_weights(self, version: int, weights: WeightSource) -> None:
        self._check_idle()
        time.sleep(self.load_seconds)
        self.weight_version = version
        self.loaded.append((version, {name: float(value) for name, value in weights.tensors()}))

    def reset_prefix_cache(self) -> None:
        self._check_idle()
        self.prefix_resets += 1

    def sleep(self) -> None:
        self._check_idle()

    def wake_up(self) -> None:
        self._check_idle()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
