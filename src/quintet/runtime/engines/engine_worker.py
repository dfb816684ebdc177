"""The engine of a worker, called by the controller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, get_args

import torch
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.policies.lora import BaseWeights
from quintet.records import Failure, FinishReason, Generation, Request
from quintet.rollout.engines.engine import Engine, take_steps
from quintet.rollout.engines.restarting_engine import FATAL_ERRORS, engine_failure
from quintet.rollout.engines.shared_weights import SharedTensor, SharedWeightsReader, StagedTensors
from quintet.rollout.engines.weight_source import TensorWeights, WeightSource
from quintet.rollout.engines.weight_verification import read_weights
from quintet.runtime.calls.remote_interface import STEPS_PER_CALL, EngineAction, EngineReport
from quintet.runtime.engines.engine_builders import engine_builder, has_engine
from quintet.runtime.groups import PolicyGroup
from quintet.runtime.memory import return_freed_memory
from quintet.runtime.process_settings import configure_process
from quintet.training.parallel.broadcast_group import BroadcastGroup, GroupAddress
from quintet.training.parallel.process_group import RankGroup


class PolicyOfRank(PolicyGroup, Protocol):
    """The policy on one rank, trained or frozen."""

    @property
    def ranks(self) -> RankGroup:
        """The rank among those with the policy."""


class LocalEngineWorker:
    """See `EngineWorker`: the engine of this process, whose death is reported instead of raised."""

    def __init__(self, policy: PolicyOfRank | None = None) -> None:
        """`policy` is this rank's part of the learner's policy; a standalone worker has none."""
        self._policy = policy
        self._received_weights = ReceivedWeights()
        self._build_engine: Callable[[], Engine] | None = None
        self._engine: Engine | None = None
        self._failure: Failure | None = None
        """Why the engine is dead."""

    def build(self, config: Experiment, policy: Path) -> int:
        """See `EngineWorker.build`.

        Raises:
            ConfigError: the engine is unknown, or the KV cache of one request does not fit.
        """
        self.close()
        if self._policy is None:
            configure_process(config)
        elif not has_engine(config, self._policy.ranks):
            return 0
        self._build_engine = engine_builder(config, policy, self._policy)
        self._engine = self._build_engine()
        return self._engine.max_model_len

    @property
    def _built(self) -> Engine:
        """
        Raises:
            ValueError: `build` has not been called.
        """
        if self._engine is None:
            raise ValueError("the engine was called before it was built")
        return self._engine

    def step(self, requests: Sequence[Request]) -> EngineReport | None:
        def advance() -> list[Generation]:
            refused = [generation for generation in map(self._add_request, requests) if generation is not None]
            return [*refused, *take_steps(self._built, STEPS_PER_CALL)]

        return self._report(advance)

    def _add_request(self, request: Request) -> Generation | None:
        """Queue a request; return a failed generation if the engine refuses it."""
        try:
            self._built.add_request(request)
        except (ValueError, ConfigError) as error:
            version = self._built.weight_version
            return Generation(request.id, (), (), FinishReason.FAILED, version, failure=engine_failure(error))
        return None

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        return self._report(lambda: self._built.abort(ids))

    def load_weights(
        self, version: int, weights: StagedTensors, adapter_scales: Mapping[str, float]
    ) -> EngineReport | None:
        return self._load(version, TensorWeights(self._received_weights.read(weights, adapter_scales)))

    def join_broadcast_group(self, address: GroupAddress, rank: int) -> None:
        self._received_weights.join(BroadcastGroup(address, rank))

    def load_broadcast_weights(
        self, version: int, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> EngineReport | None:
        def load() -> None:
            # a lost connection is a failure of the engine
            received = TensorWeights(self._received_weights.receive(weights, adapter_scales))
            self._built.load_weights(version, received)

        return self._report(load)

    def load_gathered_weights(self, version: int) -> EngineReport | None:
        """See `EngineWorker.load_gathered_weights`.

        Raises:
            ValueError: this process has no part of the policy.
        """
        policy = self._policy
        if policy is None:
            raise ValueError("a process without a learner cannot gather its weights")
        weights = policy.actor.weights()
        module = policy.actor.model if policy.has_full_weights else None
        report = self._load(version, TensorWeights(weights, module))
        if module is None:
            for _ in weights:
                pass  # all ranks wait for each tensor, also for one that the engine has not read
        return report

    def _load(self, version: int, weights: WeightSource) -> EngineReport | None:
        return self._report(lambda: self._built.load_weights(version, weights))

    def weights(self) -> Mapping[str, Tensor] | None:
        return read_weights(self._built)

    def control(self, action: EngineAction) -> EngineReport | None:
        if action not in get_args(EngineAction):
            raise ValueError(f"an engine has no action {action!r:.100}")
        report = self._report(lambda: getattr(self._built, action)())
        if action == "sleep":
            return_freed_memory()
        return report

    def rebuild(self) -> EngineReport | None:
        """See `EngineWorker.rebuild`.

        Raises:
            ValueError: `build` has not been called.
        """
        if self._build_engine is None:
            raise ValueError("the engine was called before it was built")
        self.close()
        build_engine, self._failure = self._build_engine, None

        def build() -> None:
            self._engine = build_engine()

        return self._report(build)

    def close(self) -> None:
        """Release the engine; a dead one may fail to close."""
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.close()
            except (*FATAL_ERRORS, OSError):
                return

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


class ReceivedWeights:
    """Reads weights from shared memory, from a message, or from the process group over which they are broadcast.

    With the scales of adapters, by layer, the weights are adapters and, in the first load, the weights that these
    adapt; see `BaseWeights`.
    """

    def __init__(self) -> None:
        self._shared = SharedWeightsReader()
        self._base = BaseWeights()
        self._group: BroadcastGroup | None = None
        self._memory = SharedWeightsReader()
        """Memory that receives what is broadcast, in the layout of the shared memory."""

    def read(self, weights: StagedTensors, adapter_scales: Mapping[str, float]) -> Iterable[tuple[str, Tensor]]:
        """Return full tensors, which are valid until the controller stages the next ones."""
        return self._merged(self._shared.read(weights), adapter_scales)

    def join(self, group: BroadcastGroup) -> None:
        """Receive over this group from now on."""
        self._group = group
        self._memory = _empty_memory(group.device)

    def receive(
        self, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive full tensors, which are valid until the next call. All are received before the first one is read,
        since the other members wait for this one, whatever its engine does. Memory of a GPU is released at the end.

        Raises:
            ValueError: no group was joined.
            RuntimeError: the connection to another process broke.
        """
        if self._group is None:
            raise ValueError("weights were broadcast before the process group was joined")
        self._group.broadcast(self._memory.buffers(weights))
        return self._received(self._group, weights, adapter_scales)

    def _received(
        self, group: BroadcastGroup, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self._merged(self._memory.read(weights), adapter_scales)
        if group.device.type != "cpu":
            self._memory = _empty_memory(group.device)

    def _merged(
        self, weights: Iterable[tuple[str, Tensor]], adapter_scales: Mapping[str, float]
    ) -> Iterable[tuple[str, Tensor]]:
        return self._base.merge(weights, adapter_scales) if adapter_scales else weights


def _empty_memory(device: torch.device) -> SharedWeightsReader:
    return SharedWeightsReader(lambda _, size: torch.empty(size, dtype=torch.uint8, device=device))
