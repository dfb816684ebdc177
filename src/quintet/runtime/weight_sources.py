"""Sources of weights of engines on several ranks and in other processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quintet.rollout.engines.weight_source import WeightSource
from quintet.runtime.groups import PolicyGroup
from quintet.runtime.remote_call import RemoteCall

if TYPE_CHECKING:
    from torch import Tensor, nn

    from quintet.runtime.standalone.connection import WorkerConnection


@runtime_checkable
class StagedWeightSource(WeightSource, Protocol):
    """A source whose weights have been staged for engines in other processes."""

    def load_call(self, worker: WorkerConnection, version: int) -> RemoteCall:
        """Return the call by which a worker's engine loads the staged weights as `version`."""


def shared_module(policy: PolicyGroup) -> nn.Module | None:
    """Return this rank's module of the policy if it has all weights."""
    return policy.actor.model if policy.has_full_weights else None


class GatheredWeights:
    """See `WeightSource`: the actor's weights, which all ranks gather together."""

    def __init__(self, policy: PolicyGroup) -> None:
        self._policy = policy
        self._gathered: Iterator[tuple[str, Tensor]] | None = None
        """Tensors of the load in progress."""

    @property
    def module(self) -> nn.Module | None:
        return shared_module(self._policy)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._gathered = self._gather()
        return self._gathered

    def _gather(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.actor.weights()

    def finish(self) -> None:
        gathered, self._gathered = self._gathered, None
        for _ in gathered or ():
            pass
