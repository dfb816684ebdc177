"""Learners of a run of which some have devices without the actor, as the controller sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.plan.placement import LOGPROBS
from quintet.policies.reward_model import ResponseScorer
from quintet.records import PromptRow
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_interface import CRITIC, POLICY_SCORER, REFERENCE, REWARD_MODEL, STANDALONE_LEARNERS
from quintet.runtime.remote_learners import RemoteLearnerGroup, RemoteShardedRewardModel, remote_proxy, scored_rows
from quintet.runtime.standalone.staged_weights import StagedWeights
from quintet.runtime.transport import Transport
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.protocols import Actor, Critic, LogProbScorer
from quintet.training.sharded_reward_model import shards_reward_model

if TYPE_CHECKING:
    from torch import Tensor


class StandaloneLearnerGroup(RemoteLearnerGroup):
    """See `LearnerGroup`: standalone workers have some components, the workers of the actor the others."""

    def __init__(
        self, transport: Transport, standalone: Mapping[str, Transport], config: Experiment, policy: Path
    ) -> None:
        """`standalone` are the transports of the standalone components by the name of their section of `placement`;
        components with the same workers have the same transport."""
        super().__init__(transport)
        self._standalone = standalone
        self._config = config
        self._created: dict[str, Any] = {}
        """Proxies of standalone components by name."""
        self._in_warm_start = False
        self._policy_weights = StagedWeights(num_buffers=1)
        """Weights of log-prob workers; the memory is kept between steps."""
        self._scored_step: int | None = None
        """Step whose weights the log-prob workers have; None before they have any."""
        self._broadcast_to_standalone("build", config=config, policy=policy)

    def close(self) -> None:
        """Release the memory of weights."""
        self._policy_weights.close()

    @property
    def critic(self) -> Critic | None:
        return self._created.get("critic") if "critic" in self._standalone else super().critic

    @property
    def reference(self) -> LogProbScorer | None:
        return self._created.get("reference") if "reference" in self._standalone else super().reference

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> Actor:
        self._in_warm_start = True
        return super().actor_with_optimizer(optimizer)

    def release_warm_start_actor(self) -> None:
        super().release_warm_start_actor()
        self._in_warm_start = False

    def create_critic(self) -> Critic:
        if "critic" not in self._standalone:
            return super().create_critic()
        weights = self.actor.weights if self._config.critic.path is None else None
        critic: Critic = self._create("critic", CRITIC, "create_critic", weights)
        return critic

    def policy_scorer(self, step: int) -> LogProbScorer:
        """See `LearnerGroup.policy_scorer`; the first call of a step gives log-prob workers the actor's weights.

        Raises:
            RankDiedError: a worker is lost.
            MachineError: a worker cannot load the weights.
        """
        if LOGPROBS not in self._standalone:
            return super().policy_scorer(step)
        transport = self._standalone[LOGPROBS]
        if step != self._scored_step:
            self._scored_step = None
            self._policy_weights.stage(self.actor.weights())
            self._call_with_weights(transport, "load_policy", self._policy_weights)
            self._scored_step = step
        scorer: LogProbScorer = remote_proxy(transport, POLICY_SCORER)
        return scorer

    def snapshot_reference(self) -> LogProbScorer:
        if "reference" not in self._standalone:
            return super().snapshot_reference()
        # the workers of the actor have the adapters, which checkpoints contain
        source = super().snapshot_reference() if self._config.reference_has_adapters else self.actor
        return self._create_reference(source)

    def _create_reference(self, source: Actor | LogProbScorer) -> LogProbScorer:
        """Create the standalone reference with the weights of `source`, or from `reference.path`."""
        weights = source.weights if self._config.reference.path is None else None
        reference: LogProbScorer = self._create("reference", REFERENCE, "snapshot_reference", weights)
        return reference

    def _create(
        self, name: str, target: str, method: str, weights: Callable[[], Iterator[tuple[str, Tensor]]] | None
    ) -> Any:
        """Call the method that creates a component with these weights, and return the component's proxy."""
        transport, staged = self._standalone[name], StagedWeights()
        try:
            if weights is not None:
                staged.stage(weights())
            self._call_with_weights(transport, method, staged)
        finally:
            staged.close()
        self._created[name] = remote_proxy(transport, target)
        return self._created[name]

    def _call_with_weights(self, transport: Transport, method: str, staged: StagedWeights) -> None:
        """Call a method that loads the staged weights on all workers of a component."""
        arguments = [{"weights": staged.for_worker(worker)} for worker in transport.workers]
        transport.call_together([RemoteCall(STANDALONE_LEARNERS, method, argument) for argument in arguments])

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> ResponseScorer:
        """See `LearnerGroup.load_reward_model`; every worker of a standalone one has a copy, or a shard."""
        if "reward" not in self._standalone:
            return super().load_reward_model(config, max_length)
        arguments = {"config": config, "max_length": max_length}
        self._standalone["reward"].broadcast(RemoteCall(STANDALONE_LEARNERS, "load_reward_model", arguments))
        transport = self._standalone["reward"]
        is_sharded = shards_reward_model(config, transport.world_size)
        return RemoteShardedRewardModel(transport) if is_sharded else StandaloneRewardModel(transport)

    def save(self, directory: Path) -> WriteFiles:
        self._broadcast_to_standalone("save", directory=directory)
        return super().save(directory)

    def extra_state(self) -> dict[str, Any]:
        state = super().extra_state()
        for transport in self._transports:
            state |= transport.call(RemoteCall(STANDALONE_LEARNERS, "extra_state"))
        return state

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        super().load(directory, contents, extra)
        self._scored_step = None
        if self._in_warm_start:
            return
        if "critic" in self._standalone:
            self.create_critic()
        if "reference" in self._standalone:
            restored = super().reference if self._config.reference_has_adapters else None
            self._create_reference(restored or self.actor)
        self._broadcast_to_standalone("load", directory=directory, contents=list(contents), extra=dict(extra))

    @property
    def _transports(self) -> list[Transport]:
        return list(dict.fromkeys(self._standalone.values()))

    def _broadcast_to_standalone(self, method: str, **arguments: Any) -> None:
        for transport in self._transports:
            transport.broadcast(RemoteCall(STANDALONE_LEARNERS, method, arguments))


class StandaloneRewardModel:
    """See `ResponseScorer`: a reward model with a copy on each worker of the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.offloads = bool(transport.call(RemoteCall(REWARD_MODEL, "offloads")))

    def score(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[float]:
        """See `ResponseScorer.score`; the responses are divided among the workers.

        Raises:
            RankDiedError: a worker is lost.
            RemoteCallError: the forward pass failed in a worker.
        """
        count = min(self._transport.world_size, len(responses))
        rows = scored_rows(prompt_rows)
        parts = [{"prompt_rows": rows[i::count], "responses": list(responses[i::count])} for i in range(count)]
        calls = [RemoteCall(REWARD_MODEL, "score", part) for part in parts]
        scores = [0.0] * len(responses)
        for index, part in enumerate(self._transport.call_each(calls)):
            scores[index::count] = part
        return scores
