"""The engine of a standalone worker, called by the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.native.experiment import Experiment
from quintet.records import Request
from quintet.rollout.engines.shared_weights import SharedWeightsReader, StagedTensors
from quintet.runtime.engine_worker import EngineRunner
from quintet.runtime.engines import load_engine_model, load_policy_tokenizer, local_engine_builder
from quintet.runtime.process_settings import configure_process
from quintet.runtime.remote_interface import EngineAction, EngineReport

if TYPE_CHECKING:
    from torch import Tensor


class LocalStandaloneEngine:
    """See `StandaloneEngineWorker`."""

    def __init__(self) -> None:
        self._runner: EngineRunner | None = None
        self._shared_weights = SharedWeightsReader()

    def build(self, config: Experiment, policy: Path) -> int:
        configure_process(config)
        self.close()
        model = load_engine_model(config, policy)
        tokenizer = load_policy_tokenizer(config, policy, model.config.vocab_size)
        self._runner = EngineRunner(local_engine_builder(config, policy, model, tokenizer, is_learner_model=False))
        return self._runner.max_model_len

    @property
    def _engine(self) -> EngineRunner:
        """
        Raises:
            ValueError: `build` has not been called.
        """
        if self._runner is None:
            raise ValueError("the engine was called before it was built")
        return self._runner

    def step(self, requests: Sequence[Request]) -> EngineReport | None:
        return self._engine.step(requests)

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        return self._engine.abort(ids)

    def load_weights(self, version: int, weights: StagedTensors) -> EngineReport | None:
        return self._engine.load_weights(version, self._shared_weights.read(weights))

    def weights(self) -> Mapping[str, Tensor] | None:
        return self._engine.weights()

    def control(self, action: EngineAction) -> EngineReport | None:
        return self._engine.control(action)

    def rebuild(self) -> EngineReport | None:
        return self._engine.rebuild()

    def close(self) -> None:
        """Release the engine."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
