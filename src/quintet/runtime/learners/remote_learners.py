"""Learners of a run as the controller sees them: each component on the workers of one transport."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.plan.placement import LOGPROBS
from quintet.policies.reward_model import ResponseScorer
from quintet.records import PromptRow
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import (
    ACTOR,
    CRITIC,
    LEARNERS,
    POLICY_SCORER,
    REFERENCE,
    REWARD_MODEL,
    WARM_START_ACTOR,
    WORKER,
)
from quintet.runtime.calls.transport import Transport, remote_proxy
from quintet.runtime.engines.staged_weights import StagedWeights
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.protocols import Actor, Critic, LogProbScorer
from quintet.training.sharded_reward_model import shards_reward_model

Weights = Callable[[], Iterator[tuple[str, "Tensor"]]]


class LearnerGroup:
    """Actor, critic, reference and reward model. Each is on all standalone workers that have it, or else on the ranks
    of the actor."""

    def __init__(
        self,
        ranks: Transport,
        config: Experiment,
        policy: Path,
        standalone: Mapping[str, Transport] | None = None,
        *,
        sft: bool = False,
    ) -> None:
        """Build the learners of standalone workers; those of the actor's `ranks` exist already.

        Args:
            ranks: Transport to the ranks of the actor.
            config: Configuration of the run.
            policy: Initial model of the policy.
            standalone: Transports to the workers of components that have devices without the actor, by the name of
                their section of `placement`; components with the same workers have the same transport.
            sft: Whether these are the learners of supervised fine-tuning, which has neither critic nor reference.
        """
        self._ranks, self._config, self._sft = ranks, config, sft
        self._standalone = standalone or {}
        self.actor: Actor = remote_proxy(ranks, ACTOR)
        """Learner of the policy."""
        self.critic: Critic | None = None
        """Learner of the values; None before `create_critic`."""
        self.reference: LogProbScorer | None = None
        """Policy from which the KL divergence is measured; None before `snapshot_reference`."""
        self._in_warm_start = False
        self._policy_weights = StagedWeights(num_buffers=1)
        """Weights of log-prob workers; the memory is kept between steps."""
        self._scored_step: int | None = None
        """Step whose weights the log-prob workers have; None before they have any."""
        for transport in self._standalone_transports:
            _broadcast(transport, WORKER, "build_learners", config=config, policy=policy, sft=sft)

    @property
    def _standalone_transports(self) -> list[Transport]:
        return list(dict.fromkeys(self._standalone.values()))

    def _transport_of(self, component: str) -> Transport:
        return self._standalone.get(component, self._ranks)

    def close(self) -> None:
        """Release the memory of weights."""
        self._policy_weights.close()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ranks.world_size

    @property
    def has_full_weights(self) -> bool:
        """See `PolicyGroup.has_full_weights`."""
        return bool(self._ranks.call(RemoteCall(LEARNERS, "has_full_weights")))

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> Actor:
        """Return the same policy under a fresh optimizer, with log-probs at temperature 1. `save` and `load` are about
        this actor alone until `release_warm_start_actor`."""
        self._in_warm_start = True
        _broadcast(self._ranks, LEARNERS, "actor_with_optimizer", optimizer=optimizer)
        proxy: Actor = remote_proxy(self._ranks, WARM_START_ACTOR)
        return proxy

    def release_warm_start_actor(self) -> None:
        """Free the optimizer that `actor_with_optimizer` created."""
        _broadcast(self._ranks, LEARNERS, "release_warm_start_actor")
        self._in_warm_start = False

    def create_critic(self) -> Critic:
        """Create the critic from the current policy, or from `critic.path`."""
        weights = self.actor.weights if self._config.critic.path is None else None
        critic: Critic = self._create("critic", CRITIC, "create_critic", weights)
        self.critic = critic
        return critic

    def snapshot_reference(self) -> LogProbScorer:
        """Make the current policy, or the model at `reference.path`, the reference."""
        return self._create_reference(self._snapshot_adapters() if self._has_adapters_apart else self.actor)

    @property
    def _has_adapters_apart(self) -> bool:
        """Whether the ranks of the actor have the adapters of a standalone reference, since checkpoints contain
        them."""
        return "reference" in self._standalone and self._config.reference_has_adapters

    def _snapshot_adapters(self) -> LogProbScorer:
        """Make the current policy the reference on the ranks of the actor."""
        _broadcast(self._ranks, LEARNERS, "snapshot_reference")
        scorer: LogProbScorer = remote_proxy(self._ranks, REFERENCE)
        return scorer

    def _create_reference(self, source: Actor | LogProbScorer) -> LogProbScorer:
        """Create the reference from `reference.path` or, with the weights of `source` if it is standalone, from the
        policy."""
        weights = source.weights if self._config.reference.path is None else None
        reference: LogProbScorer = self._create("reference", REFERENCE, "snapshot_reference", weights)
        self.reference = reference
        return reference

    def _create(self, name: str, target: str, method: str, weights: Weights | None) -> Any:
        """Call the method that creates a component, and return its proxy. Workers without the actor get the
        `weights`."""
        if name not in self._standalone:
            _broadcast(self._ranks, LEARNERS, method)
            return remote_proxy(self._ranks, target)
        transport, staged = self._standalone[name], StagedWeights()
        try:
            if weights is not None:
                staged.stage(weights())
            _call_with_weights(transport, method, staged)
        finally:
            staged.close()
        return remote_proxy(transport, target)

    def policy_scorer(self, step: int) -> LogProbScorer:
        """Return a scorer with the policy's weights before the first update of a step: log-prob workers, or the actor's
        scorer. The first call of a step comes before that update, and gives log-prob workers the actor's weights.

        Raises:
            RankDiedError: a worker is lost.
            MachineError: a worker cannot load the weights.
        """
        if LOGPROBS not in self._standalone:
            return self.actor.scorer
        transport = self._standalone[LOGPROBS]
        if step != self._scored_step:
            self._scored_step = None
            self._policy_weights.stage(self.actor.weights())
            _call_with_weights(transport, "load_policy", self._policy_weights)
            self._scored_step = step
        scorer: LogProbScorer = remote_proxy(transport, POLICY_SCORER)
        return scorer

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> ResponseScorer:
        """Load a reward model for up to `max_length` tokens of prompt and response. It is sharded over all workers, or
        has a copy on rank 0 or on each standalone worker.

        Raises:
            ConfigError: the directory contains no reward model, or one of its libraries cannot be imported.
            MachineError: the model cannot be loaded.
        """
        transport = self._transport_of("reward")
        arguments = {"config": config, "max_length": max_length}
        is_sharded = shards_reward_model(config, transport.world_size)
        if is_sharded or transport is not self._ranks:
            _broadcast(transport, LEARNERS, "load_reward_model", **arguments)
            return RemoteRewardModel(transport, 0 if is_sharded else transport.world_size)
        transport.call(RemoteCall(LEARNERS, "load_reward_model", arguments))
        return RemoteRewardModel(transport, 1)

    def perturb_actor(self, max_change: float, seed: int) -> None:
        """Multiply each trained weight tensor of the policy by a random factor in `1 ± max_change`, or change adapters
        by about as much."""
        _broadcast(self._ranks, LEARNERS, "perturb_actor", max_change=max_change, seed=seed)

    def save(self, directory: Path) -> WriteFiles:
        for transport in self._standalone_transports:
            _broadcast(transport, LEARNERS, "save", directory=directory)
        write: WriteFiles = _broadcast(self._ranks, LEARNERS, "save", directory=directory)
        return write

    def extra_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for transport in (self._ranks, *self._standalone_transports):
            state |= transport.call(RemoteCall(LEARNERS, "extra_state"))
        return state

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """See `CheckpointedLearners.load`. Critic and reference are created from the loaded actor, and get their own
        contents afterwards."""
        stored = {"directory": directory, "contents": list(contents)}
        _broadcast(self._ranks, LEARNERS, "load_actor", **stored, extra=dict(extra))
        self._scored_step = None
        if self._sft or self._in_warm_start:
            return
        if self._config.needs_critic:
            self.create_critic()
            _broadcast(self._transport_of("critic"), LEARNERS, "load_critic", **stored, extra=dict(extra))
        if self._config.needs_reference and self._has_adapters_apart:
            adapters = self._snapshot_adapters()
            _broadcast(self._ranks, LEARNERS, "load_reference", **stored)
            self._create_reference(adapters)
        elif self._config.needs_reference:
            self._create_reference(self.actor)
            _broadcast(self._transport_of("reference"), LEARNERS, "load_reference", **stored)


def _broadcast(transport: Transport, target: str, method: str, **arguments: Any) -> Any:
    """Call a method on all workers; return the result of this process if it is one of them."""
    return transport.broadcast(RemoteCall(target, method, arguments, discards_result=True))


def _call_with_weights(transport: Transport, method: str, staged: StagedWeights) -> None:
    """Call a method that loads the staged weights on all workers of a component."""
    arguments = [{"weights": staged.for_worker(worker)} for worker in transport.workers]
    transport.call_together([RemoteCall(LEARNERS, method, each, discards_result=True) for each in arguments])


class RemoteRewardModel:
    """See `ResponseScorer`: a reward model that is sharded over all workers of a transport, or has copies."""

    def __init__(self, transport: Transport, num_copies: int) -> None:
        """`num_copies` of the first workers have a copy; with 0 the model is sharded over all."""
        self._transport, self._num_copies = transport, num_copies
        self.offloads = bool(transport.call(RemoteCall(REWARD_MODEL, "offloads")))

    def score(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[float]:
        """See `ResponseScorer.score`; the responses are divided among the workers.

        Raises:
            RankDiedError: a worker is lost.
            RemoteCallError: the forward pass failed in a worker.
        """
        # rows have only the fields that a reward model reads
        rows = [replace(row, ground_truth=None, extra={}, response=None) for row in prompt_rows]
        count = min(self._num_copies, len(responses))
        if count <= 1:
            call = RemoteCall(REWARD_MODEL, "score", {"prompt_rows": rows, "responses": list(responses)})
            result: list[float] = self._transport.call(call) if self._num_copies else self._transport.broadcast(call)
            return result
        parts = [{"prompt_rows": rows[i::count], "responses": list(responses[i::count])} for i in range(count)]
        scores = [0.0] * len(responses)
        calls = [RemoteCall(REWARD_MODEL, "score", part) for part in parts]
        for index, part_scores in enumerate(self._transport.call_each(calls)):
            scores[index::count] = part_scores
        return scores
