"""The engine of a rank, called by the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quintet.config.native.experiment import Experiment
from quintet.config.plan.process_layout import process_layout
from quintet.errors import ConfigError
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine, take_steps
from quintet.rollout.engines.restarting_engine import FATAL_ERRORS, engine_failure
from quintet.rollout.engines.weight_source import TensorWeights, WeightSource
from quintet.rollout.engines.weight_verification import read_weights
from quintet.runtime.engines import engine_builder_of_rank, load_policy_tokenizer, ranks_per_engine
from quintet.runtime.groups import PolicyGroup
from quintet.runtime.remote_interface import STEPS_PER_CALL, EngineAction, EngineReport, EngineWorker
from quintet.runtime.weight_sources import shared_module
from quintet.training.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from torch import Tensor


class EngineWorkerOfRank(EngineWorker, Protocol):
    """`EngineWorker` of one rank."""

    @property
    def max_model_len(self) -> int:
        """Context in tokens; 0 without an engine."""

    def close(self) -> None:
        """Release the engine; a dead one may fail to close."""


class PolicyOfRank(PolicyGroup, Protocol):
    """The policy on one rank, trained or frozen."""

    @property
    def ranks(self) -> RankGroup:
        """The rank among those with the policy."""


class RankWithoutEngine:
    """`EngineWorker` of a rank whose device belongs to the engine of another rank."""

    max_model_len = 0

    def __init__(self, learners: PolicyOfRank) -> None:
        self._learners = learners

    def step(self, requests: Mapping[str, Sequence[Request]]) -> EngineReport | None:
        return None

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        return None

    def load_weights(self, version: int, ranks: Sequence[int]) -> EngineReport | None:
        gather_rest(self._learners, self._learners.actor.weights())
        return None

    def control(self, action: EngineAction) -> EngineReport | None:
        return None

    def rebuild(self, ranks: Sequence[int]) -> EngineReport | None:
        return None

    def close(self) -> None:
        """There is nothing to release."""


def gather_rest(learners: PolicyOfRank, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Take part in gathering the remaining tensors, as all ranks must."""
    if not learners.has_full_weights:
        for _ in weights:
            pass


class EngineRunner:
    """An engine whose death is reported instead of raised."""

    def __init__(self, build_engine: Callable[[], Engine]) -> None:
        self._build_engine = build_engine
        self._engine = build_engine()
        self._failure: Failure | None = None

    @property
    def max_model_len(self) -> int:
        """Context in tokens."""
        return self._engine.max_model_len

    def step(self, requests: Sequence[Request]) -> EngineReport | None:
        """Queue requests, and take up to `STEPS_PER_CALL` steps while the engine is busy."""

        def advance() -> list[Generation]:
            refused = [generation for generation in map(self._add_request, requests) if generation is not None]
            return [*refused, *take_steps(self._engine, STEPS_PER_CALL)]

        return self._report(advance)

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        """Abort requests; see `Engine.abort`."""
        return self._report(lambda: self._engine.abort(ids))

    def load_weights(self, version: int, weights: WeightSource) -> EngineReport | None:
        """Load new weights; see `Engine.load_weights`."""
        return self._report(lambda: self._engine.load_weights(version, weights))

    def weights(self) -> dict[str, Tensor] | None:
        """Return the engine's weights; None if they cannot be read."""
        return read_weights(self._engine)

    def control(self, action: EngineAction) -> EngineReport | None:
        """Call a method of the engine without arguments."""
        return self._report(getattr(self._engine, action))

    def rebuild(self) -> EngineReport | None:
        """Replace the engine by a new one, which has the initial weights."""
        self.close()
        self._failure = None

        def build() -> None:
            self._engine = self._build_engine()

        return self._report(build)

    def close(self) -> None:
        """Release the engine; a dead one may fail to close."""
        try:
            self._engine.close()
        except (*FATAL_ERRORS, OSError):
            return

    def _add_request(self, request: Request) -> Generation | None:
        """Queue a request; return a failed generation if the engine refuses it."""
        try:
            self._engine.add_request(request)
        except (ValueError, ConfigError) as error:
            version = self._engine.weight_version
            return Generation(request.id, (), (), FinishReason.FAILED, version, failure=engine_failure(error))
        return None

    def _report(self, call: Callable[[], Sequence[Generation] | None]) -> EngineReport | None:
        """Return the generations of a call, or why the engine died of it."""
        generations: Sequence[Generation] | None = None
        if self._failure is None:
            try:
                generations = call()
            except FATAL_ERRORS as error:
                self._failure = engine_failure(error)
        if generations or self._failure is not None:
            return EngineReport(tuple(generations or ()), self._failure)
        return None


class LocalEngineWorker:
    """See `EngineWorker`."""

    def __init__(self, build_engine: Callable[[], Engine], learners: PolicyOfRank) -> None:
        self._runner = EngineRunner(build_engine)
        self._learners = learners

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    @property
    def _rank(self) -> int:
        return self._learners.ranks.rank

    def step(self, requests: Mapping[str, Sequence[Request]]) -> EngineReport | None:
        return self._runner.step(requests[str(self._rank)])

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        return self._runner.abort(ids)

    def load_weights(self, version: int, ranks: Sequence[int]) -> EngineReport | None:
        weights = self._learners.actor.weights()
        source = TensorWeights(weights, shared_module(self._learners))
        report = self._runner.load_weights(version, source) if self._rank in ranks else None
        gather_rest(self._learners, weights)
        return report

    def control(self, action: EngineAction) -> EngineReport | None:
        return self._runner.control(action)

    def rebuild(self, ranks: Sequence[int]) -> EngineReport | None:
        return self._runner.rebuild() if self._rank in ranks else None

    def close(self) -> None:
        """See `EngineRunner.close`."""
        self._runner.close()


def build_engine_worker(config: Experiment, policy: Path, learners: PolicyOfRank) -> EngineWorkerOfRank:
    """Build this rank's engine with the model at `policy`, if it has one.

    Raises:
        ConfigError: the engine is unknown, or the KV cache of one request does not fit.
    """
    ranks, size, layout = learners.ranks, ranks_per_engine(config) or learners.ranks.size, process_layout(config)
    is_first = ranks.rank % size == 0 and ranks.rank + size <= ranks.size
    if not is_first or not layout.has_engine(layout.learner_ranks[ranks.rank]):
        return RankWithoutEngine(learners)
    tokenizer = load_policy_tokenizer(config, policy, learners.actor.model.config.get_text_config().vocab_size)
    return LocalEngineWorker(engine_builder_of_rank(config, policy, learners, tokenizer), learners)
