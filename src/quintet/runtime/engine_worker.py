"""The engine of a rank, called by the controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine, take_steps
from quintet.rollout.engines.restarting_engine import FATAL_ERRORS, engine_failure
from quintet.runtime.engines import load_policy_tokenizer, local_engine_builder
from quintet.runtime.local_learners import LocalLearners
from quintet.runtime.remote_interface import STEPS_PER_CALL, EngineAction, EngineReport


class LocalEngineWorker:
    """See `EngineWorker`."""

    def __init__(self, build_engine: Callable[[], Engine], learners: LocalLearners) -> None:
        self._build_engine = build_engine
        self._learners = learners
        self._engine = build_engine()
        self._version: int | None = None
        """Version of the engine's weights; None for the initial ones."""
        self._failure: Failure | None = None

    @classmethod
    def build(cls, config: Experiment, policy: Path, learners: LocalLearners) -> LocalEngineWorker:
        """Build the engine with the model at `policy`.

        Raises:
            ConfigError: the engine is unknown, or the KV cache of one request does not fit.
        """
        tokenizer = load_policy_tokenizer(config, policy, learners.actor.model.config.vocab_size)
        return cls(local_engine_builder(config, policy, learners, tokenizer), learners)

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def step(self, requests: Sequence[Sequence[Request]]) -> EngineReport | None:
        refused = [each for each in map(self._add_request, requests[self._learners.ranks.rank]) if each is not None]
        return self._report(lambda: [*refused, *take_steps(self._engine, STEPS_PER_CALL)])

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        return self._report(lambda: self._engine.abort(ids))

    def load_weights(self, version: int) -> EngineReport | None:
        weights = self._learners.actor.weights()
        report = None
        if version != self._version:
            report = self._report(lambda: self._engine.load_weights(version, weights))
        if not self._learners.has_full_weights:
            for _ in weights:
                pass  # all ranks gather every tensor
        self._version = version
        return report

    def control(self, action: EngineAction) -> EngineReport | None:
        return self._report(getattr(self._engine, action))

    def rebuild(self, ranks: Sequence[int]) -> EngineReport | None:
        if self._learners.ranks.rank not in ranks:
            return None
        self.close()
        self._failure = self._version = None

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
        except ValueError as error:
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
