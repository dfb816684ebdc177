"""Several engines behind the interface of one, with requests routed among them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from quintet import trace
from quintet.errors import MachineError
from quintet.records import Failure, Generation, Request
from quintet.rollout.engines.engine import Engine
from quintet.rollout.engines.restarting_engine import LostRequest, RestartingEngine, engine_failure, failed_generation
from quintet.rollout.engines.weight_source import WeightSource
from quintet.runtime.calls.remote_interface import STEPS_PER_CALL, EngineAction
from quintet.runtime.engines.request_router import RequestRouter

POLL_SECONDS = 0.05
MAX_REASSIGNMENTS = 2
"""How often a request that a dead engine has lost is submitted again."""


class RoutedEngines:
    """Engines behind the interface of a single one: each request is routed to one of them, see `RequestRouter`.

    Each call of `step` advances all engines that have requests, and ends with the slowest one. So the order of results
    does not depend on timing, and a run remains reproducible. Requests that a dead engine has lost go to another one;
    they generate the same tokens, since these follow from the seed of the request.
    """

    def __init__(self, engines: Sequence[RestartingEngine], max_wait_seconds: float = 300.0) -> None:
        """If all engines are dead, one of them must be available again within `max_wait_seconds`."""
        self._engines = tuple(engines)
        self._max_wait_seconds = max_wait_seconds
        self.weight_version = self._engines[0].weight_version
        self.max_model_len = min(engine.max_model_len for engine in self._engines)
        """Maximum tokens of prompt and response that every engine has room for."""
        self._router = RequestRouter(len(self._engines))
        self._busy: set[int] = set()
        """Engines that may have unfinished requests."""
        self._num_deaths: dict[int, int] = {}
        """How many engines have died with a request, by id."""
        self._failed: list[Generation] = []
        """Requests that are not submitted again."""
        self._dead: set[int] = set()
        """Engines that get no requests until they are built again."""
        self._unplaced: list[Request] = []
        """Requests for which no engine was alive."""
        self._all_dead_since: float | None = None
        self._num_reassigned = 0

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that the requests are routed to; after restarts, the engines that run now."""
        return tuple(engine.current for engine in self._engines)

    @property
    def busy(self) -> bool:
        return bool(self._busy or self._failed or self._unplaced)

    def add_request(self, request: Request) -> None:
        self._check_length(request)
        index = self._router.select(request)
        if index is None:
            self._unplaced.append(request)
            return
        self._engines[index].add_request(request)
        self._router.add(request, index)
        trace.start_request(request.id, requests_track(index), prompt_tokens=len(request.prompt))
        self._busy.add(index)
        self._reassign_lost(index)

    def _check_length(self, request: Request) -> None:
        """
        Raises:
            ValueError: an engine has no room for the prompt and a token.
        """
        if len(request.prompt) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(request.prompt)} tokens, the context {self.max_model_len}")

    def step(self) -> list[Generation]:
        self._revive_dead()
        busy = sorted(self._busy)
        for index in busy:
            self._engines[index].finish_calls()
            self._engines[index].start_step()
            self._update_dead(index)
        for index in busy:
            self._reassign_lost(index)
        steps = STEPS_PER_CALL if len(self._engines) > 1 else 1
        return self._completed(busy, [result for index in busy for result in self._step_engine(index, steps)])

    def _step_engine(self, index: int, steps: int) -> list[Generation]:
        with trace.span("step", engine_track(index)):
            return self._engines[index].step(steps)

    def abort(self, ids: Collection[int]) -> list[Generation]:
        by_engine = self._ids_by_engine(ids)
        self._failed = [generation for generation in self._failed if generation.id not in ids]
        self._unplaced = [request for request in self._unplaced if request.id not in ids]
        indices = sorted(by_engine)
        aborted = [result for index in indices for result in self._engines[index].abort(by_engine[index])]
        return self._completed(indices, aborted, failed=False)

    def _ids_by_engine(self, ids: Collection[int]) -> dict[int, list[int]]:
        by_engine: dict[int, list[int]] = defaultdict(list)
        for number in ids:
            if (index := self._router.engine_of(number)) is not None:
                by_engine[index].append(number)
        return by_engine

    def _completed(
        self, indices: Sequence[int], generations: list[Generation], *, failed: bool = True
    ) -> list[Generation]:
        """Subtract completed requests from their engine's count, and submit those again that the engines have lost;
        return the completed and the `failed` ones."""
        self._count_completed(generations)
        for index in indices:
            self._update_dead(index)
        for index in indices:
            self._reassign_lost(index)
            if not self._engines[index].busy:
                self._busy.discard(index)
        if not failed:
            return generations
        lost, self._failed = self._failed, []
        return generations + lost

    def _count_completed(self, generations: Iterable[Generation]) -> None:
        for generation in generations:
            self._router.complete(generation.id)
            trace.end_request(generation.id, tokens=len(generation.tokens), reason=generation.finish_reason)
            self._num_deaths.pop(generation.id, None)

    def _revive_dead(self) -> None:
        """Build the dead engines that are available again.

        Raises:
            MachineError: all are dead, and none is available for too long.
        """
        for index in sorted(self._dead):
            if self._revive(index):
                self._update_dead(index)
        if len(self._dead) < len(self._engines):
            self._all_dead_since = None
            return
        now = time.monotonic()
        self._all_dead_since = self._all_dead_since or now
        if now - self._all_dead_since > self._max_wait_seconds:
            raise MachineError(
                f"all {len(self._engines)} engines have been dead for {self._max_wait_seconds:g} seconds",
                "see the logs of their ranks in the run directory; rerun the same command to continue from the last "
                "checkpoint",
            )
        time.sleep(POLL_SECONDS)

    def _revive(self, index: int) -> bool:
        """Build a dead engine if that is possible now; return whether it lives."""
        return self._engines[index].revive()

    def _update_dead(self, index: int) -> None:
        """Stop or resume routing requests to an engine that died or was built again."""
        if self._engines[index].is_dead:
            self._dead.add(index)
            self._router.exclude(index)
        elif index in self._dead:
            self._dead.discard(index)
            self._router.include(index)
            requests, self._unplaced = self._unplaced, []
            for request in requests:
                self._add_or_fail(request)

    def _reassign_lost(self, index: int) -> None:
        """Submit the requests of the lost engine `index` to the other engines, or fail requests with which several
        engines have died. They are spread over the engines, since one of them may be the cause of the death.
        """
        lost_requests = self._engines[index].pop_lost()
        if not lost_requests:
            return
        for lost in lost_requests:
            self._router.remove(lost.request.id)
        with self._router.without(index):
            for lost in lost_requests:
                self._reassign(lost)

    def _reassign(self, lost: LostRequest) -> None:
        deaths = self._num_deaths[lost.request.id] = self._num_deaths.get(lost.request.id, 0) + 1
        if deaths > MAX_REASSIGNMENTS:
            self._fail(lost.request, lost.failure)
            return
        self._num_reassigned += 1
        self._add_or_fail(lost.request)

    def _add_or_fail(self, request: Request) -> None:
        """Submit a request that was accepted before; fail it if its engine refuses it."""
        try:
            self.add_request(request)
        except ValueError as error:
            self._fail(request, engine_failure(error))

    def _fail(self, request: Request, failure: Failure) -> None:
        self._num_deaths.pop(request.id, None)
        self._failed.append(failed_generation(request, self.weight_version, failure))

    def load_weights(self, version: int, weights: WeightSource) -> None:
        self.weight_version = version
        self._router.forget_prompts()
        # the engine of rank 0 last: other ranks gather the weights together with it, after they were called to do so
        for index, engine in reversed(list(enumerate(self._engines))):
            with trace.span("load_weights", engine_track(index), version=version):
                engine.load_weights(version, weights)
        weights.finish()
        self._reassign_all_lost()

    def reset_prefix_cache(self) -> None:
        self._router.forget_prompts()
        self._control("reset_prefix_cache")

    def sleep(self) -> None:
        self._control("sleep")

    def wake_up(self) -> None:
        self._control("wake_up")

    def _control(self, action: EngineAction) -> None:
        """Call a method without arguments of each engine."""
        for engine in self._engines:
            getattr(engine, action)()
        self._reassign_all_lost()

    def _reassign_all_lost(self) -> None:
        for index in range(len(self._engines)):
            self._update_dead(index)
        for index in range(len(self._engines)):
            self._reassign_lost(index)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call, summed over the engines."""
        reassigned, self._num_reassigned = self._num_reassigned, 0
        total: dict[str, float] = {"engine/requests_reassigned": reassigned}
        for engine in self._engines:
            for name, value in engine.pop_metrics().items():
                total[name] = total.get(name, 0) + value
        return total


def engine_track(index: int) -> str:
    """Return the track of an engine in traces."""
    return f"engine {index}"


def requests_track(index: int) -> str:
    """Return the track of an engine's requests in traces."""
    return f"requests of engine {index}"
