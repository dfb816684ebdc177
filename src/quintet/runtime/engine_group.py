"""Several engines behind the interface of one, with requests routed among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from quintet.records import Generation, Request
from quintet.rollout.engines.engine import Engine
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.runtime.remote_interface import STEPS_PER_CALL

if TYPE_CHECKING:
    from torch import Tensor


MAX_IMBALANCE = 1.5
"""How many times the requests of the least loaded engine another one may have, to use its cache."""


class RoutedEngines:
    """See `EngineGroup`. A request goes to the engine with the fewest running requests, or to one with about as few
    whose cache has its prompt, which all samples of a group share. The turns of an episode, which have the same id, go
    to the engine of its first turn, whose cache has the earlier turns."""

    def __init__(self, engines: Sequence[RestartingEngine]) -> None:
        self._engines = tuple(engines)
        self.weight_version = self._engines[0].weight_version
        self._engine_by_id: dict[int, int] = {}
        self._engine_by_prompt: dict[int, int] = {}
        """Engine that had a prompt last, by hash."""
        self._continued: set[int] = set()
        """Ids of episodes that will have further requests."""
        self._num_running = [0] * len(self._engines)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """See `EngineGroup.engines`; those that are running now, if some were restarted."""
        return tuple(engine.current for engine in self._engines)

    @property
    def max_model_len(self) -> int:
        return min(engine.max_model_len for engine in self._engines)

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._engines)

    def add_request(self, request: Request) -> None:
        index = self._engine_by_id.get(request.id)
        if index is None:
            index = self._select_engine(hash(request.prompt))
        self._engines[index].add_request(request)
        self._engine_by_id[request.id] = index
        self._num_running[index] += 1
        if request.keep_kv_cache:
            self._continued.add(request.id)
        else:
            self._continued.discard(request.id)

    def _select_engine(self, prompt: int) -> int:
        running = self._num_running
        least_loaded = min(range(len(self._engines)), key=running.__getitem__)
        cached = self._engine_by_prompt.get(prompt, least_loaded)
        is_balanced = running[cached] <= MAX_IMBALANCE * running[least_loaded] + 1
        index = self._engine_by_prompt[prompt] = cached if is_balanced else least_loaded
        return index

    def step(self) -> list[Generation]:
        for engine in self._engines:
            engine.start_step()
        steps = STEPS_PER_CALL if len(self._engines) > 1 else 1
        return self._completed(generation for engine in self._engines for generation in engine.step(steps))

    def abort(self, ids: Collection[int]) -> list[Generation]:
        return self._completed(generation for engine in self._engines for generation in engine.abort(ids))

    def _completed(self, generations: Iterable[Generation]) -> list[Generation]:
        """Subtract completed requests from their engine's count."""
        completed = list(generations)
        for generation in completed:
            index = self._engine_by_id.get(generation.id)
            if index is not None:
                self._num_running[index] -= 1
            if generation.id not in self._continued:
                self._engine_by_id.pop(generation.id, None)
        return completed

    def sync_weights(self, version: int, weights: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self.weight_version = version
        self._engine_by_prompt.clear()
        for engine in self._engines:
            engine.load_weights(version, weights())

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        shared = weights if len(self._engines) == 1 else list(weights)
        self.sync_weights(version, lambda: shared)

    def reset_prefix_cache(self) -> None:
        self._engine_by_prompt.clear()
        for engine in self._engines:
            engine.reset_prefix_cache()

    def sleep(self) -> None:
        for engine in self._engines:
            engine.sleep()

    def wake_up(self) -> None:
        for engine in self._engines:
            engine.wake_up()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, summed over the engines."""
        total: dict[str, float] = {}
        for engine in self._engines:
            for name, value in engine.pop_metrics().items():
                total[name] = total.get(name, 0) + value
        return total
