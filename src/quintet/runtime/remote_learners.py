"""Learners on workers, called through a transport: their methods are generated from the protocols."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import Signature
from pathlib import Path
from typing import Any

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.reward_model import ResponseScorer
from quintet.records import PromptRow
from quintet.runtime.remote_call import RemoteCall, RemoteRef
from quintet.runtime.remote_interface import (
    ACTOR,
    CRITIC,
    LEARNERS,
    LOCAL_METHODS,
    REFERENCE,
    REMOTE_OBJECTS,
    REWARD_MODEL,
    WARM_START_ACTOR,
    properties_of,
    remote_methods,
)
from quintet.runtime.transport import Transport
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.protocols import Actor, Critic, LogProbScorer
from quintet.training.sharded_reward_model import shards_reward_model


class _Proxy:
    """Base of the generated classes."""

    def __init__(self, transport: Transport, target: str) -> None:
        self._transport = transport
        self._target = target


def remote_proxy(transport: Transport, target: str) -> Any:
    """Return an object with the methods of the target's protocol, which calls the remote object `target`."""
    return _proxy_class(REMOTE_OBJECTS[target])(transport, target)


@cache
def _proxy_class(protocol: type) -> type[_Proxy]:
    methods = {name: _method(name, signature) for name, signature in remote_methods(protocol).items()}
    properties = {name: property(_getter(name)) for name in properties_of(protocol)}
    return type(f"Remote{protocol.__name__}", (_Proxy,), {**properties, **methods})


def _method(name: str, signature: Signature) -> Callable[..., Any]:
    def method(self: _Proxy, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        call = RemoteCall(self._target, name, {key: _as_reference(value) for key, value in arguments.items()})
        return self._transport.call(call) if name in LOCAL_METHODS else self._transport.broadcast(call)

    method.__name__ = name
    return method


def _getter(name: str) -> Callable[[_Proxy], Any]:
    def getter(self: _Proxy) -> Any:
        nested = f"{self._target}.{name}"
        if nested in REMOTE_OBJECTS:
            return remote_proxy(self._transport, nested)
        return self._transport.call(RemoteCall(self._target, name))

    return getter


def _as_reference(value: Any) -> Any:
    return RemoteRef(value._target) if isinstance(value, _Proxy) else value


class RemoteShardedRewardModel:
    """See `ResponseScorer`: a reward model that is sharded over all workers of the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.offloads = bool(transport.call(RemoteCall(REWARD_MODEL, "offloads")))

    def score(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[float]:
        """See `ResponseScorer.score`; each worker scores a part of the responses."""
        arguments = {"prompt_rows": scored_rows(prompt_rows), "responses": list(responses)}
        scores: list[float] = self._transport.broadcast(RemoteCall(REWARD_MODEL, "score", arguments))
        return scores


def scored_rows(prompt_rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Return rows with only the fields that a reward model reads, to be sent to it."""
    return [replace(row, ground_truth=None, extra={}, response=None) for row in prompt_rows]


class RemoteLearnerGroup:
    """See `LearnerGroup`; the learners run on all workers of the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.actor: Actor = remote_proxy(transport, ACTOR)

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    @property
    def has_full_weights(self) -> bool:
        return bool(self._transport.call(RemoteCall(LEARNERS, "has_full_weights")))

    @property
    def critic(self) -> Critic | None:
        exists = self._transport.call(RemoteCall(LEARNERS, "critic")) is not None
        proxy: Critic | None = remote_proxy(self._transport, CRITIC) if exists else None
        return proxy

    @property
    def reference(self) -> LogProbScorer | None:
        exists = self._transport.call(RemoteCall(LEARNERS, "reference")) is not None
        proxy: LogProbScorer | None = remote_proxy(self._transport, REFERENCE) if exists else None
        return proxy

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> Actor:
        self._broadcast("actor_with_optimizer", optimizer=optimizer)
        proxy: Actor = remote_proxy(self._transport, WARM_START_ACTOR)
        return proxy

    def release_warm_start_actor(self) -> None:
        self._broadcast("release_warm_start_actor")

    def create_critic(self) -> Critic:
        self._broadcast("create_critic")
        proxy: Critic = remote_proxy(self._transport, CRITIC)
        return proxy

    def snapshot_reference(self) -> LogProbScorer:
        self._broadcast("snapshot_reference")
        proxy: LogProbScorer = remote_proxy(self._transport, REFERENCE)
        return proxy

    def policy_scorer(self, step: int) -> LogProbScorer:
        return self.actor.scorer

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> ResponseScorer:
        """See `LearnerGroup.load_reward_model`; rank 0 loads and runs it, or all ranks if it is sharded."""
        call = RemoteCall(LEARNERS, "load_reward_model", {"config": config, "max_length": max_length})
        if shards_reward_model(config, self._transport.world_size):
            self._transport.broadcast(call)
            return RemoteShardedRewardModel(self._transport)
        self._transport.call(call)
        proxy: ResponseScorer = remote_proxy(self._transport, REWARD_MODEL)
        return proxy

    def perturb_actor(self, max_change: float, seed: int) -> None:
        self._broadcast("perturb_actor", max_change=max_change, seed=seed)

    def save(self, directory: Path) -> WriteFiles:
        write: WriteFiles = self._broadcast("save", directory=directory)
        return write

    def extra_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._transport.call(RemoteCall(LEARNERS, "extra_state"))
        return state

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        self._broadcast("load", directory=directory, contents=list(contents), extra=dict(extra))

    def _broadcast(self, method: str, **arguments: Any) -> Any:
        return self._transport.broadcast(RemoteCall(LEARNERS, method, arguments))
