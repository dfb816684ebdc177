"""The engine of a standalone worker, called by the controller."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quintet.config.native.experiment import Experiment
from quintet.policies.lora import BaseWeights
from quintet.records import Request
from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeightsReader, StagedTensors
from quintet.rollout.engines.weight_source import TensorWeights
from quintet.runtime.engine_worker import EngineRunner
from quintet.runtime.engines import load_engine_model, load_policy_tokenizer, local_engine_builder
from quintet.runtime.memory import return_freed_memory
from quintet.runtime.process_settings import configure_process
from quintet.runtime.remote_interface import EngineAction, EngineReport
from quintet.training.parallel.broadcast_group import BroadcastGroup, GroupAddress

if TYPE_CHECKING:
    from torch import Tensor


class BroadcastWeights:
    """Memory that receives weights over a process group."""

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group
        self._memory = self._empty_memory()

    def _empty_memory(self) -> SharedWeightsReader:
        device = self._group.device
        return SharedWeightsReader(lambda _, size: torch.empty(size, dtype=torch.uint8, device=device))

    def receive(self, weights: Sequence[SharedTensor]) -> Iterator[tuple[str, Tensor]]:
        """Receive all weights, then yield them; they are valid until the next call. Memory of a GPU is released.

        Raises:
            RuntimeError: the connection to another process broke.
        """
        self._group.broadcast(self._memory.buffers(weights))
        yield from self._memory.read(weights)
        if self._group.device.type != "cpu":
            self._memory = self._empty_memory()


class LocalStandaloneEngine:
    """See `StandaloneEngineWorker`."""

    def __init__(self) -> None:
        self._runner: EngineRunner | None = None
        self._shared_weights = SharedWeightsReader()
        self._broadcast_weights: BroadcastWeights | None = None
        self._base_weights = BaseWeights()

    def build(self, config: Experiment, policy: Path) -> int:
        configure_process(config)
        self.close()
        model = load_engine_model(config, policy)
        tokenizer = load_policy_tokenizer(config, policy, model.config.get_text_config().vocab_size)
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

    def load_weights(
        self, version: int, weights: StagedTensors, adapter_scales: Mapping[str, float]
    ) -> EngineReport | None:
        read = self._shared_weights.read(weights)
        return self._engine.load_weights(version, TensorWeights(self._merged(read, adapter_scales)))

    def join_broadcast_group(self, address: GroupAddress, rank: int) -> None:
        self._broadcast_weights = BroadcastWeights(BroadcastGroup(address, rank))

    def load_broadcast_weights(
        self, version: int, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> EngineReport | None:
        """See `StandaloneEngineWorker.load_broadcast_weights`.

        Raises:
            ValueError: `join_broadcast_group` has not been called.
        """
        if self._broadcast_weights is None:
            raise ValueError("weights were broadcast before the process group was joined")
        received = self._broadcast_weights.receive(weights)

        def merged() -> Iterator[tuple[str, Tensor]]:
            # received when the engine reads them, so that a lost connection is a failure of the engine
            yield from self._merged(received, adapter_scales)

        return self._engine.load_weights(version, TensorWeights(merged()))

    def _merged(
        self, weights: Iterable[tuple[str, Tensor]], adapter_scales: Mapping[str, float]
    ) -> Iterable[tuple[str, Tensor]]:
        return self._base_weights.merge(weights, adapter_scales) if adapter_scales else weights

    def weights(self) -> Mapping[str, Tensor] | None:
        return self._engine.weights()

    def control(self, action: EngineAction) -> EngineReport | None:
        report = self._engine.control(action)
        if action == "sleep":
            return_freed_memory()
        return report

    def rebuild(self) -> EngineReport | None:
        return self._engine.rebuild()

    def close(self) -> None:
        """Release the engine."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
